"""Measure what strangers at a gateway's frames port cost the training: rounds a second, and memory.

Usage: python scripts/bench_strangers.py [--attacks connects,frames,..] [--seconds 60] [--tls]

Two gateways that ship reduce buckets over loopback, round after round. Beside them attackers, as
another user if this is root, at the lowest priority, do one thing over and over on 64 connections.
By turns they do it to a gateway's frames port, and to a sink: what they cost as neighbours of the
machine is in both. The ratio of the rounds a second is what they cost as strangers.

Meanwhile a client that may make calls opens a connection each half second, as a peer does that
comes back, and notes how long it takes to be let in.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import multiprocessing
import os
import shutil
import signal
import socket
import ssl
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from multiprocessing.process import BaseProcess
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path

import hpack
import psutil

from isthmus.orchestrator.certificates import issue, make_authority, names_for
from isthmus.protos.mutual_tls import TlsFiles
from isthmus.protos.security import exchange_security, use_tls
from isthmus.sites.gateway.links.frame_calls import CallError, Patience, dial
from isthmus.sites.gateway.links.http2 import HEAD_BYTES, Kind
from isthmus.sites.gateway.links.transport import PUSH_METHOD, SESSION_KEY
from scripts.bench_gateways import both
from scripts.gateway_pair import SITES, GatewayChild, RankStandIn, Setting, pair

NOBODY = 65534
NICE = 19
CONNECTIONS = 64
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
PATIENCE = Patience(connect_s=5.0, idle_s=5.0, lost_s=10.0)
PROBE_EVERY_S = 0.5
SECONDS_MAX = 120.0
"""No attacker lives longer, whatever becomes of this process."""
DOMAIN = "bench.internal"
Shown = tuple[str, str, str]
"""Files: the authority that is believed, the certificate that is shown, its key; empty: no TLS."""


def frame(kind: Kind, payload: bytes, flags: int = 0, stream: int = 0) -> bytes:
    """Return a frame of HTTP/2."""
    return len(payload).to_bytes(3) + bytes([kind, flags]) + stream.to_bytes(4) + payload


OPENING = PREFACE + frame(Kind.SETTINGS, b"")
CHEAP = (frame(Kind.PING, bytes(8)) + frame(Kind.SETTINGS, b"") + frame(Kind.PRIORITY, b"")) * 500
assert len(CHEAP) > HEAD_BYTES
Attack = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def connects(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Connect, and say nothing."""


async def mutes(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
    """Connect, and stay as long as one may."""
    await reader.read()


async def drips(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Say a byte, and another."""
    for byte in OPENING * 1000:
        writer.write(bytes([byte]))
        await writer.drain()
        with contextlib.suppress(TimeoutError):
            if await asyncio.wait_for(reader.read(100), 0.01) == b"":
                return


async def frames(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Say what costs little to say, for ever."""
    writer.write(OPENING)
    draining = asyncio.create_task(reader.read())
    while not draining.done():
        writer.write(CHEAP)
        await writer.drain()


async def headers(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Make a call with a secret that is none, and a header as long as one may be."""
    fields = [(":method", "POST"), (":path", PUSH_METHOD), ("authorization", "Bearer " + "x" * 64)]
    fields += [(f"key-{index}", "a" * 90) for index in range(50)]
    block = hpack.Encoder().encode([(*each, True) for each in fields])
    writer.write(OPENING + frame(Kind.HEADERS, block, 0x4, 1))
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(reader.read(), 1.0)


ATTACKS: dict[str, Attack] = {
    each.__name__: each for each in (connects, mutes, drips, frames, headers)
}


def attack(
    name: str, port: int, seconds: float, per_s: float, shown: Shown, count: Synchronized[int]
) -> None:
    """Be the attackers, all in one process; count connections."""
    _lower()
    context: ssl.SSLContext | None = None
    if shown[0]:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.load_cert_chain(shown[1], shown[2])
        context.set_alpn_protocols(["h2"])

    async def again_and_again(gate: asyncio.Semaphore | None) -> None:
        while True:
            if gate is not None:
                await gate.acquire()
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(5.0):
                    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
                try:
                    count.value += 1  # one process writes it
                    await ATTACKS[name](reader, writer)
                finally:
                    writer.transport.abort()
            await asyncio.sleep(0)

    async def main() -> None:
        gate = asyncio.Semaphore(0) if per_s else None
        tasks = [asyncio.create_task(again_and_again(gate)) for _ in range(CONNECTIONS)]
        end_s = time.monotonic() + min(seconds, SECONDS_MAX)
        while time.monotonic() < end_s:
            await asyncio.sleep(1 / per_s if per_s else 0.1)
            if gate is not None:
                gate.release()
        for each in tasks:
            each.cancel()

    asyncio.run(main())


def sink(listening: socket.socket, shown: Shown) -> None:
    """Accept, and read and forget; with TLS, refuse whom the authority does not know."""
    _lower()
    context: ssl.SSLContext | None = None
    if shown[0]:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(shown[0])
        context.load_cert_chain(shown[1], shown[2])

    async def forget(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while await reader.read(1 << 16):
                pass
        writer.transport.abort()

    async def main() -> None:
        server = await asyncio.start_server(forget, sock=listening, ssl=context)
        await server.serve_forever()

    asyncio.run(main())


def _lower() -> None:
    """Become the least of this machine's processes, and another user's if that may be."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.nice(NICE)
    if os.geteuid() == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115 - until the process ends


@contextlib.contextmanager
def child(target: Callable[..., None], *arguments: object) -> Iterator[BaseProcess]:
    """Run a process beside."""
    process = multiprocessing.get_context("fork").Process(target=target, args=arguments)
    process.start()
    try:
        yield process
    finally:
        process.terminate()
        process.join()


class Rounds:
    """Reduces on a thread of its own, and counts."""

    def __init__(self, ranks: list[RankStandIn], first: int) -> None:
        self._ranks = ranks
        self._first = first
        self.num_done = 0
        self.longest_s = 0.0
        self._is_over = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Stop after the round under way."""
        self._is_over = True
        self._thread.join()

    def _run(self) -> None:
        while not self._is_over:
            took_s = both(self._ranks, self._first + self.num_done)
            self.longest_s = max(self.longest_s, took_s)
            self.num_done += 1


def let_in_s(port: int, seconds: float) -> list[float]:
    """Return how long calls of who may make them took to be answered; infinite where they broke."""

    async def one() -> float:
        began_s = time.monotonic()
        security = exchange_security(SITES[0])
        method, metadata = PUSH_METHOD, ((SESSION_KEY, "none"),)
        try:
            async with dial(
                ("127.0.0.1", port), method, metadata, security, f"{SITES[1]}.gateway", PATIENCE
            ) as call:
                await call.read()
        except CallError as error:
            if error.code().name != "ABORTED":  # an unknown session: it was let in
                return float("inf")
        return time.monotonic() - began_s

    async def main() -> list[float]:
        took_s = []
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            took_s.append(await one())
            await asyncio.sleep(PROBE_EVERY_S)
        return took_s

    return asyncio.run(main())


def rss_bytes(children: list[GatewayChild]) -> int:
    """Return the larger gateway's memory."""
    return max(psutil.Process(each.process.pid).memory_info().rss for each in children)


def measure(name: str, chosen: argparse.Namespace, folder: Path) -> None:
    """Print the rows of one attack."""
    own = foreign = ("", "", "")
    if chosen.tls:
        ca, name_b = str(folder / "ca.pem"), f"{SITES[1]}.gateway"
        own = (ca, str(folder / f"{name_b}.pem"), str(folder / "sink.key"))
        foreign = (ca, str(folder / "foreign.pem"), str(folder / "foreign.key"))
    setting = Setting(
        bits_per_s=100e9,
        rtt_s=0.0001,
        loss=0.0,
        congestion="cubic",
        codec="fp32",
        channels=None,
        max_flows=2,
        chunk_bytes=4 << 20,
        window_bytes=None,
        keeps_warm=False,
        num_buckets=1,
        num_bytes=chosen.mib << 20,
    )
    listening = socket.create_server(("127.0.0.1", 0), backlog=256)
    rates: dict[str, list[float]] = {"sink": [], "gateway": []}
    with child(sink, listening, own), pair(setting, [None, None]) as (children, ranks):
        frames_port = int(str(children[1].wait("listening")["port"])) + 1
        ports = {"sink": listening.getsockname()[1], "gateway": frames_port}
        for number in range(5):
            both(ranks, number)
        base = 5
        for whom in ("sink", "gateway") * chosen.turns:
            before_bytes = rss_bytes(children)
            count = multiprocessing.get_context("fork").Value("q", 0)
            arguments = (name, ports[whom], chosen.seconds + 2, chosen.per_s, foreign, count)
            with child(attack, *arguments):
                time.sleep(1.0)
                rounds = Rounds(ranks, base)
                began_s = time.monotonic()
                probes_s = let_in_s(frames_port, chosen.seconds)
                rounds.end()
                took_s = time.monotonic() - began_s
                base += rounds.num_done
            rates[whom].append(rounds.num_done / took_s)
            print(
                f"{name:9s} {whom:8s} {rates[whom][-1]:6.2f} rounds/s, longest "
                f"{rounds.longest_s:5.2f} s | {count.value / (chosen.seconds + 2):6.0f} "
                f"connections/s | let in after {statistics.median(probes_s):.3f} s, at most "
                f"{max(probes_s):.3f} | {(rss_bytes(children) - before_bytes) / 1e6:+.1f} MB",
                flush=True,
            )
    ratio = statistics.mean(rates["gateway"]) / statistics.mean(rates["sink"])
    print(f"{name:9s} ratio    {ratio:6.2f}", flush=True)
    listening.close()


def certify(folder: Path) -> None:
    """Make everybody's certificates, and one of an authority that nobody believes."""
    make_authority(folder, DOMAIN)
    for name in names_for(list(SITES)):
        issue(folder, name, 1.0)
    (folder / "other").mkdir()
    make_authority(folder / "other", DOMAIN)
    issue(folder / "other", f"{SITES[0]}.gateway", 1.0)
    for end in ("pem", "key"):
        (folder / "other" / f"{SITES[0]}.gateway.{end}").rename(folder / f"foreign.{end}")
    shutil.copy(folder / f"{SITES[1]}.gateway.key", folder / "sink.key")
    if os.geteuid() == 0:
        for path in (folder / "foreign.key", folder / "sink.key"):
            os.chown(path, NOBODY, NOBODY)
    files = TlsFiles(
        ca=str(folder / "ca.pem"), cert=f"{folder}/{{name}}.pem", key=f"{folder}/{{name}}.key"
    )
    use_tls(files)


def main() -> None:
    """Print a table an attack."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--attacks", default=",".join(ATTACKS))
    parser.add_argument("--seconds", type=float, default=20.0, help="of each turn; 60 at most")
    parser.add_argument("--turns", type=int, default=2, help="of each kind")
    parser.add_argument("--per-s", type=float, default=0.0, help="connections; 0: as many as go")
    parser.add_argument("--mib", type=int, default=64, help="of float32 a round")
    parser.add_argument("--tls", action="store_true", help="attackers show a foreign certificate")
    chosen = parser.parse_args()
    chosen.seconds = min(chosen.seconds, 60.0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        if chosen.tls:
            certify(folder)
        for each in chosen.attacks.split(","):
            measure(each, chosen, folder)


if __name__ == "__main__":
    main()
