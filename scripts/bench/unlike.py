"""Train at three sites whose speeds are 1 : 0.7 : 0.4; compare tokens/s with what each does alone.

Each row is a real run with real gateways on this machine. Sites learn for real, and their computing
takes a modelled time (`unlike_site.py`). First each site trains alone, `schedule: off`. The figure
is tokens/s of all sites, of the sum of that, without the first third of a run: shares and rounds
find their lengths there. In `sync` it is also how long it takes from the first step until ten steps
have 0.97 of the sum. Losses are held out, of diloco in lockstep after as many rounds as have about
as many tokens as the open ones.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean

from isthmus.protos import metrics
from scripts.bench.launched import Records, launched, of_kind

SPEEDS = {"fast": 1.0, "mid": 0.7, "slow": 0.4}
SEQUENCES = 84
"""Sequences of a step at all sites together; each site begins with a third of them."""
WANTED = 0.97
CONTEXT = 32
STEPS = 10
"""Consecutive steps that must have WANTED, before a run counts as arrived."""
TOPOLOGY = """
version: 1
name: unlike
sites: [SITES]
links: [LINKS]
security: {mode: insecure}
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what may be asked for."""
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--step-s", type=float, default=0.4, help="of the fastest site")
    parser.add_argument("--sync-every", type=int, default=30)
    parser.add_argument("--min-steps", type=int, default=6)
    parser.add_argument("--lasting", default="5s", help="before shares follow")
    parser.add_argument("--seed", type=int, action="append", default=[], help="of the loss")
    parser.add_argument("--only", choices=("sync", "diloco"), help="one of both")


def run(options: argparse.Namespace) -> int:
    """Print a row a run; return 1 if one has failed."""
    alone = speeds(_launched(options, 30, ["exchange.schedule=off"]), skipped=0.2)
    print(f"alone: {_by_site(alone, '.0f')} tokens/s", flush=True)
    if options.only != "diloco":
        plan = f"plan={{sites: all, replan: {{shares: follow, lasting: {options.lasting}}}}}"
        records = _launched(options, options.steps, ["regime=sync", plan])
        arrived_s = within(records, WANTED * sum(alone.values()))
        when = f"after {arrived_s:.0f} s" if arrived_s else "never"
        _print("sync, shares follow", records, alone, f"{WANTED} {when}")
    if options.only != "sync":
        kind = f"kind: diloco, sync_every: {options.sync_every}"
        opened, locked = [], []
        for seed in options.seed or [0]:
            open_ = f"regime={{{kind}, min_steps: {options.min_steps}}}"
            records = _launched(options, options.steps, [open_], seed)
            opened.append(_loss(records))
            _print("diloco, rounds wait for nobody", records, alone, f"loss {opened[-1]:.3f}")
            taken = sum(
                row["values"][metrics.SITE_TOKENS] for row in of_kind(records, metrics.STEP)
            )
            rounds = round(taken / SEQUENCES / CONTEXT / options.sync_every)
            steps = rounds * options.sync_every
            records = _launched(options, steps, [f"regime={{{kind}}}"], seed)
            locked.append(_loss(records))
            _print("diloco, lockstep", records, alone, f"loss {locked[-1]:.3f}")
        gaps = [one - other for one, other in zip(opened, locked, strict=True)]
        print(f"loss: {fmean(gaps):+.3f}  {' '.join(f'{gap:+.3f}' for gap in gaps)}", flush=True)
    return 0


def speeds(records: Records, *, skipped: float = 1 / 3) -> dict[str, float]:
    """Return tokens/s of each site, without the first part of its steps."""
    found = {}
    for site in SPEEDS:
        steps = _steps(records, site)
        steps = steps[int(skipped * len(steps)) :]
        seconds = sum(step[metrics.STEP_S] for step in steps)
        found[site] = sum(step[metrics.SITE_TOKENS] for step in steps) / seconds
    return found


def within(records: Records, wanted: float) -> float | None:
    """Return when STEPS steps in a row, the same at all sites, first have so many tokens/s."""
    by_site = [_steps(records, site) for site in SPEEDS]
    num_steps = min(map(len, by_site))
    for first in range(num_steps - STEPS):
        parts = [steps[first : first + STEPS] for steps in by_site]
        rates = [
            sum(step[metrics.SITE_TOKENS] for step in part)
            / sum(step[metrics.STEP_S] for step in part)
            for part in parts
        ]
        if sum(rates) >= wanted:
            return sum(step[metrics.STEP_S] for step in by_site[0][:first])
    return None


def _steps(records: Records, site: str) -> list[Mapping[str, float]]:
    return [row["values"] for row in of_kind(records, metrics.STEP) if row["site"] == site]


def _launched(
    options: argparse.Namespace, steps: int, settings: list[str], seed: int = 0
) -> Records:
    """Return the records of a run.

    Raises:
        SystemExit: it has failed.
    """
    trainer = {
        "steps": steps,
        "global_batch": SEQUENCES,
        "micro_batch": SEQUENCES,
        "seed": seed,
        "model": {"layers": 2, "heads": 2, "width": 48, "context": CONTEXT},
        "optimizer": {"learning_rate": 3e-3, "min_learning_rate": 3e-4, "warmup_steps": 20},
    }
    node = "nodes: 1, accelerators_per_node: 1, accelerator: cpu"
    fast, *others = SPEEDS
    links = [f"{{between: [{fast}, {each}], bandwidth: 1Gbit/s, rtt: 10ms}}" for each in others]
    topology = TOPOLOGY.replace("SITES", ", ".join(f"{{name: {each}, {node}}}" for each in SPEEDS))
    topology = topology.replace("LINKS", ", ".join(links))
    sample_s = options.step_s / SEQUENCES * len(SPEEDS)
    arguments = ", ".join(f"{site}={sample_s / speed:.6f}" for site, speed in SPEEDS.items())
    script = Path(__file__).with_name("unlike_site.py")
    settings = [*settings, f"entrypoint={script}", f"arguments=[{arguments}]"]
    records = launched(topology, trainer, settings, within_s=20 + 20 * options.step_s * steps)
    if not records:
        raise SystemExit(1)
    return records


def _loss(records: Records) -> float:
    return fmean(
        row["values"][metrics.HELD_OUT_LOSS] for row in of_kind(records, metrics.EVALUATION)
    )


def _print(name: str, records: Records, alone: Mapping[str, float], more: str) -> None:
    found = speeds(records)
    of_all = sum(found.values()) / sum(alone.values())
    parts = _by_site({site: found[site] / alone[site] for site in SPEEDS}, ".3f")
    steps = [step for site in SPEEDS for step in _steps(records, site)]
    if num_passed := sum(step.get(metrics.ROUND_STEPS) == 0 for step in steps):
        more += f"   passed over {num_passed} times, which counts as if it had not been"
    print(f"{name:30} {of_all:.3f} of the sum   {parts}   {more}", flush=True)


def _by_site(values: Mapping[str, float], form: str) -> str:
    return "  ".join(f"{site} {value:{form}}" for site, value in values.items())
