"""What gateways ask each other, with gRPC's library as either end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from isthmus.protos.errors import RemoteProtocolError
from isthmus.protos.exchange.v1 import exchange_pb2, exchange_pb2_grpc, state_pb2, state_pb2_grpc
from isthmus.protos.security import exchange_security
from isthmus.sites.gateway.links.calls import answering, ask, deadline
from isthmus.sites.gateway.links.status import CallError, Status
from isthmus.sites.gateway.links.transport import (
    HELLO_METHOD,
    LEAVE_METHOD,
    SESSION_KEY,
    Peer,
    say_hello,
)
from isthmus.sites.gateway.transfer.donors import donor
from isthmus.sites.gateway.transfer.state_fetch import StateFetch
from isthmus.sites.gateway.transfer.state_server import INDEX_METHOD
from isthmus.sites.local.entry_folder import INDEX, entry_folder
from isthmus.sites.local.rank_messages import StateProgress
from tests.fakes.certified import certify, speak_tls
from tests.fakes.gateway_sites import GATHER_2, SITES, gateway_config, gateways
from tests.fakes.library_calls import DEADLINE_S, channel_to, hello_by_library
from tests.fakes.told_calls import ToldCall
from tests.sites.test_state_transfer import EPOCH, MIB, files_of, make_state

pytestmark = [pytest.mark.slow, pytest.mark.timeout(60)]


@pytest.fixture(params=["plain", "tls"], autouse=True)
def _security(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if request.param == "tls":
        speak_tls(monkeypatch, certify(tmp_path / "certs", *SITES[:2]))


def test_the_library_asks_a_gateway(tmp_path: Path) -> None:
    configs = [
        gateway_config(tmp_path, GATHER_2, site, state_folder=str(tmp_path / SITES[site]))
        for site in range(2)
    ]
    folder = make_state(tmp_path / SITES[1], 5 * MIB)
    with (
        gateways(configs) as members,
        channel_to(members[1].peer.port, configs[0], SITES[1]) as channel,
    ):
        members[1].wait("connected")
        session = hello_by_library(channel, configs[0]).session
        metadata = ((SESSION_KEY, session),)
        stub = state_pb2_grpc.StateStub(channel)
        index = stub.Index(
            state_pb2.IndexRequest(epoch=EPOCH), metadata=metadata, timeout=DEADLINE_S
        )
        assert index.index == (folder / INDEX).read_bytes()
        requests = [
            state_pb2.ReadRequest(epoch=EPOCH, path="tensors", piece=piece) for piece in range(2)
        ]
        pieces = stub.Read(iter(requests), metadata=metadata, timeout=DEADLINE_S)
        assert b"".join(each.data for each in pieces) == (folder / "tensors").read_bytes()
        with pytest.raises(grpc.RpcError) as caught:
            stub.Index(state_pb2.IndexRequest(epoch=9), metadata=metadata, timeout=DEADLINE_S)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        assert caught.value.details() == "no state of epoch 9 is here"
        members[1].gateway.state_progress(0, StateProgress(epoch=9, done_bytes=3))
        leaving = exchange_pb2.LeaveRequest(session=session, code="RANK_LOST", message="it left")
        exchange_pb2_grpc.ExchangeStub(channel).Leave(leaving, timeout=DEADLINE_S)
        assert "it left" in members[1].wait("suspect", is_gone=True)["why"]


class Library(exchange_pb2_grpc.ExchangeServicer, state_pb2_grpc.StateServicer):
    """A gateway's servicers, as gRPC's library has them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.left: list[str] = []

    async def Hello(  # noqa: N802
        self,
        request_iterator: AsyncIterator[exchange_pb2.HelloRequest],
        context: Any,  # noqa: ANN401
    ) -> AsyncIterator[exchange_pb2.HelloResponse]:
        async for request in request_iterator:
            yield exchange_pb2.HelloResponse(session=f"of {request.site}")

    async def Leave(  # noqa: N802
        self,
        request: exchange_pb2.LeaveRequest,
        context: Any,  # noqa: ANN401
    ) -> exchange_pb2.LeaveResponse:
        self.left.append(request.session)
        return exchange_pb2.LeaveResponse()

    async def Index(  # noqa: N802
        self,
        request: state_pb2.IndexRequest,
        context: Any,  # noqa: ANN401
    ) -> state_pb2.IndexResponse:
        assert dict(context.invocation_metadata())[SESSION_KEY] == "of ash"
        if request.epoch != EPOCH:
            await context.abort(grpc.StatusCode.NOT_FOUND, "nothing: no such epoch")
        return state_pb2.IndexResponse(index=(self._folder / INDEX).read_bytes())

    async def Read(  # noqa: N802
        self,
        request_iterator: AsyncIterator[state_pb2.ReadRequest],
        context: Any,  # noqa: ANN401
    ) -> AsyncIterator[state_pb2.ReadResponse]:
        async for request in request_iterator:
            data = (self._folder / request.path).read_bytes()
            first = request.piece * 4 * MIB
            yield state_pb2.ReadResponse(data=data[first : first + 4 * MIB])


async def test_a_gateway_asks_the_library(tmp_path: Path) -> None:
    config = gateway_config(tmp_path, GATHER_2, 0)
    library = Library(make_state(tmp_path / "there", 9 * MIB))

    guard = exchange_security(SITES[1])
    options = (("grpc.max_send_message_length", 5 * MIB),)
    server = guard.server(options, 16)
    exchange_pb2_grpc.add_ExchangeServicer_to_server(library, server)
    state_pb2_grpc.add_StateServicer_to_server(library, server)
    peer = Peer(SITES[1], 0, "127.0.0.1", guard.listen(server, "127.0.0.1:0"))
    await server.start()
    async with deadline(DEADLINE_S), peer.dial(config, "", HELLO_METHOD) as call:
        answers = [(await say_hello(call, config)).session for _ in range(2)]
        call.finish()
        assert await call.read() is None, "the server has heard of the end"
    assert answers == ["of ash"] * 2
    async with deadline(DEADLINE_S), peer.dial(config, "of ash", LEAVE_METHOD) as call:
        leaving = exchange_pb2.LeaveRequest(session="of ash")
        await ask(call, leaving, exchange_pb2.LeaveResponse, is_last=True)
        assert await call.read() is None, "the end, without an error"
    assert library.left == ["of ash"]
    async with deadline(DEADLINE_S), peer.dial(config, "of ash", INDEX_METHOD) as call:
        request = state_pb2.IndexRequest(epoch=9)
        with pytest.raises(CallError, match="nothing: no such epoch") as caught:
            await ask(call, request, state_pb2.IndexResponse, is_last=True)
        assert caught.value.status is Status.NOT_FOUND
    taken = entry_folder(tmp_path / "taken", EPOCH)
    async with deadline(DEADLINE_S):
        donors = [donor(config, peer, lambda: peer)]
        await StateFetch(donors, EPOCH, taken, timeout_s=DEADLINE_S).run()
    await server.stop(None)
    assert files_of(tmp_path / "taken") == files_of(tmp_path / "there")


def test_a_question_that_cannot_be_read_is_the_askers_mistake() -> None:
    async def answer(request: exchange_pb2.LeaveRequest, _: object) -> exchange_pb2.LeaveResponse:
        assert request.code == "first"
        return exchange_pb2.LeaveResponse()

    first = exchange_pb2.LeaveRequest(code="first").SerializeToString()
    call = ToldCall(first, b"\xff")
    with pytest.raises(RemoteProtocolError, match="a question cannot be read"):
        asyncio.run(answering(answer, exchange_pb2.LeaveRequest)(call))
    assert call.answers == [b""]
