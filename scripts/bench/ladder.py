"""Cut a link to a twentieth for a while, with each regime and with one that follows the link.

Each row is a real run with real gateways on this machine, whose computing is modelled time and
whose link is emulated: tokens/s before the cut, in it and after it. A run whose regime follows the
link is to have 0.9 of the best fixed one in each part. The first seconds of a part are left out, in
which a run finds out.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

from isthmus.protos import metrics
from scripts.bench.launched import Records, launched, of_kind

FOLLOWS = "follows the link"
RUNS = {
    "sync": ["regime=sync"],
    "delayed": ["regime=delayed"],
    "diloco": ["regime={kind: diloco, sync_every: 10}"],
    FOLLOWS: [
        "plan={sites: all, max_sync_period: 10, replan: {regime: follow, shares: fixed, lasting: 5s}}"
    ],
}
TOPOLOGY = """
version: 1
name: cut
accelerators: {core: {peak: {fp32: FLOPS}, memory: 2GiB, mfu: 1.0}}
sites:
  - {name: a, nodes: 1, accelerators_per_node: 1, accelerator: core}
  - {name: b, nodes: 1, accelerators_per_node: 1, accelerator: core}
links: [{between: [a, b], bandwidth: 40Mbit/s, rtt: 10ms}]
emulate: true
emulator: relay
security: {mode: insecure}
"""
FAULTS = """
version: 1
seed: 1
faults:
  - {at: CUT, link: [a, b], rate: 2Mbit/s}
  - {at: BACK, link: [a, b], rate: 40Mbit/s}
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what may be asked for."""
    parser.add_argument("--part-s", type=float, default=120.0, help="seconds of a part of a run")
    parser.add_argument("--left-out-s", type=float, default=40.0, help="at the begin of each")
    parser.add_argument("--step-s", type=float, default=0.5, help="without exchange")
    parser.add_argument("--only", default="", help="runs whose names have this in them")


def run(options: argparse.Namespace) -> int:
    """Print a row a run, and how the last compares; return 1 if one has failed."""
    found: dict[str, Sequence[float]] = {}
    for name, settings in RUNS.items():
        if options.only not in name:
            continue
        records = _records(settings, options)
        if not records:
            return 1
        found[name] = _tokens_per_s(records, options)
        print(f"{name:20}" + "".join(f"{rate:10.0f}" for rate in found[name]), flush=True)
    fixed = [rates for name, rates in found.items() if name != FOLLOWS]
    if FOLLOWS in found and fixed:
        best = map(max, zip(*fixed, strict=True))
        shares = (rate / of for rate, of in zip(found[FOLLOWS], best, strict=True))
        print(f"{'of the best fixed':20}" + "".join(f"{share:10.2f}" for share in shares))
    return 0


def _records(settings: Sequence[str], options: argparse.Namespace) -> Records:
    trainer = {
        "compute": "modelled",
        "steps": int(3 * options.part_s / options.step_s),
        "global_batch": 32,
        "micro_batch": 1,
        "model": {"layers": 2, "heads": 2, "width": 96, "context": 32},
        "data": {"max_bytes": "1MiB"},
    }
    part_s = options.part_s
    faults = FAULTS.replace("CUT", f"{part_s:g}s").replace("BACK", f"{2 * part_s:g}s")
    # 2 layers of width 96 and 16 sequences of 32 bytes: 0.75 GFLOP a step.
    topology = TOPOLOGY.replace("FLOPS", f"{0.75 / options.step_s:.4f}GFLOP/s")
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(faults)
        file.flush()
        more = ["--faults", str(Path(file.name))]
        return launched(topology, trainer, settings, within_s=20 * part_s, more=more)


def _tokens_per_s(records: Records, options: argparse.Namespace) -> list[float]:
    """Return the tokens/s of each part of a run."""
    steps = [each for each in of_kind(records, metrics.STEP) if each["site"] == "a"]
    begin_s = steps[0]["wall_s"]
    rates = []
    for part in range(3):
        since_s = begin_s + part * options.part_s + options.left_out_s
        until_s = begin_s + (part + 1) * options.part_s
        tokens = sum(
            each["values"][metrics.SITE_TOKENS]
            for each in steps
            if since_s < each["wall_s"] <= until_s
        )
        rates.append(tokens / (until_s - since_s))
    return rates
