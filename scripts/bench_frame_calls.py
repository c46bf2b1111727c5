"""Processor time of frames in gRPC calls: over the gateways' own sockets, and over gRPC's library.

Usage: python scripts/bench_frame_calls.py [--mib 1024]

One process pushes frames to another over loopback, which acknowledges each with 32 bytes, as
gateways do. Both speak gRPC. The processor time is that of both processes, for each GB and frame.
The kernel's default congestion control is used: look at it, for BBR costs more on loopback.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import resource
import socket
import time
from collections.abc import Awaitable, Callable
from multiprocessing.connection import Connection
from typing import Any

import grpc.aio

from isthmus.protos.security import LoopbackSecurity
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

Push = Callable[[bytes], Awaitable[Any]]
Read = Callable[[], Awaitable[Any]]


def spent_s() -> float:
    """Return the processor time of this process so far."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


async def push(write: Push, read: Read, frame: bytes, num_frames: int) -> float:
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


async def serve_own(owner: Connection) -> None:
    """Serve over own sockets until the owner says so."""

    async def take(call: FrameCall) -> None:
        while await call.read() is not None:
            await call.write(ACK)

    listening = socket.create_server(("127.0.0.1", 0))
    listener = FrameListener(listening, {METHOD: take}, SECURITY, PATIENCE, 4)
    listener.begin()
    await converse(owner, listening.getsockname()[1])
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
    await converse(owner, port)
    await server.stop(0)


async def converse(owner: Connection, port: int) -> None:
    """Tell the port, and the processor time whenever the owner asks, until it has asked twice."""
    owner.send(port)
    for _ in range(2):
        await asyncio.to_thread(owner.recv)
        owner.send(spent_s())


async def over_own(port: int, frame: bytes, num_frames: int) -> float:
    """Push over an own socket."""
    async with dial(("127.0.0.1", port), METHOD, (), SECURITY, "b.gateway", PATIENCE) as call:
        return await push(call.write, call.read, frame, num_frames)


async def over_library(port: int, frame: bytes, num_frames: int) -> float:
    """Push over gRPC's library."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=OPTIONS) as channel:
        push_call: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(METHOD)
        call = push_call()
        return await push(call.write, call.read, frame, num_frames)


KINDS = {"own sockets": (serve_own, over_own), "library": (serve_library, over_library)}


def serve(kind: str, owner: Connection) -> None:
    """Be the process that takes frames."""
    asyncio.run(asyncio.wait_for(KINDS[kind][0](owner), DEADLINE_S))


def measure(kind: str, frame_bytes: int, total_bytes: int) -> str:
    """Return a row of the table."""
    ours, theirs = multiprocessing.Pipe()
    child = multiprocessing.get_context("spawn").Process(target=serve, args=(kind, theirs))
    child.start()
    port = ours.recv()
    frame, num_frames = os.urandom(frame_bytes), total_bytes // frame_bytes
    ours.send("")
    before_s = spent_s() + ours.recv()
    took_s = asyncio.run(asyncio.wait_for(KINDS[kind][1](port, frame, num_frames), DEADLINE_S))
    ours.send("")
    cpu_s = spent_s() + ours.recv() - before_s
    child.join(DEADLINE_S)
    num_gb = frame_bytes * num_frames / 1e9
    return (
        f"{frame_bytes >> 10:>6} KiB  {kind:<12} {num_gb / took_s:6.2f} GB/s "
        f"{cpu_s / num_gb:6.2f} s/GB {1e6 * cpu_s / num_frames:8.0f} us/frame"
    )


def main() -> None:
    """Print a row for each kind and length of frames."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--mib", type=int, default=1024, help="how much is pushed for each row")
    total_bytes = parser.parse_args().mib << 20
    for frame_kib, share in ((16, 8), (256, 1), (8192, 1)):
        for kind in KINDS:
            print(measure(kind, frame_kib << 10, total_bytes // share))


if __name__ == "__main__":
    main()
