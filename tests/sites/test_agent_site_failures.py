"""Which of several failures is the cause."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import pytest

from isthmus.protos.failure import Failure
from isthmus.sites.agent.site_failures import awaits_cause, order_failures
from isthmus.sites.node.failures import describe_end, rank_failure
from isthmus.sites.node.rank_failures import describe_failure, write_error_file


def failure(name: str, at_s: float, **fields: object) -> Failure:
    """Return one that is told apart by its message."""
    defaults = {"code": "RANK_EXITED", "site": "a"}
    return Failure(message=name, at_s=at_s, **{**defaults, **fields})  # type: ignore[arg-type]


RANK_GONE = failure("gateway saw rank 1 go", 9.99, code="RANK_LOST", rank=1)

STORIES = {
    "a killed rank, its gateway's word for it, and a sibling": [
        failure("killed", 10.0, exit_code=-9, rank=1),
        RANK_GONE,
        failure("sibling", 10.01, exit_code=1, rank=0),
    ],
    "a killed gateway, and a rank whose script hid why it failed": [
        failure("gateway", 10.1, code="GATEWAY_EXITED", exit_code=-9),
        failure("rank", 10.0, exit_code=1, rank=0),
    ],
    "a peer that was lost, and ranks that say so": [
        failure("peer lost", 10.3, code="PEER_LOST", site="b"),
        failure("rank", 10.0, exit_code=75, rank=0, is_collateral=True),
    ],
    "two ranks with errors of their own": [
        failure("first", 10.0, exit_code=1, rank=1),
        failure("second", 11.0, exit_code=-11, rank=0),
    ],
    "an exit, then all others lose it": [
        failure("exit", 10.0, exit_code=17, rank=3),
        failure("victim", 9.9, exit_code=1, rank=0, is_collateral=True),
    ],
}


@pytest.mark.parametrize("name", STORIES)
def test_the_cause_is_first_in_whatever_order_they_came(name: str) -> None:
    story = STORIES[name]
    for order in itertools.permutations(story):
        ordered = order_failures(order)
        assert ordered[0] == story[0]
        assert all(each.is_collateral for each in ordered[1:])
        assert {each.message for each in ordered} == {each.message for each in story}


def test_victims_alone_stay_victims() -> None:
    ordered = order_failures(
        [failure("late", 2.0, is_collateral=True), failure("early", 1.0, is_collateral=True)]
    )
    assert [each.message for each in ordered] == ["early", "late"]
    assert all(each.is_collateral for each in ordered)
    assert order_failures([]) == []


VICTIM = failure(
    "rank 1 gave up: RankLostError: a collective inside the site failed", 5.0, code="RANK_LOST",
    rank=1, exit_code=75, is_collateral=True,
)  # fmt: skip
GONE = failure("rank 0 went away without leaving", 5.01, code="RANK_LOST", rank=0,
               is_collateral=True)  # fmt: skip


@pytest.mark.parametrize(
    ("failures", "left_s"),
    [
        ([VICTIM], {0: 4.9}),
        ([VICTIM], {0: 5.02}),  # told a moment later
        ([VICTIM, GONE], {}),
        ([GONE, VICTIM], {2: 9.0}),
        ([dataclasses.replace(VICTIM, rank=2), VICTIM], {3: 5.1, 0: 4.0}),
        ([dataclasses.replace(VICTIM, code="RANK_EXITED", exit_code=1,
                              message="RuntimeError: Connection closed by peer")], {0: 4.9}),
    ],
)  # fmt: skip
def test_a_rank_that_ended_well_before_the_others_is_the_cause(
    failures: list[Failure], left_s: dict[int, float]
) -> None:
    first, *rest = order_failures(failures, "a", left_s)
    assert (first.code, first.rank, first.site, first.is_collateral) == (
        "SCRIPT_FAILED", 0, "a", False,
    )  # fmt: skip
    assert "rank 0 of site a ended with status 0" in first.message
    assert all(each.is_collateral for each in rest)
    assert first.at_s <= min(each.at_s for each in rest)


@pytest.mark.parametrize(
    ("failures", "left_s"),
    [
        ([VICTIM], {}),
        ([VICTIM], {1: 4.0}),  # its own
        ([failure("PeerLostError: site b", 5.0, exit_code=75, rank=1, is_collateral=True)],
         {0: 4.9}),  # the others' trouble, though rank 0 was done
        ([VICTIM, failure("kill", 5.0, code="RANK_KILLED", exit_code=-9, rank=2)], {0: 4.9}),
        ([failure("ValueError: x", 5.0, exit_code=1, rank=1)], {0: 4.9}),
        ([VICTIM, failure("sys.exit(3)", 4.9, exit_code=3, rank=2)], {0: 4.0}),
    ],
)  # fmt: skip
def test_a_rank_that_was_done_is_no_cause_of_what_others_do(
    failures: list[Failure], left_s: dict[int, float]
) -> None:
    assert all(each.rank != 0 for each in order_failures(failures, "a", left_s))


TERMINATED = failure("rank 0 was killed by SIGTERM", 5.1, code="RANK_KILLED", exit_code=-15,
                     rank=0, is_collateral=True)  # fmt: skip


def test_a_sigterm_that_others_suffered_from_is_the_cause() -> None:
    first, *rest = order_failures([GONE, VICTIM, TERMINATED], "a")
    assert (first.code, first.rank, first.is_collateral) == ("RANK_KILLED", 0, False)
    assert all(each.is_collateral for each in rest)
    assert len(rest) == 2


def test_a_sigterm_after_another_rank_had_gone_is_torchruns() -> None:
    gone = dataclasses.replace(GONE, rank=2)
    first = order_failures([gone, VICTIM, TERMINATED], "a")[0]
    assert (first.code, first.rank) == ("SCRIPT_FAILED", 2)
    lost_site = failure("PeerLostError: site b", 5.0, exit_code=75, rank=1, is_collateral=True)
    assert all(each.is_collateral for each in order_failures([lost_site, GONE, TERMINATED], "a"))


def test_the_agent_waits_for_a_word_about_the_rank_that_others_lost() -> None:
    assert awaits_cause([VICTIM], {})
    assert awaits_cause([VICTIM], {1: 4.0})
    assert not awaits_cause([VICTIM], {0: 4.9})
    assert awaits_cause([VICTIM, GONE], {})  # perhaps by a signal, of which nobody has told yet
    assert not awaits_cause([failure("PeerLostError: site b", 5.0, exit_code=75, rank=1,
                                     is_collateral=True)], {})  # fmt: skip
    assert awaits_cause([GONE], {})
    assert not awaits_cause(
        [VICTIM, failure("kill", 5.0, code="RANK_KILLED", exit_code=-9, rank=2)], {}
    )


def test_our_own_status_is_never_told_as_an_end(tmp_path: Path) -> None:
    details = {"message": "RankLostError: x", "code": "RANK_LOST", "collateral": True,
               "time_s": 1.0, "wall_s": 1.0}  # fmt: skip
    write_error_file(str(tmp_path / "error.json"), details, "")
    told = describe_failure(tmp_path, rank=1, exit_code=75, at_s=2.0)
    told = rank_failure(told, "a", 0)
    assert (told.code, told.is_collateral) == ("RANK_LOST", True)
    assert told.message == "rank 1 of site a gave up: RankLostError: x"


def test_a_gateway_alone_is_believed() -> None:
    assert order_failures([RANK_GONE]) == [RANK_GONE]


@pytest.mark.parametrize(
    ("exit_code", "text"),
    [(3, "exited with status 3"), (-9, "was killed by SIGKILL"), (-99, "was killed by signal 99")],
)
def test_ends_are_told_in_words(exit_code: int, text: str) -> None:
    assert describe_end(exit_code) == text


def test_a_rank_is_reported_with_what_it_said() -> None:
    told = Failure(
        code="RANK_EXITED", message="ValueError: x", at_s=3.0, rank=5, exit_code=1, log_path="/log"
    )
    report = rank_failure(told, "a", 2)
    assert report.message == "rank 5 of site a exited with status 1: ValueError: x"
    assert (report.code, report.rank, report.node, report.log_path) == ("RANK_EXITED", 5, 2, "/log")
    assert report.at_s == 3.0
