"""A site's gateways answer a change of the epoch as one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from isthmus.protos.control.v1.control_pb2 import (
    Resume,
    Resumed,
    Settle,
    Settled,
)
from isthmus.sites.agent.site_gateways import EpochChange, Opinions
from isthmus.sites.gateway import agent_port
from isthmus.sites.node.failures import SiteError
from isthmus.topology.spec.epoch import (
    Epoch,
    Finished,
    Handover,
    finished_from_bytes,
    handovers_to_bytes,
)
from isthmus.topology.spec.reduction_plan import ReductionPlan, star
from isthmus.topology.spec.run_spec import CodedPlan

SUSPECT = agent_port.Suspect(site="b", is_gone=True, why="it has ended")
STAR = CodedPlan(ReductionPlan(3, (star(3, 1),), "x"), ("int8",))


class Site:
    """A site of two nodes, and what its gateways and the coordinator are told."""

    def __init__(self) -> None:
        self.told: list[agent_port.Command] = []
        self.put: list[Settled | Resumed] = []
        self.epochs = EpochChange(2, self.told.append, self.put.append)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ((b'"weight":1', b'"weight":0'), "of weight 1 to 100"),
        ((b'"codecs":', b'"newer":1,"codecs":'), "newer: unknown"),
        ((b"{", b"["), "not JSON"),
    ],
)
def test_plans_that_cannot_be_are_refused_before_any_gateway_hears(
    changed: tuple[bytes, bytes], why: str
) -> None:
    site = Site()
    site.epochs.settle(Settle(epoch=1, reduction=STAR.to_bytes().replace(*changed)))
    assert site.told == []
    (refused,) = site.put
    assert isinstance(refused, Settled)
    assert why in refused.why


def test_one_gateway_that_cannot_have_other_trees_is_a_refusal() -> None:
    site = Site()
    site.epochs.settle(Settle(epoch=1, reduction=STAR.to_bytes()))
    assert site.told == [agent_port.Settle(epoch=1, stops=False, reduction=STAR)]
    site.epochs.answered(settled(1, 4, (), {}))
    site.epochs.answered(settled(1, 4, (), {}, why="ranks encode", codecs_fixed=True))
    (put,) = site.put
    assert isinstance(put, Settled)
    assert (put.why, put.codecs_fixed, put.round) == ("ranks encode", True, 4)


def settled(
    epoch: int,
    round_: int,
    finished: tuple[Finished, ...],
    chains: Mapping[int, int],
    **changes: Any,  # noqa: ANN401 - other fields
) -> agent_port.Settled:
    """Return a gateway's answer."""
    return agent_port.Settled(
        epoch=epoch, round=round_, finished=finished, chains=chains, **changes
    )


def test_what_gateways_have_finished_adds_up() -> None:
    site = Site()
    site.epochs.settle(Settle(epoch=3, lost=["c"], stops=True))
    assert site.told == [agent_port.Settle(epoch=3, stops=True)]
    site.epochs.answered(settled(2, 9, (), {}))
    one, other = (Finished(7, 0, ((0, 4),)),), (Finished(7, 0, ((5, 6),)), Finished(8, 0, ()))
    site.epochs.answered(settled(3, 7, one, {5: 2**63, 6: 5}))
    assert site.put == []
    site.epochs.answered(settled(3, 8, other, {5: 1, 6: 2**64 - 1, 7: 9}))
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
    assert site.told == [agent_port.Resume(epoch=record, handovers=handovers)]
    for round_ in (7, 8):
        site.epochs.answered(agent_port.Resumed(epoch=3, round=round_))
    assert site.put == [Resumed(epoch=3, round=8)]
    site.epochs.answered(agent_port.Resumed(epoch=3, round=40, behind=5))
    assert site.put[1:] == [Resumed(epoch=3, round=40, behind=5)], "one speaks for all"
    with pytest.raises(SiteError, match="the epoch is not JSON"):
        site.epochs.resume(Resume(epoch=4, record=b"{"))


def test_a_site_that_comes_back_is_not_suspected_for_what_was_before() -> None:
    opinions = Opinions("a")
    assert opinions.take(0, SUSPECT) is not None
    assert [each.site for each in opinions.suspects()] == ["b"]
    assert opinions.begin(Epoch(1, ("a", "b"), STAR, 7), ["b"]) == ["b"]
    assert opinions.suspects() == [], "a coordinator that was started again would hear of it"
    assert opinions.take(0, SUSPECT) is not None, "news, should it fail again"
    opinions.begin(Epoch(2, ("a", "b"), STAR, 9), ["a"])
    assert opinions.suspects() == [], "the own site has new links with all others"


def test_a_site_that_is_no_member_is_not_suspected() -> None:
    """A coordinator that starts while it is away would think so of it once it is back."""
    opinions = Opinions("a")
    assert opinions.take(0, SUSPECT) is not None
    assert opinions.begin(Epoch(1, ("a", "c"), STAR, 7), []) == ["b"], "is told"
    assert opinions.suspects() == []
    assert opinions.take(0, SUSPECT) is None, "its link has ended a moment later"
    opinions.begin(Epoch(2, ("a", "b", "c"), STAR, 9, follows=("b",)), ["b"])
    assert opinions.take(0, SUSPECT) is not None, "news, should it fail again"
