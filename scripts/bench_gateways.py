"""Measure the all-reduce between two gateways alone: no trainer, no collectives inside sites.

Usage: python scripts/bench_gateways.py [--rates MBIT,..] [--rtts MS,..] [--losses SHARE,..] ...
       python scripts/bench_gateways.py --loopback [--mib 256]

Two gateways that ship, each a process in a network namespace of its own, joined by emulated packets (needs
root), or both on loopback. Stand-ins for ranks post buckets through shared memory, round after round.
A round takes from the first post to the last result. The bound: the bytes at the link's rate, of which
96.5 % are payload, and half a round trip. CPU seconds are of both gateways together, a GB (1e9 bytes) of
float32 at one site.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import psutil

from orchestrator.emulator.backend import SiteNamespace
from orchestrator.emulator.link import LinkShape
from orchestrator.emulator.netns_child import running_netns
from orchestrator.emulator.netns_config import NetnsConfig
from protos.errors import IsthmusError
from sites.gateway.config import HELD_BYTES, GatewayConfig, PeerLink
from sites.worker.gateway_link import GatewayLink
from sites.worker.link import Reduce, Reduced
from sites.worker.region import create_region
from topology.channels import FLOWS_MAX
from topology.trees import ReductionPlan
from topology.wire_load import chunk_bytes_for

SITES = ("a", "b")
DEADLINE_S = 120.0
PAYLOAD_SHARE = 0.965
MALLOC = (
    "glibc.malloc.arena_max=1:glibc.malloc.mmap_threshold=1073741824:glibc.malloc.trim_threshold=4294967296"
    ":glibc.malloc.top_pad=268435456"
)
"""As the agent starts gateways."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One line of the table."""

    bits_per_s: float
    rtt_s: float
    loss: float
    congestion: str
    codec: str
    channels: int | None
    max_flows: int
    chunk_bytes: int
    window_bytes: int | None
    keeps_warm: bool
    """No slow start after idle."""
    num_buckets: int
    num_bytes: int
    """float32 of a round, all buckets together."""
    held_bytes: int = HELD_BYTES

    @property
    def bound_s(self) -> float:
        """What no exchange can be faster than."""
        return self.num_bytes * 8 / (PAYLOAD_SHARE * self.bits_per_s) + self.rtt_s / 2


class GatewayChild:
    """One gateway's process, told and heard as by an agent."""

    def __init__(self, config: GatewayConfig, where: SiteNamespace | None, log: IO[bytes]) -> None:
        enter = [] if where is None else ["--enter", where.user, where.net]
        leash = [sys.executable, "-m", "sites.leash", str(os.getpid()), *enter, "--"]
        self.process = subprocess.Popen(
            [*leash, sys.executable, "-m", "sites.gateway"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env={**os.environ, "GLIBC_TUNABLES": MALLOC},
        )
        self._lines: list[dict[str, object]] = []
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.tell({"op": "configure", **config.to_json()})

    def tell(self, message: dict[str, object]) -> None:
        """Write one line."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(message).encode() + b"\n")
        self.process.stdin.flush()

    def wait(self, op: str) -> dict[str, object]:
        """Return the first line of a kind."""
        with self._changed:
            self._changed.wait_for(lambda: self._find(op) or self._find("failed"), DEADLINE_S)
        found = self._find(op)
        if found is None:
            raise SystemExit(f"no {op}: {self._find('failed') or self._lines[-3:]}")
        return found

    def latest(self, kind: str) -> dict[str, object]:
        """Return the latest metric of a kind; empty before the first."""
        with self._changed:
            found = [line for line in self._lines if line.get("kind") == kind]
        return found[-1] if found else {}

    def end(self) -> None:
        """Have it leave; kill it if it does not."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        try:
            self.process.wait(DEADLINE_S)
        finally:
            self.process.kill()
            self._reader.join(DEADLINE_S)
            self.process.stdout.close()

    def _find(self, op: str) -> dict[str, object] | None:
        return next((line for line in self._lines if line["op"] == op), None)

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._changed:
                self._lines.append(json.loads(line))
                self._changed.notify_all()


class RankStandIn:
    """The one rank of a site: posts its buckets, and notes when each comes back."""

    def __init__(self, path: Path, setting: Setting) -> None:
        self._numel = setting.num_bytes // 4 // setting.num_buckets
        self._buckets = range(setting.num_buckets)
        self._link = GatewayLink(path, DEADLINE_S)
        self._link.join(rank=0, local_rank=0, generation=1, timeout_s=DEADLINE_S)
        self._remaining = threading.Semaphore(0)
        self._error: IsthmusError | None = None
        self.regions = []
        for bucket in self._buckets:
            values, descriptor = create_region(self._numel)
            self._link.add_region(bucket, self._numel, descriptor)
            os.close(descriptor)
            self.regions.append(values)
        self._link.start(self._reduced, self._failed)

    def round(self, number: int) -> tuple[float, float]:
        """Reduce all buckets; return when the first was posted and when the last came back."""
        began_s = self.post(number)
        ended_s = self.wait(number)
        assert all((abs(values - 1.0) < 0.02).all() for values in self.regions)  # codecs round
        return began_s, ended_s

    def post(self, number: int) -> float:
        """Hand all buckets over; return when the first was."""
        for values in self.regions:
            values.fill(1.0)
        began_s = time.perf_counter()
        for bucket in self._buckets:
            self._link.reduce(
                Reduce(
                    round=number,
                    bucket=bucket,
                    region=bucket,
                    numel=self._numel,
                    layout=7,
                    weight=1.0,
                    exact=False,
                )
            )
        return began_s

    def wait(self, number: int) -> float:
        """Wait until all have come back; return when."""
        for _ in self._buckets:
            if not self._remaining.acquire(timeout=DEADLINE_S) or self._error is not None:
                raise SystemExit(f"round {number} did not end: {self._error}")
        return time.perf_counter()

    def leave(self) -> None:
        """End cleanly."""
        self._link.leave()

    def _reduced(self, _: Reduced) -> None:
        self._remaining.release()

    def _failed(self, error: IsthmusError) -> None:
        self._error = error
        self._remaining.release(len(self._buckets))


def config_of(setting: Setting, site: int, host: str, folder: Path) -> GatewayConfig:
    """Return one gateway's configuration."""
    other = SITES[1 - site]
    return GatewayConfig(
        run_id="bench",
        generation=1,
        config_hash="0" * 64,
        site=SITES[site],
        node=0,
        sites=SITES,
        nodes_per_site=(1, 1),
        ranks_per_node=(1, 1),
        plan=ReductionPlan(2, (), "two sites"),
        codecs=(setting.codec,),
        error_feedback=True,
        chunk_bytes=setting.chunk_bytes,
        channels_per_link=setting.channels,
        window_bytes=setting.window_bytes,
        held_bytes=setting.held_bytes,
        pipeline_bytes=int(3 * setting.bits_per_s / 8 * setting.rtt_s),
        verify_every=0,
        bind_host=host,
        socket_path=str(folder / f"{SITES[site]}.sock"),
        links=(
            PeerLink(
                site=other,
                bytes_per_s=setting.bits_per_s / 8,
                rtt_s=setting.rtt_s,
                max_flows=setting.max_flows,
            ),
        ),
        peer_lost_s=30.0,
        keepalive_time_s=10.0,
        keepalive_timeout_s=10.0,
    )


@contextlib.contextmanager
def namespaces(setting: Setting) -> Iterator[list[SiteNamespace | None]]:
    """Emulate the link between two sites; set their congestion control."""
    links = tuple(
        LinkShape(
            source=source,
            target=target,
            bytes_per_s=setting.bits_per_s / 8,
            delay_s=setting.rtt_s / 2,
            loss=setting.loss,
        )
        for source, target in itertools.permutations(SITES, 2)
    )
    with running_netns(NetnsConfig(sites=SITES, links=links, seed=1)) as emulator:
        for site in SITES:
            # By route: only the host's own namespace may make any algorithm the default.
            _inside(
                emulator.sites[site],
                "ip -4 route show | while read -r route; do "
                f"ip route change $route congctl {setting.congestion} || exit 1; done",
            )
            if setting.keeps_warm:
                setting_file = "/proc/sys/net/ipv4/tcp_slow_start_after_idle"
                _inside(emulator.sites[site], f"echo 0 > {setting_file}")
        yield [emulator.sites[site] for site in SITES]


def _inside(where: SiteNamespace, script: str) -> str:
    """Run a line of shell in a site's namespace; return what it prints."""
    leash = [sys.executable, "-m", "sites.leash", "-", "--enter", where.user, where.net, "--"]
    done = subprocess.run(
        [*leash, "sh", "-c", script], capture_output=True, text=True, timeout=DEADLINE_S, check=True
    )
    return done.stdout


@contextlib.contextmanager
def pair(
    setting: Setting, places: list[SiteNamespace | None]
) -> Iterator[tuple[list[GatewayChild], list[RankStandIn]]]:
    """Run two gateways, connected, with a rank each."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        children: list[GatewayChild] = []
        hosts = ["127.0.0.1" if place is None else place.address for place in places]
        for site, place in enumerate(places):
            log = stack.enter_context((folder / f"{SITES[site]}.log").open("w+b"))
            stack.callback(_show_warnings, folder / f"{SITES[site]}.log")
            child = GatewayChild(config_of(setting, site, hosts[site], folder), place, log)
            stack.callback(child.end)
            children.append(child)
        for site, child in enumerate(children):
            other = 1 - site
            port = children[other].wait("listening")["port"]
            peer = {"site": SITES[other], "node": 0, "host": hosts[other], "port": port}
            child.tell({"op": "connect", "peers": [peer]})
        for child in children:
            child.wait("connected")
        ranks = []
        for site in range(2):
            rank = RankStandIn(folder / f"{SITES[site]}.sock", setting)
            stack.callback(rank.leave)
            ranks.append(rank)
        yield children, ranks


def _show_warnings(log: Path) -> None:
    for line in log.read_text().splitlines():
        if " WARNING " in line or " ERROR " in line or "hint" in line:
            print(f"    {line[:200]}", file=sys.stderr)


def both(ranks: list[RankStandIn], number: int) -> float:
    """Let both sites do one round; return how long it took."""
    spans: list[tuple[float, float]] = []
    gate = threading.Barrier(2)

    def run(rank: RankStandIn) -> None:
        gate.wait(DEADLINE_S)
        spans.append(rank.round(number))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    if len(spans) < 2:
        raise SystemExit(f"round {number} did not end at both sites")
    return max(end for _, end in spans) - min(begin for begin, _ in spans)


@contextlib.contextmanager
def busy_thread() -> Iterator[None]:
    """Keep the ranks' process busy with pure Python, as a training script may be.

    The thread has the lowest priority, so that of the machine's cores it takes what is left over; of the
    interpreter's lock it takes what any thread does.
    """
    is_over = threading.Event()

    def count() -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        number = 0
        while not is_over.is_set():
            number += 1

    thread = threading.Thread(target=count, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join(DEADLINE_S)


def cpu_s(children: list[GatewayChild]) -> float:
    """Return the CPU seconds that the gateways have used."""
    return sum(sum(psutil.Process(child.process.pid).cpu_times()[:2]) for child in children)


def measure(
    setting: Setting, *, emulated: bool, warmup: int, rounds: int, idle_s: float, with_busy: bool
) -> str:
    """Measure one setting; return its row.

    With a busy thread, so many rounds again have one, by turns with those that have none.
    """
    with contextlib.ExitStack() as stack:
        places: list[SiteNamespace | None] = [None, None]
        if emulated:
            places = stack.enter_context(namespaces(setting))
        children, ranks = stack.enter_context(pair(setting, places))
        times_s: list[float] = []
        busy_s: list[float] = []
        used_s = 0.0
        for number in range(warmup + rounds * (1 + with_busy)):
            if number:
                time.sleep(idle_s)
            if with_busy and number >= warmup and (number - warmup) % 2:
                with busy_thread():
                    busy_s.append(both(ranks, number))
                continue
            before_s = cpu_s(children)
            times_s.append(both(ranks, number))
            used_s += cpu_s(children) - before_s if number >= warmup else 0.0
        rss_bytes = max(psutil.Process(c.process.pid).memory_info().rss for c in children)
        median_s = statistics.median(times_s[warmup:])
        figures = [
            f"{setting.bits_per_s / 1e6:6.0f} {setting.rtt_s * 1e3:4.0f} {setting.loss * 100:5.2f}",
            f"{times_s[0]:7.3f} {median_s:7.3f} {max(times_s[warmup:]):7.3f}",
            f"{median_s / setting.bound_s:6.3f}",
            f"{setting.num_bytes / median_s / 1e6:7.0f}",
            f"{used_s / (rounds * setting.num_bytes / 1e9):6.2f} {rss_bytes / 1e6:6.0f}",
        ]
        if emulated:
            figures.append(f"{_retransmitted(places):6d}")
        if with_busy:
            figures.append(
                f"busy {statistics.median(busy_s):7.3f}, {statistics.median(busy_s) / median_s:5.2f}"
            )
        return " | ".join(figures)


def _retransmitted(places: list[SiteNamespace | None]) -> int:
    """Return the TCP segments that both sites have sent again."""
    total = 0
    for place in places:
        assert place is not None
        names, values = (
            line.split() for line in _inside(place, "grep ^Tcp: /proc/net/snmp").splitlines()
        )
        total += int(values[names.index("RetransSegs")])
    return total


def _numbers(text: str) -> list[float]:
    return [float(each) for each in text.split(",")]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--loopback", action="store_true", help="no emulation")
    parser.add_argument("--rates", type=_numbers, default=[200, 1000], help="Mbit/s")
    parser.add_argument("--rtts", type=_numbers, default=[20, 80, 150], help="ms")
    parser.add_argument("--losses", type=_numbers, default=[0.0], help="shares")
    parser.add_argument("--congestion", default="cubic")
    parser.add_argument("--codec", default="fp32")
    parser.add_argument("--channels", type=int, help="exactly; else as gateways choose them")
    parser.add_argument("--max-flows", type=int, default=FLOWS_MAX, help="where packets are lost")
    parser.add_argument("--chunk-kib", type=int, help="else as gateways choose it")
    parser.add_argument("--window-mib", type=int)
    parser.add_argument("--held-mib", type=int, default=HELD_BYTES >> 20, help="of early frames")
    parser.add_argument("--mib", type=int, default=64, help="of float32 a round")
    parser.add_argument("--buckets", type=int, default=1, help="that a round consists of")
    parser.add_argument("--warmup", type=int, default=3, help="rounds")
    parser.add_argument("--rounds", type=int, default=5, help="that are measured")
    parser.add_argument("--busy", action="store_true", help="ranks with a busy Python thread, too")
    parser.add_argument("--idle", type=float, default=0.0, help="seconds between two rounds")
    parser.add_argument("--warm", action="store_true", help="tcp_slow_start_after_idle=0")
    chosen = parser.parse_args()
    print(
        "Mbit/s   ms loss % | first s  median     max | /bound | MB/s fp32 | CPU s/GB, RSS MB",
        end="",
    )
    print(" | retransmitted" if not chosen.loopback else "")
    links = [(chosen.rates, chosen.rtts, chosen.losses), ([100e3], [0.1], [0.0])][chosen.loopback]
    for rate, rtt_ms, loss in itertools.product(*links):
        setting = Setting(
            bits_per_s=rate * 1e6,
            rtt_s=rtt_ms / 1e3,
            loss=loss,
            congestion=chosen.congestion,
            codec=chosen.codec,
            channels=chosen.channels,
            max_flows=chosen.max_flows,
            chunk_bytes=(
                chosen.chunk_kib << 10
                if chosen.chunk_kib
                else chunk_bytes_for(1 << 20, chosen.codec, [(rate * 1e6 / 8, rtt_ms / 1e3)])
            ),
            window_bytes=chosen.window_mib and chosen.window_mib << 20,
            keeps_warm=chosen.warm,
            num_buckets=chosen.buckets,
            num_bytes=chosen.mib << 20,
            held_bytes=chosen.held_mib << 20,
        )
        print(
            measure(
                setting,
                emulated=not chosen.loopback,
                warmup=chosen.warmup,
                rounds=chosen.rounds,
                idle_s=chosen.idle,
                with_busy=chosen.busy,
            ),
            flush=True,
        )


if __name__ == "__main__":
    main()
