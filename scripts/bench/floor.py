"""Measure what two gateways cost the processor, beside Gloo and the least that it can be.

The least is floor.c, a program that sends, checks and sums the same bytes over the same kind of
sockets, compiled by the compiler that compiles isthmus. It wakes up every 5 ms, and does nothing
else that a product must do. All run by turns on an emulated link (needs root), so that what else
the machine does meets all of them. CPU seconds are of both sites together, a GB (1e9 bytes) of
float32 at one site; the ratio is to the floor's median.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from isthmus.orchestrator.core.run_events import SiteNamespace
from isthmus.orchestrator.emulator.site_namespaces import DEVICE
from isthmus.orchestrator.evidence.bench.allreduce_baselines import (
    LOOPBACK,
    LOOPBACK_ADDRESS,
    outputs_of,
)
from isthmus.protos.own_processes import entered
from isthmus.sites.bench.gateways import cpu_s
from isthmus.sites.gateway.config import HELD_BYTES
from scripts.bench.gateways import (
    DEADLINE_S,
    SITES,
    Setting,
    both,
    chosen_chunk,
    emulated,
    numbers,
    pair,
)

PORT: Final = 7788
NAP_US: Final = 5000
Places = Mapping[str, SiteNamespace]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what may be asked for."""
    parser.add_argument("--loopback", action="store_true", help="no emulation")
    parser.add_argument("--rates", type=numbers, default=[1000, 400], help="Mbit/s")
    parser.add_argument("--rtts", type=numbers, default=[20, 60], help="ms, one for each rate")
    parser.add_argument("--codecs", default="fp32", help="of gateways, as fp32,int8")
    parser.add_argument(
        "--chunks-kib", type=numbers, help="of gateways, as 128,512; else as they choose"
    )
    parser.add_argument("--tls", action="store_true", help="of gateways, beside those without")
    parser.add_argument("--mib", type=int, default=64, help="of float32 a round")
    parser.add_argument("--warmup", type=int, default=3, help="rounds")
    parser.add_argument("--rounds", type=int, default=5, help="that are measured")
    parser.add_argument("--turns", type=int, default=3, help="of all rows")
    parser.set_defaults(congestion="cubic", warm=False)


def run(options: argparse.Namespace) -> int:
    """Print a row for each rival on each link."""
    with tempfile.TemporaryDirectory() as own:
        program = _compiled(Path(own))
        print("Mbit/s   ms | who               | CPU s/GB by turns   | median, / floor | s a round")
        links = ([100e3], [0.1]) if options.loopback else (options.rates, options.rtts)
        for rate, rtt_ms in zip(*links, strict=True):
            _link(program, rate, rtt_ms, options)
    return 0


def _link(program: Path, rate: float, rtt_ms: float, options: argparse.Namespace) -> None:
    setting = _setting(rate, rtt_ms, "fp32", 512, options)
    rivals: dict[str, tuple[Setting, Callable[..., tuple[float, float]]]] = {
        "floor": (setting, lambda *given: _floor(program, *given)),
        "Gloo": (setting, _gloo),
    }
    for codec, chunk_kib, has_tls in itertools.product(
        options.codecs.split(","), options.chunks_kib or [None], [False, True][: 1 + options.tls]
    ):
        plain = _setting(rate, rtt_ms, codec, chunk_kib, options)
        name = f"{codec} {plain.chunk_bytes >> 10} KiB" + " TLS" * has_tls
        rivals[name] = dataclasses.replace(plain, has_tls=has_tls), _gateways
    cpu_of: dict[str, list[float]] = {name: [] for name in rivals}
    lasted: dict[str, list[float]] = {name: [] for name in rivals}
    for _ in range(options.turns):
        for name, (its_setting, measure) in rivals.items():
            with _places(its_setting, options) as places:
                round_s, used_s = measure(its_setting, places, options)
            cpu_of[name].append(used_s / (setting.num_bytes / 1e9))
            lasted[name].append(round_s)
    floor = statistics.median(cpu_of["floor"])
    for name, figures in cpu_of.items():
        middle = statistics.median(figures)
        turns = " ".join(f"{figure:5.2f}" for figure in figures)
        print(f"{rate:6.0f} {rtt_ms:4.0f} | {name:17} | {turns:19} | ", end="")
        print(f"{middle:6.2f}, {middle / floor:6.2f} | {statistics.median(lasted[name]):6.3f}")


def _places(
    setting: Setting, options: argparse.Namespace
) -> contextlib.AbstractContextManager[Places]:
    return contextlib.nullcontext({}) if options.loopback else emulated(setting, options)


def _setting(
    rate: float, rtt_ms: float, codec: str, chunk_kib: float | None, options: argparse.Namespace
) -> Setting:
    bits_per_s, rtt_s = rate * 1e6, rtt_ms / 1e3
    return Setting(
        bits_per_s=bits_per_s,
        rtt_s=rtt_s,
        codec=codec,
        channels=None,
        chunk_bytes=int(chunk_kib) << 10 if chunk_kib else chosen_chunk(codec, bits_per_s, rtt_s),
        held_bytes=HELD_BYTES,
        num_buckets=16,
        num_bytes=options.mib << 20,
        num_ranks=1,
        num_lanes=1,
    )


def _compiled(folder: Path) -> Path:
    """Compile floor.c as isthmus is compiled."""
    from isthmus.sites.compiling import build_backend  # it wants setuptools

    command, lacks = build_backend.find_compiler()
    if lacks:
        raise SystemExit(f"floor.c cannot be compiled: {lacks}")
    source, target = Path(__file__).with_suffix(".c"), folder / "floor"
    subprocess.run([*command, "-O3", "-march=native", str(source), "-o", str(target)], check=True)
    return target


def _floor(
    program: Path, setting: Setting, places: Places, options: argparse.Namespace
) -> tuple[float, float]:
    """Return the seconds of a round, and CPU seconds of both sites."""
    figures = [setting.num_bytes, setting.chunk_bytes, options.warmup + options.rounds, NAP_US]
    address = places[SITES[0]].address if places else LOOPBACK_ADDRESS
    running = []
    for index, site in enumerate(SITES):
        command = [str(program), str(index), address, str(PORT), *map(str, figures)]
        if places:
            command = entered((places[site].user, places[site].net), command)
        running.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
    said = [process.communicate(timeout=DEADLINE_S)[0] for process in running]
    if any(process.returncode for process in running):
        raise SystemExit("the floor failed")
    rounds = [
        [[float(word) for word in line.split()] for line in lines.splitlines()][options.warmup :]
        for lines in said
    ]
    lasted_s = statistics.median(
        max(round_s for round_s, _ in sides) for sides in zip(*rounds, strict=True)
    )
    return lasted_s, sum(used_s for own in rounds for _, used_s in own) / options.rounds


def _gloo(setting: Setting, places: Places, options: argparse.Namespace) -> tuple[float, float]:
    with tempfile.TemporaryDirectory() as own:
        command = [
            *("isthmus.sites.bench.gloo", "--size-bytes", str(setting.num_bytes)),
            *("--count", str(options.warmup + options.rounds), "--timeout", str(DEADLINE_S)),
            *("--world-size", str(len(SITES)), "--store", str(Path(own, "store"))),
            *("--device", DEVICE if places else LOOPBACK),
        ]
        sites = {site: places.get(site) for site in SITES}
        told = outputs_of("gloo", command, sites, Path(own), DEADLINE_S)
    repeats = [each["repeats"][options.warmup :] for each in told]
    used_s = sum(repeat["cpu_s"] for own in repeats for repeat in own) / options.rounds
    spans = [
        max(each["end_s"] for each in both_sites) - min(each["begin_s"] for each in both_sites)
        for both_sites in zip(*repeats, strict=True)
    ]
    return statistics.median(spans), used_s


def _gateways(setting: Setting, places: Places, options: argparse.Namespace) -> tuple[float, float]:
    with pair(setting, places) as (gateways, ranks):
        pids = tuple(gateway.process.pid for gateway in gateways)
        for number in range(options.warmup):
            both(ranks, number)
        before_s = cpu_s(pids)
        measured = range(options.warmup, options.warmup + options.rounds)
        lasted_s = statistics.median([both(ranks, number) for number in measured])
        return lasted_s, (cpu_s(pids) - before_s) / options.rounds
