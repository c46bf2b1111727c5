"""Epochs and handovers on their way between processes, and runs of chunks."""

from __future__ import annotations

import itertools
import random

import pytest

from isthmus.topology.spec.epoch import (
    Epoch,
    Finished,
    Handover,
    finished_from_bytes,
    finished_to_bytes,
    handovers_from_bytes,
    handovers_to_bytes,
    merged,
    numbers_of,
    runs_of,
    union,
)
from isthmus.topology.spec.errors import ConfigError
from isthmus.topology.spec.reduction_plan import ReductionPlan, Tree
from isthmus.topology.spec.run_spec import CodedPlan

PLAN = ReductionPlan(4, (Tree(3, {0: 3, 1: 0}),), "of three", (0, 1, 3))


def test_what_is_written_is_read_again() -> None:
    epoch = Epoch(4, ("a", "b", "d"), CodedPlan(PLAN, ("int8",)), 17)
    assert Epoch.from_bytes(epoch.to_bytes()) == epoch
    finished = (Finished(17, 0, ((0, 3), (9, 9))), Finished(17, 1, ()))
    assert finished_from_bytes(finished_to_bytes(finished)) == finished
    handovers = (Handover("a", "d", 17, 0, ((0, 3),)),)
    assert handovers_from_bytes(handovers_to_bytes(handovers)) == handovers


def test_other_bytes_are_refused() -> None:
    with pytest.raises(ConfigError, match="the epoch is not JSON"):
        Epoch.from_bytes(b"{")
    with pytest.raises(ConfigError, match=r"0\.runs\.0: want 2 values"):
        finished_from_bytes(b'[{"round": 1, "bucket": 0, "runs": [[1]]}]')


@pytest.mark.parametrize("seed", range(20))
def test_runs_are_sets_of_chunks(seed: int) -> None:
    chance = random.Random(seed)
    one, other = ({chance.randrange(40) for _ in range(chance.randrange(40))} for _ in range(2))
    runs = runs_of(one)
    assert set(numbers_of(runs)) == one
    assert all(last + 1 < first for (_, last), (first, _) in itertools.pairwise(runs))
    assert union(runs, runs_of(other)) == runs_of(one | other)


def test_gateways_of_a_site_have_a_bucket_together() -> None:
    parts = [Finished(3, 1, ((5, 6),)), Finished(2, 0, ()), Finished(3, 1, ((0, 4),))]
    assert merged(parts) == (Finished(2, 0, ()), Finished(3, 1, ((0, 6),)))


@pytest.mark.parametrize("only", [(), (1, 0), (0, 4), (1, 1)])
def test_members_that_cannot_be(only: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match=r"plan\.only"):
        ReductionPlan(4, (), "", only)


def test_all_members_are_nobody_in_particular() -> None:
    assert ReductionPlan(3, (), "", (0, 1, 2)) == ReductionPlan(3, (), "")
    assert ReductionPlan(3, (), "", (0, 2)).neighbours(0) == (2,)
