"""Measure the all-reduce between two gateways alone: no trainer, no collectives inside sites.

Two gateways that ship, each a process in a network namespace of its own, joined by emulated packets
(needs root), or both on loopback. Stand-ins for ranks post buckets through shared memory, round
after round. A round takes from the first post to the last result. The bound: the bytes at the
link's rate, of which 96.5 % are payload, and half a round trip. CPU seconds are of both gateways
together, a GB (1e9 bytes) of float32 at one site.

With --lanes each site has several gateways, on loopback: how fast is the exchange by their number,
and what does it cost? A row tells CPU seconds of one site's gateways. Beside them is Gloo with as
many processes a site, each of which reduces its part of the bytes with the other site's.

`isthmus bench allreduce` measures whole runs, with losses and other flows where that is asked for.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import statistics
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping

from isthmus.orchestrator.core.run_events import SiteNamespace
from isthmus.orchestrator.emulator.emulator_child import running_emulator
from isthmus.orchestrator.emulator.emulator_config import NetnsConfig
from isthmus.orchestrator.emulator.link_shape import LinkShape
from isthmus.protos.own_processes import entered
from isthmus.sites.bench.gateways import cpu_s
from isthmus.sites.gateway.config import HELD_BYTES
from isthmus.topology.trees.wire_load import chunk_bytes_for
from scripts.bench import gateway_lanes
from scripts.bench.gateway_pair import DEADLINE_S, SITES, Setting, both, pair
from scripts.bench.timing import numbers, rss_bytes


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what may be asked for."""
    parser.add_argument("--loopback", action="store_true", help="no emulation")
    parser.add_argument("--rates", type=numbers, default=[200, 1000], help="Mbit/s")
    parser.add_argument("--rtts", type=numbers, default=[20, 80, 150], help="ms")
    parser.add_argument("--congestion", default="cubic")
    parser.add_argument("--codec", help="with --lanes several, as fp32,int8")
    parser.add_argument("--channels", type=int, help="exactly; else as gateways choose them")
    parser.add_argument("--chunk-kib", type=int, help="else as gateways choose it")
    parser.add_argument("--held-mib", type=int, default=HELD_BYTES >> 20, help="of early frames")
    parser.add_argument("--mib", type=int, help="of float32 a round")
    parser.add_argument("--buckets", type=int, help="that a round consists of")
    parser.add_argument("--warmup", type=int, default=3, help="rounds")
    parser.add_argument("--rounds", type=int, default=5, help="that are measured")
    parser.add_argument("--busy", action="store_true", help="ranks with a busy Python thread, too")
    parser.add_argument("--idle", type=float, default=0.0, help="seconds between two rounds")
    parser.add_argument("--warm", action="store_true", help="tcp_slow_start_after_idle=0")
    parser.add_argument("--lanes", type=numbers, help="gateways of a site, as 1,2,4")
    parser.add_argument("--ranks", type=int, help="with --lanes: of a site; else the most lanes")
    parser.add_argument("--turns", type=int, default=2, help="with --lanes: of all rows")


def run(options: argparse.Namespace) -> int:
    """Print a row for each rate and RTT, or with --lanes for each number of gateways."""
    if options.lanes:
        options.codec, options.mib = options.codec or "fp32,int8", options.mib or 512
        return gateway_lanes.run(options)
    options.codec, options.mib = options.codec or "fp32", options.mib or 64
    print("Mbit/s   ms | first s  median     max | /bound | MB/s fp32 | CPU s/GB, RSS MB", end="")
    print("" if options.loopback else " | retransmitted")
    links = ([100e3], [0.1]) if options.loopback else (options.rates, options.rtts)
    for rate, rtt_ms in itertools.product(*links):
        bits_per_s, rtt_s = rate * 1e6, rtt_ms / 1e3
        chunk_bytes = (options.chunk_kib or 0) << 10
        setting = Setting(
            bits_per_s=bits_per_s,
            rtt_s=rtt_s,
            codec=options.codec,
            channels=options.channels,
            chunk_bytes=chunk_bytes
            or chunk_bytes_for(1 << 20, options.codec, bits_per_s / 8, rtt_s, is_gather=True),
            num_buckets=options.buckets or 1,
            num_bytes=options.mib << 20,
            held_bytes=options.held_mib << 20,
        )
        print(f"{rate:6.0f} {rtt_ms:4.0f} | {row(setting, options)}", flush=True)
    return 0


def row(setting: Setting, options: argparse.Namespace) -> str:
    """Measure one setting; with --busy, every other round has a busy thread beside it."""
    with contextlib.ExitStack() as stack:
        places: Mapping[str, SiteNamespace] = {}
        if not options.loopback:
            places = stack.enter_context(_emulated(setting, options))
        gateways, ranks = stack.enter_context(pair(setting, places))
        pids = tuple(gateway.process.pid for gateway in gateways)
        quiet_s: list[float] = []
        busy_s: list[float] = []
        used_s = 0.0
        for number in range(options.warmup + options.rounds * (1 + options.busy)):
            if number:
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
            f" {rss_bytes(pids) / 1e6:6.0f}",
        ]
        if places:
            figures.append(f"{sum(map(_retransmitted, places.values())):6d}")
        if busy_s:
            middle_s = statistics.median(busy_s)
            figures.append(f"busy {middle_s:7.3f}, {middle_s / median_s:5.2f}")
        return " | ".join(figures)


@contextlib.contextmanager
def _emulated(
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
