"""A rank that hangs is told from ranks that wait, and from those that evaluate."""

from __future__ import annotations

from isthmus.orchestrator.core.stall_watch import AbsentRank, StallWatch


def absent(rank: int, *, is_stopped: bool = False, is_in_collective: bool = False) -> AbsentRank:
    return AbsentRank(
        rank=rank,
        for_s=15.0,
        round=7,
        is_stopped=is_stopped,
        is_in_collective=is_in_collective,
        doing="it is in f",
        stack_path="/x",
    )


def test_nobody_hangs_where_nobody_waits() -> None:
    watch = StallWatch()
    assert watch.report("a", [absent(0)], is_waiting=False) == []
    assert watch.report("b", [absent(0)], is_waiting=False) == []
    assert watch.report("a", [], is_waiting=False) == []


def test_who_is_away_while_another_site_waits_is_named_once() -> None:
    watch, late = StallWatch(), absent(1)
    assert watch.report("a", [late], is_waiting=False) == []
    assert watch.report("b", [], is_waiting=True) == [("a", late)]
    assert watch.report("b", [], is_waiting=True) == []


def test_a_site_that_is_gone_is_forgotten() -> None:
    watch = StallWatch()
    watch.report("a", [absent(0)], is_waiting=True)
    watch.forget("a")
    assert watch.report("b", [absent(0)], is_waiting=False) == []
    assert watch.report("c", [], is_waiting=True) == [("b", absent(0))]


def test_who_waits_for_a_rank_of_its_own_site_is_not_to_blame() -> None:
    watch, hangs = StallWatch(), absent(1)
    found = watch.report("a", [absent(0, is_in_collective=True), hangs], is_waiting=False)
    assert found == []
    assert watch.report("b", [], is_waiting=True) == [("a", hangs)]
    assert StallWatch().report("a", [absent(0), absent(1, is_stopped=True)], is_waiting=True) == [
        ("a", absent(1, is_stopped=True))
    ]
    both = [absent(0, is_in_collective=True), absent(1, is_in_collective=True)]
    assert len(StallWatch().report("a", both, is_waiting=True)) == 2


def test_who_lets_results_wait_while_its_site_catches_up_is_named_though_nobody_waits() -> None:
    """And nobody else, for the others may evaluate."""
    watch, late = StallWatch(), absent(1)
    assert watch.report("a", [absent(0)], is_waiting=False) == []
    assert watch.report("b", [late], is_waiting=False, is_behind=True) == [("b", late)]
    assert watch.report("b", [late], is_waiting=False, is_behind=True) == []
    assert watch.report("b", [], is_waiting=False) == []
