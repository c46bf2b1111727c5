"""A choice: one way to run a job, its step and cost, and which of two choices is better."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from topology.codec_costs import RELATIVE_ERRORS, usual_ratio
from topology.cost.money import accelerators_usd, egress_usd
from topology.documents.placement import restricted
from topology.job import CODECS, Exchange, Job, LinkCodec, Placed
from topology.model.buckets import gradient_bytes
from topology.model.site_timing import SiteTiming
from topology.model.step_model import StepModel
from topology.model.tree_times import bytes_of_hops
from topology.model.wire_load import Wire
from topology.planner.cuts import parallel_of
from topology.planner.reductions import Candidate
from topology.trees.pairs import Edge, Pairs, edge
from topology.trees.trees import ReductionPlan
from topology.world import Topology

Split = tuple[int, ...]
"""The sequences of a step that each site takes."""
Rank = tuple[float, ...]
"""The figures that order choices, entry by entry: the lower the better."""
_DIGITS = 10
"""Significant digits of times and costs that are compared: sums in another order are no
difference."""
_TOLD = 3
"""The most links whose codecs are named to people."""
_EVERY_CODING_MAX = 81
"""The most combinations of trees' codecs that are all tried."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sizing:
    """The sizes into which the exchange is cut."""

    chunk_bytes: int
    bucket_bytes: int

    def of(self, exchange: Exchange) -> Exchange:
        """Return an exchange that is cut up so."""
        return dataclasses.replace(
            exchange, chunk_bytes=self.chunk_bytes, bucket_bytes=self.bucket_bytes
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Coding:
    """The codecs of all links, for one reduction."""

    codec: str
    """The codec of the links that are not listed."""
    links: tuple[LinkCodec, ...]
    loss: float
    """The mean square of the chunks' relative errors: what decides between equally fast ones."""

    @property
    def codecs(self) -> tuple[str, ...]:
        """The codecs that there are, each once, the usual one first."""
        return tuple(dict.fromkeys((self.codec, *(each.codec for each in self.links))))

    def __str__(self) -> str:
        """Return it for people: `fp32, and int8 between a and b`."""
        told = [f"{each.codec} between {' and '.join(each.between)}" for each in self.links]
        more = [f"others on {len(told) - _TOLD} more links"] if len(told) > _TOLD else []
        return ", and ".join((self.codec, *told[:_TOLD], *more))

    def of(self, exchange: Exchange) -> Exchange:
        """Return an exchange with these codecs."""
        return dataclasses.replace(exchange, codec=self.codec, codecs=self.links)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A choice: everything that a plan decides, and its step and cost."""

    sites: tuple[str, ...]
    """The names of the sites that take part, in the topology's order."""
    sequences: Split
    """The sequences of each site."""
    timings: tuple[SiteTiming, ...]
    """The timing of each site, with its cut where the job describes a model."""
    candidate: Candidate
    coding: Coding
    sizing: Sizing
    micro_batch: int
    """Sequences of the shipped trainer's micro-batch, at all sites."""
    step_s: float
    """Seconds of a step: as simulated if it has been, else by the step model."""
    modelled_s: float
    """Seconds of a step by the step model."""
    usd_per_step: float
    rank: Rank

    def job(self, job: Job) -> Job:
        """Return `job` with these decisions in it."""
        placement = tuple(
            Placed(
                site=site,
                sequences=count,
                parallel=None if timing.cut is None else parallel_of(timing.cut.degrees),
            )
            for site, count, timing in zip(self.sites, self.sequences, self.timings, strict=True)
        )
        return dataclasses.replace(
            job,
            exchange=self.sizing.of(self.coding.of(job.exchange)),
            reduction=self.candidate.reduction,
            placement=placement,
            trainer=dataclasses.replace(job.trainer, micro_batch=self.micro_batch),
        )

    def topology(self, topology: Topology) -> Topology:
        """Return the part of a topology that takes part."""
        return restricted(topology, self.sites)

    def model(self, job: Job, topology: Topology) -> StepModel:
        """Return the model of this choice's steps; `topology` is described in full."""
        return StepModel(self.job(job), self.topology(topology), self.candidate.plan)

    def lasting(self, objective: str, step_s: float, usd_per_s: float) -> Choice:
        """Return the same with another step.

        Args:
            objective: Of the plan.
            step_s: Seconds, from a better source than the step model.
            usd_per_s: Of all accelerators.
        """
        usd = self.usd_per_step + usd_per_s * (step_s - self.step_s)
        rest = self.rank[2 if objective == "cost" else 1 :]
        return dataclasses.replace(
            self, step_s=step_s, usd_per_step=usd, rank=rank_of(objective, step_s, usd, *rest)
        )


def usd_per_s(topology: Topology) -> float:
    """Return US dollars a second of all accelerators of a topology."""
    return accelerators_usd(topology, {site.name: site.num_ranks for site in topology.sites}, 1.0)


def egress_usd_per_step(job: Job, topology: Topology, plan: ReductionPlan) -> float:
    """Return the US dollars that the bytes of a step cost.

    Args:
        job: With the exchange that is meant.
        topology: Of the sites that take part.
        plan: Of reduction.
    """
    if plan.num_sites == 1:
        return 0.0
    load = Wire(job, topology, plan, usual_ratio(job.exchange.codec)).load(gradient_bytes(job))
    names = [site.name for site in topology.sites]
    sent_bytes = {
        (names[source], names[target]): num_bytes
        for (source, target), num_bytes in bytes_of_hops(plan, load).items()
    }
    return egress_usd(topology, sent_bytes)


def rank_of(objective: str, step_s: float, usd_per_step: float, *rest: float) -> Rank:
    """Return what orders choices: by the objective, then by time, then by `rest`."""
    if objective == "cost":
        return (_rounded(usd_per_step), _rounded(step_s), *rest)
    return (_rounded(step_s), *rest)


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")


def better(one: Choice | None, other: Choice | None) -> Choice | None:
    """Return the better of two, as far as there are any."""
    if one is None or other is None:
        return one or other
    return min(one, other, key=by_rank)


def by_rank(choice: Choice) -> Rank:
    """Return what orders choices."""
    return choice.rank


def one_for_all(codecs: Sequence[str], exchange: Exchange) -> list[Coding]:
    """Return each permitted codec for all links, but for those that the job itself gives one."""
    return [Coding(each, exchange.codecs, RELATIVE_ERRORS[each] ** 2) for each in codecs]


def by_link(
    plan: ReductionPlan, pairs: Pairs, codecs: Sequence[str], exchange: Exchange
) -> Iterator[Coding]:
    """Yield codecs of single links.

    A tree's chunks travel as the smallest codec of its links (topology/trees/link_codecs.py), so
    several trees may have codecs of their own, and lose less where a larger one is as fast. None
    where the job gives links codecs itself: it is asked for no others.

    Args:
        plan: Over the sites.
        pairs: Of them.
        codecs: That are permitted.
        exchange: Of the job.
    """
    count = len(plan.trees)
    if exchange.codecs or count < 2:
        return
    ordered = sorted(codecs, key=_size)
    if len(codecs) ** count <= _EVERY_CODING_MAX:
        found: Iterable[tuple[str, ...]] = itertools.product(ordered, repeat=count)
    else:
        # The trees with the narrowest links have the smaller of two, the others the larger.
        widths = [min(pairs.rate(*hop) for hop in tree.parent.items()) for tree in plan.trees]
        found = (
            tuple(large if width >= limit else small for width in widths)
            for limit in sorted(set(widths))[1:]
            for small, large in itertools.combinations(ordered, 2)
        )
    for each in found:
        coding = _coding(plan, pairs.names, each)
        if coding is not None:
            yield coding


def _coding(plan: ReductionPlan, names: Sequence[str], codecs: Sequence[str]) -> Coding | None:
    """Return the links' codecs that give each tree its own; None: all are alike, or none do.

    Each link has the largest that crosses it, and `exchange.codec` is that of most links.
    """
    largest: dict[Edge, str] = {}
    for tree, codec in zip(plan.trees, codecs, strict=True):
        for hop in tree.parent.items():
            largest[edge(*hop)] = max(largest.get(edge(*hop), codec), codec, key=_size)
    smallest = [
        min((largest[edge(*hop)] for hop in tree.parent.items()), key=_size) for tree in plan.trees
    ]
    if len(set(codecs)) == 1 or smallest != list(codecs):
        return None
    counts = Counter(largest.values())
    usual = max(counts, key=lambda codec: (counts[codec], _size(codec)))
    links = tuple(
        LinkCodec(between=(names[one], names[other]), codec=codec)
        for (one, other), codec in sorted(largest.items())
        if codec != usual
    )
    total = sum(tree.weight for tree in plan.trees)
    loss = math.fsum(
        tree.weight / total * RELATIVE_ERRORS[codec] ** 2
        for tree, codec in zip(plan.trees, codecs, strict=True)
    )
    return Coding(usual, links, loss)


def _size(codec: str) -> tuple[float, int]:
    """Return what orders codecs by their bytes, as `link_codecs.smallest` does."""
    return usual_ratio(codec), CODECS.index(codec)
