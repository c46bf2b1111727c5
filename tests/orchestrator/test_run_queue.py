"""Priority first, then age, and nobody is overtaken at a site that it waits for."""

from __future__ import annotations

import random

import pytest

from isthmus.orchestrator.core.run_queue import RunQueue, Waiting

SITES = "abcd"


def waiting(run_id: str, sequence: int, sites: str = SITES, priority: int = 0) -> Waiting:
    return Waiting(run_id=run_id, priority=priority, sequence=sequence, sites=frozenset(sites))


def queue(*runs: Waiting) -> RunQueue:
    made = RunQueue()
    for run in runs:
        made.add(run)
    return made


def test_the_highest_priority_begins_first_and_of_those_the_oldest() -> None:
    made = queue(waiting("old", 1), waiting("older", 0), waiting("urgent", 2, priority=5))
    assert [made.position(each) for each in ("urgent", "older", "old")] == [1, 2, 3]
    assert made.startable("") == ["urgent"]
    assert made.remove("urgent")
    assert made.startable("") == ["older"]
    assert not made.remove("urgent")
    assert made.position("urgent") == 0


def test_runs_of_other_sites_begin_beside_one_another() -> None:
    made = queue(waiting("one", 0, "ab"), waiting("two", 1, "cd"), waiting("three", 2, "a"))
    assert made.startable("") == ["one", "two"]
    assert made.startable("c") == ["one"]


def test_a_run_of_many_sites_is_not_overtaken_at_any_of_them() -> None:
    made = queue(waiting("wide", 0, "abcd"), waiting("narrow", 1, "b"))
    assert made.startable("a") == []


def test_a_run_that_waits_already_keeps_its_place() -> None:
    made = queue(waiting("one", 0), waiting("two", 1), waiting("one", 2, priority=9))
    assert len(made) == 2
    assert made.position("one") == 1


@pytest.mark.parametrize("seed", range(20))
def test_every_run_begins_once_and_never_two_at_a_site(seed: int) -> None:
    drawn = random.Random(seed)
    made, going, begun = RunQueue(), dict[str, frozenset[str]](), list[str]()
    sites = {str(n): "".join(drawn.sample(SITES, drawn.randint(1, 4))) for n in range(30)}
    left = list(sites)
    while left or len(made) or going:
        if left and drawn.random() < 0.5:
            run_id = left.pop(0)
            made.add(waiting(run_id, int(run_id), sites[run_id], drawn.randint(0, 2)))
        if going and drawn.random() < 0.5:
            going.pop(drawn.choice(list(going)))
        for run_id in made.startable(site for each in going.values() for site in each):
            made.remove(run_id)
            assert not any(set(sites[run_id]) & other for other in going.values()), f"{seed=}"
            going[run_id] = frozenset(sites[run_id])
            begun.append(run_id)
    assert sorted(begun, key=int) == list(sites), f"{seed=}"
