"""A site's gateways answer a proposal as one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from protos.control.v1.control_pb2 import (
    DecideReduction,
    PrepareReduction,
    ReductionBegun,
    ReductionPrepared,
    Resume,
    Resumed,
    Settle,
    Settled,
)
from sites.agent.site_gateways import EpochChange, PlanSwitch
from sites.gateway import agent_port
from sites.gateway.config import Proposal
from sites.node.failures import SiteError
from topology.epoch import (
    Epoch,
    Finished,
    Handover,
    finished_from_bytes,
    handovers_to_bytes,
)
from topology.json_fields import read_json, to_json
from topology.run_spec import CodedPlan
from topology.trees.trees import ReductionPlan, star

STAR = CodedPlan(ReductionPlan(3, (star(3, 1),), "x"), ("int8",))
GATHER = CodedPlan(ReductionPlan(3, (), "x"), ("fp32",))


Answer = ReductionPrepared | ReductionBegun | Settled | Resumed


class Site:
    """A site of two nodes, and what its gateways and the coordinator are told."""

    def __init__(self) -> None:
        self.told: list[Mapping[str, Any]] = []
        self.put: list[Answer] = []
        self.switch = PlanSwitch(2, self.told.append, self.put.append)
        self.epochs = EpochChange(2, self.told.append, self.put.append)

    def prepare(self, epoch: int, reduction: CodedPlan) -> None:
        written = reduction.to_bytes()
        self.switch.prepare(PrepareReduction(epoch=epoch, from_round=9, reduction=written))


def answer(epoch: int, **changes: object) -> Mapping[str, Any]:
    fields = {"accepted": True, "hash": "h", "round": 4, "late": False, "codecs_fixed": False}
    return {"op": "plan_prepared", "epoch": epoch, "why": "", **fields, **changes}


def test_that_ranks_encode_is_passed_on() -> None:
    site = Site()
    site.prepare(1, STAR)
    site.switch.prepared(answer(1))
    site.switch.prepared(answer(1, accepted=False, why="ranks encode", codecs_fixed=True))
    (put,) = site.put
    assert isinstance(put, ReductionPrepared)
    assert (put.accepted, put.late, put.codecs_fixed) == (False, False, True)


def test_gateways_get_the_plan_by_site_index() -> None:
    site = Site()
    site.prepare(1, STAR)
    (line,) = site.told
    fields = {key: value for key, value in line.items() if key != "op"}
    proposal = read_json(Proposal, fields)
    assert (proposal.epoch, proposal.from_round) == (1, 9)
    assert proposal.plan.trees == (star(3, 1),)
    assert proposal.codecs == ("int8",)
    assert proposal.hash == STAR.hash
    site.prepare(2, GATHER)
    assert site.told[1]["plan"]["trees"] == ()
    site.switch.decide(DecideReduction(epoch=2, commit=True))
    assert site.told[2] == {"op": "decide_plan", "epoch": 2, "commit": True}


def test_all_gateways_have_to_accept() -> None:
    site = Site()
    site.prepare(1, STAR)
    site.switch.prepared(answer(1, round=4))
    assert site.put == []
    site.switch.prepared(answer(1, round=5))
    assert site.put == [ReductionPrepared(epoch=1, accepted=True, plan_hash="h", round=5)]
    site.prepare(2, STAR)
    site.switch.prepared(answer(1))  # of before
    site.switch.prepared(answer(2))
    site.switch.prepared(answer(2, accepted=False, late=True, why="round 9 has begun"))
    late = site.put[-1]
    assert isinstance(late, ReductionPrepared)
    assert (late.accepted, late.late, late.why) == (False, True, "round 9 has begun")
    site.prepare(3, STAR)
    site.switch.prepared(answer(3, accepted=False, late=True, why="late"))
    site.switch.prepared(answer(3, accepted=False, why="no links"))
    unable = site.put[-1]
    assert isinstance(unable, ReductionPrepared)
    assert not unable.late, "a later round would not help"


def test_gateways_that_understood_different_plans_are_a_refusal() -> None:
    site = Site()
    site.prepare(1, STAR)
    site.switch.prepared(answer(1, hash="h"))
    site.switch.prepared(answer(1, hash="i"))
    refused = site.put[-1]
    assert isinstance(refused, ReductionPrepared)
    assert (refused.accepted, refused.why) == (False, "its gateways understood different plans")


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ((b'"root":1', b'"root":1,"weight":0'), "of weight 1 to 100"),
        ((b'"codecs":', b'"newer":1,"codecs":'), "newer: unknown"),
        ((b"{", b"["), "not JSON"),
    ],
)
def test_plans_that_cannot_be_are_refused_before_any_gateway_hears(
    changed: tuple[bytes, bytes], why: str
) -> None:
    site = Site()
    written = STAR.to_bytes().replace(*changed)
    site.switch.prepare(PrepareReduction(epoch=1, from_round=9, reduction=written))
    assert site.told == []
    (refused,) = site.put
    assert isinstance(refused, ReductionPrepared)
    assert not refused.accepted
    assert why in refused.why


def test_the_first_gateway_that_begins_is_told() -> None:
    site = Site()
    for _ in range(2):
        site.switch.begun({"op": "plan_begun", "epoch": 1, "round": 9})
    assert site.put == [ReductionBegun(epoch=1, round=9)]


def settled(epoch: int, round_: int, finished: tuple[Finished, ...], chains: object) -> Any:  # noqa: ANN401
    """Return a gateway's answer."""
    fields = {"round": round_, "finished": to_json(finished), "chains": chains}
    return {"op": "settled", "epoch": epoch, **fields}


def test_what_gateways_have_finished_adds_up() -> None:
    site = Site()
    site.epochs.settle(Settle(epoch=3, lost=["c"], stops=True))
    assert site.told == [{"op": "settle", "epoch": 3, "stops": True}]
    site.epochs.answered(settled(2, 9, (), {}))
    one, other = (Finished(7, 0, ((0, 4),)),), (Finished(7, 0, ((5, 6),)), Finished(8, 0, ()))
    site.epochs.answered(settled(3, 7, one, {"5": 2**63, "6": 5}))
    assert site.put == []
    site.epochs.answered(settled(3, 8, other, {"5": 1, "6": 2**64 - 1, "7": 9}))
    (put,) = site.put
    assert isinstance(put, Settled)
    assert (put.epoch, put.round, put.chain_round, put.chain) == (3, 8, 6, 4)
    assert finished_from_bytes(put.finished) == (Finished(7, 0, ((0, 6),)), Finished(8, 0, ()))


def test_gateways_resume_with_what_the_coordinator_says() -> None:
    site = Site()
    handovers = (Handover("a", "b", 7, 0, ((1, 2),)),)
    record = Epoch(3, ("a", "b"), STAR, 7)
    message = Resume(epoch=3, record=record.to_bytes(), handovers=handovers_to_bytes(handovers))
    site.epochs.resume(message)
    (line,) = site.told
    fields = {key: value for key, value in line.items() if key != "op"}
    told = read_json(agent_port.Resume, fields)
    assert (told.epoch, told.from_round, told.members) == (3, 7, ("a", "b"))
    assert (told.plan, told.codecs, told.handovers) == (STAR.plan, STAR.codecs, handovers)
    for round_ in (7, 8):
        site.epochs.answered({"op": "resumed", "epoch": 3, "round": round_})
    assert site.put == [Resumed(epoch=3, round=8)]
    with pytest.raises(SiteError, match="the epoch is not JSON"):
        site.epochs.resume(Resume(epoch=4, record=b"{"))
