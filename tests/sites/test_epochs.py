"""Which plan carries a round, what is finished, and what a resume means: without any chunks."""

from __future__ import annotations

import random

import pytest

from isthmus.protos.errors import LocalProtocolError
from isthmus.sites.gateway.reduction.epochs import (
    Epochs,
    Fate,
    Gift,
    PlanInForce,
    Verdict,
    in_force,
)
from isthmus.topology.spec.epoch import Finished
from isthmus.topology.spec.reduction_plan import ReductionPlan

ALL = ReductionPlan(3, (), "")
LEFT = ReductionPlan(3, (), "", (0, 1))


def plan(epoch: int, from_round: int, members: ReductionPlan = LEFT, site: int = 0) -> PlanInForce:
    return in_force(members, ("fp32",), site, epoch=epoch, from_round=from_round)


def epochs_in_round(round_: int, site: int = 0) -> Epochs:
    found = Epochs(plan(0, 0, ALL, site))
    for each in range(round_ + 1):
        found.begin(each)
    return found


def test_a_planned_change_waits_for_a_later_round_and_old_ones_end_as_they_began() -> None:
    epochs = epochs_in_round(4)
    epochs.settle(1, stops=False)
    assert (epochs.may_begin(4), epochs.may_begin(5)) == (True, False)
    assert epochs.verdict(0, 4) is Verdict.TAKE
    assert epochs.verdict(1, 6) is Verdict.WAIT, "others may be sooner"
    assert epochs.resume(plan(1, 6))
    assert [epochs.plan_of(each).epoch for each in (4, 5, 6)] == [0, 0, 1]
    assert epochs.verdict(0, 5) is Verdict.TAKE
    assert epochs.verdict(0, 6) is Verdict.DROP
    assert epochs.needs(2)
    for each in (5, 6, 7):
        epochs.begin(each)
    assert not epochs.needs(2)


def test_a_site_that_is_no_member_any_more_has_its_part_in_the_rounds_before() -> None:
    epochs = epochs_in_round(4, site=2)
    epochs.settle(1, stops=False)
    assert epochs.resume(plan(1, 6, site=2))
    assert [epochs.may_begin(each) for each in (5, 6)] == [True, False]
    assert [epochs.is_over(each) for each in (5, 6)] == [False, True]
    assert epochs.needs(0), "until it is done"


def test_a_change_that_does_not_come_leaves_no_trace() -> None:
    epochs = epochs_in_round(4)
    epochs.settle(3, stops=False)
    epochs.cancel(2)
    assert not epochs.may_begin(5)
    epochs.cancel(3)
    assert epochs.may_begin(5)
    assert not epochs.resume(plan(0, 9))
    assert epochs.number == 0


def test_where_a_site_is_lost_nothing_moves_until_the_resume() -> None:
    epochs = epochs_in_round(4)
    epochs.finish((4, 0, 1), ("r",), 5)
    epochs.settle(1, stops=True)
    assert epochs.verdict(0, 4) is Verdict.DROP
    epochs.cancel(1)
    assert epochs.is_stopped, "frames have been dropped"
    epochs.settle(2, stops=False)
    epochs.settle(1, stops=True)
    assert epochs.is_stopped
    gifts = [Gift(1, 0, 4, 0, ((0, 1),)), Gift(0, 1, 4, 0, ((1, 2),)), Gift(1, 2, 4, 0, ((0, 0),))]
    assert epochs.resume(plan(2, 4), gifts)
    assert not epochs.resume(plan(2, 4), gifts), "it may be told twice"
    assert [epochs.fate((4, 0, chunk)) for chunk in (0, 1, 2)] == [
        Fate.COMES,
        Fate.DONE,
        Fate.AGAIN,
    ]
    assert epochs.donor((4, 0, 0)) == 1
    assert epochs.due() == [((4, 0, 1), 1, ("r",))]
    epochs.finish((4, 0, 2), ("s",), 6)
    assert epochs.due() == [((4, 0, 2), 1, ("s",))]
    assert epochs.due() == []
    assert not epochs.needs(2)


def test_what_is_handed_over_still_comes_after_a_planned_change() -> None:
    epochs = epochs_in_round(4)
    epochs.settle(1, stops=True)
    gifts = [Gift(1, 0, 4, 0, ((0, 0),)), Gift(0, 2, 4, 0, ((0, 0),))]
    assert epochs.resume(plan(1, 4, ALL), gifts)
    assert epochs.due() == []
    epochs.settle(2, stops=False)
    assert epochs.resume(plan(2, 5, ALL))
    assert epochs.donor((4, 0, 0)) == 1
    assert epochs.verdict(2, 4) is Verdict.TAKE, "the donor has changed already"
    epochs.finish((4, 0, 0), ("r",), 5)
    assert epochs.due() == [((4, 0, 0), 2, ("r",))]


def test_a_round_that_goes_on_is_not_carried_by_others() -> None:
    epochs = epochs_in_round(4)
    epochs.settle(1, stops=False)
    with pytest.raises(LocalProtocolError, match="round 4 has begun"):
        epochs.resume(plan(1, 4))


def test_what_is_stable_is_not_kept() -> None:
    epochs = epochs_in_round(0)
    for chunk in (3, 1, 2):
        epochs.finish((0, 0, chunk), (), 0)
    epochs.begin(1)
    assert epochs.finished() == (Finished(0, 0, ((1, 3),)),)
    epochs.finish((1, 7, 0), (), 0)
    assert epochs.finished() == (Finished(1, 7, ((0, 0),)),)


@pytest.mark.parametrize("seed", range(5))
def test_gateways_of_sites_have_one_chain_however_chunks_are_divided(seed: int) -> None:
    chance = random.Random(seed)
    sums = {(round_, 0, chunk): chance.getrandbits(64) for round_ in range(6) for chunk in range(9)}
    found = set()
    for num_gateways in (1, 2, 3):
        gateways = [epochs_in_round(0) for _ in range(num_gateways)]
        for round_ in range(6):
            own = [order for order in sums if order[0] == round_]
            for order in chance.sample(own, len(own)):
                gateways[order[2] % num_gateways].finish(order, (), sums[order])
            for each in gateways:
                each.begin(round_ + 1)
        found.add(sum(each.chains[5] for each in gateways) % (1 << 64))
        assert set(gateways[0].chains) == {2, 3, 4, 5}
    assert len(found) == 1


def test_the_first_round_without_a_site_is_told_whatever_comes_after() -> None:
    epochs = epochs_in_round(4)
    epochs.settle(1, stops=True)
    assert epochs.resume(plan(1, 4))
    assert epochs.missing == {2: 4}
    epochs.begin(5)
    epochs.settle(2, stops=False)
    assert epochs.resume(plan(2, 6)), "other trees, the same members"
    assert epochs.missing == {2: 4}
    epochs.settle(3, stops=False)
    assert epochs.resume(plan(3, 8, ALL)), "it has returned"
    assert epochs.missing == {}


def test_a_site_enters_with_the_round_that_ranks_mark() -> None:
    epochs = epochs_in_round(4)
    epochs.settle(1, stops=True)
    assert epochs.resume(plan(1, 4, LEFT))
    epochs.settle(2, stops=False)
    assert epochs.await_entry(plan(2, 6, ALL))
    assert not epochs.await_entry(plan(2, 6, ALL)), "told twice"
    assert epochs.may_begin(5), "rounds go on meanwhile"
    assert epochs.needs(2), "its links are opened"
    for each in (5, 6, 7):
        epochs.begin(each)
    assert (epochs.number, epochs.missing) == (1, {2: 4})
    assert epochs.verdict(2, 8) is Verdict.WAIT
    assert not epochs.enter(9, 8), "given up elsewhere"
    assert epochs.enter(2, 8)
    assert not epochs.enter(2, 8), "another rank of the gateway"
    epochs.begin(8)
    assert [epochs.plan_of(each).epoch for each in (7, 8)] == [1, 2]
    assert (epochs.number, epochs.missing) == (2, {})


def test_a_site_that_was_to_enter_is_missing_if_it_is_lost_before() -> None:
    """Its ranks and others' may have agreed by then that it takes part."""
    epochs = Epochs(plan(0, 0, LEFT))
    for round_ in range(5):
        epochs.begin(round_)
    epochs.settle(1, stops=False)
    assert epochs.await_entry(plan(1, 6, ALL))
    epochs.settle(2, stops=True)
    assert epochs.resume(plan(2, 4, LEFT))
    assert epochs.missing == {2: 4}
    epochs.settle(3, stops=False)
    assert epochs.await_entry(plan(3, 8, ALL))
    epochs.settle(4, stops=True)
    assert epochs.resume(plan(4, 5, LEFT))
    assert epochs.missing == {2: 4}, "since it was lost"


def test_a_loss_takes_the_place_of_an_entry() -> None:
    epochs = epochs_in_round(4)
    epochs.settle(1, stops=False)
    assert epochs.await_entry(plan(1, 6, ALL))
    epochs.settle(1, stops=True)
    epochs.settle(2, stops=True)
    assert not epochs.await_entry(plan(1, 6, ALL)), "late"
    assert epochs.resume(plan(2, 4, LEFT))
    assert not epochs.enter(1, 6)
    epochs.begin(5)
    assert epochs.plan_of(5).epoch == 2
