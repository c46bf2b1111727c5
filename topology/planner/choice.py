"""One way to run a job, what it takes, and which of two is better."""

from __future__ import annotations

import dataclasses
from typing import TypeVar

from topology.codec_costs import usual_ratio
from topology.cost.money import accelerators_usd, egress_usd
from topology.documents.placement import restricted
from topology.job import Exchange, Job, Placed
from topology.model.buckets import gradient_bytes
from topology.model.step_model import StepModel
from topology.model.tree_times import bytes_of_hops
from topology.model.wire_load import wire_load
from topology.planner.codings import Coding
from topology.planner.shares import Split
from topology.planner.ways import Way
from topology.world import Topology

Rank = tuple[float, ...]
"""The lower the better, entry by entry."""
DIGITS = 10
"""Of times and costs that are compared: sums in another order are no difference."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sizing:
    """How the exchange is cut up."""

    chunk_bytes: int
    bucket_bytes: int

    def of(self, exchange: Exchange) -> Exchange:
        """Return an exchange that is cut up so."""
        return dataclasses.replace(
            exchange, chunk_bytes=self.chunk_bytes, bucket_bytes=self.bucket_bytes
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Everything that a plan decides, and what it comes to."""

    sites: tuple[str, ...]
    """That take part, in the topology's order."""
    sequences: Split
    """Of each."""
    way: Way
    coding: Coding
    sizing: Sizing
    micro_batch: int
    """Of the shipped trainer, at all sites."""
    step_s: float
    usd_per_step: float
    rank: Rank

    def job(self, job: Job) -> Job:
        """Return `job` with these decisions in it."""
        placement = tuple(
            Placed(site=site, sequences=count)
            for site, count in zip(self.sites, self.sequences, strict=True)
        )
        return dataclasses.replace(
            job,
            exchange=self.sizing.of(self.coding.of(job.exchange)),
            reduction=self.way.reduction,
            placement=placement,
            trainer=dataclasses.replace(job.trainer, micro_batch=self.micro_batch),
        )

    def topology(self, topology: Topology) -> Topology:
        """Return the part of a topology that takes part."""
        return restricted(topology, self.sites)

    def model(self, job: Job, topology: Topology) -> StepModel:
        """Return the model of this choice's steps; `topology` is described in full."""
        return StepModel(self.job(job), self.topology(topology), self.way.plan)


AnyChoice = TypeVar("AnyChoice", bound=Choice)
"""A choice, or one that decides more."""


def money(job: Job, topology: Topology, way: Way) -> tuple[float, float]:
    """Return US dollars a second of all accelerators, and those of one step's egress.

    Args:
        job: With the exchange that is meant.
        topology: Of the sites that take part.
        way: Of reduction.
    """
    per_s = accelerators_usd(topology, {site.name: site.num_ranks for site in topology.sites}, 1.0)
    if way.plan.num_sites == 1:
        return per_s, 0.0
    ratio = usual_ratio(job.exchange.codec)
    load = wire_load(job, topology, way.plan, gradient_bytes(job), ratio)
    names = [site.name for site in topology.sites]
    sent_bytes = {
        (names[source], names[target]): num_bytes
        for (source, target), num_bytes in bytes_of_hops(way.plan, load).items()
    }
    return per_s, egress_usd(topology, sent_bytes)


def rank_of(objective: str, step_s: float, usd_per_step: float, *rest: float) -> Rank:
    """Return what orders choices: by the objective, then by time, then by `rest`."""
    if objective == "cost":
        return (_rounded(usd_per_step), _rounded(step_s), *rest)
    return (_rounded(step_s), *rest)


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")


def better(one: AnyChoice | None, other: AnyChoice | None) -> AnyChoice | None:
    """Return the better of two, as far as there are any."""
    if one is None or other is None:
        return one or other
    return min(one, other, key=by_rank)


def by_rank(choice: Choice) -> Rank:
    """Return what orders choices."""
    return choice.rank
