"""Train at three sites whose speeds are 1 : 0.7 : 0.4; compare tokens/s with what all could do.

Each row is a real run with real gateways on this machine, whose computing is modelled time. A site
could do what it does while it computes; the figure is what all sites do, of the sum of that. The
first part of a run is left out, in which shares and rounds find their lengths.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping

from isthmus.protos import metrics
from scripts.bench.launched import Records, launched, of_kind

SPEEDS = {"fast": 1.0, "mid": 0.7, "slow": 0.4}
RUNS = {
    "sync, equal shares": ["regime=sync", "plan={sites: all, replan: {shares: fixed}}"],
    "sync, shares follow": [
        "regime=sync",
        "plan={sites: all, replan: {shares: follow, lasting: 5s}}",
    ],
    "diloco, rounds wait for all": ["regime={kind: diloco, sync_every: 20}"],
    "diloco, rounds wait for nobody": ["regime={kind: diloco, sync_every: 20, min_steps: 4}"],
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what may be asked for."""
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--step-s", type=float, default=0.2, help="of the fastest site")
    parser.add_argument("--only", default="", help="runs whose names have this in them")
    parser.add_argument("--within", type=float, default=900.0, help="seconds for a run")


def run(options: argparse.Namespace) -> int:
    """Print a row a run; return 1 if one has failed."""
    trainer = {
        "compute": "modelled",
        "steps": options.steps,
        "global_batch": 84,
        "micro_batch": 1,
        "model": {"layers": 2, "heads": 2, "width": 48, "context": 32},
        "data": {"max_bytes": "1MiB"},
    }
    status = 0
    for name, settings in RUNS.items():
        if options.only not in name:
            continue
        topology = topology_of(options.step_s)
        records = launched(topology, trainer, settings, within_s=options.within)
        if not records:
            status = 1
            continue
        of_all, by_site = shares_used(records, options.steps // 3)
        sites = "  ".join(f"{site} {share:.3f}" for site, share in by_site.items())
        print(f"{name:32} {of_all:.3f} of the sum   {sites}", flush=True)
    return status


def topology_of(step_s: float) -> str:
    """Return three sites, of which the fastest computes its third of a batch for so long."""
    # 2 layers of width 48 and 28 sequences of 32 bytes: 0.4 GFLOP a step.
    flops = 4e8 / step_s
    kinds = "\n".join(
        f"  {name}: {{peak: {{fp32: {flops * speed / 1e9:.4f}GFLOP/s}}, memory: 2GiB, mfu: 1.0}}"
        for name, speed in SPEEDS.items()
    )
    sites = "\n".join(
        f"  - {{name: {name}, nodes: 1, accelerators_per_node: 1, accelerator: {name}}}"
        for name in SPEEDS
    )
    names = [*SPEEDS]
    links = "\n".join(
        f"  - {{between: [{one}, {other}], bandwidth: 1Gbit/s, rtt: 10ms}}"
        for place, one in enumerate(names)
        for other in names[place + 1 :]
    )
    return (
        f"version: 1\nname: unlike\naccelerators:\n{kinds}\nsites:\n{sites}\nlinks:\n{links}\n"
        "security: {mode: insecure}\n"
    )


def shares_used(records: Records, after: int) -> tuple[float, Mapping[str, float]]:
    """Return what all sites have done of what they could, and each one of its own; from a step on.

    A step that a site was passed over in has done nothing.
    """
    done: dict[str, float] = {}
    could: dict[str, float] = {}
    for site in SPEEDS:
        steps = [
            each["values"]
            for each in of_kind(records, metrics.STEP)
            if each["site"] == site and each["step"] > after
        ]
        tokens = sum(each[metrics.SITE_TOKENS] for each in steps)
        done[site] = tokens / sum(each[metrics.STEP_S] for each in steps)
        could[site] = tokens / sum(each[metrics.COMPUTE_S] for each in steps)
    by_site = {site: done[site] / could[site] for site in SPEEDS}
    return sum(done.values()) / sum(could.values()), by_site
