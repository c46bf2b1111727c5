"""Calls that carry frames, over sockets of our own: it is gRPC, whoever is at the other end.

Both ends are ours, or either is gRPC's own library; without TLS, and with it. Hostile ends are
written by hand.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import gc
import random
import select
import socket
import ssl
import struct
import termios
import tracemalloc
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import grpc
import grpc.aio
import hpack
import psutil
import pytest

from isthmus.orchestrator.certificates import issue, make_authority, renew
from isthmus.protos import mutual_tls
from isthmus.protos.error_statuses import STATUS
from isthmus.protos.errors import CorruptDataError, IsthmusError, StaleGenerationError
from isthmus.protos.mutual_tls import TlsFiles, TlsSecurity
from isthmus.protos.security import LoopbackSecurity, Security
from isthmus.sites.gateway.links import call_socket, frame_calls, frame_listener, http2, inbox
from isthmus.sites.gateway.links.congestion.kernel import unacknowledged_bytes
from isthmus.sites.gateway.links.frame_calls import FrameCall, dial
from isthmus.sites.gateway.links.frame_listener import FrameListener, Serve
from isthmus.sites.gateway.links.http2 import CANCEL, Kind
from isthmus.sites.gateway.links.keep_alive import Patience
from isthmus.sites.gateway.links.read_ahead import ReadAhead
from isthmus.sites.gateway.links.status import CallError, Status
from isthmus.sites.gateway.links.transport import PUSH_METHOD, REVERSE_METHOD
from isthmus.sites.gateway.wire import connection
from isthmus.sites.gateway.wire import tls as wire_tls
from tests.fakes.certified import DOMAIN, certify, held_by
from tests.fakes.compiled_modules import PLAIN as AS_PYTHON
from tests.fakes.compiled_modules import load
from tests.fakes.http2_frames import (
    END_STREAM,
    INITIAL_WINDOW_SIZE,
    PREFACE,
    begun,
    cut,
    data,
    frame,
    frames_in,
    header,
    number,
    prefixed,
    settings,
)
from tests.fakes.raw_calls import (
    RawPeer,
    accept_any,
    answer_raw,
    keep_little,
    raw_client,
    raw_server,
)
from tests.fakes.waiting import until, wait_for

DEADLINE_S = 30.0
SHORT_S = 0.05
SERVER, CLIENT = "ash.gateway", "birch.gateway"
MESSAGE_BYTES_MAX = 17 << 20
OPTIONS = [
    ("grpc.max_send_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
]
PATIENCE = Patience(connect_s=10.0, idle_s=7.0, lost_s=21.0)
Address = tuple[str, int]


@dataclass(frozen=True)
class World:
    """Who speaks with whom, and how it is protected."""

    server: Security
    client: Security
    folder: Path | None
    """With everybody's certificates; None: there is no TLS."""

    @property
    def target_options(self) -> list[tuple[str, str | int]]:
        """For channels of gRPC's library."""
        name = f"gateway.ash.site.{DOMAIN}"
        return [*OPTIONS, *([("grpc.ssl_target_name_override", name)] if self.folder else [])]

    def files(self) -> TlsFiles:
        assert self.folder is not None
        return files_in(self.folder)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with everybody's certificates; nobody changes it."""
    folder = tmp_path_factory.mktemp("certs")
    certify(folder, "ash", "birch")
    return folder


def files_in(folder: Path) -> TlsFiles:
    return TlsFiles(
        ca=str(folder / "ca.pem"), cert=f"{folder}/{{name}}.pem", key=f"{folder}/{{name}}.key"
    )


def tls_world(folder: Path) -> World:
    files = files_in(folder)
    return World(TlsSecurity(files, SERVER), TlsSecurity(files, CLIENT), folder)


PLAIN = World(LoopbackSecurity("s" * 64), LoopbackSecurity("s" * 64), None)


@pytest.fixture(params=["plain", "tls"])
def world(request: pytest.FixtureRequest) -> World:
    if request.param == "plain":
        return PLAIN
    return tls_world(request.getfixturevalue("certificates"))


@pytest.fixture
def tls(certificates: Path) -> World:
    return tls_world(certificates)


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    """No connection stays open. gRPC's library closes its own a little later."""
    before = open_connections()
    yield
    wait_for(lambda: open_connections() <= before, "all connections are closed")


def open_connections() -> int:
    return len(psutil.Process().net_connections("tcp"))


def run(story: Coroutine[Any, Any, None]) -> None:
    """Run a story to its end, which leaves no task."""

    async def watched() -> None:
        await asyncio.wait_for(story, DEADLINE_S)
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not [each for each in left if each.get_name() == "frame-call"], left

    asyncio.run(watched())


# ------------------------------------------------------------------------ who speaks


class Call(Protocol):
    """A call, as a client of either library has it."""

    async def write(self, message: bytes) -> None: ...

    async def read(self) -> bytes | None: ...

    def cancel(self) -> object: ...


class OurCall:
    """A client of ours."""

    def __init__(self, call: FrameCall) -> None:
        self.call = call

    async def write(self, message: bytes) -> None:
        await self.call.write(message)

    async def read(self) -> bytes | None:
        message = await self.call.read()
        return None if message is None else bytes(message)

    def cancel(self) -> None:
        self.call.cancel()


class LibraryCall:
    """A client of gRPC's."""

    def __init__(self, call: Any) -> None:  # noqa: ANN401 - a stream of bytes
        self.call = call

    async def write(self, message: bytes) -> None:
        await self.call.write(message)

    async def read(self) -> bytes | None:
        message = await self.call.read()
        return None if message is grpc.aio.EOF else message

    def cancel(self) -> object:
        return self.call.cancel()


Dial = Callable[[World, Address, str], AbstractAsyncContextManager[Call]]
Served = AbstractAsyncContextManager[Address]


@asynccontextmanager
async def our_client(world: World, address: Address, method: str) -> AsyncIterator[Call]:
    async with dial(address, method, (("key", "value"),), world.client, SERVER, PATIENCE) as call:
        yield OurCall(call)


@asynccontextmanager
async def library_channel(world: World, address: Address) -> AsyncIterator[grpc.aio.Channel]:
    target = f"{address[0]}:{address[1]}"
    if world.folder is None:
        channel = grpc.aio.insecure_channel(target, options=world.target_options)
    else:
        shown = held_by(world.folder, CLIENT)
        channel = grpc.aio.secure_channel(target, shown, options=world.target_options)
    async with channel:
        yield channel


@asynccontextmanager
async def library_client(world: World, address: Address, method: str) -> AsyncIterator[Call]:
    metadata = (("key", "value"), *world.client.shown())
    async with library_channel(world, address) as channel:
        yield LibraryCall(channel.stream_stream(method)(metadata=metadata))


@asynccontextmanager
async def our_server(
    world: World,
    methods: Mapping[str, Serve],
    most: int = 8,
    *,
    listening: socket.socket | None = None,
) -> AsyncIterator[Address]:
    listening = listening or socket.socket()
    listening.bind(("127.0.0.1", 0))
    listener = FrameListener(listening, methods, world.server, PATIENCE, most)
    listener.begin()
    try:
        yield listening.getsockname()
    finally:
        await listener.close()


@asynccontextmanager
async def library_server(world: World, behave: Callable[[Any], Awaitable[None]]) -> Any:  # noqa: ANN401
    """Serve Push by gRPC's library, for whom `world` lets in; give the address."""
    server = world.server.server(OPTIONS, 8)

    async def push(_: object, context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        await behave(context)

    handler: Any = grpc.stream_stream_rpc_method_handler(push)
    service, _, name = PUSH_METHOD[1:].partition("/")
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(service, {name: handler}),)
    )
    port = world.server.listen(server, "127.0.0.1:0")
    await server.start()
    try:
        yield "127.0.0.1", port
    finally:
        await server.stop(None)


async def echo(call: FrameCall) -> None:
    """Give back each message before the next is read."""
    while (message := await call.read()) is not None:
        await call.write(message)


async def library_echo(context: Any) -> None:  # noqa: ANN401 - a stream of bytes
    while (message := await context.read()) is not grpc.aio.EOF:
        await context.write(message)


@asynccontextmanager
async def echo_call(world: World, kinds: str) -> AsyncIterator[Call]:
    """Give a call to a server that echoes; `kinds` names client and server."""
    client, _, server = kinds.partition(" to ")
    serving: Served = (
        our_server(world, {PUSH_METHOD: echo})
        if server == "ours"
        else library_server(world, library_echo)
    )
    async with serving as address, CLIENTS[client](world, address, PUSH_METHOD) as call:
        yield call


CLIENTS: dict[str, Dial] = {"ours": our_client, "library": library_client}
KINDS = pytest.mark.parametrize("kinds", ["ours to ours", "library to ours", "ours to library"])
EITHER_CLIENT = pytest.mark.parametrize("client", list(CLIENTS))


async def status_of(what: Awaitable[object]) -> tuple[Status, str]:
    """Return how a call fails, and why."""
    with pytest.raises((grpc.RpcError, CallError)) as caught:
        await what
    error: Any = caught.value
    if isinstance(error, CallError):
        return error.status, error.why
    return Status[error.code().name], error.details() or ""


# ------------------------------------------------------------------------ messages


async def exchange(call: Call, sent: list[bytes]) -> None:
    """Send messages and read them back, both at once."""

    async def write() -> None:
        for message in sent:
            await call.write(message)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(write())
        for index, message in enumerate(sent):
            assert await call.read() == message, f"number {index} of {len(message)} bytes"


@KINDS
def test_messages_of_all_sizes_cross_both_ways(world: World, kinds: str) -> None:
    chance = random.Random(1)
    sizes = [0, 1, 5, 4091, 4096, 4097, 16_384, 65_531, 65_536, 200_000, 0, 0, 1]
    sent = [chance.randbytes(each) for each in sizes]

    async def story() -> None:
        async with echo_call(world, kinds) as call:
            await exchange(call, sent)

    run(story())


@pytest.mark.slow
@KINDS
def test_messages_that_take_several_frames_cross_both_ways(world: World, kinds: str) -> None:
    chance = random.Random(2)
    sent = [chance.randbytes(each) for each in ((16 << 20) - 6, MESSAGE_BYTES_MAX, 3, 1 << 20)]

    async def story() -> None:
        async with echo_call(world, kinds) as call:
            await exchange(call, sent)

    run(story())


@pytest.mark.slow
def test_an_echo_goes_on_while_the_client_sends_ahead(world: World) -> None:
    """What makes room for the echo lies behind the messages that were sent ahead of it.

    Not to read any more while nobody wants the next message would be for ever.
    """
    sent = [bytes([index]) * 700_000 for index in range(16)]

    async def story() -> None:
        async with echo_call(world, "library to ours") as call:
            for message in sent:
                await call.write(message)
            for message in sent:
                assert await call.read() == message

    run(story())


@EITHER_CLIENT
def test_a_handler_gets_what_the_client_says_beside(world: World, client: str) -> None:
    seen: list[FrameCall] = []

    async def serve(call: FrameCall) -> None:
        seen.append(call)
        await echo(call)

    async def story() -> None:
        async with (
            our_server(world, {PUSH_METHOD: serve}) as address,
            CLIENTS[client](world, address, PUSH_METHOD) as call,
        ):
            await exchange(call, [b"x"])

    run(story())
    (call,) = seen
    assert dict(call.invocation_metadata())["key"] == "value"
    assert not [each for each, _ in call.invocation_metadata() if each.startswith(":")]
    assert call.peer().startswith("127.0.0.1:")
    uri = f"spiffe://{DOMAIN}/site/birch/gateway".encode()
    assert call.auth_context().get("peer_uri") == ([uri] if world.folder else None)


def test_messages_cross_where_nothing_was_compiled(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    twin: Any = load(connection, AS_PYTHON)
    monkeypatch.setattr(http2, "Reader", twin.Reader)
    monkeypatch.setattr(http2, "Writer", twin.Writer)
    monkeypatch.setattr(call_socket, "Line", twin.Line)
    monkeypatch.setattr(wire_tls, "use_openssl", twin.use_openssl)
    wire_tls.openssl.cache_clear()
    sent = [random.Random(1).randbytes(each) for each in (0, 1, 4097, 65_536, 200_000, 1_000_000)]

    async def story() -> None:
        async with echo_call(world, "ours to ours") as call:
            await exchange(call, sent)

    try:
        run(story())
    finally:
        wire_tls.openssl.cache_clear()


def test_messages_cross_where_openssl_is_out_of_reach(
    tls: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire_tls, "session_of", lambda _connection: 0)
    sent = [random.Random(1).randbytes(each) for each in (0, 1, 4097, 65_536, 200_000, 3_000_000)]

    async def story() -> None:
        async with echo_call(tls, "ours to ours") as call:
            await exchange(call, sent)

    run(story())


def test_no_more_is_on_the_way_than_the_window_permits(world: World) -> None:
    """The peer's TCP acknowledges nothing after what its buffer holds, and later everything."""
    window_bytes, message = 100_000, bytes(range(250)) * 4000
    may_read = asyncio.Event()

    async def serve(call: FrameCall) -> None:
        call._wire.line.wants_read = False
        await may_read.wait()
        call._wire.line.wants_read = True
        call._wire.line.tend()
        await echo(call)

    async def story() -> None:
        listening = socket.socket()
        keep_little(listening, socket.SO_RCVBUF)
        async with (
            our_server(world, {PUSH_METHOD: serve}, listening=listening) as address,
            our_client(world, address, PUSH_METHOD) as call,
        ):
            assert isinstance(call, OurCall)
            call.call.limit(window_bytes, 0.001)
            writing = asyncio.create_task(call.write(message))
            await until(lambda: call.call._wire.line.is_full, "the window is full")
            for _ in range(5):
                await asyncio.sleep(0.002)
                assert 80_000 < unacknowledged_bytes(call.call.socket) <= window_bytes + (17 << 10)
            assert not writing.done()
            may_read.set()
            assert await call.read() == message
            await writing

    run(story())


@asynccontextmanager
async def streams_to(
    world: World, address: Address
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Connect as the client does, and call Push by hand."""
    context, name = world.client.client_tls(SERVER) or (None, None)
    reader, writer = await asyncio.open_connection(*address, ssl=context, server_hostname=name)
    fields = [(":method", "POST"), (":path", PUSH_METHOD), *world.client.shown()]
    writer.write(PREFACE + settings() + header(fields))
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


@pytest.mark.parametrize("seed", range(6))
def test_a_message_that_comes_in_bits_is_not_waited_for_too_long(world: World, seed: int) -> None:
    """The kernel is asked to wake the loop for much at a time, and never for more than comes."""
    chance = random.Random(seed)
    sent = [chance.randbytes(each) for each in (300_000, 40_000, 17_000, 0, 150_000)]
    come = asyncio.Event()

    async def serve(call: FrameCall) -> None:
        for message in sent:
            assert bytes(await call.read() or b"") == message, f"{seed=}"
            come.set()

    async def story() -> None:
        async with (
            our_server(world, {PUSH_METHOD: serve}) as address,
            streams_to(world, address) as (reader, writer),
        ):
            for message in sent:
                come.clear()
                for piece in cut(data(prefixed(message)), chance):
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0)
                await come.wait()
            assert b"grpc-status" in header_names(await reader.read())

    run(story())


def header_names(sent: bytes) -> set[bytes]:
    """Return the names in all headers of what a server has sent."""
    decoder = hpack.Decoder()
    return {
        str(name).encode()
        for kind, _, _, payload in frames_in(sent)
        if kind == Kind.HEADERS
        for name, _ in decoder.decode(payload)
    }


def test_a_read_that_is_given_up_loses_nothing() -> None:
    async def serve(call: FrameCall) -> None:
        reading = asyncio.create_task(call.read())
        await asyncio.sleep(0)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        await call.write(b"go on")
        await echo(call)

    async def story() -> None:
        async with (
            our_server(PLAIN, {PUSH_METHOD: serve}) as address,
            our_client(PLAIN, address, PUSH_METHOD) as call,
        ):
            assert await call.read() == b"go on"
            await exchange(call, [b"x", b"y"])

    run(story())


def test_a_record_of_tls_that_is_half_read_is_not_forgotten(tls: World) -> None:
    """The server stops reading in the middle of a record: no packet will tell of the rest."""
    got: list[bytes] = []
    is_stopped, may_read = asyncio.Event(), asyncio.Event()

    async def serve(call: FrameCall) -> None:
        is_stopped.set()
        await may_read.wait()
        while len(got) < 5:
            message = await call.read()
            assert message is not None
            got.append(bytes(message))

    large = b"y" * 6000

    async def story() -> None:
        async with (
            our_server(tls, {PUSH_METHOD: serve}) as address,
            streams_to(tls, address) as (reader, writer),
        ):
            # Three messages and the beginning of the fourth, and then the rest of it with a fifth.
            fourth = data(prefixed(large))
            writer.write(data(prefixed(b"x")) * 3 + fourth[:100])
            await is_stopped.wait()
            writer.write(fourth[100:] + data(prefixed(b"z")))
            await writer.drain()
            may_read.set()
            await reader.read()

    run(story())
    assert got == [b"x"] * 3 + [large, b"z"]


# ------------------------------------------------------------------------ who is let in


@EITHER_CLIENT
@pytest.mark.parametrize("shown", ["", "t" * 64])
def test_without_the_secret_nobody_is_served(client: str, shown: str) -> None:
    world = World(PLAIN.server, LoopbackSecurity(shown), None)

    async def story() -> None:
        async with (
            our_server(world, {PUSH_METHOD: echo}) as address,
            CLIENTS[client](world, address, PUSH_METHOD) as call,
        ):
            status, why = await status_of(call.read())
            assert status is Status.UNAUTHENTICATED
            assert "was not shown" in why

    run(story())


@EITHER_CLIENT
def test_another_role_is_not_served(tls: World, client: str) -> None:
    folder, files = tls.folder, tls.files()
    assert folder is not None

    async def story() -> None:
        async with our_server(tls, {PUSH_METHOD: echo}) as address:
            if client == "ours":
                agent = World(tls.server, TlsSecurity(files, "ash.agent"), folder)
                async with our_client(agent, address, PUSH_METHOD) as call:
                    status, why = await status_of(call.read())
            else:
                shown = held_by(folder, "ash.agent")
                target = f"127.0.0.1:{address[1]}"
                options = tls.target_options
                async with grpc.aio.secure_channel(target, shown, options=options) as channel:
                    status, why = await status_of(
                        LibraryCall(channel.stream_stream(PUSH_METHOD)()).read()
                    )
            assert status is Status.PERMISSION_DENIED
            assert "Push is not for the agent of site ash" in why

    run(story())


def test_who_shows_no_certificate_of_the_deployment_gets_no_connection(
    tls: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mutual_tls, "_is_signed", lambda *_: True)  # it would not even try
    assert tls.folder is not None
    make_authority(tmp_path, DOMAIN)
    issue(tmp_path, CLIENT, 1.0)
    ca = tls.folder / "ca.pem"
    library: list[grpc.ChannelCredentials] = [
        grpc.ssl_channel_credentials(ca.read_bytes()),
        held_by(tmp_path, CLIENT, ca=ca),
    ]
    foreign = TlsFiles(
        ca=str(ca), cert=str(tmp_path / f"{CLIENT}.pem"), key=str(tmp_path / f"{CLIENT}.key")
    )

    async def story() -> None:
        async with our_server(tls, {PUSH_METHOD: echo}) as address:
            for shown in library:
                target = f"127.0.0.1:{address[1]}"
                async with grpc.aio.secure_channel(
                    target, shown, options=tls.target_options
                ) as channel:
                    call = LibraryCall(channel.stream_stream(PUSH_METHOD)())
                    assert (await status_of(call.read()))[0] is Status.UNAVAILABLE
            stranger = World(tls.server, TlsSecurity(foreign, CLIENT), tls.folder)
            async with our_client(stranger, address, PUSH_METHOD) as ours:
                assert (await status_of(ours.read()))[0] is Status.UNAVAILABLE
            reader, writer = await asyncio.open_connection(
                *address, ssl=accept_any(), server_hostname="x"
            )
            with pytest.raises(ssl.SSLError, match=r"(?i)certificate"):
                await reader.read()
            writer.close()
            with contextlib.suppress(ssl.SSLError):
                await writer.wait_closed()

    run(story())


def test_a_client_speaks_only_with_whom_it_wants(
    tls: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mutual_tls, "_is_signed", lambda *_: True)  # it would not even try
    make_authority(tmp_path, DOMAIN)
    foreign = TlsFiles(ca=str(tmp_path / "ca.pem"), cert=tls.files().cert, key=tls.files().key)

    async def story() -> None:
        async with our_server(tls, {PUSH_METHOD: echo}) as address:
            for security, to in ((tls.client, CLIENT), (TlsSecurity(foreign, CLIENT), SERVER)):
                call = dial(address, PUSH_METHOD, (), security, to, PATIENCE)
                status, why = await status_of(call.__aenter__())
                assert status is Status.UNAVAILABLE
                assert "certificate verify failed" in why.lower().replace("_", " ")

    run(story())


@EITHER_CLIENT
def test_a_method_that_is_not_there_is_said_to_be(world: World, client: str) -> None:
    async def story() -> None:
        async with (
            our_server(world, {PUSH_METHOD: echo}) as address,
            CLIENTS[client](world, address, REVERSE_METHOD) as call,
        ):
            status, why = await status_of(call.read())
            assert status is Status.UNIMPLEMENTED
            assert REVERSE_METHOD in why

    run(story())


def test_nothing_is_kept_of_who_is_not_let_in(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        async with (
            our_server(PLAIN, {PUSH_METHOD: echo}) as address,
            raw_client(address, PUSH_METHOD) as stranger,
        ):
            tracemalloc.start()
            try:
                large = frame(Kind.DATA, prefixed(bytes(16 << 20))[:16_000_000], 0, 1)
                before = tracemalloc.get_traced_memory()[0]
                tracemalloc.reset_peak()
                sending = asyncio.create_task(stranger.send(large))
                assert (await stranger.fields())["grpc-status"] == "16"
                sending.cancel()
                taken_bytes = tracemalloc.get_traced_memory()[1] - before
            finally:
                tracemalloc.stop()
            assert taken_bytes < 1 << 20

    run(story())


def test_the_librarys_server_lets_in_who_may(world: World) -> None:
    if world.folder is None:
        stranger: Security = LoopbackSecurity("t" * 64)
        refused = Status.UNAUTHENTICATED
    else:
        stranger = TlsSecurity(world.files(), "ash.agent")
        refused = Status.PERMISSION_DENIED

    async def story() -> None:
        async with library_server(world, library_echo) as address:
            other = World(world.server, stranger, world.folder)
            async with our_client(other, address, PUSH_METHOD) as call:
                assert (await status_of(call.read()))[0] is refused
            async with our_client(world, address, REVERSE_METHOD) as call:
                assert (await status_of(call.read()))[0] in {Status.UNIMPLEMENTED, refused}
            async with our_client(world, address, PUSH_METHOD) as call:
                await exchange(call, [b"x"])

    run(story())


# ------------------------------------------------------------------------ how calls end


def test_what_the_librarys_server_says_at_the_end_arrives(world: World) -> None:
    why = 'chunk 7: 100% "wrong" \N{SNOWMAN}\nand more'

    async def behave(context: Any) -> None:  # noqa: ANN401 - a stream of bytes
        asked = await context.read()
        await context.write(asked)
        if asked == b"refuse":
            await context.abort(grpc.StatusCode.DATA_LOSS, why)

    async def story() -> None:
        async with library_server(world, behave) as address:
            async with our_client(world, address, PUSH_METHOD) as call:
                await call.write(b"end")
                assert [await call.read() for _ in range(2)] == [b"end", None]
            async with our_client(world, address, PUSH_METHOD) as call:
                await call.write(b"refuse")
                assert await call.read() == b"refuse"
                assert await status_of(call.read()) == (Status.DATA_LOSS, why)
                assert (await status_of(call.write(b"late")))[0] is Status.DATA_LOSS

    run(story())


def test_the_librarys_server_hears_that_a_client_cancels(world: World) -> None:
    has_ended = asyncio.Event()

    async def behave(context: Any) -> None:  # noqa: ANN401 - a stream of bytes
        try:
            await library_echo(context)
        finally:
            has_ended.set()

    async def story() -> None:
        async with library_server(world, behave) as address:
            async with our_client(world, address, PUSH_METHOD) as call:
                await exchange(call, [b"x"])
            await has_ended.wait()

    run(story())


def test_the_librarys_server_that_stops_is_unavailable(world: World) -> None:
    async def story() -> None:
        async with contextlib.AsyncExitStack() as stack:
            serving = library_server(world, library_echo)
            address = await serving.__aenter__()
            call = await stack.enter_async_context(our_client(world, address, PUSH_METHOD))
            await exchange(call, [b"x"])
            await serving.__aexit__(None, None, None)
            assert (await status_of(call.read()))[0] in {Status.UNAVAILABLE, Status.CANCELLED}

    run(story())


def test_a_call_may_be_over_with_its_header() -> None:
    async def story() -> None:
        fields = [(":method", "POST"), (":path", PUSH_METHOD), *PLAIN.client.shown()]
        async with (
            our_server(PLAIN, {PUSH_METHOD: echo}) as address,
            raw_client(address) as client,
        ):
            await client.send(PREFACE, settings(), header(fields, END_STREAM))
            assert (await client.fields())[":status"] == "200"
            assert await client.fields() == {"grpc-status": "0"}

    run(story())


def test_a_server_that_ends_a_call_leaves_nobody_waiting(world: World) -> None:
    """Others than the handler may read and write meanwhile: links do, of who has dialled in."""
    ended: list[Status] = []

    async def serve(call: FrameCall) -> None:
        async def use(what: Callable[[], Awaitable[object]]) -> None:
            try:
                while True:
                    await what()
            except CallError as error:
                ended.append(error.status)

        asyncio.get_running_loop().create_task(use(call.read))
        asyncio.get_running_loop().create_task(use(lambda: call.write(bytes(1 << 20))))
        assert await call.over.wait()

    async def story() -> None:
        async with (
            our_server(world, {PUSH_METHOD: serve}) as address,
            library_client(world, address, PUSH_METHOD) as call,
        ):
            assert isinstance(call, LibraryCall)
            assert await call.read() == bytes(1 << 20)
            await call.call.done_writing()
            while await call.read() is not None:
                pass
            await until(lambda: len(ended) == 2, "both hear of it")

    run(story())


@EITHER_CLIENT
@pytest.mark.parametrize("error", [CorruptDataError, StaleGenerationError])
@pytest.mark.parametrize("comes_first", [False, True], ids=["at once", "later"])
def test_what_a_handler_refuses_arrives_with_status_and_text(
    world: World, client: str, error: type[IsthmusError], comes_first: bool
) -> None:
    why = 'chunk 7: 100% "wrong" \N{EM DASH} \N{SNOWMAN}\nand more'

    async def serve(call: FrameCall) -> None:
        if comes_first:
            await call.write(b"first")
            assert bytes(await call.read() or b"") == b"asked"
        raise error(why)

    async def story() -> None:
        async with (
            our_server(world, {PUSH_METHOD: serve}) as address,
            CLIENTS[client](world, address, PUSH_METHOD) as call,
        ):
            if comes_first:
                assert await call.read() == b"first"
                await call.write(b"asked")
            assert await status_of(call.read()) == (Status[STATUS[error].name], why)
            with pytest.raises((grpc.RpcError, CallError, asyncio.InvalidStateError)):
                await call.write(b"late")

    run(story())


@EITHER_CLIENT
def test_a_reason_is_cut_where_peers_would_not_take_it(world: World, client: str) -> None:
    async def serve(call: FrameCall) -> None:
        raise CorruptDataError("\udcff" + "\N{SNOWMAN}" * 20_000)

    async def story() -> None:
        async with (
            our_server(world, {PUSH_METHOD: serve}) as address,
            CLIENTS[client](world, address, PUSH_METHOD) as call,
        ):
            status, why = await status_of(call.read())
            assert status is Status.DATA_LOSS
            assert set(why[1:]) == {"\N{SNOWMAN}"}

    run(story())


@EITHER_CLIENT
def test_a_handler_that_crashes_is_told_of(
    world: World, client: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def serve(call: FrameCall) -> None:
        raise ZeroDivisionError("a bug")

    async def story() -> None:
        async with (
            our_server(world, {PUSH_METHOD: serve}) as address,
            CLIENTS[client](world, address, PUSH_METHOD) as call,
        ):
            assert await status_of(call.read()) == (Status.UNKNOWN, "a bug")

    run(story())
    assert "was not served" in caplog.text


@EITHER_CLIENT
def test_a_server_may_end_a_call_well(world: World, client: str) -> None:
    async def serve(call: FrameCall) -> None:
        await call.write(b"all")

    async def story() -> None:
        async with (
            our_server(world, {PUSH_METHOD: serve}) as address,
            CLIENTS[client](world, address, PUSH_METHOD) as call,
        ):
            assert [await call.read() for _ in range(3)] == [b"all", None, None]

    run(story())


def test_after_the_end_a_client_writes_nothing_more(world: World) -> None:
    async def serve(call: FrameCall) -> None:
        await call.write(b"all")

    async def story() -> None:
        async with (
            our_server(world, {PUSH_METHOD: serve}) as address,
            our_client(world, address, PUSH_METHOD) as call,
        ):
            assert [await call.read() for _ in range(2)] == [b"all", None]
            assert (await status_of(call.write(b"late")))[0] is Status.CANCELLED

    run(story())


async def write_on(call: Call) -> None:
    while True:
        await call.write(bytes(1 << 20))


def test_the_last_word_is_read_by_who_still_sends(world: World) -> None:
    """A connection with unread bytes in it would be reset."""
    has_refused = asyncio.Event()

    async def serve(call: FrameCall) -> None:
        has_refused.set()
        raise StaleGenerationError("too late")

    async def story() -> None:
        async with (
            our_server(world, {PUSH_METHOD: serve}) as address,
            our_client(world, address, PUSH_METHOD) as call,
        ):
            # Nobody reads meanwhile, so the writer finds out.
            assert (await status_of(write_on(call)))[0] is Status.ABORTED
            assert has_refused.is_set()

    run(story())


@EITHER_CLIENT
def test_a_client_that_cancels_ends_the_servers_read(world: World, client: str) -> None:
    ends: list[BaseException] = []

    async def serve(call: FrameCall) -> None:
        try:
            await echo(call)
        except CallError as error:
            ends.append(error)
            assert call.over.is_set()
            raise

    async def story() -> None:
        async with (
            our_server(world, {PUSH_METHOD: serve}) as address,
            CLIENTS[client](world, address, PUSH_METHOD) as call,
        ):
            await exchange(call, [b"x"])
            call.cancel()
            await until(lambda: bool(ends), "the read ends")

    run(story())
    assert isinstance(ends[0], CallError)
    assert ends[0].status is Status.CANCELLED


def test_a_client_of_the_library_may_end_its_side_first(world: World) -> None:
    async def serve(call: FrameCall) -> None:
        await echo(call)
        await call.write(b"that was all")

    async def story() -> None:
        async with (
            our_server(world, {PUSH_METHOD: serve}) as address,
            library_client(world, address, PUSH_METHOD) as call,
        ):
            assert isinstance(call, LibraryCall)
            await call.write(b"x")
            await call.call.done_writing()
            assert [await call.read() for _ in range(3)] == [b"x", b"that was all", None]
            assert await call.call.code() is grpc.StatusCode.OK

    run(story())


def test_a_server_that_vanishes_within_a_message_is_unavailable() -> None:
    async def story() -> None:
        async with (
            raw_server() as (address, accepted),
            our_client(PLAIN, address, PUSH_METHOD) as call,
        ):
            server = await accepted
            await answer_raw(server)
            await server.send(data(prefixed(bytes(100_000))[:50_000]))
            server.socket.close()
            assert (await status_of(call.read()))[0] is Status.UNAVAILABLE
            assert (await status_of(call.write(b"x")))[0] is Status.UNAVAILABLE

    run(story())


def test_a_client_that_vanishes_within_a_message_is_unavailable() -> None:
    ends: list[Status] = []

    async def serve(call: FrameCall) -> None:
        try:
            await call.read()
        except CallError as error:
            ends.append(error.status)
            raise

    async def story() -> None:
        async with our_server(PLAIN, {PUSH_METHOD: serve}) as address:
            async with raw_client(address, PUSH_METHOD, PLAIN.client.shown()) as client:
                await client.send(data(prefixed(bytes(100_000))[:50_000]))
            await until(lambda: bool(ends), "the read ends")

    run(story())
    assert ends == [Status.UNAVAILABLE]


@pytest.mark.parametrize(
    ("said", "status", "why"),
    [
        (data(b"", END_STREAM), Status.INTERNAL, "without a status"),
        (frame(Kind.RST_STREAM, number(CANCEL), 0, 1), Status.CANCELLED, "error 8"),
        (frame(Kind.RST_STREAM, number(7), 0, 1), Status.UNAVAILABLE, "error 7"),
        (frame(Kind.RST_STREAM, number(2), 0, 1), Status.INTERNAL, "error 2"),
        (frame(Kind.RST_STREAM, number(0), 0, 1), Status.CANCELLED, "without a status"),
        (frame(Kind.GOAWAY, number(0) + number(0)), Status.UNAVAILABLE, "error 7"),
        (header([("grpc-status", "5")], END_STREAM), Status.NOT_FOUND, ""),
        (header([("grpc-status", "5"), ("grpc-message", "a%20%E2%98%83%")], END_STREAM),
         Status.NOT_FOUND, "a \N{SNOWMAN}%"),
        (header([("grpc-status", "9" * 5000)], END_STREAM), Status.UNKNOWN, "HTTP status"),
        (header([("else", "5")], END_STREAM), Status.UNKNOWN, "HTTP status"),
        (b"\0\0\0\xff", Status.UNAVAILABLE, "closed"),
        (data(b"\x01\0\0\0\0"), Status.INTERNAL, "compressed"),
    ],
)  # fmt: skip
def test_what_a_server_says_at_the_end_is_understood(said: bytes, status: Status, why: str) -> None:
    async def story() -> None:
        async with (
            raw_server() as (address, accepted),
            our_client(PLAIN, address, PUSH_METHOD) as call,
        ):
            server = await accepted
            await answer_raw(server)
            await server.send(data(prefixed(b"before")), said)
            server.socket.shutdown(socket.SHUT_WR)
            assert await call.read() == b"before"
            for _ in range(2):
                found, told = await status_of(call.read())
                assert found is status
                assert why in told

    run(story())


@pytest.mark.parametrize(
    ("fields", "flags", "status", "why"),
    [
        ([(":status", "200"), ("grpc-status", "7")], END_STREAM, Status.PERMISSION_DENIED, ""),
        ([(":status", "502"), ("content-type", "text/html")], 0, Status.UNKNOWN, "status 502"),
        ([(":status", "404")], END_STREAM, Status.UNKNOWN, "status 404"),
    ],
)
def test_an_answer_that_is_none_is_a_refusal(
    fields: list[tuple[str, str]], flags: int, status: Status, why: str
) -> None:
    async def story() -> None:
        async with (
            raw_server() as (address, accepted),
            our_client(PLAIN, address, PUSH_METHOD) as call,
        ):
            server = await accepted
            await server.send(settings(), header(fields, flags))
            found, told = await status_of(call.read())
            assert found is status
            assert why in told

    run(story())


def test_what_does_not_speak_http2_is_told_apart() -> None:
    async def story() -> None:
        async with (
            raw_server() as (address, accepted),
            our_client(PLAIN, address, PUSH_METHOD) as call,
        ):
            await (await accepted).send(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            status, why = await status_of(call.read())
            assert status is Status.INTERNAL
            assert "not HTTP/2" in why

    run(story())


# ------------------------------------------------------------------------ connecting


def test_calls_go_to_addresses_of_ip_6(world: World) -> None:
    peers: list[str] = []

    async def serve(call: FrameCall) -> None:
        peers.append(call.peer())
        await echo(call)

    async def story() -> None:
        listening = socket.socket(socket.AF_INET6)
        try:
            listening.bind(("::1", 0))
        except OSError:
            listening.close()
            pytest.skip("no IPv6 here")
        listener = FrameListener(listening, {PUSH_METHOD: serve}, world.server, PATIENCE, 1)
        listener.begin()
        address = listening.getsockname()[:2]
        async with our_client(world, address, PUSH_METHOD) as call:
            await exchange(call, [b"x"])
        for _ in range(2):
            await listener.close()

    run(story())
    assert peers[0].startswith("[::1]:")


def test_nobody_at_an_address_is_unavailable() -> None:
    async def story() -> None:
        with socket.create_server(("127.0.0.1", 0)) as unused:
            address = unused.getsockname()
        call = our_client(PLAIN, address, PUSH_METHOD)
        status, why = await status_of(call.__aenter__())
        assert status is Status.UNAVAILABLE
        assert "cannot connect" in why

    run(story())


def test_a_connection_that_is_never_made_is_given_up(world: World) -> None:
    """Nobody answers: not to TLS, or not even to TCP."""
    patience = Patience(connect_s=SHORT_S, idle_s=1.0, lost_s=1.0)

    async def story() -> None:
        with contextlib.ExitStack() as stack:
            listening = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
            address = listening.getsockname()
            if world.folder is None:
                stack.enter_context(socket.create_connection(address))  # more are not queued
            call = dial(address, PUSH_METHOD, (), world.client, SERVER, patience)
            status, why = await status_of(call.__aenter__())
            assert status is Status.UNAVAILABLE
            assert "no connection within" in why

    run(story())


def test_whoever_gives_up_while_connecting_leaves_nothing(tls: World) -> None:
    async def story() -> None:
        async with raw_server() as (address, accepted):
            entering = asyncio.create_task(our_client(tls, address, PUSH_METHOD).__aenter__())
            await (await accepted).receive(100)  # the handshake has begun
            entering.cancel()
            with pytest.raises(asyncio.CancelledError):
                await entering
            assert await (await accepted).end() is not None

    run(story())


def test_the_kernel_looks_after_connections(world: World) -> None:
    ends: list[socket.socket] = []

    async def serve(call: FrameCall) -> None:
        ends.append(call.socket)
        await echo(call)

    async def story() -> None:
        async with (
            our_server(world, {PUSH_METHOD: serve}) as address,
            our_client(world, address, PUSH_METHOD) as call,
        ):
            await exchange(call, [b"x"])
            assert isinstance(call, OurCall)
            ends.append(call.call.socket)
            for end in ends:
                assert end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
                told = [
                    end.getsockopt(socket.IPPROTO_TCP, option)
                    for option in (
                        socket.TCP_KEEPIDLE,
                        socket.TCP_KEEPINTVL,
                        socket.TCP_USER_TIMEOUT,
                        socket.TCP_NODELAY,
                    )
                ]
                assert told == [7, 7, 21_000, 1]

    run(story())
    assert len(ends) == 2


# ------------------------------------------------------------------------ certificates


def serial_of(end: socket.socket) -> str:
    assert isinstance(end, ssl.SSLSocket)
    shown = end.getpeercert()
    assert shown is not None
    return str(shown["serialNumber"])


def test_a_renewed_certificate_counts_for_the_next_connection(tmp_path: Path) -> None:
    certify(tmp_path, "ash", "birch")
    world = tls_world(tmp_path)
    seen: list[str] = []

    async def serve(call: FrameCall) -> None:
        seen.append(serial_of(call.socket))
        await echo(call)

    async def story() -> None:
        async with our_server(world, {PUSH_METHOD: serve}) as address:
            async with our_client(world, address, PUSH_METHOD) as first:
                await exchange(first, [b"x"])
                for name in (SERVER, CLIENT):
                    renew(tmp_path, name, 2.0)
                async with our_client(world, address, PUSH_METHOD) as second:
                    await exchange(second, [b"x"])
                    assert isinstance(first, OurCall)
                    assert isinstance(second, OurCall)
                    shown = [serial_of(each.call.socket) for each in (first, second)]
                await exchange(first, [b"y"])  # stays as it is
            assert len({*shown, *seen}) == 4

    run(story())


def test_while_a_certificate_is_renewed_connections_are_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """For a moment the certificate is not of the key."""
    certify(tmp_path, "ash", "birch")
    world = tls_world(tmp_path)
    files = {name: (tmp_path / f"{name}.pem").read_bytes() for name in (SERVER, CLIENT)}

    async def story() -> None:
        async with our_server(world, {PUSH_METHOD: echo}) as address:
            for name in (CLIENT, SERVER):
                issue(tmp_path, name, 1.0, replace=True)
                made = (tmp_path / f"{name}.pem").read_bytes()
                (tmp_path / f"{name}.pem").write_bytes(files[name])
                status, _ = await status_of(our_client(world, address, PUSH_METHOD).__aenter__())
                assert status is Status.UNAVAILABLE
                (tmp_path / f"{name}.pem").write_bytes(made)
            async with our_client(world, address, PUSH_METHOD) as call:
                await exchange(call, [b"x"])

    run(story())
    assert "is not the key of" in caplog.text


def test_a_certificate_that_has_gone_is_the_operators_matter(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    certify(tmp_path, "ash", "birch")
    world = tls_world(tmp_path)

    async def story() -> None:
        async with our_server(world, {PUSH_METHOD: echo}) as address:
            (tmp_path / f"{SERVER}.pem").unlink()
            status, _ = await status_of(our_client(world, address, PUSH_METHOD).__aenter__())
            assert status is Status.UNAVAILABLE
            (tmp_path / f"{CLIENT}.pem").unlink()
            with pytest.raises(CallError, match=f"{CLIENT}.pem: No such file"):
                await our_client(world, address, PUSH_METHOD).__aenter__()

    run(story())
    assert "cannot be served" in caplog.text


# ------------------------------------------------------------------------ strangers, and too many


def test_what_never_makes_a_call_is_closed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frame_listener, "HANDSHAKE_S", SHORT_S)
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    outgoing = ssl.MemoryBIO()
    greeting = client.wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname="x")
    with pytest.raises(ssl.SSLWantReadError):
        greeting.do_handshake()
    hello = outgoing.read()
    said_by = [b"", hello[:100], hello + b"rubbish" * 20, PREFACE[:9], PREFACE]
    said_by.append(PREFACE + settings() + frame(Kind.HEADERS, b"", 0, 1))

    async def story() -> None:
        async with our_server(world, {PUSH_METHOD: echo}) as address:
            for said in said_by:
                async with raw_client(address) as stranger:
                    if said:
                        await stranger.send(said)
                    await stranger.end()

    run(story())


@pytest.mark.parametrize(
    ("early", "status"),
    [
        (b"", Status.UNAVAILABLE),
        (data(prefixed(b"x")), Status.UNAVAILABLE),
        (data(b"\x01\0\0\0\0"), Status.INTERNAL),
        (b"\xff" * 9, Status.INTERNAL),
    ],
)
def test_a_client_that_says_all_at_once_and_is_gone_harms_nobody(
    world: World, early: bytes, status: Status, caplog: pytest.LogCaptureFixture
) -> None:
    ends: list[Status] = []

    async def serve(call: FrameCall) -> None:
        try:
            await echo(call)
        except CallError as error:
            ends.append(error.status)
            raise

    async def story() -> None:
        async with our_server(world, {PUSH_METHOD: serve}) as address:
            async with streams_to(world, address) as (reader, writer):
                writer.write(early)
                if status is Status.INTERNAL:
                    with contextlib.suppress(ConnectionError):
                        await reader.read()  # it is closed for what it has said
            await until(lambda: bool(ends), "the read ends")
            async with our_client(world, address, PUSH_METHOD) as call:
                await exchange(call, [b"x"])

    run(story())
    assert ends[0] is status
    assert not [each for each in caplog.records if each.exc_info]


def test_rubbish_is_closed(world: World) -> None:
    chance = random.Random(3)

    async def story() -> None:
        async with our_server(world, {PUSH_METHOD: echo}) as address:
            for length in (30, 1000, 100_000):
                async with raw_client(address) as stranger:
                    with contextlib.suppress(ConnectionError):
                        await stranger.send(chance.randbytes(length))
                    await stranger.end()

    run(story())


def test_beyond_the_most_calls_a_connection_is_closed_at_once(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    async def story() -> None:
        async with our_server(world, {PUSH_METHOD: echo}, most=2) as address:
            async with our_client(world, address, PUSH_METHOD) as first:
                await exchange(first, [b"x"])
                async with our_client(world, address, PUSH_METHOD) as second:
                    await exchange(second, [b"x"])
                    with pytest.raises(CallError) as caught:
                        async with our_client(world, address, PUSH_METHOD) as third:
                            await third.read()
                    assert caught.value.status is Status.UNAVAILABLE
                    await exchange(first, [b"y"])
                    await exchange(second, [b"y"])
            async with our_client(world, address, PUSH_METHOD) as fourth:
                await exchange(fourth, [b"z"])

    run(story())
    assert "more than 2 connections" in caplog.text


def test_who_says_nothing_keeps_nobody_out(world: World) -> None:
    async def story() -> None:
        async with (
            our_server(world, {PUSH_METHOD: echo}, most=3) as address,
            contextlib.AsyncExitStack() as stack,
        ):
            # All at once: some are closed before anything was done for them.
            mute = [stack.enter_context(socket.create_connection(address)) for _ in range(10)]
            async with our_client(world, address, PUSH_METHOD) as call:
                await exchange(call, [b"x"])
                for each in mute[:8]:
                    each.setblocking(False)
                    await RawPeer(each).end()
                later = [stack.enter_context(socket.create_connection(address)) for _ in range(3)]
                later[0].setblocking(False)
                await RawPeer(later[0]).end()
                await exchange(call, [b"y"])

    run(story())


def test_a_listener_that_cannot_accept_tries_again(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frame_listener, "_RETRY_S", 0.001)

    class Exhausted(socket.socket):
        num_left = 2

        def accept(self) -> tuple[socket.socket, Any]:
            if self.num_left:
                self.num_left -= 1
                raise OSError(errno.EMFILE, "no descriptor is left")
            return super().accept()

    async def story() -> None:
        async with (
            our_server(PLAIN, {PUSH_METHOD: echo}, listening=Exhausted()) as address,
            our_client(PLAIN, address, PUSH_METHOD) as call,
        ):
            await exchange(call, [b"x"])

    run(story())
    assert caplog.text.count("no descriptor is left") == 2


@EITHER_CLIENT
def test_a_listener_that_closes_ends_all_calls(world: World, client: str) -> None:
    ends: list[type[BaseException]] = []

    async def serve(call: FrameCall) -> None:
        try:
            await echo(call)
        except BaseException as error:
            ends.append(type(error))
            raise

    async def story() -> None:
        async with contextlib.AsyncExitStack() as stack:
            serving = our_server(world, {PUSH_METHOD: serve})
            address = await serving.__aenter__()
            calls = [
                await stack.enter_async_context(CLIENTS[client](world, address, PUSH_METHOD))
                for _ in range(3)
            ]
            for call in calls:
                await exchange(call, [b"x"])
            async with raw_client(address) as stranger:
                await serving.__aexit__(None, None, None)
                await stranger.end()
            for call in calls:
                status, _ = await status_of(call.read())
                assert status in {Status.CANCELLED, Status.UNAVAILABLE}
            left = {each.get_name() for each in asyncio.all_tasks()}
            assert "frame-call" not in left

    run(story())
    assert ends == [asyncio.CancelledError] * 3


# ------------------------------------------------------------------------ peers that behave badly


def unread_bytes(end: socket.socket) -> int:
    """Return what the kernel keeps for a socket's reader."""
    found = fcntl.ioctl(end, termios.FIONREAD, bytes(4))
    return int(struct.unpack("i", found)[0])


async def send_on(client: RawPeer, again: bytes) -> None:
    while True:
        await client.send(again)


def test_a_writer_waits_for_a_peer_that_does_not_read() -> None:
    written = 0
    message = bytes(50_000)
    ahead_bytes = 400_000
    """Both ends' kernels, one message, and what the test has read of the next."""

    async def serve(call: FrameCall) -> None:
        nonlocal written
        keep_little(call.socket, socket.SO_SNDBUF)
        while True:
            await call.write(message)
            written += len(message)

    async def story() -> None:
        wide = ((INITIAL_WINDOW_SIZE, (1 << 31) - 1),)
        shown = PLAIN.client.shown()
        async with (
            our_server(PLAIN, {PUSH_METHOD: serve}) as address,
            raw_client(address, PUSH_METHOD, shown, given=wide, receive_bytes=4096) as client,
        ):
            await client.send(frame(Kind.WINDOW_UPDATE, number(1 << 30)))
            read = 0
            while read < 2_000_000:
                found = await client.frame()
                assert found is not None
                read += len(found[3])
                assert written <= read + ahead_bytes
            assert written > 1_500_000

    run(story())


def test_a_writer_hears_of_the_end_though_nobody_reads() -> None:
    ends: list[Status] = []
    calls: list[FrameCall] = []

    async def serve(call: FrameCall) -> None:
        calls.append(call)
        keep_little(call.socket, socket.SO_SNDBUF)
        try:
            await call.write(bytes(1 << 20))
        except CallError as error:
            ends.append(error.status)
            raise

    async def story() -> None:
        wide = ((INITIAL_WINDOW_SIZE, (1 << 31) - 1),)
        shown = PLAIN.client.shown()
        async with (
            our_server(PLAIN, {PUSH_METHOD: serve}) as address,
            raw_client(address, PUSH_METHOD, shown, given=wide, receive_bytes=4096) as client,
        ):
            await client.send(frame(Kind.WINDOW_UPDATE, number(1 << 30)))
            await until(lambda: unread_bytes(client.socket) > 1000, "it writes")
            await client.send(frame(Kind.RST_STREAM, number(CANCEL), 0, 1))
            await until(lambda: bool(ends), "the write ends")

    run(story())
    assert ends == [Status.CANCELLED]


@pytest.mark.parametrize(
    "one", [frame(Kind.PING, bytes(8)), settings(), header([(":path", "/x")], stream=3)]
)
def test_a_peer_that_asks_and_reads_no_answer_is_cut_off(one: bytes) -> None:
    ends: list[Status] = []

    async def serve(call: FrameCall) -> None:
        try:
            await call.read()
        except CallError as error:
            ends.append(error.status)
            raise

    async def story() -> None:
        listening = socket.socket()
        keep_little(listening, socket.SO_SNDBUF)  # accepted sockets inherit it
        shown = PLAIN.client.shown()
        async with (
            our_server(PLAIN, {PUSH_METHOD: serve}, listening=listening) as address,
            raw_client(address, PUSH_METHOD, shown, receive_bytes=4096) as client,
        ):
            with pytest.raises(ConnectionError):
                await send_on(client, one * 500)

    run(story())
    assert ends == [Status.RESOURCE_EXHAUSTED]


def test_a_peer_that_sends_no_messages_has_one_read_a_turn() -> None:
    """Thousands of frames have come: others have their turn before all are taken."""

    async def story() -> None:
        async with our_server(PLAIN, {PUSH_METHOD: serve}) as address:
            shown = PLAIN.client.shown()
            async with raw_client(address, PUSH_METHOD, shown) as client:
                await client.fields()
                (call,) = calls
                client.socket.setblocking(True)
                client.socket.settimeout(DEADLINE_S)
                client.socket.sendall(frame(Kind.PRIORITY, bytes(5), 0, 1) * 5000)
                came = unread_bytes(call.socket)
                call._wire.line.note(select.EPOLLIN)
                call._readable()
                assert came - unread_bytes(call.socket) <= 32 << 10
                client.socket.setblocking(False)
                call.cancel()

    async def serve(call: FrameCall) -> None:
        calls.append(call)
        await call.read()

    calls: list[FrameCall] = []
    run(story())


def test_a_peer_that_sends_and_makes_no_room_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inbox, "_AHEAD_BYTES_MAX", 1 << 20)
    ends: list[Status] = []

    async def serve(call: FrameCall) -> None:
        try:
            await echo(call)
        except CallError as error:
            ends.append(error.status)
            raise

    async def story() -> None:
        shown = PLAIN.client.shown()
        narrow = ((INITIAL_WINDOW_SIZE, 20),)
        async with (
            our_server(PLAIN, {PUSH_METHOD: serve}) as address,
            raw_client(address, PUSH_METHOD, shown, given=narrow) as client,
        ):
            with pytest.raises(ConnectionError):
                await send_on(client, data(prefixed(bytes(1000))) * 50)

    run(story())
    assert ends == [Status.RESOURCE_EXHAUSTED]


@contextlib.contextmanager
def without_collector() -> Iterator[None]:
    """Nothing is freed but by the last reference to it."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.mark.parametrize("is_client", [False, True], ids=["server", "client"])
@pytest.mark.parametrize("end", ["broken", "cancelled", "cut off"])
def test_a_call_that_is_over_frees_at_once_what_it_has_read(
    is_client: bool, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = ReadAhead()
    monkeypatch.setattr(inbox, "_READ_AHEAD", held)
    monkeypatch.setattr(inbox, "_AHEAD_BYTES_MAX", 1 << 20)

    async def story() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listening:
            theirs = socket.create_connection(listening.getsockname())
            ours, _ = listening.accept()
        for each in (ours, theirs):
            each.setblocking(False)
        far = RawPeer(theirs)
        await check(FrameCall(ours, is_client=is_client), far)
        await asyncio.sleep(0)
        assert [each() for each in gone] == [None] * 4
        assert held.num_bytes == 0
        theirs.close()

    async def check(call: FrameCall, far: RawPeer) -> None:
        call.begin([(":path", "/x")] if is_client else ())
        await far.send(begun(is_client) + settings((INITIAL_WINDOW_SIZE, 0)))
        if not is_client:
            await call.wait_header()
            call.answer()
        messages = data(prefixed(bytes(100_000))) * 3 + data(prefixed(bytes(1 << 20))[:5000])
        await far.send(messages)
        await until(lambda: len(call._inbox._messages) == 3, "messages wait")
        await until(lambda: held.num_bytes > 1 << 20, "one is under way")
        gone.extend(weakref.ref(each) for each in call._inbox._messages)
        gone.append(weakref.ref(call))
        if end == "cut off":  # it waits for room, and reads on
            writing = asyncio.create_task(code_of(call.write(b"x")))
            sending = asyncio.create_task(send_on(far, data(bytes(10_000))))
            await asyncio.wait([sending])
            assert isinstance(sending.exception(), ConnectionError)
            assert await writing is Status.RESOURCE_EXHAUSTED
        elif end == "broken":
            far.socket.close()
            await call.over.wait()
            for _ in range(3):
                await call.read()
            assert await code_of(call.read()) is Status.UNAVAILABLE
        call.cancel()

    async def code_of(what: Awaitable[object]) -> Status:
        """Return how it fails, and keep nothing of the exception."""
        try:
            await what
        except CallError as error:
            return error.status
        raise AssertionError("it does not fail")

    gone: list[weakref.ref[Any]] = []
    with without_collector():
        run(story())


def test_all_calls_together_hold_a_bounded_number_of_bytes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Beyond it a call waits for its turn; each message arrives all the same."""
    held = ReadAhead(300_000)
    monkeypatch.setattr(inbox, "_READ_AHEAD", held)
    may_read = asyncio.Event()
    most_bytes = num_read = 0

    async def serve(call: FrameCall) -> None:
        nonlocal num_read, most_bytes
        await may_read.wait()
        while await call.read() is not None:
            most_bytes = max(most_bytes, held.num_bytes)
            num_read += 1

    async def story() -> None:
        shown = PLAIN.client.shown()
        async with (
            our_server(PLAIN, {PUSH_METHOD: serve}) as address,
            contextlib.AsyncExitStack() as stack,
            asyncio.TaskGroup() as tasks,
        ):
            clients = [
                await stack.enter_async_context(raw_client(address, PUSH_METHOD, shown))
                for _ in range(6)
            ]
            # One whose message never ends; another goes away while it waits.
            await clients[0].send(data(prefixed(bytes(100_000))[:50_000]))
            await until(lambda: held.num_bytes > 0, "it has begun")
            for each in clients[1:]:
                tasks.create_task(each.send(data(prefixed(bytes(90_000))) * 5))
            await until(lambda: len(held._waiting) >= 3, "they wait")
            clients[0].socket.close()
            may_read.set()
            await until(lambda: num_read == 25, "all is read")

    run(story())
    assert 250_000 < most_bytes <= 300_000 + 6 * 33_000  # beside what is read with a beginning
    assert held.num_bytes == 0


def test_one_message_always_has_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inbox, "_READ_AHEAD", ReadAhead(1000))
    sizes: list[int] = []

    async def serve(call: FrameCall) -> None:
        while (message := await call.read()) is not None:
            sizes.append(len(message))
            await call.write(b"taken")

    async def story() -> None:
        async with (
            our_server(PLAIN, {PUSH_METHOD: serve}) as address,
            our_client(PLAIN, address, PUSH_METHOD) as call,
        ):
            for size in (1 << 20, 5, 2 << 20):
                await call.write(bytes(size))
                assert await call.read() == b"taken"

    run(story())
    assert sizes == [1 << 20, 5, 2 << 20]


def test_a_connection_is_not_read_while_nobody_wants_its_messages() -> None:
    num_read = 0
    may_go_on = asyncio.Event()

    async def serve(call: FrameCall) -> None:
        nonlocal num_read
        await may_go_on.wait()
        while await call.read() is not None:
            num_read += 1

    async def story() -> None:
        shown = PLAIN.client.shown()
        listening = socket.socket()
        keep_little(listening, socket.SO_RCVBUF)
        async with (
            our_server(PLAIN, {PUSH_METHOD: serve}, listening=listening) as address,
            raw_client(address, PUSH_METHOD, shown) as client,
        ):
            keep_little(client.socket, socket.SO_SNDBUF)
            message = data(prefixed(bytes(16_000)))
            sent_bytes = 0
            with contextlib.suppress(TimeoutError):
                while sent_bytes < 4_000_000:
                    async with asyncio.timeout(SHORT_S):
                        await client.send(message)
                    sent_bytes += len(message)
            # What the kernels and the server keep, and no more.
            assert sent_bytes < 1_000_000
            may_go_on.set()
            await until(lambda: num_read * len(message) >= sent_bytes, "all is read")

    run(story())


def test_a_writer_hears_of_room_that_was_made_while_answers_waited() -> None:
    """TCP was full of answers just then: the writer waits for both."""
    began = asyncio.Event()
    may_write = asyncio.Event()
    calls: list[FrameCall] = []

    async def serve(call: FrameCall) -> None:
        calls.append(call)
        began.set()
        await may_write.wait()
        await call.write(b"m" * 100)
        await call.read()

    async def story() -> None:
        listening = socket.socket()
        keep_little(listening, socket.SO_SNDBUF)
        shown = PLAIN.client.shown()
        none = ((INITIAL_WINDOW_SIZE, 0),)
        async with (
            our_server(PLAIN, {PUSH_METHOD: serve}, listening=listening) as address,
            raw_client(address, PUSH_METHOD, shown, given=none, receive_bytes=2048) as client,
        ):
            await began.wait()
            for _ in range(8):
                await client.send(frame(Kind.PING, bytes(8)) * 120)
                await until(lambda: unread_bytes(calls[0].socket) == 0, "it takes pings")
            may_write.set()
            await asyncio.sleep(0)
            await client.send(frame(Kind.WINDOW_UPDATE, number(1000), 0, 1))
            await until(lambda: unread_bytes(calls[0].socket) == 0, "it hears of room")
            pieces = b""
            while len(pieces) < 105:
                found = await client.frame()
                assert found is not None
                if found[0] == Kind.DATA:
                    pieces += found[3]
            assert pieces == prefixed(b"m" * 100)

    run(story())


def test_calls_on_one_channel_of_the_library_have_connections_of_their_own(world: World) -> None:
    num_calls = 4
    peers: list[str] = []

    async def serve(call: FrameCall) -> None:
        peers.append(call.peer())
        await echo(call)

    async def story() -> None:
        async with (
            our_server(world, {PUSH_METHOD: serve}) as address,
            library_channel(world, address) as channel,
        ):

            async def call_it() -> None:
                made: Any = channel.stream_stream(PUSH_METHOD)
                call = LibraryCall(made(metadata=world.client.shown(), wait_for_ready=True))
                await exchange(call, [b"x"])
                await all_there.wait()
                await call.call.done_writing()
                assert await call.read() is None

            all_there = asyncio.Barrier(num_calls)
            async with asyncio.TaskGroup() as tasks:
                for _ in range(num_calls):
                    tasks.create_task(call_it())

    run(story())
    assert len(set(peers)) == num_calls


def test_nothing_more_comes_after_the_last_word(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of the connection is told at once, also to who does not close it first."""
    monkeypatch.setattr(frame_calls, "_LINGER_S", 10 * DEADLINE_S)

    async def serve(call: FrameCall) -> None:
        await call.write(bytes(1 << 20))

    async def story() -> None:
        async with (
            our_server(world, {PUSH_METHOD: serve}) as address,
            streams_to(world, address) as (reader, writer),
        ):
            # It has to make room for all of that.
            writer.write(frame(Kind.WINDOW_UPDATE, number(1 << 20)))
            writer.write(frame(Kind.WINDOW_UPDATE, number(1 << 20), 0, 1))
            assert b"grpc-status" in header_names(await reader.read())

    run(story())


def is_reset(end: socket.socket) -> bool:
    """Whether the other end has closed the connection, and not only one direction of it."""
    try:
        end.send(frame(Kind.PING, bytes(8)))
    except ConnectionError:
        return True
    return False


def test_who_was_refused_and_stays_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frame_listener, "_LINGER_S", SHORT_S)

    async def story() -> None:
        async with (
            our_server(PLAIN, {PUSH_METHOD: echo}) as address,
            raw_client(address, PUSH_METHOD) as stranger,
        ):
            assert (await stranger.fields())["grpc-status"] == "16"
            await until(lambda: is_reset(stranger.socket), "it is closed")

    run(story())
