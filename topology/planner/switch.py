"""What a run that goes on could change: the reduction alone, all else staying as it is.

A tree's codec follows from the links that it crosses (topology/trees/link_codecs.py), at each site
by the same rule.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass

from topology.cost.compute import site_shares
from topology.documents.placement import placed
from topology.job import Job, Reduction
from topology.model.reduction_plans import plan_reduction
from topology.model.step_model import StepModel
from topology.model.wire_load import starts_slowly
from topology.planner.cut_mixes import MIXED_SITES
from topology.planner.joint_step import JointModel
from topology.planner.mix_links import alone
from topology.planner.placed_cuts import placed_timings
from topology.planner.plan import make_plan
from topology.planner.switch_mixes import best_cut_mix, best_mix
from topology.planner.tree_mixes import spanning_trees
from topology.planner.ways import Way, named, ways
from topology.trees.pairs import pairs_of
from topology.trees.trees import ReductionPlan
from topology.world import Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class Switch:
    """The best reduction for a run, beside the one that it has."""

    form: str
    """For people: `star at oregon`."""
    reduction: Reduction
    """As a job writes it; the run's own, if nothing is better."""
    before_s: float
    """Predicted seconds of a step with the reduction that the run has."""
    after_s: float
    """And with this one; the same, if nothing is better."""


def best_switch(
    job: Job,
    topology: Topology,
    cut_bytes: int,
    allows: Callable[[Reduction], bool] = lambda _: True,
) -> Switch:
    """Return the reduction with which a run's step would be shortest.

    Args:
        job: As the run executes it, its reduction included.
        topology: Described in full, as its links are now.
        cut_bytes: Of the run's chunks, in float32: they are cut as they were when it began,
            whatever its links have become.
        allows: Whether a reduction, other than the run's own, comes into question at all.

    Raises:
        ConfigError: nothing can be said of its steps.
    """
    exchange = dataclasses.replace(job.exchange, chunk_bytes=cut_bytes, is_cut=True)
    job = dataclasses.replace(job, exchange=exchange)
    here = placed(job, topology)
    predict = _steps(job, here)
    present = plan_reduction(job, here)
    before_s = predict(present)
    names = [site.name for site in here.sites]
    best, best_s = Way(present.why, present, named(present, names)), before_s
    is_mixed = len(names) in MIXED_SITES
    free = dataclasses.replace(job, reduction=Reduction())
    for way in ways(free, here, by_rates=not is_mixed or starts_slowly(here)):
        if not allows(way.reduction):
            continue
        step_s = predict(way.plan)
        if step_s < best_s:
            best, best_s = way, step_s
    if is_mixed:
        best, best_s = _mixed(free, here, (best, best_s), predict, allows)
    return Switch(form=best.form, reduction=best.reduction, before_s=before_s, after_s=best_s)


def _mixed(
    job: Job,
    topology: Topology,
    begun: tuple[Way, float],
    predict: Callable[[ReductionPlan], float],
    allows: Callable[[Reduction], bool],
) -> tuple[Way, float]:
    """Return the best of the menu's weighted trees and its step, or what it began with."""
    pairs = pairs_of(topology)
    best, best_s = begun

    def is_allowed(plan: ReductionPlan) -> bool:
        return allows(named(plan, pairs.names))

    def predict_allowed(plan: ReductionPlan) -> float:
        return predict(plan) if is_allowed(plan) else math.inf

    every = spanning_trees(pairs)
    # Where each tree by itself leaves every chunk its codec, so do all of them together.
    trees = tuple(
        tree for tree, plan in zip(every, alone(topology, every), strict=True) if is_allowed(plan)
    )
    if len(trees) < 2:
        return begun
    known = (best.plan, best_s)
    if job.workload is not None:
        timings = placed_timings(job, topology)
        plan, step_s = best_cut_mix(job, topology, trees, timings, known, predict_allowed)
    else:
        sequences = _sequences(job, topology)
        plan, step_s = best_mix(job, topology, pairs, trees, sequences, known, predict_allowed)
    if plan is best.plan:
        return begun
    return Way(plan.why, plan, named(plan, pairs.names)), step_s


def relaunched_s(job: Job, topology: Topology) -> float:
    """Return the predicted seconds of a step if the job were planned anew, in all respects.

    Raises:
        ConfigError: nothing can be planned.
    """
    free = dataclasses.replace(job, placement=(), reduction=Reduction())
    step_s: float = make_plan(free, topology)["predicted"]["step_s"]
    return step_s


def _steps(job: Job, topology: Topology) -> Callable[[ReductionPlan], float]:
    """Return what predicts the step of a reduction."""
    if job.workload is not None:
        timings = placed_timings(job, topology)
        return lambda plan: JointModel(job, topology, plan).step_s(timings)
    sequences = _sequences(job, topology)
    return lambda plan: StepModel(job, topology, plan).step_s(sequences)


def _sequences(job: Job, topology: Topology) -> list[int]:
    """Return the sequences of the busiest rank of each site."""
    return [max(site_shares(job, topology, site)) for site in topology.sites]
