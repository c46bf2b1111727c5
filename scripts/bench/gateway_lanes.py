"""The all-reduce between two sites on loopback, by the number of gateways (lanes) of a site."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from isthmus.orchestrator.evidence.bench.allreduce_baselines import LOOPBACK, outputs_of
from isthmus.orchestrator.evidence.bench.allreduce_bench import GB, spans_of
from isthmus.protos.usable_cores import usable_cores
from isthmus.sites.bench.gateways import cpu_s
from scripts.bench.gateway_pair import DEADLINE_S, SITES, Setting, both, pair

GLOO = "gloo"
CHUNK_BYTES = 8 << 20
BUCKET_BYTES = 64 << 20
"""As `isthmus bench allreduce` has them where no link has to be kept full."""


@dataclasses.dataclass(slots=True)
class Figures:
    """What one number of lanes did with one codec, or Gloo with as many pairs of processes."""

    times_s: list[float] = dataclasses.field(default_factory=list)
    """How long each measured round took."""
    cpu_s: float = 0.0
    """Processor time of both sites' gateways in these rounds, or of Gloo's processes."""


def run(options: argparse.Namespace) -> int:
    """Print a row for each number of lanes and each codec, Gloo's beside them."""
    lanes = [int(count) for count in options.lanes]
    num_ranks = options.ranks or max(lanes)
    if bad := [count for count in lanes if num_ranks % count]:
        print(f"--lanes {bad[0]}: does not divide {num_ranks} ranks")
        return 2
    began_s = time.monotonic()
    print(_machine(), flush=True)
    num_bytes = options.mib << 20
    codecs = [*options.codec.split(","), GLOO]
    rows = {key: Figures() for key in itertools.product(lanes, codecs)}
    for _ in range(options.turns):
        for (count, codec), figures in rows.items():
            if codec == GLOO:
                _measure_gloo(figures, count, num_bytes, options)
                continue
            setting = Setting(
                codec=codec,
                channels=options.channels,
                chunk_bytes=options.chunk_kib << 10 if options.chunk_kib else CHUNK_BYTES,
                held_bytes=options.held_mib << 20,
                num_buckets=options.buckets or max(1, num_bytes // BUCKET_BYTES),
                num_bytes=num_bytes,
                num_ranks=num_ranks,
                num_lanes=count,
            )
            _measure(figures, setting, options)
    print(
        f"two sites on loopback, {num_ranks} stand-ins for ranks each; {options.mib} MiB of float32"
        f" a round and site; medians of {options.turns} x {options.rounds} rounds, by turns"
    )
    print("lanes  codec     GB/s  median s (min to max)     x Gloo  CPU s/GB of a site")
    for (count, codec), figures in rows.items():
        print(_row(count, codec, figures, rows[count, GLOO], num_bytes))
    print(f"{time.monotonic() - began_s:.0f} s in all")
    return 0


def _measure(figures: Figures, setting: Setting, options: argparse.Namespace) -> None:
    """Add the rounds of two sites' gateways."""
    with pair(setting) as (gateways, ranks):
        pids = tuple(gateway.process.pid for gateway in gateways)
        for number in range(options.warmup):
            both(ranks, number)
        for number in range(options.warmup, options.warmup + options.rounds):
            before_s = cpu_s(pids)
            figures.times_s.append(both(ranks, number))
            figures.cpu_s += cpu_s(pids) - before_s


def _measure_gloo(
    figures: Figures, num_lanes: int, num_bytes: int, options: argparse.Namespace
) -> None:
    """Add the rounds of as many pairs of Gloo's processes, each with its part of the bytes."""
    names = [f"{site}{lane}" for site in SITES for lane in range(num_lanes)]
    with tempfile.TemporaryDirectory() as name:
        command = [
            *("isthmus.sites.bench.gloo", "--size-bytes", str(num_bytes // num_lanes)),
            *("--count", str(options.warmup + options.rounds), "--timeout", str(DEADLINE_S)),
            *("--world-size", str(len(names)), "--lanes", str(num_lanes)),
            *("--store", f"{name}/store", "--device", LOOPBACK),
        ]
        told = outputs_of(GLOO, command, dict.fromkeys(names), Path(name), DEADLINE_S)
    repeats = list(zip(*(each["repeats"] for each in told), strict=True))[options.warmup :]
    spans = spans_of([(each["begin_s"], each["end_s"]) for each in repeat] for repeat in repeats)
    figures.times_s += [end_s - begin_s for begin_s, end_s in spans]
    figures.cpu_s += sum(each["cpu_s"] for repeat in repeats for each in repeat)


def _row(count: int, codec: str, figures: Figures, gloo: Figures, num_bytes: int) -> str:
    median_s = statistics.median(figures.times_s)
    cpu_s_per_gb = figures.cpu_s / len(SITES) / (len(figures.times_s) * num_bytes / GB)
    return (
        f"{count:5}  {codec:8} {num_bytes / median_s / GB:5.2f}"
        f"  {median_s:8.3f} ({_range(figures.times_s)})"
        f"  {statistics.median(gloo.times_s) / median_s:9.2f}  {cpu_s_per_gb:8.2f}"
    )


def _range(times_s: Sequence[float]) -> str:
    return f"{min(times_s):.3f} to {max(times_s):.3f}"


def _machine() -> str:
    """Return when and where this runs, and the load before, in one line."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    congestion = Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
    return (
        f"{time.strftime('%Y-%m-%d %H:%M')}, {usable_cores()} of {os.cpu_count()} cores of "
        f"{models[0] if models else platform.machine()}, load {os.getloadavg()[0]:.1f} before, "
        f"Linux {platform.release()}, Python {platform.python_version()}, "
        f"torch {metadata.version('torch')}, {congestion}"
    )
