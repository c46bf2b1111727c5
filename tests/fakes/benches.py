"""Benchmarks as bench.json keeps them, made by hand: two sites, swept over RTT and bandwidth."""

from __future__ import annotations

import dataclasses
import itertools

from isthmus.orchestrator.evidence.bench.scaling import result_of
from isthmus.orchestrator.evidence.bench.sweep_settings import parse_sweeps
from isthmus.orchestrator.evidence.record.bench_record import (
    Bench,
    LinkBytes,
    Measured,
    Question,
    Run,
    Setting,
    Source,
    Split,
    Sweep,
)
from isthmus.topology.documents.load import load_topology
from isthmus.topology.spec.job import Exchange, Job, Model, Trainer
from isthmus.topology.spec.world import Topology

SITES = ("oregon", "virginia")
SWEEPS = (
    Sweep(path="links.*.rtt", values=("5ms", "20ms", "80ms")),
    Sweep(path="links.*.bandwidth", values=("50Mbit/s", "200Mbit/s")),
)
REPEATS = 3
COMPUTE_S = 0.4
TOKENS = 8192.0
"""A step, of each site."""
WIRE_BYTES = 2_000_000.0
"""A step, in each direction."""


def a_topology(rtt: str = "20ms", bandwidth: str = "200Mbit/s") -> Topology:
    """Return two sites with one accelerator each, and a link of 0.05 USD a GB between them."""
    return load_topology(
        f"""
version: 1
name: two
accelerators: {{chip: {{peak: {{bf16: 50GFLOP/s}}, memory: 4GiB, mfu: 0.5}}}}
sites:
  - {{name: {SITES[0]}, nodes: 1, accelerators_per_node: 1, accelerator: chip, location: {{lat: 45.6, lon: -121.2}}}}
  - {{name: {SITES[1]}, like: {SITES[0]}, location: {{lat: 39.0, lon: -77.5}}}}
links:
  - {{between: [{", ".join(SITES)}], bandwidth: {bandwidth}, rtt: {rtt}, egress: 0.05USD/GB}}
emulate: true
emulator: relay
""",
        "topology.yaml",
    )


def a_question(*sweeps: str, **changes: object) -> Question:
    """Return a question as `bench JOB` asks it, but for fewer steps and repeats, and `changes`."""
    question = Question(
        config_hash="",
        overrides=(),
        compute="modelled",
        schedule=None,
        emulator=None,
        warmup_steps=2,
        steps=4,
        repeats=2,
        sweeps=parse_sweeps(sweeps),
    )
    return dataclasses.replace(question, **changes)  # type: ignore[arg-type]


def a_job(schedule: str = "serial", codec: str = "fp32") -> Job:
    """Return a job of modelled compute."""
    return Job(
        name="bench",
        topology="topology.yaml",
        exchange=Exchange(schedule=schedule, codec=codec),
        trainer=Trainer(
            compute="modelled", global_batch=64, model=Model(layers=2, width=128, context=128)
        ),
    )


def measured(
    *, sites: int = 2, step_s: float = 0.5, compute_s: float = COMPUTE_S, wire_bytes: float = 0.0
) -> Measured:
    """Return a run's figures: what is not computed was exposed."""
    return Measured(
        tokens_per_s=TOKENS * sites / step_s,
        tokens_per_step=TOKENS * sites,
        step_s=step_s,
        split=Split(
            compute_s=compute_s,
            intra_s=0.0,
            exposed_inter_s=step_s - compute_s,
            wait_s=0.0,
            hidden_inter_s=0.01,
            encode_s=0.002,
            decode_s=0.003,
        ),
        links=tuple(
            LinkBytes(source=source, target=target, bytes_per_step=wire_bytes)
            for source, target in (SITES, SITES[::-1])
            if sites > 1
        ),
        wire_ratio=1.0 if sites > 1 else None,
    )


def a_run(repeat: int, site: str | None = None, figures: Measured | None = None) -> Run:
    """Return a run that succeeded; of all sites unless one is named."""
    name = f"{repeat}-{site or 'all'}"
    return Run(
        kind="solo" if site else "all",
        site=site,
        repeat=repeat,
        run_id=name,
        folder=f"runs/{name}",
        emulator="none" if site else "relay",
        wall_s=30.0,
        measured=figures
        or (measured(sites=1, step_s=COMPUTE_S) if site else measured(wire_bytes=WIRE_BYTES)),
    )


def a_setting(rtt: str, bandwidth: str, repeats: int = REPEATS) -> Setting:
    """Return a finished point of the sweep: the step is compute, transfer, half a round trip."""
    topology, job = a_topology(rtt, bandwidth), a_job()
    link = topology.links[0]
    step_s = COMPUTE_S + WIRE_BYTES / link.bytes_per_s + link.rtt_s / 2
    runs = tuple(
        run
        for repeat in range(repeats)
        for run in (
            *(a_run(repeat, site) for site in SITES),
            # Repeats differ by a thousandth, so that intervals have a width.
            a_run(
                repeat,
                None,
                measured(step_s=step_s * (1 + repeat / 1000), wire_bytes=WIRE_BYTES),
            ),
        )
    )
    return Setting(
        overrides={"links.*.rtt": rtt, "links.*.bandwidth": bandwidth},
        runs=runs,
        result=result_of(job, topology, runs),
    )


def a_bench() -> Bench:
    """Return a finished benchmark of three RTTs and two bandwidths, three repeats each."""
    points = itertools.product(*(sweep.values for sweep in SWEEPS))
    return Bench(
        name="rtt-and-bandwidth",
        job=Source(name="bench", path="/jobs/job.yaml"),
        topology=Source(name="two", path="/jobs/topology.yaml"),
        question=a_question(
            schedule="serial",
            emulator="relay",
            warmup_steps=5,
            steps=20,
            repeats=REPEATS,
            sweeps=SWEEPS,
        ),
        settings=tuple(a_setting(rtt, bandwidth) for rtt, bandwidth in points),
    )


def an_interrupted_bench() -> Bench:
    """Return the same after its first setting: the others have no runs and no result."""
    bench = a_bench()
    first, *others = bench.settings
    unmeasured = [dataclasses.replace(each, runs=(), result=None) for each in others]
    return dataclasses.replace(bench, settings=(first, *unmeasured))
