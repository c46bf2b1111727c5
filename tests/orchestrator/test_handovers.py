"""After the handovers all members have what any had, from donors that it crosses from directly."""

import random

import pytest

from isthmus.orchestrator.core.handovers import share_finished
from isthmus.topology.spec.epoch import Runs, numbers_of, runs_of


def test_donors_share_what_a_third_lacks() -> None:
    finished: dict[str, dict[int, Runs]] = {"a": {0: ((0, 9),)}, "b": {0: ((0, 9),)}, "c": {}}
    ways = {"a": {"b", "c"}, "b": {"a", "c"}, "c": {"a", "b"}}
    found = share_finished(7, finished, ways)
    assert [(each.donor, each.receiver, each.round, each.runs) for each in found] == [
        ("a", "c", 7, ((0, 4),)),
        ("b", "c", 7, ((5, 9),)),
    ]


def test_a_chunk_is_passed_on_by_a_member_that_was_handed_it() -> None:
    finished: dict[str, dict[int, Runs]] = {"a": {0: ((3, 3),)}, "b": {}, "c": {}}
    ways = {"a": {"b"}, "b": {"a", "c"}, "c": {"b"}}
    assert [(each.donor, each.receiver) for each in share_finished(0, finished, ways)] == [
        ("a", "b"),
        ("b", "c"),
    ]


@pytest.mark.parametrize("seed", range(50))
def test_everybody_ends_with_what_anybody_had(seed: int) -> None:
    draw = random.Random(seed)
    names = "abcd"[: draw.randint(2, 4)]
    has = {
        name: {bucket: {c for c in range(12) if draw.random() < 0.5} for bucket in (0, 1)}
        for name in names
    }
    finished = {
        name: {bucket: runs_of(chunks) for bucket, chunks in buckets.items() if chunks}
        for name, buckets in has.items()
    }
    ways = {name: set(names) - {name} for name in names}
    union = {bucket: set.union(*(has[name][bucket] for name in names)) for bucket in (0, 1)}
    for each in share_finished(3, finished, ways):
        chunks = set(numbers_of(each.runs))
        assert chunks <= has[each.donor][each.bucket], f"{seed=}"
        assert not chunks & has[each.receiver][each.bucket], f"{seed=}"
        has[each.receiver][each.bucket] |= chunks
    assert all(has[name] == union for name in names), f"{seed=}"
