"""Strangers at a gateway cost a bounded part of the loop's time, of memory and of logs."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import select
import socket
import ssl
import struct
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import hpack
import pytest

from isthmus.orchestrator.certificates import renew
from isthmus.protos.mutual_tls import TlsFiles, TlsSecurity
from isthmus.protos.security import LoopbackSecurity
from isthmus.sites.gateway.links import frame_calls, frame_listener
from isthmus.sites.gateway.links.allowance import Allowance
from isthmus.sites.gateway.links.frame_calls import FrameCall, dial
from isthmus.sites.gateway.links.frame_listener import FrameListener
from isthmus.sites.gateway.links.http2 import Kind
from isthmus.sites.gateway.links.keep_alive import Patience
from isthmus.sites.gateway.links.transport import PUSH_METHOD
from tests.fakes.certified import certify
from tests.fakes.http2_frames import END_HEADERS, PREFACE, frame, frames_in, number, settings
from tests.fakes.raw_calls import RawPeer, accept_any, raw_client
from tests.fakes.waiting import until

DEADLINE_S = 30.0
SECURITY = LoopbackSecurity("s" * 64)
PATIENCE = Patience(connect_s=10.0, idle_s=7.0, lost_s=21.0)
Address = tuple[str, int]


async def echo(call: FrameCall) -> None:
    while (message := await call.read()) is not None:
        await call.write(message)


@asynccontextmanager
async def listener(
    most: int = 8,
    patience: Patience = PATIENCE,
    security: LoopbackSecurity | TlsSecurity = SECURITY,
    host: str = "127.0.0.1",
) -> AsyncIterator[tuple[Address, FrameListener]]:
    listening = socket.socket()
    listening.bind((host, 0))
    made = FrameListener(listening, {PUSH_METHOD: echo}, security, patience, most)
    made.begin()
    try:
        yield listening.getsockname(), made
    finally:
        await made.close()


@asynccontextmanager
async def peer(address: Address) -> AsyncIterator[FrameCall]:
    """Make a call that is let in."""
    async with dial(address, PUSH_METHOD, (), SECURITY, "ash.gateway", PATIENCE) as call:
        await says_again(call, b"x")
        yield call


async def says_again(call: FrameCall, message: bytes) -> None:
    await call.write(message)
    assert bytes(await call.read() or b"") == message


# ------------------------------------------------------------------------ the share of time


@pytest.mark.parametrize("seed", range(10))
def test_what_is_spent_is_a_share_of_all_time_and_what_was_saved(seed: int) -> None:
    chance = random.Random(seed)
    allowance, now_s, spent_s, longest_s = Allowance(0.1, 0.25, 0.0), 0.0, 0.0, 0.005
    for _ in range(2000):
        now_s += allowance.wait_s(0.0, now_s) + chance.choice((0.0, 0.0, 0.001))
        if allowance.left_s(now_s) <= 0:
            now_s += 1e-9
        cost_s = chance.uniform(0, longest_s)
        allowance.spend(cost_s)
        spent_s += cost_s
        now_s += cost_s
    assert spent_s <= 0.1 * now_s + 0.25 + longest_s
    assert spent_s >= 0.09 * now_s


def test_after_a_pause_no_more_than_the_most_is_saved() -> None:
    allowance = Allowance(0.1, 0.25, 0.0)
    allowance.spend(0.25)
    assert allowance.left_s(1.0) == pytest.approx(0.1)
    assert allowance.wait_s(0.2, 1.0) == pytest.approx(1.0)
    assert allowance.left_s(1000.0) == 0.25


async def test_strangers_wait_while_their_share_is_used_up_and_calls_go_on() -> None:
    async with listener() as (address, made), peer(address) as call:
        made._allowance.spend(60.0)
        async with raw_client(address, PUSH_METHOD, SECURITY.shown()) as waiting:
            for index in range(100):
                await says_again(call, b"%d" % index)
            with pytest.raises(BlockingIOError):
                waiting.socket.recv(1)
            assert made._allowance.left_s(asyncio.get_running_loop().time()) < 0


async def test_strangers_go_on_once_they_have_a_share_again() -> None:
    async with listener() as (address, made):
        made._allowance.spend(0.3)  # half a second's worth more than there was
        async with peer(address):
            pass


# ------------------------------------------------------------------------ what one may say


@pytest.mark.parametrize(
    "one",
    [
        frame(Kind.PING, bytes(8)),
        settings(),
        frame(Kind.SETTINGS, b"", 1),
        frame(Kind.WINDOW_UPDATE, number(1)),
        frame(Kind.PRIORITY, bytes(5), 0, 1),
        frame(Kind.RST_STREAM, number(8), 0, 1),
        frame(99),
    ],
    ids=["ping", "settings", "answers", "windows", "priorities", "resets", "unknown"],
)
async def test_who_says_much_and_makes_no_call_is_closed(one: bytes) -> None:
    async with listener() as (address, _), raw_client(address) as stranger:
        with contextlib.suppress(ConnectionError):
            await stranger.send(PREFACE + settings() + one * 20)
            await stranger.send(one * 100_000)
        answers = frames_in_part(await stranger.end())
        assert len(answers) < 70
    async with listener() as (address, _), raw_client(address) as client:
        await client.send(PREFACE + settings() + one * 20)
        await client.send(called())
        assert (await client.fields())[":status"] == "200"


def frames_in_part(read: bytes) -> list[object]:
    """Return the frames of what was read, of which the last may have been cut off."""
    for end in range(len(read), max(-1, len(read) - 100), -1):
        with contextlib.suppress(AssertionError, Exception):
            return list(frames_in(read[:end]))
    return []


def called(*more: tuple[str, str]) -> bytes:
    fields = [(":method", "POST"), (":path", PUSH_METHOD), *SECURITY.shown(), *more]
    block = hpack.Encoder().encode([(*each, True) for each in fields])
    return frame(Kind.HEADERS, block, END_HEADERS, 1)


@pytest.mark.parametrize("kind", [Kind.HEADERS, Kind.CONTINUATION], ids=["one frame", "several"])
async def test_a_huge_header_is_not_read(kind: Kind) -> None:
    block = hpack.Encoder().encode([("a", "b" * 24_000, True)], huffman=False)

    async with listener() as (address, _), raw_client(address) as stranger:
        with contextlib.suppress(ConnectionError):
            if kind is Kind.HEADERS:
                await stranger.send(PREFACE + settings() + frame(kind, block, END_HEADERS, 1))
            else:
                pieces = [block[at : at + 500] for at in range(0, len(block), 500)]
                first = frame(Kind.HEADERS, pieces[0], 0, 1)
                rest = [frame(kind, piece, 0, 1) for piece in pieces[1:]]
                await stranger.send(PREFACE + settings() + first + b"".join(rest))
        await stranger.end()


async def test_who_drips_is_closed_after_some_reads() -> None:
    async with listener() as (address, made), raw_client(address) as stranger:
        num_sent = 0
        with contextlib.suppress(ConnectionError):
            for byte in PREFACE + settings() + bytes(1000):
                await stranger.send(bytes([byte]))
                num_sent += 1
                steps = num_sent
                await until(
                    lambda steps=steps: all(  # type: ignore[misc]
                        each._num_steps >= steps for each in made._strangers.values()
                    ),
                    "it is read",
                )
                if not made._strangers:
                    break
        assert num_sent <= frame_listener._READS_MAX + 1


@pytest.mark.parametrize("said", [b"", PREFACE[:5], PREFACE + settings()])
async def test_who_makes_no_call_is_closed_soon(said: bytes) -> None:
    """Sooner than after HANDSHAKE_S, where peers need less."""

    patience = Patience(connect_s=0.05, idle_s=7.0, lost_s=21.0)
    async with listener(patience=patience) as (address, _), raw_client(address) as stranger:
        await stranger.send(said)
        async with asyncio.timeout(5.0):
            await stranger.end()


async def test_what_who_was_refused_sends_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frame_listener, "_LINGER_S", 0.2)

    async with listener() as (address, made), raw_client(address, PUSH_METHOD) as stranger:
        assert (await stranger.fields())["grpc-status"] == "16"
        (refused,) = made._strangers.values()
        num_steps = refused._num_steps
        sent = 0
        stranger.socket.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:  # until both kernels are full
                sent += stranger.socket.send(bytes(1 << 16))
        assert sent < 64 << 20
        async with peer(address):
            assert refused._num_steps == num_steps
        stranger.socket.close()
        await until(lambda: not made._strangers, "it is forgotten")


# ------------------------------------------------------------------------ how many, and who


async def test_strangers_are_bounded_and_the_oldest_goes_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(frame_listener, "_STRANGERS_MAX", 3)

    async with listener(most=100) as (address, made), contextlib.AsyncExitStack() as stack:
        mute = [await stack.enter_async_context(raw_client(address)) for _ in range(6)]
        for each in mute[:3]:
            await each.end()
        assert len(made._strangers) == 3
        async with peer(address):
            await mute[3].end()


async def test_who_was_let_in_before_is_not_kept_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Strangers of another address are closed before a peer that comes back."""
    monkeypatch.setattr(frame_listener, "_STRANGERS_MAX", 2)

    async with listener(most=100, host="0.0.0.0") as (address, made):
        port = address[1]
        async with peer(("127.0.0.1", port)):
            pass
        async with contextlib.AsyncExitStack() as stack:
            back = await stack.enter_async_context(raw_client(("127.0.0.1", port)))
            await until(lambda: len(made._strangers) == 1, "it is accepted")
            strangers = []
            for _ in range(5):
                strange = stack.enter_context(socket.socket())
                strange.bind(("127.0.0.2", 0))
                strange.setblocking(False)
                await asyncio.get_running_loop().sock_connect(strange, ("127.0.0.1", port))
                strangers.append(RawPeer(strange))
            for each in strangers[:4]:
                await each.end()
            await back.send(PREFACE + settings() + called())
            assert (await back.fields())[":status"] == "200"


async def test_a_call_that_is_let_in_as_the_listener_closes_leaves_no_socket() -> None:
    async with listener() as (address, made), raw_client(address) as client:
        await client.send(PREFACE + settings() + called())
        # This blocks the loop, which would take the call in and read it itself.
        select.select([made._poll], [], [], DEADLINE_S)
        deadline_s = time.monotonic() + DEADLINE_S
        while not made._calls and time.monotonic() < deadline_s:
            made._turn()
        assert made._calls
        await made.close()  # before the call's first step
        await client.end()


async def test_refusals_fill_no_log(caplog: pytest.LogCaptureFixture) -> None:
    async with listener() as (address, _):
        for _ in range(20):
            async with raw_client(address, PUSH_METHOD) as stranger:
                assert (await stranger.fields())["grpc-status"] == "16"
    warnings = [each for each in caplog.records if each.levelname == "WARNING"]
    assert len(warnings) == 1
    assert "'Push' was refused to 127.0.0.1" in warnings[0].getMessage()


# ------------------------------------------------------------------------ TLS


def secured(folder: Path) -> TlsSecurity:
    certify(folder, "ash", "birch")
    files = TlsFiles(
        ca=str(folder / "ca.pem"), cert=f"{folder}/{{name}}.pem", key=f"{folder}/{{name}}.key"
    )
    return TlsSecurity(files, "ash.gateway")


def reset(connection: socket.socket) -> None:
    """Close it so that the other end finds it reset."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


async def test_who_resets_a_connection_before_its_handshake_is_forgotten(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with listener(security=secured(tmp_path)) as (address, made):
        for _ in range(3):
            reset(socket.create_connection(address, DEADLINE_S))
        made._turn()
        await until(lambda: not made._strangers, "they are forgotten")
    assert "Exception" not in caplog.text


def test_a_connection_that_was_reset_before_its_handshake_is_closed(tmp_path: Path) -> None:
    context, name = secured(tmp_path).client_tls("birch.gateway")
    with socket.create_server(("127.0.0.1", 0)) as listening:
        connection = socket.create_connection(listening.getsockname(), DEADLINE_S)
        descriptor = connection.fileno()
        reset(listening.accept()[0])
        connection.setblocking(False)
        with pytest.raises(OSError, match="reset"):
            frame_calls.tls_socket(context, connection, name)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_one_context_serves_all_connections_until_files_change(tmp_path: Path) -> None:
    security = secured(tmp_path)
    server, (client, _) = security.server_tls(), security.client_tls("birch.gateway")
    assert security.server_tls() is server
    assert security.client_tls("ash.gateway")[0] is client
    assert server is not client
    renew(tmp_path, "ash.gateway", 2.0)
    assert security.server_tls() is not server
    assert security.client_tls("birch.gateway")[0] is not client


async def test_who_shows_no_certificate_costs_no_new_context(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    security = secured(tmp_path)
    num_loads = 0
    load = ssl.SSLContext.load_cert_chain

    def counting(*given: Any, **more: Any) -> None:  # noqa: ANN401 - as it is
        nonlocal num_loads
        num_loads += 1
        load(*given, **more)

    stranger = accept_any()
    async with listener(security=security) as (address, _):
        monkeypatch.setattr(ssl.SSLContext, "load_cert_chain", counting)
        for _ in range(5):
            reader, writer = await asyncio.open_connection(*address, ssl=stranger)
            with contextlib.suppress(OSError):
                await reader.read()
            writer.transport.abort()
    assert num_loads == 1
