"""Measure what strangers at a gateway's frames port cost the training: rounds a second, and memory.

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
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path

from isthmus.orchestrator.certificates import issue, make_authority
from isthmus.protos.security import exchange_security, use_tls
from isthmus.sites.gateway.links.frame_calls import CallError, Patience, dial
from isthmus.sites.gateway.links.http2 import HEAD_BYTES, Kind
from isthmus.sites.gateway.links.transport import PUSH_METHOD, SESSION_KEY
from scripts.bench.gateway_pair import SITES, RankStandIn, Setting, both, pair
from scripts.bench.timing import rss_bytes
from tests.fakes.certified import DOMAIN, certify
from tests.fakes.http2_frames import PREFACE, frame, header

NOBODY = 65534
NICE = 19
CONNECTIONS = 64
PATIENCE = Patience(connect_s=5.0, idle_s=5.0, lost_s=10.0)
PROBE_EVERY_S = 0.5
WARMUP = 5
"""Rounds."""
SECONDS_MAX = 60.0
"""No turn takes longer, and no attacker lives much longer, whatever becomes of this process."""
OPENING = PREFACE + frame(Kind.SETTINGS)
CHEAP = (frame(Kind.PING, bytes(8)) + frame(Kind.SETTINGS) + frame(Kind.PRIORITY)) * 500
assert len(CHEAP) > HEAD_BYTES
CALL = [
    *((":method", "POST"), (":path", PUSH_METHOD), ("authorization", "Bearer " + "x" * 64)),
    *((f"key-{index}", "a" * 90) for index in range(50)),
]
"""A call with a secret that is none, and a header as long as one may be."""
Attack = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
Shown = tuple[str, str, str]
"""Files: the authority that is believed, the certificate that is shown, its key; empty: no TLS."""
FORKED = multiprocessing.get_context("fork")


async def connects(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Connect, and say nothing."""


async def mutes(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
    """Connect, and stay as long as one may."""
    await reader.read()


async def drips(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Send one byte after the other, slowly."""
    for byte in OPENING * 1000:
        writer.write(bytes([byte]))
        await writer.drain()
        with contextlib.suppress(TimeoutError):
            if await asyncio.wait_for(reader.read(100), 0.01) == b"":
                return


async def frames(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Send HTTP/2 frames that are cheap to make, without end."""
    writer.write(OPENING)
    draining = asyncio.create_task(reader.read())
    while not draining.done():
        writer.write(CHEAP)
        await writer.drain()


async def headers(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Make a call that is refused."""
    writer.write(OPENING + header(CALL))
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(reader.read(), 1.0)


ATTACKS: dict[str, Attack] = {
    attack.__name__: attack for attack in (connects, mutes, drips, frames, headers)
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what may be asked for."""
    parser.add_argument("--attacks", default=",".join(ATTACKS))
    parser.add_argument("--seconds", type=float, default=20.0, help="of each turn; 60 at most")
    parser.add_argument("--turns", type=int, default=2, help="of each kind")
    parser.add_argument("--per-s", type=float, default=0.0, help="connections; 0: as many as go")
    parser.add_argument("--mib", type=int, default=64, help="of float32 a round")
    parser.add_argument("--tls", action="store_true", help="attackers show a foreign certificate")


def run(options: argparse.Namespace) -> None:
    """Print rows for each attack."""
    options.seconds = min(options.seconds, SECONDS_MAX)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        own, foreign = _certify(folder) if options.tls else (("", "", ""), ("", "", ""))
        for attack in options.attacks.split(","):
            measure(attack, options, own, foreign)


def measure(name: str, options: argparse.Namespace, own: Shown, foreign: Shown) -> None:
    """Print the rows of one attack."""
    rates: dict[str, list[float]] = {"sink": [], "gateway": []}
    with (
        socket.create_server(("127.0.0.1", 0), backlog=256) as listening,
        _beside(_sink, listening, own),
        pair(Setting(num_bytes=options.mib << 20)) as (gateways, ranks),
    ):
        pids = [gateway.process.pid for gateway in gateways]
        frames_port = int(gateways[1].wait("listening")["port"]) + 1
        ports = {"sink": listening.getsockname()[1], "gateway": frames_port}
        for number in range(WARMUP):
            both(ranks, number)
        first = WARMUP
        for whom in ("sink", "gateway") * options.turns:
            before_bytes = rss_bytes(pids)
            count = FORKED.Value("q", 0)
            attack_s = options.seconds + 2
            with _beside(_attack, name, ports[whom], attack_s, options.per_s, foreign, count):
                time.sleep(1.0)
                rounds = Rounds(ranks, first)
                began_s = time.monotonic()
                probes_s = asyncio.run(let_in_s(frames_port, options.seconds))
                rounds.end()
                rates[whom].append(rounds.num_done / (time.monotonic() - began_s))
                first += rounds.num_done
            print(
                f"{name:9s} {whom:8s} {rates[whom][-1]:6.2f} rounds/s, longest "
                f"{rounds.longest_s:5.2f} s | {count.value / attack_s:6.0f} "
                f"connections/s | let in after {statistics.median(probes_s):.3f} s, at most "
                f"{max(probes_s):.3f} | {(rss_bytes(pids) - before_bytes) / 1e6:+.1f} MB",
                flush=True,
            )
    ratio = statistics.mean(rates["gateway"]) / statistics.mean(rates["sink"])
    print(f"{name:9s} ratio    {ratio:6.2f}", flush=True)


class Rounds:
    """Reduces on a thread of its own, and counts."""

    def __init__(self, ranks: list[RankStandIn], first: int) -> None:
        self.num_done = 0
        self.longest_s = 0.0
        self._is_over = False
        self._thread = threading.Thread(target=self._run, args=(ranks, first), daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Stop after the round under way."""
        self._is_over = True
        self._thread.join()

    def _run(self, ranks: list[RankStandIn], first: int) -> None:
        while not self._is_over:
            self.longest_s = max(self.longest_s, both(ranks, first + self.num_done))
            self.num_done += 1


async def let_in_s(port: int, seconds: float) -> list[float]:
    """Return how long calls of who may make them took to be answered; infinite where they broke."""
    to, server = ("127.0.0.1", port), f"{SITES[1]}.gateway"
    security, metadata = exchange_security(SITES[0]), ((SESSION_KEY, "none"),)
    taken_s = []
    end_s = time.monotonic() + seconds
    while (began_s := time.monotonic()) < end_s:
        is_in = True
        try:
            async with dial(to, PUSH_METHOD, metadata, security, server, PATIENCE) as call:
                await call.read()
        except CallError as error:
            is_in = error.code().name == "ABORTED"  # an unknown session: it was let in
        taken_s.append(time.monotonic() - began_s if is_in else float("inf"))
        await asyncio.sleep(PROBE_EVERY_S)
    return taken_s


def _attack(
    name: str, port: int, seconds: float, per_s: float, shown: Shown, count: Synchronized[int]
) -> None:
    """Be the attackers, all in one process; count connections."""
    _lower()
    context = _context(ssl.PROTOCOL_TLS_CLIENT, shown)

    async def again_and_again(gate: asyncio.Semaphore) -> None:
        while True:
            if per_s:
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

    async def attack() -> None:
        gate = asyncio.Semaphore(0)
        tasks = [asyncio.create_task(again_and_again(gate)) for _ in range(CONNECTIONS)]
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            await asyncio.sleep(1 / per_s if per_s else 0.1)
            gate.release()
        for task in tasks:
            task.cancel()

    asyncio.run(attack())


def _sink(listening: socket.socket, shown: Shown) -> None:
    """Accept, and read and forget; with TLS, refuse whom the authority does not know."""
    _lower()
    context = _context(ssl.PROTOCOL_TLS_SERVER, shown)

    async def forget(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while await reader.read(1 << 16):
                pass
        writer.transport.abort()

    async def serve() -> None:
        server = await asyncio.start_server(forget, sock=listening, ssl=context)
        await server.serve_forever()

    asyncio.run(serve())


def _context(protocol: int, shown: Shown) -> ssl.SSLContext | None:
    """Return the TLS of a side: servers want to know who comes, attackers believe everybody."""
    if not shown[0]:
        return None
    context = ssl.SSLContext(protocol)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    if protocol == ssl.PROTOCOL_TLS_SERVER:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(shown[0])
    else:
        context.set_alpn_protocols(["h2"])
    context.load_cert_chain(shown[1], shown[2])
    return context


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
def _beside(target: Callable[..., None], *arguments: object) -> Iterator[None]:
    """Run a process beside."""
    process = FORKED.Process(target=target, args=arguments)
    process.start()
    try:
        yield
    finally:
        process.terminate()
        process.join()


def _certify(folder: Path) -> tuple[Shown, Shown]:
    """Make everybody's certificates, and return the sink's and those that nobody believes."""
    use_tls(certify(folder, *SITES))
    stranger, site = folder / "other", f"{SITES[0]}.gateway"
    stranger.mkdir(mode=0o755)
    make_authority(stranger, DOMAIN)
    issue(stranger, site, 1.0)
    sink_key = shutil.copy(folder / f"{SITES[1]}.gateway.key", folder / "sink.key")
    keys = (str(sink_key), str(stranger / f"{site}.key"))
    if os.geteuid() == 0:
        for key in keys:
            os.chown(key, NOBODY, NOBODY)
    ca = str(folder / "ca.pem")
    return (ca, f"{folder}/{SITES[1]}.gateway.pem", keys[0]), (
        ca,
        str(stranger / f"{site}.pem"),
        keys[1],
    )
