"""A choice: one way to run a job, its step and cost, and which of two choices is better."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator, Sequence

from isthmus.topology.cost.money import accelerators_usd
from isthmus.topology.documents.placement import restricted
from isthmus.topology.model.site_timing import SiteTiming
from isthmus.topology.model.step_model import StepModel
from isthmus.topology.planner.cuts import parallel_of
from isthmus.topology.planner.reductions import Candidate
from isthmus.topology.planner.spreads import Split
from isthmus.topology.spec.codec_names import CODECS
from isthmus.topology.spec.job import Exchange, Job, LinkCodec, Placed
from isthmus.topology.spec.reduction_plan import ReductionPlan, shape_of
from isthmus.topology.spec.world import Topology
from isthmus.topology.trees.codec_costs import RELATIVE_ERRORS, usual_ratio
from isthmus.topology.trees.pairs import Edge, edge

Rank = tuple[float, ...]
"""The figures that order choices, entry by entry: the lower the better."""
_DIGITS = 10
"""Significant digits of compared times and costs, so that rounding does not matter."""
AS_GOOD = 1 + 5e-4
"""Ratio of steps or costs up to which two choices are equal, and simplicity or lower loss
decides."""
_OVER_BUDGET = 1e12
"""Times by which a choice is over its budget, this is its rank: behind all that are within."""
_TOLD = 3
"""Number of links whose codecs are named to people."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sizing:
    """Bucket and chunk sizes of the exchange."""

    chunk_bytes: int
    bucket_bytes: int

    def of(self, exchange: Exchange) -> Exchange:
        """Return an exchange with these sizes."""
        return dataclasses.replace(
            exchange, chunk_bytes=self.chunk_bytes, bucket_bytes=self.bucket_bytes
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Coding:
    """The codecs of all links, for one reduction."""

    codec: str
    """The codec of the links that are not listed."""
    links: tuple[LinkCodec, ...] = ()

    @property
    def codecs(self) -> tuple[str, ...]:
        """The distinct codecs, the usual one first."""
        return tuple(dict.fromkeys((self.codec, *(each.codec for each in self.links))))

    def __str__(self) -> str:
        """Return the codecs in words: `fp32, and int8 between a and b`."""
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
    egress_usd_per_step: float = 0.0
    """US dollars of what a step sends; part of `usd_per_step`."""
    budget_usd_per_s: float | None = None
    """What egress may cost; None: anything."""

    @property
    def is_over_budget(self) -> bool:
        """Whether its egress costs more than it may."""
        return over_budget(self.egress_usd_per_step, self.step_s, self.budget_usd_per_s) > 1

    @property
    def decisions(self) -> object:
        """The decisions, by which choices are equal or not."""
        cuts = tuple(None if each.cut is None else each.cut.degrees for each in self.timings)
        trees = tuple((*shape_of(tree), tree.weight) for tree in self.candidate.plan.trees)
        how = (self.coding, self.sizing, self.micro_batch, cuts)
        return (self.sites, self.sequences, trees, *how)

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
        """Return the topology of the sites that take part."""
        return restricted(topology, self.sites)

    def model(self, job: Job, topology: Topology) -> StepModel:
        """Return the step model of this choice; `topology` has all sites."""
        return StepModel(self.job(job), self.topology(topology), self.candidate.plan)

    def with_step(self, objective: str, step_s: float, usd_per_s: float) -> Choice:
        """Return this choice with another time of its step.

        Args:
            objective: The plan's objective.
            step_s: Seconds, from a better source than the step model.
            usd_per_s: Price of all accelerators.
        """
        known_s = self.step_s if self.step_s < math.inf else 0.0
        usd = self.usd_per_step + usd_per_s * (step_s - known_s)
        rest = self.rank[2 if objective == "cost" else 1 :]
        over = over_budget(self.egress_usd_per_step, step_s, self.budget_usd_per_s)
        return dataclasses.replace(
            self,
            step_s=step_s,
            usd_per_step=usd,
            rank=rank_of(objective, step_s, usd, *rest, over=over),
        )


def usd_per_s(topology: Topology) -> float:
    """Return US dollars a second of all accelerators of a topology."""
    return accelerators_usd(topology, {site.name: site.num_ranks for site in topology.sites}, 1.0)


def over_budget(egress_usd_per_step: float, step_s: float, budget_usd_per_s: float | None) -> float:
    """Return how many times the budget egress costs; 1 where it is within, or there is none."""
    if budget_usd_per_s is None or not 0 < step_s < math.inf:
        return 1.0
    over = egress_usd_per_step / step_s / budget_usd_per_s
    return over if over > 1 + 10**-_DIGITS else 1.0


def rank_of(
    objective: str, step_s: float, usd_per_step: float, *rest: float, over: float = 1.0
) -> Rank:
    """Return the sort key of a choice: by the objective, then time, then `rest`.

    What is `over` its budget comes behind all that is within, the cheapest a second first.
    """
    if over > 1:
        rest = (step_s, *rest) if objective == "cost" else rest
        return (_rounded(_OVER_BUDGET * over), *rest)
    if objective == "cost":
        return (_rounded(usd_per_step), _rounded(step_s), *rest)
    return (_rounded(step_s), *rest)


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")


def by_rank(choice: Choice) -> Rank:
    """Return the sort key of a choice."""
    return choice.rank


def is_clearly_better(one: Choice, other: Choice) -> bool:
    """Return whether the first of two is better by the objective, by more than rounding."""
    return one.rank[0] * AS_GOOD < other.rank[0]


def is_better(one: Choice, other: Choice) -> bool:
    """Return whether the first of two is clearly better, or as good and simpler."""
    if is_clearly_better(one, other):
        return True
    return one.rank[0] <= other.rank[0] * AS_GOOD and one.rank[1:] < other.rank[1:]


def loss(codecs: Sequence[str], plan: ReductionPlan) -> float:
    """Return the mean square of the chunks' relative errors; `codecs` are those of the trees."""
    weights = [tree.weight for tree in plan.trees] or [1]
    squares = (
        weight * RELATIVE_ERRORS[codec] ** 2 for weight, codec in zip(weights, codecs, strict=True)
    )
    return math.fsum(squares) / sum(weights)


def recoded(
    now: Sequence[str], plan: ReductionPlan, names: Sequence[str], codecs: Sequence[str]
) -> Iterator[Coding]:
    """Yield codecs of links with which one tree's codec changes.

    A tree's chunks travel as the smallest codec of its links (topology/trees/link_codecs.py), so
    several trees may have codecs of their own, and lose less where a larger one is as fast.

    Args:
        now: The codec of each tree.
        plan: Over the sites.
        names: Names of the sites.
        codecs: Permitted codecs.
    """
    for place, usual in enumerate(now if len(plan.trees) > 1 else ()):
        for codec in codecs:
            coding = _coding(plan, names, (*now[:place], codec, *now[place + 1 :]))
            if codec != usual and coding is not None:
                yield coding


def _coding(plan: ReductionPlan, names: Sequence[str], codecs: Sequence[str]) -> Coding | None:
    """Return the links' codecs that give each tree its own; None: none do.

    Each link has the largest that crosses it, and `exchange.codec` is that of most links.
    """
    largest: dict[Edge, str] = {}
    for tree, codec in enumerate(codecs):
        for hop in plan.hops(tree):
            largest[edge(*hop)] = max(largest.get(edge(*hop), codec), codec, key=_size)
    smallest = [
        min((largest[edge(*hop)] for hop in plan.hops(tree)), key=_size)
        for tree in range(len(plan.trees))
    ]
    if smallest != list(codecs):
        return None
    counts = Counter(largest.values())
    usual = max(counts, key=lambda codec: (counts[codec], _size(codec)))
    links = tuple(
        LinkCodec(between=(names[one], names[other]), codec=codec)
        for (one, other), codec in sorted(largest.items())
        if codec != usual
    )
    return Coding(usual, links)


def _size(codec: str) -> tuple[float, int]:
    """Return the sort key of codecs by size, as in `link_codecs.smallest`."""
    return usual_ratio(codec), CODECS.index(codec)
