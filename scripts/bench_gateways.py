"""Measure the all-reduce between two gateways alone: no trainer, no collectives inside sites.

Usage: python scripts/bench_gateways.py [--rates MBIT,..] [--rtts MS,..] [--losses SHARE,..] ...
       python scripts/bench_gateways.py --loopback [--mib 256]

Two gateways that ship, each a process in a network namespace of its own, joined by emulated packets
(needs root), or both on loopback. Stand-ins for ranks post buckets through shared memory, round
after round. A round takes from the first post to the last result. The bound: the bytes at the
link's rate, of which 96.5 % are payload, and half a round trip. CPU seconds are of both gateways
together, a GB (1e9 bytes) of float32 at one site.
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
from collections.abc import Iterator

import psutil

from isthmus.orchestrator.core.run_events import SiteNamespace
from isthmus.orchestrator.emulator.emulator_child import running_emulator
from isthmus.orchestrator.emulator.emulator_config import NetnsConfig
from isthmus.orchestrator.emulator.link_shape import LinkShape
from isthmus.protos.own_processes import entered
from isthmus.sites.gateway.config import HELD_BYTES
from isthmus.topology.trees.channels import FLOWS_MAX
from isthmus.topology.trees.wire_load import chunk_bytes_for
from scripts.gateway_pair import DEADLINE_S, SITES, GatewayChild, RankStandIn, Setting, pair


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
    with running_emulator(NetnsConfig(sites=SITES, links=links, seed=1)) as emulator:
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
    command = entered((where.user, where.net), ["sh", "-c", script])
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=True)
    return done.stdout


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
                f"busy {statistics.median(busy_s):7.3f}, "
                f"{statistics.median(busy_s) / median_s:5.2f}"
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
                else chunk_bytes_for(1 << 20, chosen.codec, rate * 1e6 / 8, rtt_ms / 1e3)
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
