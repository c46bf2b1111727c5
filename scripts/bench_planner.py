#!/usr/bin/env python3
"""Plan random topologies: how long steps and planning take, whether wider links make steps longer.

Usage: python scripts/bench_planner.py [--sites 4] [--seeds 0:60] [--wider 3] [--model 64]
           [--codecs fp32] [--sizes one] [--job trainer] [--of plan] [--out FILE] [--against FILE];
       --help has the others

Each seed is a topology whose links become wider `--wider` times, at random, one after another. Two
planners are compared by `--out` with the one and `--against` with the other. `--model` is a width,
or `any`: some of up to 1.6 GB of gradients, with links and sites that are as many times as fast.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import random
import statistics
import time
from pathlib import Path

from tests.fakes.described import described_job, few_degrees, sites_of_nodes
from tests.fakes.plannable import (
    SMALL,
    a_job,
    a_job_of_one_size,
    a_random_world,
    randomly_widened,
)
from topology.cost.compute import num_parameters
from topology.job import Job, Model, Reduction
from topology.model.wire_load import chunk_bytes_of
from topology.planner.parallel_search import ParallelSearch
from topology.planner.search import Search
from topology.planner.switch import best_switch
from topology.world import Topology

SAME = 1 + 1e-9
WIDTHS = (64, 256, 768, 2048)
RATES = ((4.5, 7.0), (5.5, 8.0))
"""Powers of ten, bytes per second, for the smallest model."""


def chance_of(seed: int | str) -> random.Random:
    """Return chance that is the same for the same seed."""
    return random.Random(seed)  # noqa: S311 - not a secret


def a_case(seed: int, chosen: argparse.Namespace) -> tuple[Job, Topology]:
    """Return a job and a topology: the same for the same seed and arguments."""
    chance, choice = chance_of(seed), chance_of(f"case {seed}")
    width = choice.choice(WIDTHS) if chosen.model == "any" else int(chosen.model)
    rates = choice.choice(RATES) if chosen.model == "any" else RATES[0]
    codec = choice.choice(chosen.codecs.split("|"))
    sizes = choice.choice(chosen.sizes.split("|"))
    model = Model(layers=2 if width < 768 else 8, heads=2, width=width, context=SMALL.context)
    times = num_parameters(model) / num_parameters(SMALL)
    more = math.log10(times)
    topology = a_random_world(
        chance, chosen.sites, density=chosen.density, rates=(rates[0] + more, rates[1] + more)
    )
    sites = tuple(
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
    made = a_job_of_one_size if sizes == "one" else a_job
    job = made(chosen.batch, codecs=tuple(codec.split(",")), sites=chosen.take)
    trainer = dataclasses.replace(job.trainer, model=model)
    return dataclasses.replace(job, trainer=trainer), dataclasses.replace(
        topology, sites=sites, emulator=chosen.emulator
    )


def a_described_case(seed: int, chosen: argparse.Namespace) -> tuple[Job, Topology]:
    """Return a job that describes its model, and sites of four or eight accelerators."""
    chance, choice = chance_of(seed), chance_of(f"case {seed}")
    links = [
        (one, other, 10 ** chance.uniform(7.5, 10.5), chance.uniform(0.001, 0.1))
        for one, other in itertools.combinations(range(chosen.sites), 2)
    ]
    topology = sites_of_nodes(
        [chance.choice((1, 1, 2)) for _ in range(chosen.sites)],
        links,
        speeds=[chance.choice((1e14, 5e13)) for _ in range(chosen.sites)],
    )
    job = described_job(
        few_degrees(global_batch=chosen.batch),
        codecs=tuple(choice.choice(chosen.codecs.split("|")).split(",")),
        sites=chosen.take,
        gateways=choice.choice(("unlimited", "measured")),
    )
    return job, dataclasses.replace(topology, emulator=chosen.emulator)


def plan_s(job: Job, topology: Topology) -> float:
    """Return the step that is planned."""
    search = Search if job.workload is None else ParallelSearch
    choice = search(job, topology).best()
    if choice is None:
        raise SystemExit("the batch is too small for these sites")
    return choice.step_s


def steps_of_wider_links(seed: int, chosen: argparse.Namespace) -> tuple[list[float], float]:
    """Return the steps planned for links that become wider, and the CPU seconds of a plan."""
    described, chance = chosen.job == "described", chance_of(seed)
    job, topology = (a_described_case if described else a_case)(seed, chosen)
    if chosen.of == "switch":
        exchange = dataclasses.replace(job.exchange, codec=chosen.codecs.split("|")[0])
        star = Reduction(tree="star", hub=topology.sites[0].name)
        job = dataclasses.replace(job, exchange=exchange, reduction=star)
    cut_bytes, steps_s = chunk_bytes_of(job, topology), []
    begun_s = time.process_time()
    for _ in range(chosen.wider + 1):
        if chosen.of == "switch":
            steps_s.append(best_switch(job, topology, cut_bytes).after_s)
        else:
            steps_s.append(plan_s(job, topology))
        topology = randomly_widened(chance, topology)
    return steps_s, (time.process_time() - begun_s) / len(steps_s)


def told_against(found: dict[str, list[float]], against: dict[str, list[float]]) -> str:
    """Return how these steps compare with others."""
    ratios = sorted(
        step_s / other_s
        for seed in sorted(found.keys() & against.keys())
        for step_s, other_s in zip(found[seed], against[seed], strict=True)
    )
    longer = [each for each in ratios if each > SAME]
    shorter = [each for each in ratios if each < 1 / SAME]
    mean = math.exp(statistics.fmean(map(math.log, ratios)))
    told = f"against the other, {len(ratios)} steps are {mean:.5f} times as long in the mean"
    for name, some in (("longer", longer), ("shorter", shorter)):
        if some:
            median, most = statistics.median(some), max(some, key=lambda each: abs(each - 1))
            told += f"; {len(some)} {name}, by {median - 1:+.2%} in the median, {most - 1:+.2%}"
    return told


def parsed() -> argparse.Namespace:
    """Return the arguments."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--sites", type=int, default=4)
    parser.add_argument("--seeds", default="0:60", help="FROM:UNTIL")
    parser.add_argument("--wider", type=int, default=3)
    parser.add_argument("--model", default=str(SMALL.width))
    parser.add_argument("--codecs", default="fp32", help="permitted; a|b,c: one or the other")
    parser.add_argument("--sizes", default="one", help="of chunks and buckets: one, all, one|all")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--take", default="all", choices=("all", "auto"), help="sites")
    parser.add_argument("--density", type=float, default=1.0, help="of links")
    parser.add_argument("--emulator", default="relay", choices=("relay", "netns"))
    parser.add_argument("--job", default="trainer", choices=("trainer", "described"))
    parser.add_argument("--of", default="plan", choices=("plan", "switch"))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--against", type=Path)
    return parser.parse_args()


def main() -> None:
    """Print what was found."""
    chosen = parsed()
    first, until = map(int, chosen.seeds.split(":"))
    found: dict[str, list[float]] = {}
    cpu_s, longer, num_pairs = [], [], 0
    for seed in range(first, until):
        found[str(seed)], each_s = steps_of_wider_links(seed, chosen)
        cpu_s.append(each_s)
        steps_s = found[str(seed)]
        num_pairs += len(steps_s) - 1
        for place, step_s in enumerate(steps_s[1:]):
            if step_s > steps_s[place] * SAME:
                longer.append(step_s / steps_s[place] - 1)
                print(f"seed {seed}, wider {place + 1}: {longer[-1]:+.4%}", flush=True)
    print(
        f"{len(longer)} of {num_pairs} wider links gave a slower plan; most: {max(longer, default=0.0):.2%}"
    )
    print(
        f"CPU seconds a plan: {statistics.fmean(cpu_s):.3f} in the mean, {max(cpu_s):.3f} at most"
    )
    if chosen.out:
        chosen.out.write_text(json.dumps(found))
    if chosen.against:
        print(told_against(found, json.loads(chosen.against.read_text())))


if __name__ == "__main__":
    main()
