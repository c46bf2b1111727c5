"""The plans that a choice was weighed against: the obvious ones, each with what it comes to."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

from topology.cost.compute import share
from topology.errors import ConfigError
from topology.job import Job, Reduction
from topology.model.reduction_plans import plan_reduction
from topology.model.step_model import StepModel
from topology.planner.choice import Choice, money
from topology.planner.search import Search
from topology.planner.shares import Split, busiest
from topology.planner.ways import Way, ways
from topology.world import Topology

FORMS = 4
"""Other reductions that are named, the fastest."""
OWN_SIZES = "the job's own chunk and bucket"
"""Of the same plan otherwise, where it decides others."""
Weighed = tuple[str, float, float]
"""What, seconds a step, US dollars a step."""


class Estimates(Protocol):
    """A search, as far as it weighs sets of sites."""

    topology: Topology

    def estimate(self, names: Iterable[str]) -> Choice | None:
        """Return a good choice for these sites; None where there is none."""

    def best_of(self, names: Iterable[str]) -> Choice | None:
        """Return the best choice in which just these sites take part; None where there is none."""


def alternatives(search: Search, choice: Choice) -> list[dict[str, Any]]:
    """Return other plans than the choice with their step time and cost, the fastest first."""
    found = [
        *other_sites(search, choice),
        *_other_codecs(search, choice),
        *_undecided(search, choice),
        *_naive(search),
    ]
    return ordered(found, _other_forms(search, choice))


def ordered(found: Iterable[Weighed], forms: Iterable[Weighed]) -> list[dict[str, Any]]:
    """Return what was weighed as plain values, fastest first; of other reductions the fastest."""
    best = sorted(forms, key=lambda each: each[1])[:FORMS]
    unique = {what: (step_s, usd) for what, step_s, usd in reversed([*found, *best])}
    return [
        {"what": what, "step_s": step_s, "usd_per_step": usd}
        for what, (step_s, usd) in sorted(unique.items(), key=lambda each: each[1])
    ]


def other_sites(search: Estimates, choice: Choice) -> Iterator[Weighed]:
    """All sites, and the best one by itself."""
    names = tuple(site.name for site in search.topology.sites)
    if choice.sites != names:
        everybody = search.estimate(names)
        if everybody is not None:
            yield "all sites", everybody.step_s, everybody.usd_per_step
    if len(choice.sites) > 1:
        alone = [each for each in (search.best_of([name]) for name in names) if each is not None]
        best = min(alone, key=lambda each: each.rank, default=None)
        if best is not None:
            yield f"{best.sites[0]} alone", best.step_s, best.usd_per_step


def _other_codecs(search: Search, choice: Choice) -> Iterator[Weighed]:
    for codec in search.codecs:
        if choice.coding.codecs != (codec,) and len(choice.sites) > 1:
            wishes = dataclasses.replace(search.wishes, codecs=(codec,))
            job = dataclasses.replace(search.job, plan=wishes)
            found = Search(job, search.topology).estimate(choice.sites)
            if found is not None:
                yield f"codec {codec}", found.step_s, found.usd_per_step


def _undecided(search: Search, choice: Choice) -> Iterator[Weighed]:
    """The same, with one decision left as it would be without a plan."""
    topology, job = choice.topology(search.topology), choice.job(search.job)
    even = even_split(search.job, topology)
    if even != choice.sequences:
        yield _weighed("equal sequences on all ranks", job, topology, choice.way, even)
    own = search.job.exchange
    sized = dataclasses.replace(
        job.exchange, chunk_bytes=own.chunk_bytes, bucket_bytes=own.bucket_bytes
    )
    if sized != job.exchange and len(choice.sites) > 1:
        same = dataclasses.replace(job, exchange=sized)
        yield _weighed(OWN_SIZES, same, topology, choice.way, choice.sequences)


def _other_forms(search: Search, choice: Choice) -> Iterator[Weighed]:
    """The same batch, codec and sizes over other reductions."""
    topology = choice.topology(search.topology)
    job = choice.job(search.job)
    for way in ways(search.job, topology, with_packings=False):
        if way.plan.trees != choice.way.plan.trees:
            yield _weighed(way.form, job, topology, way, choice.sequences)


def _naive(search: Search) -> Iterator[Weighed]:
    """Equal replicas at all sites, round a ring: what is done without a plan."""
    job, topology = search.job, search.topology
    num_ranks = topology.num_ranks
    if len(topology.sites) < 3 or job.trainer.global_batch < num_ranks:
        return
    try:
        plan = plan_reduction(dataclasses.replace(job, reduction=Reduction(tree="ring")), topology)
    except ConfigError:
        return
    ring = Way("ring", plan, Reduction(tree="ring"))
    yield _weighed("equal replicas, ring", job, topology, ring, even_split(job, topology))


def even_split(job: Job, topology: Topology) -> Split:
    """Return the sequences of each site where all ranks of all sites take alike."""
    found, first = [], 0
    for site in topology.sites:
        ranks = range(first, first + site.num_ranks)
        batch = job.trainer.global_batch
        found.append(sum(len(share(batch, topology.num_ranks, rank)) for rank in ranks))
        first += site.num_ranks
    return tuple(found)


def _weighed(what: str, job: Job, topology: Topology, way: Way, split: Split) -> Weighed:
    ranks = [site.num_ranks for site in topology.sites]
    step_s = StepModel(job, topology, way.plan).step_s(busiest(split, ranks))
    per_s, egress = money(job, topology, way)
    return what, step_s, per_s * step_s + egress
