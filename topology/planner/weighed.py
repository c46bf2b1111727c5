"""The alternatives that a plan was weighed against: other sites, codecs, reductions, wider links.

A plan must not be slower than one that it prints itself. So whatever the step model takes for
faster than the plan is simulated, too, and becomes the plan if it is faster. Steps of the others
are the step model's, times what the simulator made of the chosen plan's.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

from topology.cost.compute import site_shares
from topology.errors import ConfigError
from topology.job import Job, Reduction
from topology.model.reduction_plans import plan_reduction
from topology.model.site_timing import SiteTiming
from topology.model.step_model import StepModel
from topology.planner.choice import Choice, Sizing, Split, egress_usd_per_step, usd_per_s
from topology.planner.connections import first_connections
from topology.planner.reductions import Candidate, menu
from topology.planner.search import Search
from topology.trees.link_codecs import plan_codecs
from topology.trees.trees import ReductionPlan
from topology.world import Link, Topology

FORMS = 4
"""The number of other reductions that are named, the fastest."""
OWN_SIZES = "the job's own chunk and bucket"
"""The name of the same plan with the job's own sizes, where the plan decides others."""
GBIT_BYTES_PER_S = 125e6
_TURNS = 3
"""The most times that an alternative may become the plan."""
_FASTER = 1 - 1e-3
"""Ratio of a modelled step to the plan's from which on an alternative counts as no faster."""


class Weighed:
    """A choice, and the others that it was weighed against."""

    def __init__(self, search: Search, best: Choice) -> None:
        """Weigh a choice; take what turns out to be better instead."""
        self.search = search
        for _ in range(_TURNS):
            self.choice = best
            self._others = [*self._other_plans(best)]
            self.by_site = {
                site.name: self._otherwise(best, site.name) for site in search.topology.sites
            }
            permitted = [each for _, each in self._others]
            if self.is_free:
                permitted += [each for each in self.by_site.values() if each is not None]
            permitted = [
                each for each in permitted if each.rank[0] < _FASTER * self._modelled_rank(best)
            ]
            best = min(map(search.judged, permitted), key=lambda each: each.rank[0], default=best)
            if best.rank[0] >= self.choice.rank[0]:
                break

    @property
    def is_free(self) -> bool:
        """Whether sites may be left out."""
        return self.search.wishes.sites != "all" and not self.search.job.placement

    def told_s(self, other: Choice) -> float:
        """Return an other plan's step for people: in the same measure as the chosen one's."""
        is_simulated = self.choice.step_s != self.choice.modelled_s
        if is_simulated and other.modelled_s < _FASTER * self.choice.modelled_s:
            return max(self.search.judged(other).step_s, self.choice.step_s)
        return other.modelled_s * self.choice.step_s / self.choice.modelled_s

    def _modelled_rank(self, choice: Choice) -> float:
        if self.search.wishes.objective == "cost":
            return choice.rank[0]
        return choice.modelled_s

    @functools.cached_property
    def alternatives(self) -> list[dict[str, Any]]:
        """Return other plans with their step time and cost, the fastest first."""
        found: dict[str, Choice] = {}
        forms = sorted(self._other_forms(), key=lambda each: each[1].modelled_s)[:FORMS]
        for what, other in (*self._of_sites(), *self._others, *self._not_permitted(), *forms):
            found.setdefault(what, other)
        listed = [
            {
                "what": what,
                "step_s": self.told_s(other),
                "usd_per_step": self._usd(other),
            }
            for what, other in found.items()
        ]
        return sorted(listed, key=lambda each: (each["step_s"], each["usd_per_step"]))

    def _usd(self, other: Choice) -> float:
        here = other.topology(self.search.topology)
        return other.usd_per_step + usd_per_s(here) * (self.told_s(other) - other.step_s)

    def _other_plans(self, choice: Choice) -> Iterator[tuple[str, Choice]]:
        """Yield plans that the search could have chosen: other sites, codecs, and the job's own."""
        if self.is_free:
            yield from self._of_sites(choice)
        if len(choice.sites) == 1:
            return
        search, job = self.search, self.search.job
        for codec in search.codecs:
            if choice.coding.codecs != (codec,):
                wishes = dataclasses.replace(search.wishes, codecs=(codec,))
                asked = dataclasses.replace(job, plan=wishes)
                other = Search(asked, search.topology, search.sizes, search.allows, search.options)
                found = other.best_of(choice.sites)
                if found is not None:
                    yield f"codec {codec}", found
        even = even_split(job, choice.topology(search.topology))
        if job.workload is None and not job.placement and even != choice.sequences:
            yield "equal sequences on all ranks", self._with(choice, sequences=even)
        own = Sizing(chunk_bytes=job.exchange.chunk_bytes, bucket_bytes=job.exchange.bucket_bytes)
        if own != choice.sizing:
            yield OWN_SIZES, self._with(choice, sizing=own)

    def _of_sites(self, choice: Choice | None = None) -> Iterator[tuple[str, Choice]]:
        """Yield all sites, and the best one by itself."""
        search, choice = self.search, choice or self.choice
        if search.job.placement:
            return
        names = tuple(site.name for site in search.topology.sites)
        if choice.sites != names:
            everybody = search.best_of(names)
            if everybody is not None:
                yield "all sites", everybody
        if len(choice.sites) > 1:
            alone = [each for name in names if (each := search.best_of([name])) is not None]
            if alone:
                best = min(alone, key=lambda each: each.rank)
                yield f"{best.sites[0]} alone", best

    def _other_forms(self) -> Iterator[tuple[str, Choice]]:
        """Yield the same over other reductions of the menu."""
        choice = self.choice
        for candidate in menu(self.search.job, choice.topology(self.search.topology), packed=False):
            if candidate.plan.trees != choice.candidate.plan.trees:
                yield candidate.form, self._with(choice, candidate=candidate)

    def _not_permitted(self) -> Iterator[tuple[str, Choice]]:
        """Yield what is done without a plan, and what a plan does not change."""
        search, choice = self.search, self.choice
        job, topology = search.job, search.topology
        if job.workload is None:
            if len(topology.sites) < 3 or job.global_batch < topology.num_ranks:
                return
            ring = Reduction(tree="ring")
            try:
                plan = plan_reduction(dataclasses.replace(job, reduction=ring), topology)
            except ConfigError:
                return
            everybody = dataclasses.replace(
                choice, sites=tuple(site.name for site in topology.sites), sizing=search.sizes[0]
            )
            candidate, even = Candidate("ring", plan, ring), even_split(job, topology)
            yield "equal replicas, ring", self._with(everybody, candidate=candidate, sequences=even)
        elif len(choice.sites) > 1:
            if job.exchange.schedule == "overlap":
                exchange = dataclasses.replace(job.exchange, schedule="serial")
                serial = Search(dataclasses.replace(job, exchange=exchange), topology, search.sizes)
                found = serial.best_of(choice.sites)
                if found is not None:
                    yield "nothing hidden", found
            fastest = tuple(
                search.options.timings(choice.job(job), topology.site(name), count)[0]
                for name, count in zip(choice.sites, choice.sequences, strict=True)
            )
            if fastest != choice.timings:
                what = "the cuts that are fastest without an exchange"
                yield what, self._with(choice, timings=fastest)

    def _with(self, choice: Choice, **changes: Any) -> Choice:  # noqa: ANN401 - of its fields
        """Return a choice with other decisions, and the step that these come to."""
        other: Choice = dataclasses.replace(choice, **changes)
        if "timings" not in changes:
            other = dataclasses.replace(other, timings=self._timings_of(other))
        job, here = other.job(self.search.job), other.topology(self.search.topology)
        step_s = StepModel(job, here, other.candidate.plan).step_s(other.timings)
        egress = egress_usd_per_step(job, here, other.candidate.plan)
        usd = usd_per_s(here) * step_s + egress
        rank = (usd if self.search.wishes.objective == "cost" else step_s, *other.rank[1:])
        return dataclasses.replace(
            other, step_s=step_s, modelled_s=step_s, usd_per_step=usd, rank=rank
        )

    def _timings_of(self, choice: Choice) -> tuple[SiteTiming, ...]:
        """Return what sites compute with a choice's decisions: each with the cut that it has."""
        trainer = dataclasses.replace(self.search.job.trainer, micro_batch=choice.micro_batch)
        exchange = choice.sizing.of(choice.coding.of(self.search.job.exchange))
        job = dataclasses.replace(self.search.job, exchange=exchange, trainer=trainer)
        known = dict(zip(self.choice.sites, self.choice.timings, strict=True))
        found = []
        for site, count in zip(
            choice.topology(self.search.topology).sites, choice.sequences, strict=True
        ):
            able = self.search.options.timings(job, site, count)
            mine = known[site.name].cut if site.name in known else None
            found.append(next((each for each in able if each.cut is mine), able[0]))
        return tuple(found)

    def _otherwise(self, choice: Choice, name: str) -> Choice | None:
        """Return a plan without a site that takes part, or with one that takes none."""
        others = [each for each in choice.sites if each != name]
        wanted = others if name in choice.sites else [*others, name]
        if not wanted or self.search.job.placement:
            return None
        return self.search.like(choice).best_of(wanted)

    @functools.cached_property
    def sites(self) -> list[dict[str, Any]]:
        """Return each site with the step without it; or with it, if it takes no part."""
        choice = self.choice
        taken = dict(
            zip(choice.sites, zip(choice.sequences, choice.timings, strict=True), strict=True)
        )
        found = []
        for site in self.search.topology.sites:
            mine, otherwise = taken.get(site.name), self.by_site[site.name]
            found.append(
                {
                    "site": site.name,
                    "sequences": 0 if mine is None else mine[0],
                    "compute_s": 0.0 if mine is None else mine[1].alone_s,
                    "step_s_otherwise": None if otherwise is None else self.told_s(otherwise),
                }
            )
        return found

    def links(self, model: StepModel) -> list[dict[str, Any]]:
        """Return each link between sites that take part: how busy, and the step were it wider.

        Decisions stay as they are.
        """
        choice, search = self.choice, self.search
        job, topology = choice.job(search.job), choice.topology(search.topology)
        index = {site.name: site.index for site in topology.sites}
        found: dict[frozenset[str], dict[str, Any]] = {}
        for link in topology.links:
            pair = frozenset((link.source, link.target))
            if pair in found:
                continue
            one, other = index[link.source], index[link.target]
            busy_s = max(model.link_s.get(hop, 0.0) for hop in ((one, other), (other, one)))
            wider = StepModel(
                job, widened(topology, pair, more=GBIT_BYTES_PER_S), choice.candidate.plan
            )
            wider_s = wider.step_s(choice.timings) * choice.step_s / choice.modelled_s
            found[pair] = {
                "between": [link.source, link.target],
                "busy": busy_s / choice.step_s,
                # What is wider can be used as if it were not.
                "step_s_with_one_more_gbit_s": min(choice.step_s, wider_s),
                **crossing(job, topology, choice.candidate.plan, link),
            }
        return list(found.values())


def even_split(job: Job, topology: Topology) -> Split:
    """Return the sequences of each site where all ranks of all sites take alike."""
    even = dataclasses.replace(job, placement=())
    return tuple(sum(site_shares(even, topology, site)) for site in topology.sites)


def crossing(
    job: Job, topology: Topology, plan: ReductionPlan, link: Link
) -> dict[str, list[str] | int | str]:
    """Return how gradients cross a link: the codecs of its chunks, and its connections.

    Args:
        job: With the exchange that was decided.
        topology: Of the sites that take part.
        plan: Over them.
        link: Stands for both directions.
    """
    index = {site.name: site.index for site in topology.sites}
    hop = {index[link.source], index[link.target]}
    codecs = plan_codecs(job, topology, plan)
    crossed = [
        codec
        for codec, tree in zip(codecs, plan.trees, strict=False)
        if any({*each} == hop for each in tree.parent.items())
    ]
    if plan.is_gather:
        crossed = [*codecs]
    count, why = first_connections(job, topology, link) if crossed else (0, "nothing crosses")
    return {
        "codecs": list(dict.fromkeys(crossed)),
        "connections": count,
        "connections_because": why,
    }


def widened(
    topology: Topology, pair: frozenset[str] | None, times: float = 1.0, more: float = 0.0
) -> Topology:
    """Return a topology in which the links between two sites, or all, carry more bytes a second."""
    links = tuple(
        dataclasses.replace(link, bytes_per_s=link.bytes_per_s * times + more)
        if pair is None or {link.source, link.target} == pair
        else link
        for link in topology.links
    )
    return dataclasses.replace(topology, links=links)
