"""Train a GPT at two sites that share this machine's accelerator, by regime and codec.

The link is free: both sites are here, and nothing is emulated. So a step is longer than without
exchange by what the exchange itself costs, and by how little of it is hidden. Figures are medians
over the last half of each run's steps; for diloco means, as few of these exchange. On a machine
without an accelerator, --small shows that it works.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from isthmus.protos import metrics
from scripts.bench.launched import launched, of_kind

CONFIGURATIONS = {
    "no exchange": ["exchange.schedule=off"],
    "sync, fp32": ["exchange.codec=fp32"],
    "sync, int8": ["exchange.codec=int8"],
    "delayed, fp32": ["exchange.codec=fp32", "regime=delayed"],
    "delayed, int8": ["exchange.codec=int8", "regime=delayed"],
    "diloco, H = 5": ["exchange.codec=fp32", "regime={kind: diloco, sync_every: 5}"],
}
PARTS = (
    metrics.STEP_S,
    metrics.COMPUTE_S,
    metrics.INTRA_S,
    metrics.EXPOSED_INTER_S,
    metrics.WAIT_S,
    metrics.HIDDEN_INTER_S,
)
LARGE = {"layers": 24, "heads": 16, "width": 1024, "context": 1024}
SMALL = {"layers": 2, "heads": 2, "width": 64, "context": 64}
MICRO_BATCH, MICRO_BATCHES = 8, 16
TOPOLOGY = """
version: 1
name: one-machine
sites:
  - {name: east, nodes: 1, accelerators_per_node: 1, accelerator: ACCELERATOR}
  - {name: west, like: east}
links: [{between: [east, west], bandwidth: 100Gbit/s, rtt: 0.1ms}]
failure: {start_within: 120s, detect_within: 20s}
security: {mode: insecure}
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what may be asked for."""
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--small", action="store_true", help="a tiny model, on CPUs")
    parser.add_argument("--accelerator", default="h200", help="as topologies name it")
    parser.add_argument("--only", default="", help="configurations whose names have this in them")


def run(options: argparse.Namespace) -> int:
    """Print a row for each configuration; return 1 if a run has failed."""
    status = 0
    print(f"{'':16}{'step':>9}{'compute':>9}{'inside':>9}{'exposed':>9}{'waiting':>9}{'hidden':>9}")
    for name, settings in CONFIGURATIONS.items():
        if options.only not in name:
            continue
        steps = _steps(settings, options)
        if not steps:
            status = 1
            continue
        late = [each["values"] for each in steps if each["step"] > options.steps // 2]
        average = statistics.fmean if "diloco" in name else statistics.median
        parts = [average(each[key] for each in late) for key in PARTS]
        print(f"{name:16}" + "".join(f"{each:8.3f}s" for each in parts), flush=True)
    return status


def _steps(settings: list[str], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Run a job; return its steps' records, of both sites."""
    accelerator = "cpu" if options.small else options.accelerator
    trainer = {
        "steps": options.steps,
        "global_batch": 2 * MICRO_BATCH * (2 if options.small else MICRO_BATCHES),
        "micro_batch": MICRO_BATCH,
        "precision": "fp32" if options.small else "bf16",
        "evaluation_batches": 1,
        "model": SMALL if options.small else LARGE,
    }
    topology = TOPOLOGY.replace("ACCELERATOR", accelerator)
    return [*of_kind(launched(topology, trainer, settings, within_s=300), metrics.STEP)]
