"""Measure steps over emulated links, beside what plan and simulator say, for twelve jobs.

Compute is modelled, everything else is real: gateways, codecs, and packets where the emulator has
them. With --planned, `isthmus plan` decides sequences, trees, chunks, and buckets. With a short
--compute, less of the exchange hides. Prints a table, and the median and the largest deviation of
each column from what was measured.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from isthmus.orchestrator.cli.whole_run import run_to_end
from isthmus.orchestrator.documents import Pair, load_pair
from isthmus.orchestrator.evidence.record.measured_steps import measure
from isthmus.orchestrator.plans import as_launched
from isthmus.orchestrator.run_folder.home import new_run_id
from isthmus.orchestrator.run_folder.run_files import METRICS, read_metrics
from isthmus.topology.model.step_model import step_time
from isthmus.topology.simulator.settings import Settings
from isthmus.topology.simulator.simulation import simulate
from isthmus.topology.spec.compute import flops_per_sequence
from isthmus.topology.spec.job import Model

SHAPE: dict[str, Any] = {"layers": 24, "heads": 4, "width": 64, "context": 64}
MODEL = Model(**SHAPE)
SEQUENCES = 8
"""Sequences of a rank, on average."""
TIMEOUT_S = 300.0
KNOWN = ("cubic", "reno", "bbr")
"""Congestion controls that a topology may name."""
Links = Mapping[str, tuple[float, float]]
"""By the letters of two sites: Mbit/s and ms."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """One pair of documents."""

    name: str
    speeds: tuple[float, ...]
    """Relative speeds of the sites a, b, ..., which have one rank each."""
    links: Links
    codec: str = "fp32"
    shares: tuple[int, ...] | None = None
    """Sequences a site; None: as many each."""
    schedule: str = "overlap"
    tree: str = "auto"


def mesh(num_sites: int, mbit_per_s: float, rtt_ms: float) -> Links:
    """Return equal links between all sites."""
    names = "abcde"[:num_sites]
    return {x + y: (mbit_per_s, rtt_ms) for i, x in enumerate(names) for y in names[i + 1 :]}


SCENARIOS = (
    Scenario("2 near", (1, 1), mesh(2, 1000, 10)),
    Scenario("2 far", (1, 1), mesh(2, 100, 80)),
    Scenario("2 narrow int8", (1, 1), mesh(2, 50, 150), "int8"),
    Scenario("2 unequal", (1, 0.5), mesh(2, 50, 20)),
    Scenario("2 serial bf16", (1, 1), mesh(2, 200, 40), "bf16", schedule="serial"),
    Scenario("3 bf16", (1, 1, 1), mesh(3, 200, 40), "bf16"),
    Scenario("3 mixed", (1, 1, 1), {"ab": (100, 20), "bc": (200, 60), "ac": (50, 80)}),
    Scenario("3 unequal int8", (1, 0.5, 0.75), mesh(3, 50, 100), "int8", (11, 5, 8)),
    Scenario("4", (1, 1, 1, 1), mesh(4, 100, 30)),
    Scenario(
        "4 one narrow int8",
        (1, 1, 1, 1),
        {**mesh(4, 500, 40), "ad": (50, 60), "bd": (50, 60), "cd": (50, 60)},
        "int8",
    ),
    Scenario("4 unequal bf16", (1, 1, 0.5, 0.5), mesh(4, 200, 60), "bf16", (11, 11, 5, 5)),
    Scenario(
        "5 mixed int8",
        (1, 1, 1, 0.5, 0.5),
        {**mesh(5, 100, 40), "ae": (50, 150), "be": (50, 120), "ab": (500, 10)},
        "int8",
        (10, 10, 10, 5, 5),
    ),
)
NARROW = tuple(
    Scenario(f"{num_sites} at 25 Mbit/s", (1,) * num_sites, mesh(num_sites, 25, 30))
    for num_sites in (2, 3, 4)
)
"""Links that hold but a frame or two."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what may be asked for."""
    parser.add_argument("--only", action="append", default=[], help="scenarios of this name")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--emulator", default="netns", choices=("netns", "relay"))
    parser.add_argument("--planned", action="store_true", help="as `isthmus plan` decides")
    parser.add_argument("--narrow", action="store_true", help="three others, of narrow links")
    parser.add_argument("--compute", type=float, default=1.5, help="seconds, of a site of speed 1")


def run(options: argparse.Namespace) -> int:
    """Measure each scenario; 1 if a run failed."""
    scenarios = NARROW if options.narrow else SCENARIOS
    chosen = [each for each in scenarios if not options.only or each.name in options.only]
    print(f"{'scenario':18} {'plan':>8} {'simulated':>10} {'measured':>9}   off by", flush=True)
    deviations: list[tuple[float, float]] = []
    for scenario in chosen:
        with tempfile.TemporaryDirectory(prefix="isthmus-predict-") as folder:
            pair = documents(scenario, Path(folder), options)
            predicted_s = step_time(pair.job, pair.topology).step_s
            simulation = simulate(pair.job, pair.topology, Settings(steps=options.steps))
            simulated_s = simulation.mean_step_s
            print(
                f"{scenario.name:18} {predicted_s:7.3f}s {simulated_s:9.3f}s ", end="", flush=True
            )
            measured_s = measured(pair, Path(folder), options)
        if measured_s is None:
            print("  failed", flush=True)
            continue
        deviations.append((measured_s / predicted_s - 1, measured_s / simulated_s - 1))
        shown = "  ".join(f"{100 * each:+5.1f} %" for each in deviations[-1])
        print(f"{measured_s:8.3f}s   {shown}", flush=True)
    for name, off in zip(("plan", "simulated"), zip(*deviations, strict=True), strict=False):
        sizes = [100 * abs(each) for each in off]
        print(f"{name}: median {statistics.median(sizes):.1f} %, largest {max(sizes):.1f} %")
    return int(len(deviations) < len(chosen))


def congestion() -> str:
    """Return the congestion control of this host, which that of emulated sites is too."""
    name = Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
    return name if name in KNOWN else "cubic"


def documents(scenario: Scenario, folder: Path, options: argparse.Namespace) -> Pair:
    """Write a scenario's two files and load them."""
    flops_per_s = SEQUENCES * flops_per_sequence(MODEL) / options.compute
    names = "abcde"[: len(scenario.speeds)]
    sites = [
        {"name": name, "nodes": 1, "accelerators_per_node": 1, "accelerator": f"speed-{name}"}
        for name in names
    ]
    chips = {
        f"speed-{name}": {
            "peak": {"bf16": f"{speed * flops_per_s / 1e9:.6f}GFLOP/s"},
            "memory": "4GiB",
            "mfu": 1.0,
        }
        for name, speed in zip(names, scenario.speeds, strict=True)
    }
    shapes = [
        {"between": list(ends), "bandwidth": f"{mbit_per_s}Mbit/s", "rtt": f"{rtt_ms}ms"}
        for ends, (mbit_per_s, rtt_ms) in scenario.links.items()
    ]
    links = [{**shape, "congestion": congestion()} for shape in shapes]
    head = {"version": 1, "name": "predicted"}
    emulation = {"emulate": True, "emulator": options.emulator}
    topology = {**head, "accelerators": chips, "sites": sites, "links": links, **emulation}
    exchange = {"codec": scenario.codec, "schedule": scenario.schedule}
    num_steps = options.warmup + options.steps
    job: dict[str, Any] = {
        **head,
        "topology": "topology.yaml",
        "timeline": {"every": 0},
        "trainer": {
            "compute": "modelled",
            "steps": num_steps,
            "evaluate_every": num_steps,
            "global_batch": SEQUENCES * len(names),
            "micro_batch": 2 * SEQUENCES,
            "model": SHAPE,
            "data": {"max_bytes": "1MiB"},
        },
    }
    if options.planned:
        job |= {"plan": {"sites": "all"}, "exchange": exchange}
    else:
        job["exchange"] = {**exchange, "chunk": "256KiB", "bucket": "256KiB"}
        job["reduction"] = {"tree": scenario.tree}
        if scenario.shares is not None:
            job["placement"] = [
                {"site": name, "sequences": share}
                for name, share in zip(names, scenario.shares, strict=True)
            ]
    (folder / "topology.yaml").write_text(yaml.safe_dump(topology))
    (folder / "job.yaml").write_text(yaml.safe_dump(job))
    pair, _ = as_launched(load_pair(folder / "job.yaml"))
    return pair


def measured(pair: Pair, folder: Path, options: argparse.Namespace) -> float | None:
    """Return the mean step of a run; None if it failed."""
    run_id = new_run_id()
    ended = run_to_end(pair, folder, run_id, timeout_s=TIMEOUT_S, show=lambda run: None)
    if ended.failed is not None:
        print(f"{ended.failed.code}: {ended.failed.message}", file=sys.stderr)
        return None
    records = read_metrics(folder / "runs" / run_id / METRICS)
    return measure(records, pair.topology, warmup_steps=options.warmup, steps=options.steps).step_s
