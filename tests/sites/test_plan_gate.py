"""Rounds that wait for the outcome of a plan which was proposed for them."""

from __future__ import annotations

import threading
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from protos.errors import DeadlineExceededError, LocalProtocolError, PeerLostError
from sites.gateway.proposal import Proposal
from sites.gateway.reduction import plan_gate
from sites.gateway.reduction.bucket import Post
from tests.fakes.exchanges import Exchanges
from topology.trees.trees import ReductionPlan, star

DEADLINE_S = 20.0


def a_proposal(plan: ReductionPlan, *, from_round: int) -> Proposal:
    return Proposal(epoch=1, from_round=from_round, plan=plan, codecs=("fp32",))


def a_post(round_: int) -> Post:
    part = np.ones(8, dtype=np.float32)
    return Post(round=round_, bucket=0, numel=8, layout=7, weight=1.0, exact=False, values=part)


def test_a_rank_waits_at_the_first_round_until_the_outcome_is_known() -> None:
    plan = ReductionPlan(2, (star(2, 0),), "")
    exchange = Exchanges(plan, "fp32", (1, 1)).exchanges[0]
    assert exchange.plans.propose(a_proposal(plan, from_round=1)) == (True, -1)
    posting = threading.Thread(target=exchange.post, args=(0, a_post(1)), daemon=True)
    posting.start()
    posting.join(0.05)
    assert posting.is_alive(), "it has to wait"
    assert exchange.plans.round == -1
    exchange.plans.decide(1, commit=True)
    posting.join(DEADLINE_S)
    assert not posting.is_alive()
    assert exchange.plans.begun is not None
    assert (exchange.plans.begun.epoch, exchange.plans.begun.round) == (1, 1)


def test_nobody_waits_for_an_outcome_for_ever() -> None:
    plan = ReductionPlan(2, (star(2, 0),), "")
    exchange = Exchanges(plan, "fp32", (1, 1), peer_lost_s=0.01).exchanges[0]
    exchange.plans.propose(a_proposal(plan, from_round=1))
    with pytest.raises(DeadlineExceededError, match="round 1 has waited"):
        exchange.post(0, a_post(1))
    exchange.close()
    patient = Exchanges(plan, "fp32", (1, 1)).exchanges[0]
    patient.plans.propose(a_proposal(plan, from_round=1))
    patient.close()
    with pytest.raises(PeerLostError, match="stopping"):
        patient.post(0, a_post(1))


def test_who_stood_still_meanwhile_waits_on(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = ReductionPlan(2, (star(2, 0),), "")
    exchange = Exchanges(plan, "fp32", (1, 1), peer_lost_s=10.0).exchanges[0]
    exchange.plans.propose(a_proposal(plan, from_round=1))
    now_s, num_waits = 100.0, 0

    def wait(wait_s: float) -> None:
        nonlocal now_s, num_waits
        num_waits += 1
        now_s += wait_s if num_waits > 1 else 3600.0
        if num_waits > 25:
            exchange.plans.decide(1, commit=True)

    monkeypatch.setattr(plan_gate, "time", SimpleNamespace(monotonic=lambda: now_s))
    monkeypatch.setattr(exchange._condition, "wait", wait)
    exchange.post(0, a_post(1))
    assert num_waits == 26
    exchange.close()


def test_what_comes_too_late_or_twice_is_not_kept() -> None:
    plan = ReductionPlan(2, (star(2, 1),), "")
    exchange = Exchanges(plan, "fp32", (1, 1)).exchanges[0]
    exchange.post(0, a_post(0))
    plans = exchange.plans
    proposal = a_proposal(plan, from_round=5)
    assert plans.propose(replace(proposal, from_round=0)) == (False, 0), "it has begun"
    assert plans.propose(replace(proposal, epoch=2)) == (True, 0)
    assert plans.propose(replace(proposal, epoch=1)) == (False, 0), "a later one came first"
    plans.decide(3, commit=False)
    assert plans.propose(replace(proposal, epoch=3)) == (False, 0), "given up before it came"
    assert plans.propose(replace(proposal, epoch=4)) == (True, 0)
    with pytest.raises(LocalProtocolError, match="not kept here"):
        plans.decide(5, commit=True)
    assert plans.propose(replace(proposal, epoch=6)) == (True, 0)
    plans.decide(6, commit=True)
    assert plans.propose(replace(proposal, epoch=7)) == (False, 0), "two plans for one round"
    assert plans.propose(replace(proposal, epoch=8, from_round=6)) == (True, 0)


def test_links_are_needed_for_as_long_as_a_plan_is() -> None:
    before, after = (ReductionPlan(3, (star(3, hub),), "") for hub in (1, 2))
    exchange = Exchanges(before, "fp32", (1, 1, 1)).exchanges[0]
    plans = exchange.plans
    assert [plans.needs(site) for site in (1, 2)] == [True, False]
    plans.propose(a_proposal(after, from_round=1))
    assert plans.needs(2)
    plans.decide(1, commit=True)
    for round_, needed in ((0, [True, True]), (1, [True, True]), (2, [False, True])):
        exchange.post(0, a_post(round_))
        assert [plans.needs(site) for site in (1, 2)] == needed, round_
