"""Measure the all-reduce between two gateways alone: no trainer, no collectives inside sites.

Two gateways that ship, each a process in a network namespace of its own, joined by emulated packets
(needs root), or both on loopback. Stand-ins for ranks post buckets through shared memory, round
after round. A round takes from the first post to the last result. The bound: the bytes at the
link's rate, of which 96.5 % are payload, and half a round trip. CPU seconds are of both sites'
gateways together, a GB (1e9 bytes) of float32 at one site. With --lanes each site has several
gateways, which divide its ranks among them.

`isthmus bench allreduce` measures whole runs, with losses and other flows, and Gloo beside them.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import os
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil

from isthmus.orchestrator.certificates import issue, make_authority, names_for
from isthmus.orchestrator.core.run_events import SiteNamespace
from isthmus.orchestrator.emulator.emulator_child import running_emulator
from isthmus.orchestrator.emulator.emulator_config import NetnsConfig
from isthmus.orchestrator.emulator.link_shape import LinkShape
from isthmus.protos.errors import IsthmusError
from isthmus.protos.mutual_tls import NAME, TlsFiles
from isthmus.protos.own_processes import entered
from isthmus.protos.security import TLS_VARIABLES
from isthmus.sites.bench.gateways import cpu_s
from isthmus.sites.gateway.config import HELD_BYTES, GatewayConfig, PeerLink
from isthmus.sites.local.chunk_grid import shard_numel
from isthmus.sites.local.rank_messages import Reduce, Region
from isthmus.sites.local.regions import create_region
from isthmus.sites.worker.exchange.gateway_link import GatewayLink
from isthmus.topology.spec.job import Exchange
from isthmus.topology.spec.reduction_plan import ReductionPlan
from isthmus.topology.trees.codec_costs import RATIOS
from isthmus.topology.trees.wire_load import chunk_bytes_for
from tests.fakes.gateway_process import GatewayProcess

SITES = ("a", "b")
DEADLINE_S = 120.0
PAYLOAD_SHARE = 0.965


def numbers(text: str) -> list[float]:
    """Return what an option lists, as `20,80`."""
    return [float(number) for number in text.split(",")]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what may be asked for."""
    parser.add_argument("--loopback", action="store_true", help="no emulation")
    parser.add_argument("--rates", type=numbers, default=[200, 1000], help="Mbit/s")
    parser.add_argument("--rtts", type=numbers, default=[20, 80, 150], help="ms")
    parser.add_argument("--congestion", default="cubic")
    parser.add_argument("--codec", default="fp32")
    parser.add_argument("--tls", action="store_true", help="between gateways")
    parser.add_argument("--channels", type=int, help="exactly; else as gateways choose them")
    parser.add_argument("--chunk-kib", type=int, help="else as gateways choose it")
    parser.add_argument("--held-mib", type=int, default=HELD_BYTES >> 20, help="of early frames")
    parser.add_argument("--mib", type=int, default=64, help="of float32 a round")
    parser.add_argument("--buckets", type=int, default=1, help="of a round")
    parser.add_argument("--warmup", type=int, default=3, help="rounds")
    parser.add_argument("--rounds", type=int, default=5, help="that are measured")
    parser.add_argument("--busy", action="store_true", help="ranks with a busy Python thread, too")
    parser.add_argument("--idle", type=float, default=0.0, help="seconds before each round")
    parser.add_argument("--warm", action="store_true", help="tcp_slow_start_after_idle=0")
    parser.add_argument("--lanes", type=numbers, default=[1], help="gateways of a site, as 1,2,4")
    parser.add_argument("--ranks", type=int, help="of a site; else as many as the most lanes")


def run(options: argparse.Namespace) -> int:
    """Print a row for each rate, RTT and number of gateways."""
    num_ranks = options.ranks or int(max(options.lanes))
    if bad := [count for count in options.lanes if num_ranks % count]:
        print(f"--lanes {bad[0]:.0f}: does not divide {num_ranks} ranks")
        return 2
    print("Mbit/s   ms lanes | first s  median     max | /bound | MB/s fp32 | CPU s/GB, ", end="")
    print("RSS MB" if options.loopback else "RSS MB | retransmitted")
    links = ([100e3], [0.1]) if options.loopback else (options.rates, options.rtts)
    for rate, rtt_ms, num_lanes in itertools.product(*links, options.lanes):
        bits_per_s, rtt_s = rate * 1e6, rtt_ms / 1e3
        chunk_bytes = (options.chunk_kib or 0) << 10
        setting = Setting(
            bits_per_s=bits_per_s,
            rtt_s=rtt_s,
            codec=options.codec,
            channels=options.channels,
            chunk_bytes=chunk_bytes or chosen_chunk(options.codec, bits_per_s, rtt_s),
            num_buckets=options.buckets,
            num_bytes=options.mib << 20,
            held_bytes=options.held_mib << 20,
            num_ranks=num_ranks,
            num_lanes=int(num_lanes),
            has_tls=options.tls,
        )
        print(f"{rate:6.0f} {rtt_ms:4.0f} {num_lanes:5.0f} | {row(setting, options)}", flush=True)
    return 0


def chosen_chunk(codec: str, bits_per_s: float, rtt_s: float) -> int:
    """Return the chunk size in bytes of a job that leaves it open, between two sites."""
    most_bytes = Exchange().chunk_bytes
    return chunk_bytes_for(most_bytes, codec, bits_per_s / 8, rtt_s, is_gather=True)


def row(setting: Setting, options: argparse.Namespace) -> str:
    """Measure one setting; with --busy, every other round has a busy thread beside it."""
    with contextlib.ExitStack() as stack:
        places: Mapping[str, SiteNamespace] = {}
        if not options.loopback:
            places = stack.enter_context(emulated(setting, options))
        gateways, ranks = stack.enter_context(pair(setting, places))
        pids = tuple(gateway.process.pid for gateway in gateways)
        quiet_s: list[float] = []
        busy_s: list[float] = []
        used_s = 0.0
        for number in range(options.warmup + options.rounds * (1 + options.busy)):
            time.sleep(options.idle)
            if options.busy and number >= options.warmup and (number - options.warmup) % 2:
                with _busy_thread():
                    busy_s.append(both(ranks, number))
                continue
            before_s = cpu_s(pids)
            quiet_s.append(both(ranks, number))
            used_s += cpu_s(pids) - before_s if number >= options.warmup else 0.0
        measured_s = quiet_s[options.warmup :]
        median_s = statistics.median(measured_s)
        figures = [
            f"{quiet_s[0]:7.3f} {median_s:7.3f} {max(measured_s):7.3f}",
            f"{median_s / setting.bound_s:6.3f}",
            f"{setting.num_bytes / median_s / 1e6:7.0f}",
            f"{used_s / (options.rounds * setting.num_bytes / 1e9):6.2f}"
            f" {max(psutil.Process(pid).memory_info().rss for pid in pids) / 1e6:6.0f}",
        ]
        if places:
            figures.append(f"{sum(map(_retransmitted, places.values())):6d}")
        if busy_s:
            middle_s = statistics.median(busy_s)
            figures.append(f"busy {middle_s:7.3f}, {middle_s / median_s:5.2f}")
        return " | ".join(figures)


@contextlib.contextmanager
def emulated(
    setting: Setting, options: argparse.Namespace
) -> Iterator[Mapping[str, SiteNamespace]]:
    """Emulate the link between two sites; yield where each is."""
    links = tuple(
        LinkShape(
            source=source,
            target=target,
            bytes_per_s=setting.bits_per_s / 8,
            delay_s=setting.rtt_s / 2,
        )
        for source, target in itertools.permutations(SITES, 2)
    )
    config = NetnsConfig(sites=SITES, links=links, seed=1, congestion=options.congestion)
    with running_emulator(config) as emulator:
        if options.warm:
            for place in emulator.sites.values():
                _inside(place, "echo 0 > /proc/sys/net/ipv4/tcp_slow_start_after_idle")
        yield emulator.sites


def _inside(place: SiteNamespace, script: str) -> str:
    """Run a line of shell in a site's namespace; return what it prints."""
    command = entered((place.user, place.net), ["sh", "-c", script])
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=True)
    return done.stdout


def _retransmitted(place: SiteNamespace) -> int:
    """Return the TCP segments that a site has sent again."""
    lines = _inside(place, "grep ^Tcp: /proc/net/snmp").splitlines()
    names, values = (line.split() for line in lines)
    return int(values[names.index("RetransSegs")])


@contextlib.contextmanager
def _busy_thread() -> Iterator[None]:
    """Keep the ranks' process busy with pure Python, as a training script may be.

    The thread has the lowest priority, so that of the machine's cores it takes what is left over;
    of the interpreter's lock it takes what any thread does.
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


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Settings of the gateways, the link and the rounds."""

    bits_per_s: float
    rtt_s: float
    codec: str
    channels: int | None
    """TCP connections; None: as many as gateways choose."""
    chunk_bytes: int
    held_bytes: int
    num_buckets: int
    num_bytes: int
    """float32 of a round at a site, all buckets together."""
    described: float = 1.0
    """Bandwidth that the gateways are told, as a multiple of the link's."""
    num_ranks: int
    """Ranks of each site; each has its shard of each bucket."""
    num_lanes: int
    """Gateways of each site, which divide its ranks among them: a divisor of `num_ranks`."""
    has_tls: bool = False

    @property
    def bound_s(self) -> float:
        """Lower bound on the time of an exchange."""
        wire_bytes = RATIOS.get(self.codec, 1.0) * self.num_bytes
        return wire_bytes * 8 / (PAYLOAD_SHARE * self.bits_per_s) + self.rtt_s / 2


class RankStandIn:
    """A rank of a site: posts its shards of buckets, and waits until all have come back."""

    def __init__(self, path: Path, setting: Setting, rank: int) -> None:
        self._numel = setting.num_bytes // 4 // setting.num_buckets
        self._link = GatewayLink(path, DEADLINE_S)
        self._link.join(rank=rank, local_rank=rank, generation=1, timeout_s=DEADLINE_S)
        self._returned = threading.Semaphore(0)
        self._error: IsthmusError | None = None
        self.regions = []
        for bucket in range(setting.num_buckets):
            numel = shard_numel(self._numel, setting.num_ranks)
            values, descriptor = create_region(numel)
            self._link.send(Region(region=bucket, numel=numel), descriptor)
            os.close(descriptor)
            self.regions.append(values)
        self._link.start(lambda _: self._returned.release(), self._failed)

    def fill(self) -> None:
        """Write what is to be reduced."""
        for values in self.regions:
            values.fill(1.0)

    def check(self) -> None:
        """Refuse a wrong result; codecs round."""
        assert all((abs(values - 1.0) < 0.02).all() for values in self.regions)

    def post(self, number: int) -> float:
        """Hand all buckets over; return when the first was."""
        began_s = time.perf_counter()
        for bucket in range(len(self.regions)):
            self._link.send(
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
        for _ in self.regions:
            if not self._returned.acquire(timeout=DEADLINE_S) or self._error is not None:
                raise SystemExit(f"round {number} did not end: {self._error}")
        return time.perf_counter()

    def leave(self) -> None:
        """End cleanly."""
        self._link.leave()

    def _failed(self, error: IsthmusError) -> None:
        self._error = error
        self._returned.release(len(self.regions))


def _config(setting: Setting, site: int, lane: int, host: str, folder: Path) -> GatewayConfig:
    bytes_per_s = setting.described * setting.bits_per_s / 8
    return GatewayConfig(
        run_id="bench",
        generation=1,
        config_hash="0" * 64,
        site=SITES[site],
        gateway=lane,
        sites=SITES,
        gateways_per_site=(setting.num_lanes,) * 2,
        ranks_per_gateway=(setting.num_ranks // setting.num_lanes,) * 2,
        plan=ReductionPlan(2, (), "two sites"),
        codecs=(setting.codec,),
        error_feedback=True,
        chunk_bytes=setting.chunk_bytes,
        channels_per_link=setting.channels,
        window_bytes=None,
        held_bytes=setting.held_bytes,
        pipeline_bytes=int(3 * bytes_per_s * setting.rtt_s),
        verify_every=0,
        bind_host=host,
        socket_path=str(_socket(folder, SITES[site], lane)),
        links=(PeerLink(site=SITES[1 - site], bytes_per_s=bytes_per_s, rtt_s=setting.rtt_s),),
        peer_lost_s=30.0,
        rank_wait_s=300.0,
        keepalive_time_s=10.0,
        keepalive_timeout_s=10.0,
    )


@contextlib.contextmanager
def pair(
    setting: Setting, places: Mapping[str, SiteNamespace] | None = None
) -> Iterator[tuple[list[GatewayProcess], list[RankStandIn]]]:
    """Run the gateways of two sites, connected, with their ranks: the first site's first.

    `places` are the sites' namespaces; without any they are on loopback.
    """
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if setting.has_tls:
            stack.enter_context(_certified(folder))
        sites: list[list[GatewayProcess]] = []
        for index, site in enumerate(SITES):
            place = places[site] if places else None
            lanes = []
            for lane in range(setting.num_lanes):
                log = folder / f"{site}{lane}.log"
                stack.callback(_show_warnings, log)
                gateway = stack.enter_context(GatewayProcess(log, place))
                stack.callback(gateway.end)
                gateway.configure(_config(setting, index, lane, gateway.host, folder))
                lanes.append(gateway)
            sites.append(lanes)
        for lanes, others in zip(sites, reversed(sites), strict=True):
            for gateway in lanes:
                gateway.connect(*others)
        gateways = [gateway for lanes in sites for gateway in lanes]
        for gateway in gateways:
            gateway.wait("connected", DEADLINE_S)
        ranks = []
        for site in SITES:
            for rank in range(setting.num_ranks):
                lane = rank * setting.num_lanes // setting.num_ranks
                ranks.append(RankStandIn(_socket(folder, site, lane), setting, rank))
                stack.callback(ranks[-1].leave)
        yield gateways, ranks


@contextlib.contextmanager
def _certified(folder: Path) -> Iterator[None]:
    """Make certificates of both sites, which this process's children use."""
    make_authority(folder, "bench.internal")
    for name in names_for([*SITES]):
        issue(folder, name, 30.0)
    files = TlsFiles(
        ca=str(folder / "ca.pem"), cert=f"{folder}/{NAME}.pem", key=f"{folder}/{NAME}.key"
    )
    os.environ.update({TLS_VARIABLES[each]: getattr(files, each) for each in TLS_VARIABLES})
    try:
        yield
    finally:
        for variable in TLS_VARIABLES.values():
            del os.environ[variable]


def _socket(folder: Path, site: str, lane: int) -> Path:
    return folder / f"{site}{lane}.sock"


def both(ranks: list[RankStandIn], number: int) -> float:
    """Let both sites do one round; return the time from the first post to the last result."""
    spans: list[tuple[float, float]] = []
    gate = threading.Barrier(len(ranks))

    def run(rank: RankStandIn) -> None:
        rank.fill()
        gate.wait(DEADLINE_S)
        began_s = rank.post(number)
        spans.append((began_s, rank.wait(number)))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    if len(spans) < len(ranks):
        raise SystemExit(f"round {number} did not end at both sites")
    for rank in ranks:
        rank.check()
    return max(end for _, end in spans) - min(begin for begin, _ in spans)


def _show_warnings(log: Path) -> None:
    for line in log.read_text().splitlines():
        if " WARNING " in line or " ERROR " in line or "hint" in line:
            print(f"    {line[:200]}")
