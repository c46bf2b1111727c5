"""Plan meshes and random topologies: how long it takes, and how long planned steps are.

First come the CPU seconds of `isthmus plan` for meshes of sites, and what they may be at most. Then
random topologies are planned, and the steps simulated. Each seed is a topology with links of unlike
width, some of them missing, and a job of the trainer that ships. With `--against`, another checkout
of isthmus, with an environment of its own in .venv, plans the same, and this one's simulator judges
both.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from isthmus.protos.own_processes import own_command
from isthmus.topology.planner.plan import make_plan
from isthmus.topology.presets.templates import job_yaml, topology_yaml
from isthmus.topology.spec.compute import num_parameters
from isthmus.topology.spec.geography import great_circle_km
from isthmus.topology.spec.job import Job, Model
from isthmus.topology.spec.world import Location, Topology
from tests.fakes.plannable import a_job, a_random_world, randomly_widened

STEPS, SKIPPED = 12, 4
"""Steps that are simulated, and the first of them, which do not count."""
_WIDTHS = (64, 64, 256, 768)
_SMALLEST = Model(layers=2, heads=2, width=64, context=32)
JOB = "version: 1\nname: j\ntopology: t.yaml\ntrainer: {compute: modelled}"
MOST_CPU_S = {2: 2.0, 16: 10.0, 64: 60.0}
"""CPU seconds that a plan may take at most, by the number of meshed sites."""
_NEAR_KM = 9000
"""Distance up to which a mesh's links are wide: half of all."""
ROOT = Path(__file__).resolve().parents[2]
_CODECS = (("fp32",), ("bf16",), ("fp32", "int8"), ("bf16", "int8"))


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what may be asked for."""
    parser.add_argument("--seeds", default="0:100", help="FROM:UNTIL")
    parser.add_argument("--sites", default="3,4,5,6", help="how many; seeds take them in turn")
    parser.add_argument("--wider", type=int, default=0, help="times that links become wider")
    parser.add_argument("--against", type=Path, help="another checkout")
    parser.add_argument("--meshed", default="2,16,64", help="how many sites; empty: no meshes")
    parser.add_argument("--only-plan", action="store_true", help="print plans as JSON")


def run(options: argparse.Namespace) -> None:
    """Print how plans do, and how they do against those of the other checkout."""
    for num_sites in () if options.only_plan else map(int, filter(None, options.meshed.split(","))):
        show_mesh(num_sites)
    sites = [int(number) for number in options.sites.split(",")]
    seeds = range(*map(int, options.seeds.split(":")))
    if not seeds:
        return
    plans = {str(seed): planned(seed, sites, options.wider) for seed in seeds}
    if options.only_plan:
        json.dump(plans, sys.stdout)
        return
    steps_s = {seed: steps_of(int(seed), sites, its_plans) for seed, its_plans in plans.items()}
    show_cpu("", plans)
    predicted_s = [plan["predicted_s"] for seed in plans for plan in plans[seed]]
    simulated_s = list(itertools.chain(*steps_s.values()))
    show("simulated over predicted", simulated_s, predicted_s)
    if options.wider:
        pairs = [pair for of_seed in steps_s.values() for pair in itertools.pairwise(of_seed)]
        narrower_s, wider_s = zip(*pairs, strict=True)
        show("a wider link's step over the one before", wider_s, narrower_s)
    if options.against:
        others = plans_of(options.against.resolve(), options)
        theirs_s = [
            step_s
            for seed, its_plans in others.items()
            for step_s in steps_of(int(seed), sites, its_plans)
        ]
        show("steps over those of the other checkout", simulated_s, theirs_s)
        names = [f"{seed}.{index}" for seed in plans for index in range(len(plans[seed]))]
        ratios = zip(names, simulated_s, theirs_s, strict=True)
        worst = sorted(((mine / other - 1, name) for name, mine, other in ratios), reverse=True)
        print("longest: " + ", ".join(f"seed {name} {ratio:+.2%}" for ratio, name in worst[:5]))
        show_cpu("the other's ", others)


def show_mesh(num_sites: int) -> None:
    """Print the CPU seconds of `isthmus plan` for sites that are all joined."""
    preset = {2: "two-sites-1000km", 16: "mesh-16"}.get(num_sites)
    with tempfile.TemporaryDirectory() as scratch:
        topology, job = Path(scratch, "topology.yaml"), Path(scratch, "job.yaml")
        topology.write_text(topology_yaml(preset) if preset else a_mesh(num_sites))
        job.write_text(job_yaml(preset or "mesh-16"))
        more = [] if preset else ["--set", f"trainer.global_batch={128 * num_sites}"]
        command = own_command("isthmus.orchestrator.cli.main", "plan", str(job), "--json", *more)
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        made = subprocess.run(command, check=True, stdout=subprocess.PIPE)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    step_s = json.loads(made.stdout)["data"]["plan"]["predicted"]["step_s"]
    most_s = MOST_CPU_S.get(num_sites, math.inf)
    bar = f"at most {most_s:g}" + (": MISSED" if cpu_s > most_s else "")
    print(f"{num_sites} meshed sites: {cpu_s:.1f} CPU seconds, {bar}; a step of {step_s:.4g} s")


def a_mesh(num_sites: int) -> str:
    """Return a topology like the preset mesh-16, of sites all over the Earth, in YAML."""
    chance = chance_of(f"mesh {num_sites}")
    places = [
        Location(lat=round(chance.uniform(-55, 65), 2), lon=round(chance.uniform(-180, 180), 2))
        for _ in range(num_sites)
    ]
    hardware = (
        "nodes: 8, accelerators_per_node: 8, accelerator: h100-sxm, "
        "fabric: {node: 450GB/s, cluster: 400Gbit/s, latency: 8us}, wan: {nic: 100Gbit/s}"
    )
    lines = ["version: 1", f"name: mesh-{num_sites}", "sites:"]
    for site, place in enumerate(places):
        where = f"location: {{lat: {place.lat}, lon: {place.lon}}}"
        lines.append(f"  - {{name: s{site}, {where}, {'like: s0' if site else hardware}}}")
    lines.append("links:")
    for one, other in itertools.combinations(range(num_sites), 2):
        is_near = great_circle_km(places[one], places[other]) < _NEAR_KM
        figures = f"bandwidth: {40 if is_near else 10}Gbit/s, egress: 0.02USD/GB"
        lines.append(f"  - {{between: [s{one}, s{other}], {figures}}}")
    return "\n".join(lines)


def show(name: str, some_s: Sequence[float], others_s: Sequence[float]) -> None:
    """Print how many times as long as others some steps are."""
    ratios = [some / other for some, other in zip(some_s, others_s, strict=True)]
    mean = math.exp(statistics.fmean(map(math.log, ratios)))
    longer = sum(ratio > 1.001 for ratio in ratios)
    print(
        f"{name}: {len(ratios)}, mean {mean - 1:+.2%}, median {statistics.median(ratios) - 1:+.2%}, "
        f"least {min(ratios) - 1:+.2%}, most {max(ratios) - 1:+.2%}, longer by 0.1 %: {longer}"
    )


def show_cpu(whose: str, plans: dict[str, Any]) -> None:
    """Print what plans took."""
    cpu_s = [plan["cpu_s"] for of_seed in plans.values() for plan in of_seed]
    print(
        f"{whose}CPU seconds a plan: {statistics.fmean(cpu_s):.2f} in the mean, {max(cpu_s):.2f} at most"
    )


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
    # Not above: another checkout's isthmus, which only plans, may have these elsewhere.
    from isthmus.topology.documents.load import load_job
    from isthmus.topology.documents.placement import placed
    from isthmus.topology.simulator.settings import Settings
    from isthmus.topology.simulator.simulation import simulate
    from isthmus.topology.spec.plan_decisions import overrides_of

    batch = f"trainer.global_batch={job.trainer.global_batch}"
    decided = load_job(JOB, "job.yaml", [batch, *overrides_of(decisions)])
    job = dataclasses.replace(
        job,
        placement=decided.placement,
        exchange=dataclasses.replace(decided.exchange, schedule=job.exchange.schedule),
        reduction=decided.reduction,
        trainer=dataclasses.replace(job.trainer, micro_batch=decided.trainer.micro_batch),
    )
    here = placed(job, topology)
    run = simulate(job, here, Settings(steps=STEPS))
    return max(run.step_s(site, SKIPPED) for site in range(len(here.sites)))


def plans_of(checkout: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Return what another checkout plans, for the same seeds: these scripts run on its modules."""
    command = [
        *(str(checkout / ".venv/bin/python"), "-m", "scripts.bench", "planner", "--only-plan"),
        *("--seeds", options.seeds, "--sites", options.sites, "--wider", str(options.wider)),
    ]
    environment = {**os.environ, "PYTHONPATH": str(checkout / ".src")}
    made = subprocess.run(command, cwd=ROOT, env=environment, check=True, stdout=subprocess.PIPE)
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
