"""Which of several failures is the cause."""

from __future__ import annotations

import itertools

import pytest

from protos.failure import Failure
from sites.agent.site_failures import order_failures
from sites.node.failures import describe_end, rank_failure


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
