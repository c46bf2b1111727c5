"""A gateway that cannot be dialled: it dials for both directions, and all else goes as ever."""

from __future__ import annotations

import os
from collections.abc import Coroutine
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest

from isthmus.protos.exchange.v1 import state_pb2
from isthmus.sites.gateway.config import GatewayConfig
from isthmus.sites.gateway.links.calls import ask, deadline
from isthmus.sites.gateway.links.reversed_calls import OFFERED
from isthmus.sites.gateway.links.status import CallError, Status
from isthmus.sites.gateway.links.transport import REVERSE_METHOD
from isthmus.sites.gateway.transfer.state_server import INDEX_METHOD
from isthmus.sites.local.entry_folder import INDEX, entry_folder
from isthmus.sites.local.rank_messages import StateProgress
from isthmus.topology.spec.reduction_plan import ReductionPlan, star
from tests.fakes.certified import certify, speak_tls
from tests.fakes.gateway_rank import DEADLINE_S
from tests.fakes.gateway_sites import (
    GATHER_2,
    Member,
    gateway_config,
    gateways,
    join,
    leave,
    reduce_once,
    through_proxies,
)
from tests.fakes.waiting import wait_for

Result = TypeVar("Result")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


def configs_of(
    folder: Path, plan: ReductionPlan, shut: set[int], **changes: object
) -> list[GatewayConfig]:
    """Return a configuration for each site; those in `shut` cannot be dialled."""
    configs = []
    for site in range(plan.num_sites):
        config = gateway_config(folder, plan, site, listens=site not in shut, **changes)  # type: ignore[arg-type]
        links = tuple(
            replace(each, dials_in=config.sites.index(each.site) in shut) for each in config.links
        )
        configs.append(replace(config, links=links))
    return configs


@pytest.mark.parametrize("shut", [{0}, {1}])
def test_tensors_cross_both_ways(tmp_path: Path, shut: set[int]) -> None:
    configs = configs_of(tmp_path, GATHER_2, shut)
    with gateways(configs) as members, ExitStack() as stack:
        for site in shut:
            assert members[site].wait("listening")["port"] == 0
        ranks = [join(stack, member) for member in members]
        for round_ in range(20):
            reduce_once(ranks, round_, 50_000, [1.0, 3.0], seed=round_)
        leave(members, ranks)
        assert [member.end() for member in members] == [None, None]


def test_a_star_whose_leaves_are_behind_nat_over_mutual_tls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    speak_tls(monkeypatch, certify(tmp_path / "certs", "ash", "birch", "cedar"))
    plan = ReductionPlan(3, (star(3, 1),), "")
    configs = configs_of(tmp_path, plan, {0, 2}, gateways_per_site=(1, 1, 1))
    with gateways(configs) as members, ExitStack() as stack:
        ranks = [join(stack, member) for member in members]
        for round_ in range(5):
            reduce_once(ranks, round_, 50_000, [1.0, 3.0, 2.0], seed=round_)
        leave(members, ranks)
        assert [member.end() for member in members] == [None] * 3


def test_broken_connections_are_dialled_again(tmp_path: Path) -> None:
    configs = configs_of(tmp_path, GATHER_2, {0})
    with ExitStack() as stack:
        dial, proxies = through_proxies(stack)
        members = stack.enter_context(gateways(configs, dial))
        ranks = [join(stack, member) for member in members]
        for round_ in range(12):
            reduce_once(ranks, round_, 50_000, [1.0, 3.0], seed=round_)
            if round_ % 3 == 2:
                proxies[0].reset()
        leave(members, ranks)
        assert [member.end() for member in members] == [None, None]


def test_silence_is_suspected_and_the_end_of_it_told(tmp_path: Path) -> None:
    configs = configs_of(tmp_path, GATHER_2, {0}, peer_lost_s=1.5, keepalive_time_s=0.5)
    with ExitStack() as stack:
        dial, proxies = through_proxies(stack)
        members = stack.enter_context(gateways(configs, dial))
        ranks = [join(stack, member) for member in members]
        reduce_once(ranks, 0, 5000, [1.0, 3.0], seed=0)
        proxies[0].swallow()
        for member in members:
            assert member.wait("suspect")["is_gone"] is False
        proxies[0].reset()
        for member in members:
            member.wait("reached")
        reduce_once(ranks, 1, 5000, [1.0, 3.0], seed=1)
        leave(members, ranks)


@pytest.mark.parametrize("failing", [0, 1])
def test_a_failure_is_told_at_once_either_way(tmp_path: Path, failing: int) -> None:
    configs = configs_of(tmp_path, GATHER_2, {0})
    with gateways(configs) as members, ExitStack() as stack:
        ranks = [join(stack, member) for member in members]
        reduce_once(ranks, 0, 5000, [1.0, 3.0], seed=0)
        members[failing].gateway.stop()
        told = members[1 - failing].wait("suspect", is_gone=True)
        assert told["site"] == configs[failing].site


def test_a_site_that_cannot_be_dialled_gives_its_state(tmp_path: Path) -> None:
    configs = configs_of(tmp_path, GATHER_2, {0})
    configs = [
        replace(each, state_folder=str(tmp_path / f"node{at}")) for at, each in enumerate(configs)
    ]
    with gateways(configs) as members:
        members[1].wait("connected")
        with pytest.raises(CallError) as caught:
            index_of(members[1], 3)
        assert caught.value.status is Status.NOT_FOUND
        members[0].gateway.state_progress(0, StateProgress(epoch=3, done_bytes=5))
        answer = index_of(members[1], 3)
        assert (answer.done_bytes, answer.index) == (5, b"")
        folder = entry_folder(tmp_path / "node0", 3)
        folder.mkdir(parents=True)
        (folder / INDEX).write_bytes(b"index")
        assert index_of(members[1], 3).index == b"index"


def test_a_state_that_cannot_be_read_costs_a_site_that_dials_in_only_that(tmp_path: Path) -> None:
    configs = configs_of(tmp_path, GATHER_2, {0})
    configs[0] = replace(configs[0], state_folder=str(tmp_path))
    (entry_folder(tmp_path, 3) / INDEX).mkdir(parents=True)
    with gateways(configs) as members:
        members[1].wait("connected")
        assert status_of_index(members[1], 3) is Status.UNKNOWN
        assert status_of_index(members[1], 4) is Status.NOT_FOUND


def test_an_answer_for_which_nobody_waits_any_more_harms_nobody(tmp_path: Path) -> None:
    configs = configs_of(tmp_path, GATHER_2, {0})
    configs[0] = replace(configs[0], state_folder=str(tmp_path))
    index = entry_folder(tmp_path, 3) / INDEX
    index.parent.mkdir(parents=True)
    os.mkfifo(index)  # it is read when there is something in it
    with gateways(configs) as members:
        members[1].wait("connected")
        assert status_of_index(members[1], 3, 0.5) is Status.DEADLINE_EXCEEDED
        with index.open("wb"):  # it is being read
            assert status_of_index(members[1], 4) is Status.NOT_FOUND
        assert status_of_index(members[1], 4) is Status.NOT_FOUND


def test_more_calls_at_a_time_than_connections_wait_are_made(tmp_path: Path) -> None:
    configs = configs_of(tmp_path, GATHER_2, {0}, channels_per_link=4 * OFFERED)
    with gateways(configs) as members, ExitStack() as stack:
        ranks = [join(stack, member) for member in members]
        [link] = members[1].gateway._links.all.values()
        wait_for(lambda: len(link._streams.connections) == 4 * OFFERED, "all streams are open")
        reduce_once(ranks, 0, 50_000, [1.0, 3.0], seed=0)
        leave(members, ranks)


def test_a_gateway_that_can_be_dialled_is_not_asked_to_be(tmp_path: Path) -> None:
    """Calls of Reverse are for a gateway that dials out; one of its peers makes none."""
    configs = configs_of(tmp_path, GATHER_2, {0})
    with gateways(configs) as members:
        members[1].wait("connected")
        assert status_of(members[1], REVERSE_METHOD) is Status.INVALID_ARGUMENT
        assert status_of(members[1], "/isthmus.exchange.v1.Probe/Flood") is (Status.UNIMPLEMENTED)


def index_of(member: Member, epoch: int, timeout_s: float = DEADLINE_S) -> state_pb2.IndexResponse:
    """Ask the first site's gateway, which dials in to a member, for a state."""

    async def asked() -> state_pb2.IndexResponse:
        proxy = member.gateway._server.inbound_proxy((0, 0))
        async with deadline(timeout_s), proxy.dial(member.config, "", INDEX_METHOD) as call:
            return await ask(call, state_pb2.IndexRequest(epoch=epoch), state_pb2.IndexResponse)

    return on_loop(member, asked())


def status_of_index(member: Member, epoch: int, timeout_s: float = DEADLINE_S) -> Status:
    """Ask for a state that is not there; return what the answer is."""
    with pytest.raises(CallError) as caught:
        index_of(member, epoch, timeout_s)
    return caught.value.status


def status_of(member: Member, method: str) -> Status:
    """Make a call to the first site's gateway that is refused; return how."""

    async def refused() -> Status:
        proxy = member.gateway._server.inbound_proxy((0, 0))
        async with proxy.dial(member.config, "", method) as call:
            with pytest.raises(CallError) as caught:
                await call.read()
            return caught.value.status

    return on_loop(member, refused())


def on_loop(member: Member, work: Coroutine[Any, Any, Result]) -> Result:
    """Run work on a member's event loop."""
    assert member.gateway._wire is not None
    return member.gateway._wire.run(work).result(2 * DEADLINE_S)
