"""Measure frames in gRPC calls: over the gateways' own sockets, and over gRPC's library.

One process pushes frames to another over loopback, which acknowledges each with 32 bytes, as
gateways do. Both speak gRPC. The processor time is that of both processes, for each GB and frame.
The kernel's default congestion control is used: look at it, for BBR costs more on loopback.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import socket
import time
from collections.abc import Awaitable, Callable
from multiprocessing.connection import Connection
from typing import Any

import grpc.aio

from isthmus.protos.security import LoopbackSecurity
from isthmus.sites.bench.gateways import cpu_s
from isthmus.sites.gateway.links.frame_calls import FrameCall, Patience, dial
from isthmus.sites.gateway.links.frame_listener import FrameListener

METHOD = "/isthmus.exchange.v1.Exchange/Push"
ACK = bytes(32)
SECURITY = LoopbackSecurity("0" * 64)
PATIENCE = Patience(connect_s=5.0, idle_s=5.0, lost_s=5.0)
OPTIONS = (
    ("grpc.max_send_message_length", 17 << 20),
    ("grpc.max_receive_message_length", 17 << 20),
    ("grpc.http2.max_frame_size", (16 << 20) - 1),
    ("grpc.http2.lookahead_bytes", 64 << 20),
    ("grpc.http2.bdp_probe", 0),
)
ON_THE_WAY_BYTES = 16 << 20
DEADLINE_S = 120.0


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what may be asked for."""
    parser.add_argument("--mib", type=int, default=1024, help="how much is pushed for each row")


def run(options: argparse.Namespace) -> None:
    """Print a row for each length of frames and each kind of calls."""
    for frame_kib, share in ((16, 8), (256, 1), (8192, 1)):
        for kind in KINDS:
            print(row(kind, frame_kib << 10, (options.mib << 20) // share), flush=True)


def row(kind: str, frame_bytes: int, total_bytes: int) -> str:
    """Measure one kind of calls with one length of frames."""
    serve, push_all = KINDS[kind]
    ours, theirs = multiprocessing.Pipe()
    child = multiprocessing.get_context("spawn").Process(target=_served, args=(serve, theirs))
    child.start()
    assert child.pid is not None
    pids = (os.getpid(), child.pid)
    port = ours.recv()
    frame, num_frames = os.urandom(frame_bytes), total_bytes // frame_bytes
    before_s = cpu_s(pids)
    took_s = asyncio.run(asyncio.wait_for(push_all(port, frame, num_frames), DEADLINE_S))
    used_s = cpu_s(pids) - before_s
    ours.send("end")
    child.join(DEADLINE_S)
    num_gb = frame_bytes * num_frames / 1e9
    return (
        f"{frame_bytes >> 10:>6} KiB  {kind:<12} {num_gb / took_s:6.2f} GB/s "
        f"{used_s / num_gb:6.2f} s/GB {1e6 * used_s / num_frames:8.0f} us/frame"
    )


async def push(
    write: Callable[[bytes], Awaitable[Any]],
    read: Callable[[], Awaitable[Any]],
    frame: bytes,
    num_frames: int,
) -> float:
    """Push frames, as many as may be on the way at once; return the seconds that it took."""
    room = asyncio.Semaphore(max(2, ON_THE_WAY_BYTES // len(frame)))

    async def take_acks() -> None:
        for _ in range(num_frames):
            assert len(await read()) == len(ACK)
            room.release()

    async with asyncio.TaskGroup() as tasks:
        began_s = time.perf_counter()
        tasks.create_task(take_acks())
        for _ in range(num_frames):
            await room.acquire()
            await write(frame)
    return time.perf_counter() - began_s


async def over_own(port: int, frame: bytes, num_frames: int) -> float:
    """Push over an own socket."""
    async with dial(("127.0.0.1", port), METHOD, (), SECURITY, "b.gateway", PATIENCE) as call:
        return await push(call.write, call.read, frame, num_frames)


async def over_library(port: int, frame: bytes, num_frames: int) -> float:
    """Push over gRPC's library."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=OPTIONS) as channel:
        method: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(METHOD)
        call = method()
        return await push(call.write, call.read, frame, num_frames)


async def serve_own(owner: Connection) -> None:
    """Serve over own sockets until the owner says so."""

    async def take(call: FrameCall) -> None:
        while await call.read() is not None:
            await call.write(ACK)

    listening = socket.create_server(("127.0.0.1", 0))
    listener = FrameListener(listening, {METHOD: take}, SECURITY, PATIENCE, 4)
    listener.begin()
    owner.send(listening.getsockname()[1])
    await asyncio.to_thread(owner.recv)
    await listener.close()


async def serve_library(owner: Connection) -> None:
    """Serve over gRPC's library until the owner says so."""

    async def take(_: object, context: grpc.aio.ServicerContext[bytes, bytes]) -> None:
        while isinstance(await context.read(), bytes):
            await context.write(ACK)

    server = grpc.aio.server(options=OPTIONS)
    service, _, name = METHOD[1:].partition("/")
    methods: dict[str, grpc.RpcMethodHandler[bytes, bytes]]
    methods = {name: grpc.stream_stream_rpc_method_handler(take)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, methods),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    owner.send(port)
    await asyncio.to_thread(owner.recv)
    await server.stop(0)


def _served(serve: Callable[[Connection], Awaitable[None]], owner: Connection) -> None:
    """Be the process that takes frames."""
    asyncio.run(asyncio.wait_for(serve(owner), DEADLINE_S))


KINDS = {"own sockets": (serve_own, over_own), "library": (serve_library, over_library)}
