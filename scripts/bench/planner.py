#!/usr/bin/env python3
"""Plan random topologies: how long the planned steps are, by the simulator, and how long it takes.

Usage: python scripts/bench_planner.py [--seeds 0:100] [--sites 3,4,5,6] [--against CHECKOUT]
       python scripts/bench_planner.py --wider 2 [--seeds 0:30]     # links become wider
       --help has the others

Each seed is a topology with links of unlike width, some of them missing, and a job of the trainer
that ships. With `--against`, another checkout of isthmus, with an environment of its own in .venv,
plans the same, and this one's simulator judges both.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from isthmus.topology.planner.plan import make_plan
from isthmus.topology.spec.compute import num_parameters
from isthmus.topology.spec.job import Job, LinkCodec, Model, NamedTree, Placed, Reduction
from isthmus.topology.spec.units import parse_size
from isthmus.topology.spec.world import Topology
from tests.fakes.plannable import a_job, a_random_world, randomly_widened

_STEPS, _SKIPPED = 12, 4
"""Steps that are simulated, and the first of them, which do not count."""
_WIDTHS = (64, 64, 256, 768)
_SMALLEST = Model(layers=2, heads=2, width=64, context=32)
_CODECS = (("fp32",), ("bf16",), ("fp32", "int8"), ("bf16", "int8"))


def chance_of(seed: int | str) -> random.Random:
    """Return chance that is the same for the same seed."""
    return random.Random(seed)  # noqa: S311 - not a secret


def a_case(seed: int, sites: list[int]) -> tuple[Job, Topology]:
    """Return a job and a topology: the same for the same seed."""
    chance = chance_of(f"case {seed}")
    num_sites = sites[seed % len(sites)]
    width = chance.choice(_WIDTHS)
    model = Model(layers=2 if width < 768 else 8, heads=2, width=width, context=32)
    times = num_parameters(model) / num_parameters(_SMALLEST)
    more = math.log10(times)
    topology = a_random_world(
        chance, num_sites, density=chance.choice((0.5, 0.8, 1.0)), rates=(4.7 + more, 7.3 + more)
    )
    places = tuple(
        dataclasses.replace(
            site,
            accelerator=dataclasses.replace(
                site.accelerator,
                peak_flops_per_s={
                    kind: times * each for kind, each in site.accelerator.peak_flops_per_s.items()
                },
            ),
        )
        for site in topology.sites
    )
    topology = dataclasses.replace(
        topology, sites=places, emulator=chance.choice(("relay", "netns"))
    )
    job = a_job(max(chance.choice((8, 16, 32)), 2 * num_sites), codecs=chance.choice(_CODECS))
    assert job.plan is not None
    wishes = dataclasses.replace(job.plan, sites=chance.choice(("auto", "all")))
    schedule = chance.choice(("overlap", "overlap", "serial"))
    return dataclasses.replace(
        job,
        exchange=dataclasses.replace(job.exchange, schedule=schedule),
        trainer=dataclasses.replace(job.trainer, model=model),
        plan=wishes,
    ), topology


def planned(seed: int, sites: list[int], num_wider: int) -> list[dict[str, Any]]:
    """Return the plan of a seed's topology, and of those that have wider links."""
    job, topology = a_case(seed, sites)
    chance, found = chance_of(seed), []
    for _ in range(num_wider + 1):
        begun_s = time.process_time()
        plan = make_plan(job, topology)
        found.append(
            {
                "decisions": plan["decisions"],
                "predicted_s": plan["predicted"]["step_s"],
                "cpu_s": time.process_time() - begun_s,
            }
        )
        topology = randomly_widened(chance, topology)
    return found


def judged_s(job: Job, topology: Topology, decisions: dict[str, Any]) -> float:
    """Return the step that decisions come to, by the simulator."""
    from isthmus.topology.documents.placement import placed
    from isthmus.topology.simulator.settings import Settings
    from isthmus.topology.simulator.simulation import simulate

    exchange, reduction = decisions["exchange"], decisions["reduction"]
    decided = dataclasses.replace(
        job,
        placement=tuple(
            Placed(site=each["site"], sequences=each["sequences"])
            for each in decisions["placement"]
        ),
        exchange=dataclasses.replace(
            job.exchange,
            codec=exchange["codec"],
            codecs=tuple(
                LinkCodec(between=tuple(each["between"]), codec=each["codec"])
                for each in exchange.get("codecs", ())
            ),
            chunk_bytes=parse_size(exchange["chunk"]),
            bucket_bytes=parse_size(exchange["bucket"]),
        ),
        reduction=Reduction(
            tree=reduction.get("tree", "auto"),
            trees=tuple(
                NamedTree(
                    root=each["root"],
                    parents=each["parents"],
                    weight=each["weight"],
                    down=each.get("down"),
                )
                for each in reduction.get("trees", ())
            ),
        ),
        trainer=dataclasses.replace(job.trainer, micro_batch=decisions["micro_batch"]),
    )
    here = placed(decided, topology)
    run = simulate(decided, here, Settings(steps=_STEPS))
    return max(run.step_s(site, _SKIPPED) for site in range(len(here.sites)))


def plans_of(checkout: Path, chosen: argparse.Namespace) -> dict[str, Any]:
    """Return what another checkout plans."""
    command = [
        str(checkout / ".venv/bin/python"),
        str(Path(__file__).resolve()),
        *("--seeds", chosen.seeds, "--sites", chosen.sites, "--wider", str(chosen.wider)),
        "--only-plan",
    ]
    environment = {**os.environ, "PYTHONPATH": str(checkout / ".src")}
    made = subprocess.run(
        command, cwd=checkout, env=environment, check=True, stdout=subprocess.PIPE
    )
    found: dict[str, Any] = json.loads(made.stdout)
    return found


def steps_of(seed: int, sites: list[int], plans: list[dict[str, Any]]) -> list[float]:
    """Return the judged steps of a seed's plans."""
    job, topology = a_case(seed, sites)
    chance, found = chance_of(seed), []
    for plan in plans:
        found.append(judged_s(job, topology, plan["decisions"]))
        topology = randomly_widened(chance, topology)
    return found


def told(name: str, ratios: list[float]) -> str:
    """Return what ratios say: how many times one is the other."""
    mean = math.exp(statistics.fmean(map(math.log, ratios)))
    longer = sum(each > 1.001 for each in ratios)
    return (
        f"{name}: {len(ratios)}, mean {mean - 1:+.2%}, median {statistics.median(ratios) - 1:+.2%}, "
        f"least {min(ratios) - 1:+.2%}, most {max(ratios) - 1:+.2%}, longer by 0.1 %: {longer}"
    )


def main() -> None:
    """Print what was found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seeds", default="0:100", help="FROM:UNTIL")
    parser.add_argument("--sites", default="3,4,5,6", help="how many; seeds take them in turn")
    parser.add_argument("--wider", type=int, default=0, help="times that links become wider")
    parser.add_argument("--against", type=Path, help="another checkout")
    parser.add_argument("--only-plan", action="store_true", help="print plans as JSON")
    chosen = parser.parse_args()
    sites = [int(each) for each in chosen.sites.split(",")]
    seeds = range(*map(int, chosen.seeds.split(":")))
    plans = {str(seed): planned(seed, sites, chosen.wider) for seed in seeds}
    if chosen.only_plan:
        json.dump(plans, sys.stdout)
        return
    steps_s = {seed: steps_of(int(seed), sites, each) for seed, each in plans.items()}
    every = [
        (plan, step_s)
        for seed in plans
        for plan, step_s in zip(plans[seed], steps_s[seed], strict=True)
    ]
    cpu_s = [plan["cpu_s"] for plan, _ in every]
    print(
        f"CPU seconds a plan: {statistics.fmean(cpu_s):.2f} in the mean, {max(cpu_s):.2f} at most"
    )
    print(told("simulated over predicted", [s / plan["predicted_s"] for plan, s in every]))
    if chosen.wider:
        pairs = [each for seed in steps_s.values() for each in itertools.pairwise(seed)]
        print(told("a wider link's step over the one before", [b / a for a, b in pairs]))
    if chosen.against:
        others = plans_of(chosen.against.resolve(), chosen)
        theirs = {seed: steps_of(int(seed), sites, each) for seed, each in others.items()}
        ratios = {
            f"{seed}.{place}": mine / other
            for seed in plans
            for place, (mine, other) in enumerate(zip(steps_s[seed], theirs[seed], strict=True))
        }
        print(told("steps over those of the other checkout", list(ratios.values())))
        worst = sorted(ratios, key=lambda each: -ratios[each])[:5]
        print("longest: " + ", ".join(f"seed {each} {ratios[each] - 1:+.2%}" for each in worst))
        cpu_s = [plan["cpu_s"] for each in others.values() for plan in each]
        print(f"the other's CPU seconds: {statistics.fmean(cpu_s):.2f}, {max(cpu_s):.2f} at most")


if __name__ == "__main__":
    main()
