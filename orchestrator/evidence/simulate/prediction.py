"""What closed forms say of a simulated run, for the same links. Pure.

- the trainer that ships, in every step: topology/timing/step_time.py, as for a benchmark;
- a model that the job describes: topology/planner/joint_step.py, as a plan has it;
- rounds: H c + P max(0, x - tau c), with c a simulated step that exchanges nothing and x the
  crossing of a fragment (topology/cost/local_sgd.py).
"""

from __future__ import annotations

import dataclasses
import math

from orchestrator.documents import Pair
from orchestrator.evidence.bench.prediction import by_themselves, predict, together
from orchestrator.evidence.bench.record import Predicted
from topology.codec_costs import usual_ratio
from topology.cost.local_sgd import local_round
from topology.planner.joint_step import JointModel
from topology.planner.placed_cuts import placed_timings
from topology.simulator.rounds import Rounds
from topology.simulator.run import SimulatedRun
from topology.timing.gateway_times import gateways_s_per_byte
from topology.timing.wire_time import crossing_times_s
from topology.traffic.wire_load import has_packets


def predicted(
    pair: Pair, run: SimulatedRun, alone: SimulatedRun, step_s: float
) -> Predicted | None:
    """Return what the closed form says of a run whose mean step was simulated to be `step_s`.

    None where there is none: results that come later than the next fragment leaves.

    Args:
        pair: its documents.
        run: of all sites together.
        alone: of sites that exchange nothing.
        step_s: after the warm-up.
    """
    rounds = None if run.work.rounds is None else run.work.rounds.rounds
    if rounds is not None:
        return _of_rounds(pair, run, alone, rounds, step_s)
    if run.work.inside:
        return _of_cuts(pair, run, step_s)
    job = dataclasses.replace(
        pair.job, trainer=dataclasses.replace(pair.job.trainer, compute="modelled")
    )
    emulator = "netns" if has_packets(pair.topology) else "relay"
    # As plans and the simulator itself have it: nothing was measured.
    return predict(job, pair.topology, emulator, usual_ratio(job.exchange.codec), step_s)


def _of_rounds(
    pair: Pair, run: SimulatedRun, alone: SimulatedRun, rounds: Rounds, step_s: float
) -> Predicted | None:
    if rounds.overlap_steps * rounds.fragments > rounds.steps:
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
    crossings_s = crossing_times_s(job, topology, raw_bytes, ratio)
    return max([*crossings_s.values(), *gateways_s])


def _of_cuts(pair: Pair, run: SimulatedRun, step_s: float) -> Predicted:
    timings = placed_timings(pair.job, pair.topology)
    each_s = [timing.alone_s for timing in timings]
    if run.work.schedule == "off":
        return by_themselves(each_s, step_s)
    model = JointModel(pair.job, pair.topology, run.work.plan)
    exchange_s, expected_s = model.exchange_s(timings), model.step_s(timings)
    return together(_tokens(run), each_s, exchange_s, expected_s, step_s)


def _tokens(run: SimulatedRun) -> list[float]:
    return [site.tokens for site in run.work.sites]
