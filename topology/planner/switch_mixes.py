"""Weighted trees for a run that goes on: the best of the menu, with all else as the run has it.

There is one spread of the batch, one codec for each link and one size of chunks. Where links start
slowly, bounds say less, and only the most promising mixes are looked at.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from topology.job import Job
from topology.model.wire_load import starts_slowly
from topology.plan_wishes import PlanWishes
from topology.planner.choice import Choice, Sizing, rank_of
from topology.planner.codings import Coding
from topology.planner.cut_mixes import CutMixes
from topology.planner.cuts import Timing
from topology.planner.mix_search import MixSearch
from topology.planner.sizings import Sizes
from topology.planner.ways import Way
from topology.trees.pairs import Pairs
from topology.trees.trees import ReductionPlan, Tree
from topology.world import Topology

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

_FEW = 9
"""Mixes that are looked at where bounds say little."""
_LESS = 1 - 1e-9
"""What a step has to be less than: sums in another order are no difference."""

Predict = Callable[[ReductionPlan], float]
"""What the step of a reduction takes, in seconds; infinite if it does not come into question."""


def best_cut_mix(
    job: Job,
    topology: Topology,
    trees: tuple[Tree, ...],
    timings: Sequence[Timing],
    begun: tuple[ReductionPlan, float],
    predict: Predict,
) -> tuple[ReductionPlan, float]:
    """Return the best mix for a job that describes its model, and its step; or what it began with.

    Args:
        job: As the run executes it.
        topology: Of the sites that take part: three or four.
        trees: That may be mixed.
        timings: Of the cut of each site.
        begun: The best reduction that is known, and its step.
        predict: Says what others take.
    """
    best, best_s = begun
    split = tuple(1 for _ in timings)
    fronts = [{1: [timing]} for timing in timings]
    mixes = CutMixes(job, topology, trees, fronts, [split], [0.0] * len(trees))

    def longest(egress_n: Floats) -> Floats:
        return np.full(len(egress_n), best_s * _LESS)

    if starts_slowly(topology):
        found = iter(mixes.few(longest, _FEW))
    else:
        found = (plan for plan, _ in mixes.promising(longest, deeper=True))
    for plan in found:
        step_s = predict(plan)
        if step_s < best_s:
            best, best_s = plan, step_s
    return best, best_s


def best_mix(
    job: Job,
    topology: Topology,
    pairs: Pairs,
    trees: tuple[Tree, ...],
    sequences: Sequence[int],
    begun: tuple[ReductionPlan, float],
    predict: Predict,
) -> tuple[ReductionPlan, float]:
    """Return the same for the trainer that ships.

    Args:
        job: As the run executes it.
        topology: Of the sites that take part: three to five.
        pairs: Of them.
        trees: That may be mixed.
        sequences: Of the busiest rank of each site.
        begun: The best reduction that is known, and its step.
        predict: Says what others take.
    """
    wishes = dataclasses.replace(job.plan or PlanWishes(), objective="throughput")
    job = dataclasses.replace(job, plan=wishes)
    exchange = job.exchange
    coding = Coding(exchange.codec, exchange.codecs, 0.0)
    sizing = Sizing(chunk_bytes=exchange.chunk_bytes, bucket_bytes=exchange.bucket_bytes)

    def choice(plan: ReductionPlan, step_s: float) -> Choice:
        return Choice(
            sites=pairs.names,
            sequences=tuple(sequences),
            way=Way(plan.why, plan, job.reduction),
            coding=coding,
            sizing=sizing,
            micro_batch=job.trainer.micro_batch,
            step_s=step_s,
            usd_per_step=0.0,
            rank=rank_of("throughput", step_s, 0.0, len(sequences), coding.loss, 0, 0, 0),
        )

    def try_one(
        best: Choice | None, _least_s: float, plan: ReductionPlan, _coding: int, _sizing: Sizing
    ) -> Choice | None:
        step_s = predict(plan)
        return best if best is not None and best.step_s <= step_s else choice(plan, step_s)

    search = MixSearch(job, topology, pairs, [coding], [sequences], are_all=True, trees=trees)
    found = search.best(choice(*begun), Sizes(job, topology, only=(sizing,)), try_one)
    return found.way.plan, found.step_s
