from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import pytest

from isthmus.sites.local.rank_messages import Members
from isthmus.sites.worker.exchange.member_history import (
    Announced,
    CatchingUp,
    CaughtUp,
    Change,
    Changed,
    GivenUp,
    MemberHistory,
)
from isthmus.topology.spec.regime import Rung

DELAYED, BACK = Rung(5, "delayed"), Rung(6)
REJOINS = Members(epoch=2, from_round=10, sites=("a", "b", "c"), enters=("b",))
CATCHES_UP = dataclasses.replace(REJOINS, follows=("b",), state="state")
LOSS = Members(epoch=3, from_round=11, sites=("a", "c"))


def ends(history: MemberHistory, rounds: range, notice_steps: int = 3) -> list[list[Change]]:
    return [history.end_step(each, lambda _: notice_steps) for each in rounds]


def test_a_site_rejoins_some_steps_after_all_ranks_have_heard_of_it() -> None:
    history = MemberHistory("a")
    assert ends(history, range(6, 8)) == [[], []]
    history.tell(REJOINS)
    found = ends(history, range(8, 15))
    assert found == [
        [],
        [],
        [Announced(("b",), 8)],
        [],
        [],
        [CaughtUp(("b",), 2)],
        [],
    ]


def test_a_site_catches_up_from_the_next_gradients_on_and_rejoins_like_any_other() -> None:
    history = MemberHistory("a")
    history.tell(CATCHES_UP)
    assert ends(history, range(9, 12)) == [[], [CatchingUp(("b",), 2, Path("state"))], []]
    history.tell(CATCHES_UP)
    assert ends(history, range(12, 13)) == [[]], "told again"
    own = MemberHistory("b", rejoins=True)
    own.tell(CATCHES_UP)
    assert ends(own, range(11, 13)) == [[], []]
    assert (own.is_catching_up, history.is_catching_up) == (True, False)
    for each in (history, own):
        each.tell(dataclasses.replace(REJOINS, epoch=3, from_round=14))
        assert ends(each, range(13, 16), 1) == [
            [],
            [Announced(("b",), each._step)],
            [CaughtUp(("b",), 3)],
        ]
        assert not each.is_catching_up


def test_another_regime_begins_once_all_ranks_know_of_it() -> None:
    """It is told again with each later epoch, and that changes nothing."""
    history = MemberHistory("a")
    told = Members(epoch=5, from_round=8, sites=("a", "b"), rung=DELAYED)
    history.tell(told)
    assert ends(history, range(9, 12)) == [[], [Changed(DELAYED)], []]
    history.tell(dataclasses.replace(told, epoch=6, from_round=12))
    assert ends(history, range(12, 16)) == [[]] * 4
    history.tell(dataclasses.replace(told, epoch=7, from_round=15, rung=BACK))
    assert ends(history, range(16, 19)) == [[], [Changed(BACK)], []]


def test_a_site_is_let_in_after_the_regime_that_was_decided_before() -> None:
    history = MemberHistory("a")
    history.tell(Members(epoch=5, from_round=9, sites=("a", "c"), rung=DELAYED))
    history.tell(dataclasses.replace(CATCHES_UP, epoch=6, from_round=10, rung=DELAYED))
    expected = [Changed(DELAYED), CatchingUp(("b",), 6, Path("state"))]
    assert ends(history, range(10, 13)) == [[], expected, []]


def test_a_site_that_comes_back_knows_the_regime_it_begins_with() -> None:
    own = MemberHistory("b", rejoins=True)
    own.tell(dataclasses.replace(CATCHES_UP, epoch=6, rung=DELAYED))
    admitted = own.own_entry(0.0)
    assert admitted is not None
    assert admitted.rung == DELAYED
    own.tell(dataclasses.replace(REJOINS, enters=(), rung=DELAYED, epoch=7))
    own.note_state(0, DELAYED.number)
    assert ends(own, range(10, 16)) == [[]] * 6


def test_where_rounds_are_longer_than_a_step_nothing_changes_amid_one() -> None:
    """Though members are known, and something of the script's has crossed since."""
    history = MemberHistory("a")
    history.tell(CATCHES_UP)
    found = [
        history.end_step(num_rounds, lambda _: 4, has_landed=step % 4 == 0)
        for step, num_rounds in enumerate([9, 9, 9, 9, 10, 10, 11, 11, 12], start=1)
    ]
    assert found == [*[[]] * 7, [CatchingUp(("b",), 2, Path("state"))], []]
    history.tell(dataclasses.replace(REJOINS, epoch=3, from_round=11))
    found = [history.end_step(13, lambda _: 4, has_landed=step % 4 == 0) for step in range(10, 17)]
    assert found == [[], [], [Announced(("b",), 16)], [], [], [], [CaughtUp(("b",), 3)]]


def test_without_data_loaders_it_rejoins_with_the_next_step() -> None:
    history = MemberHistory("a")
    history.tell(REJOINS)
    assert ends(history, range(10, 12), 0) == [
        [Announced(("b",), 1), CaughtUp(("b",), 2)],
        [],
    ]


@pytest.mark.parametrize("seed", range(20))
def test_ranks_that_hear_sooner_or_later_do_the_same(seed: int) -> None:
    """A loss is heard of before its second round can be completed, never later."""
    draw = random.Random(seed)
    found = []
    for _ in range(4):
        history, changes = MemberHistory("a"), []
        enters_at, loss_at = draw.randint(5, 10), draw.randint(11, 13)
        for num_rounds in range(5, 20):
            if num_rounds == enters_at:
                history.tell(REJOINS)
            if num_rounds == loss_at:
                history.tell(LOSS)
            changes.append(history.end_step(num_rounds, lambda _: 3))
        found.append(changes)
    assert all(each == found[0] for each in found), f"{seed=}"
    assert [type(each) for changes in found[0] for each in changes][:1] == [Announced]


def test_a_loss_meanwhile_gives_it_up_and_later_it_is_announced_anew() -> None:
    history = MemberHistory("a")
    history.tell(REJOINS)
    assert ends(history, range(10, 12)) == [[Announced(("b",), 4)], []]
    history.tell(LOSS)
    assert ends(history, range(12, 14)) == [[], [GivenUp(("b",), 4)]]
    history.tell(Members(epoch=4, from_round=14, sites=("a", "b", "c"), enters=("b",)))
    assert ends(history, range(14, 15)) == [[Announced(("b",), 8)]]


def test_a_site_that_comes_back_averages_gradients_first() -> None:
    history = MemberHistory("b", rejoins=True)
    with pytest.raises(RuntimeError, match=r"site\.checkpoint"):
        history.check_may_begin(0, is_gradient=True)
    assert history.own_entry(0.0) is None
    history.tell(CATCHES_UP)
    assert history.own_entry(0.0) == CATCHES_UP
    history.note_state(0)
    with pytest.raises(RuntimeError, match="gradients"):
        history.check_may_begin(10, is_gradient=False)
    history.check_may_begin(10, is_gradient=True)
    history.check_may_begin(11, is_gradient=False)
