"""A simulated run's figures as a benchmark's, and tables of what has no place there. Pure.

What closed forms say of it, for the same links:

- the trainer that ships, in every step: topology/model/step_model.py, as for a benchmark;
- a model that the job describes: the same, with each site's cut as a plan has it;
- rounds: H c + P max(0, x - tau c), with c a simulated step that exchanges nothing and x the
  crossing of a fragment (topology/cost/local_sgd.py).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

from isthmus.orchestrator.documents import Pair
from isthmus.orchestrator.evidence.bench.bench_tables import Section, swept_columns
from isthmus.orchestrator.evidence.bench.experiment import RUNS
from isthmus.orchestrator.evidence.bench.scaling import (
    by_themselves,
    predict,
    result_of,
    together,
)
from isthmus.orchestrator.evidence.bench.sweep_settings import Point
from isthmus.orchestrator.evidence.record.bench_record import (
    Predicted,
    Result,
    Run,
)
from isthmus.orchestrator.evidence.record.measured_steps import measure
from isthmus.orchestrator.evidence.simulate.simulated_run import records
from isthmus.orchestrator.evidence.view import formats
from isthmus.orchestrator.evidence.view.fitting_table import Column, figures
from isthmus.topology.cost.local_sgd import local_round
from isthmus.topology.model.step_model import StepModel, exchange_time_s
from isthmus.topology.planner.cuts import in_words, placed_timings
from isthmus.topology.simulator.settings import Rounds
from isthmus.topology.simulator.simulation import SimulatedRun
from isthmus.topology.simulator.step_work import Inside
from isthmus.topology.spec.job import Job
from isthmus.topology.spec.world import Site
from isthmus.topology.trees.codec_costs import usual_ratio
from isthmus.topology.trees.wire_load import gateways_s_per_byte, has_packets

SIMULATED = "simulated"
"""The name that a simulated result has in the place of an emulator."""


def setting_runs(
    run: SimulatedRun, alone: SimulatedRun, run_id: str, wall_s: float, warmup: int
) -> tuple[Run, ...]:
    """Return the run of each site by itself, and that of all.

    `alone` is the run of sites that exchange nothing. Simulating took `wall_s`.
    """

    def made(of: SimulatedRun, site: Site | None) -> Run:
        topology = of.work.topology
        if site is not None:
            topology = dataclasses.replace(topology, sites=(site,), links=())
        measured = measure(
            records(of, run_id, 0.0),
            topology,
            warmup_steps=warmup,
            steps=len(of.steps) - warmup,
        )
        return Run(
            kind="solo" if site else "all",
            site=site.name if site else None,
            repeat=0,
            run_id=f"{run_id}-{site.name}" if site else run_id,
            folder=f"{RUNS}/{run_id}",
            emulator=SIMULATED,
            wall_s=0.0 if site else wall_s,
            measured=measured,
        )

    return (*(made(alone, site) for site in alone.work.topology.sites), made(run, None))


def result(pair: Pair, runs: Sequence[Run], run: SimulatedRun, alone: SimulatedRun) -> Result:
    """Return a setting's figures; `predicted` is of the closed form, for the same links."""
    found = result_of(_modelled(pair.job), pair.topology, runs)
    assert found is not None, "all runs are there"
    return dataclasses.replace(found, predicted=predicted(pair, run, alone, found.step_s.mean))


def _modelled(job: Job) -> Job:
    return dataclasses.replace(job, trainer=dataclasses.replace(job.trainer, compute="modelled"))


def predicted(
    pair: Pair, run: SimulatedRun, alone: SimulatedRun, step_s: float
) -> Predicted | None:
    """Return what the closed form says of a run whose mean step was simulated to be `step_s`.

    None where there is none: results that come later than the next fragment leaves, rounds that
    wait for nobody, and steps that apply the gradients of the step before.

    `alone` is the run of sites that exchange nothing.
    """
    rounds = None if run.work.rounds is None else run.work.rounds.rounds
    if rounds is not None:
        return _of_rounds(pair, run, alone, rounds, step_s)
    if run.work.is_delayed:
        return None
    if run.work.inside:
        return _of_cuts(pair, run, step_s)
    job = _modelled(pair.job)
    emulator = "netns" if has_packets(pair.topology) else "relay"
    # As plans and the simulator itself have it: nothing was measured.
    return predict(job, pair.topology, emulator, usual_ratio(job.exchange.codec), step_s)


def _of_rounds(
    pair: Pair, run: SimulatedRun, alone: SimulatedRun, rounds: Rounds, step_s: float
) -> Predicted | None:
    if rounds.overlap_steps * rounds.fragments > rounds.steps or rounds.min_steps is not None:
        return None
    each_s = [site.alone_s(1.0, is_serial=False)[1] for site in alone.work.sites]
    compute_s, fragment_s = max(each_s), _fragment_s(pair, run, rounds)
    found = local_round(rounds.steps, compute_s, fragment_s, rounds.fragments, rounds.overlap_steps)
    return together(_tokens(run), each_s, rounds.fragments * fragment_s, found.step_s, step_s)


def _fragment_s(pair: Pair, run: SimulatedRun, rounds: Rounds) -> float:
    """Return the crossing of a fragment: no gateway is faster than it can be."""
    job, topology, work = pair.job, pair.topology, run.work
    raw_bytes = math.ceil(sum(each.raw_bytes for each in work.buckets) / rounds.fragments)
    ratio = usual_ratio(job.exchange.codec)
    per_byte_s = gateways_s_per_byte(job, topology, work.plan, ratio)
    gateways_s = [
        raw_bytes * each_s / site.gateway.num_gateways
        for each_s, site in zip(per_byte_s, work.sites, strict=True)
        if site.gateway.num_gateways
    ]
    return max(exchange_time_s(job, topology, raw_bytes, ratio), *gateways_s)


def _of_cuts(pair: Pair, run: SimulatedRun, step_s: float) -> Predicted:
    timings = placed_timings(pair.job, pair.topology)
    each_s = [timing.alone_s for timing in timings]
    if run.work.schedule == "off":
        return by_themselves(each_s, step_s)
    model = StepModel(pair.job, pair.topology, run.work.plan)
    exchange_s, expected_s = model.exchange_s(timings), model.step_s(timings)
    return together(_tokens(run), each_s, exchange_s, expected_s, step_s)


def _tokens(run: SimulatedRun) -> list[float]:
    return [site.tokens for site in run.work.sites]


Rows = Sequence[tuple[Point, SimulatedRun]]


def further_tables(made: Rows, *, fails: bool) -> Iterator[Section]:
    """Yield what is to be printed after a benchmark's tables."""
    cut = [(point, inside) for point, run in made for inside in run.work.inside]
    if cut:
        yield Section("inside each site, without the others", _inside(cut), list(_cuts(made)))
    if fails:
        yield Section("failures", _goodput(made))


def inside_data(inside: Inside) -> dict[str, Any]:
    """Return how a site cuts the model, and what its step is without the others, in seconds."""
    return {
        "site": inside.site,
        "cut": in_words(inside.degrees),
        "micro_batches": inside.step.num_micro_batches,
        "pipeline_s": inside.step.pipeline_s,
        "bubble": inside.bubble,
        "stages_busy_s": inside.stages_busy_s,
        "reduction_s": inside.step.gradients.busy_s,
        "after_s": inside.step.parameters.exposed_s + inside.step.optimizer_s,
    }


def _inside(rows: Sequence[tuple[Point, Inside]]) -> list[Column]:
    sites = [inside for _, inside in rows]

    def bubble(inside: Inside) -> float | None:
        return inside.bubble if inside.degrees.pipeline > 1 else None

    def seconds(heading: str, key: str) -> Column:
        return figures(heading, sites, lambda each: inside_data(each)[key], formats.duration)

    return [
        *swept_columns([point for point, _ in rows]),
        figures("site", sites, lambda each: each.site, formats.words, is_text=True),
        figures("micro-batches", sites, lambda each: each.step.num_micro_batches),
        seconds("passes", "pipeline_s"),
        figures("bubble", sites, bubble, formats.percent),
        seconds("reduction", "reduction_s"),
        seconds("after it", "after_s"),
    ]


def _cuts(made: Rows) -> Iterator[str]:
    """Yield how sites cut the model, each cut of a setting once."""
    for point, run in made:
        sites: dict[str, list[str]] = {}
        for inside in run.work.inside:
            sites.setdefault(in_words(inside.degrees), []).append(formats.words(inside.site))
        setting = "".join(f"{path}={value}, " for path, value in point.overrides.items())
        yield from (f"{setting}{', '.join(names)}: {cut}" for cut, names in sites.items())


def _goodput(made: Rows) -> list[Column]:
    runs = [run for _, run in made]
    return [
        *swept_columns([point for point, _ in made]),
        figures("wall time", runs, lambda run: run.wall_s, formats.duration),
        figures("failures", runs, lambda run: len(run.outages)),
        figures("steps lost", runs, lambda run: sum(each.lost_steps for each in run.outages)),
        figures("goodput", runs, lambda run: run.goodput, formats.percent),
    ]
