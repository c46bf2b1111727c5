"""The reduction of a running job, chosen again over links as they were measured meanwhile. Pure.

Who trains what stays, and so do codecs, chunks and buckets: trees and their weights are all that can
change between two rounds. A tree's codec follows from its links (topology/link_codecs.py), so only trees
come into question whose chunks travel as some tree's do already; where all have one codec, that is
what every chunk keeps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from topology.codec_costs import usual_ratio
from topology.compute import site_shares
from topology.job import Job, Reduction
from topology.link_codecs import plan_codecs
from topology.planner.choice import Rank, money, rank_of
from topology.planner.parallel_search import ParallelSearch
from topology.planner.search import Search
from topology.planner.ways import Way, ways
from topology.reduction_plans import JUDGED_BYTES, plan_reduction
from topology.step_time import StepModel, gradient_bytes
from topology.tree_times import plan_times_s
from topology.trees import ReductionPlan
from topology.wire_load import chunk_bytes_of, wire_load
from topology.world import Link, Topology


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredLink:
    """What a direction between two sites was measured to do; None: nothing new is known."""

    bytes_per_s: float | None = None
    """That a run gets: no share is applied to it."""
    rtt_s: float | None = None


Measured = Mapping[tuple[str, str], MeasuredLink]
"""By (source, target), names of sites. Links that are missing are as described."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Replanned:
    """The best trees over the measured links, beside those that the job has now."""

    reduction: Reduction
    """To put into the job: gather, or explicit trees."""
    form: str
    """For people: `star at oregon`."""
    is_other: bool
    """Other trees or weights than the job's present ones."""
    step_s: float
    """A step with them, over the measured links."""
    kept_s: float
    """A step with the present ones, over the measured links."""
    assumed_s: float
    """A step with the present ones over the links as the topology had them: what was planned."""
    is_exchange: bool
    """The three figures are of an exchange by itself, for nothing is known of what a script computes."""

    @property
    def gain(self) -> float:
        """The share of a step that the other trees save; less than 0 where they only save money."""
        return 1 - self.step_s / self.kept_s


def replan_reduction(job: Job, topology: Topology, measured: Measured) -> Replanned | None:
    """Return the best reduction for a running job over links as they were measured.

    Takes seconds for more than eight sites: call it in a process of its own. Arguments and result can
    be pickled.

    Args:
        job: Of the run, with its placement and its present reduction, as `load_run(...).job`. A
            reduction that the user named is the caller's to respect: it looks like any other here.
        topology: Of the sites that take part, as the run began with it: `load_run(...).topology`.
        measured: Of links between these sites; others do not count.

    Returns:
        None where nothing crosses, so that there is nothing to choose.
    """
    if len(topology.sites) == 1 or job.exchange.schedule == "off":
        return None
    # Chunks stay as the run has cut them, whatever is measured.
    chunk_bytes = chunk_bytes_of(job, topology)
    job = dataclasses.replace(
        job, exchange=dataclasses.replace(job.exchange, chunk_bytes=chunk_bytes)
    )
    present = plan_reduction(job, topology)
    now = with_measured(topology, measured)
    codecs = set(plan_codecs(job, topology, present))
    free = dataclasses.replace(job, reduction=Reduction())
    kept = Way("as it is", present, job.reduction)
    best, best_rank = kept, _rank(job, now, kept, 0)
    for place, way in enumerate(ways(free, now), start=1):
        if set(plan_codecs(job, now, way.plan)) <= codecs:
            rank = _rank(job, now, way, place)
            if rank < best_rank:
                best, best_rank = way, rank
    return Replanned(
        reduction=best.reduction,
        form=best.form,
        is_other=best is not kept,
        step_s=_step_s(job, now, best.plan),
        kept_s=_step_s(job, now, present),
        assumed_s=_step_s(job, topology, present),
        is_exchange=job.entrypoint is not None,
    )


def fresh_step_s(job: Job, described: Topology, measured: Measured) -> float | None:
    """Return what a step of a plan made anew would take, were the job launched again over these links.

    Takes as long as `isthmus plan`.

    Args:
        job: As its file has it, without what a plan decided.
        described: All sites.
        measured: Of any links.

    Returns:
        Seconds; None where there is no plan, or what a script computes is not known.
    """
    now = with_measured(described, measured)
    if job.workload is None:
        found = None if job.entrypoint is not None else Search(job, now).best()
        return None if found is None else found.step_s
    cut = ParallelSearch(job, now).best()
    return None if cut is None else cut.step_s


def with_measured(topology: Topology, measured: Measured) -> Topology:
    """Return a topology whose links have these figures, and remember what they were before."""
    links = tuple(
        _measured(link, measured.get((link.source, link.target), MeasuredLink()))
        for link in topology.links
    )
    return dataclasses.replace(topology, links=links)


def _measured(link: Link, figures: MeasuredLink) -> Link:
    if figures.bytes_per_s is not None:
        link = dataclasses.replace(
            link,
            bytes_per_s=figures.bytes_per_s,
            bandwidth_origin="measured",
            described_bytes_per_s=link.bytes_per_s,
        )
    if figures.rtt_s is not None:
        link = dataclasses.replace(
            link, rtt_s=figures.rtt_s, rtt_origin="measured", described_rtt_s=link.rtt_s
        )
    return link


def _rank(job: Job, topology: Topology, way: Way, place: int) -> Rank:
    """Return what orders reductions: the plan's objective; of equal ones the present, then the simplest."""
    step_s = _step_s(job, topology, way.plan)
    per_s, egress = money(job, topology, way)
    objective = "throughput" if job.plan is None else job.plan.objective
    return rank_of(objective, step_s, per_s * step_s + egress, place)


def _step_s(job: Job, topology: Topology, plan: ReductionPlan) -> float:
    if job.entrypoint is None:
        sequences = [max(site_shares(job, topology, site)) for site in topology.sites]
        return StepModel(job, topology, plan).step_s(sequences)
    raw_bytes = JUDGED_BYTES if job.workload is None else gradient_bytes(job)
    load = wire_load(job, topology, plan, raw_bytes, usual_ratio(job.exchange.codec))
    return max(plan_times_s(plan, topology, load).values())
