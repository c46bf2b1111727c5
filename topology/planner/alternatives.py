"""Alternatives to a chosen plan: other sites, codecs, reductions, wider links.

A plan must not be worse than one that it lists, by the job's objective. So an alternative that the
step model finds better is simulated, too, and becomes the plan if it is. Other alternatives' steps
are those of the step model, scaled by the ratio of simulated to modelled step of the chosen plan.

Some alternatives are not permitted by the job: the sites that `plan.sites` excludes, another
reduction than the job names. They are listed all the same, and are marked where they are better.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

from isthmus.topology.cost.money import egress_usd
from isthmus.topology.model.step_model import StepModel
from isthmus.topology.planner.choice import Choice, Coding, by_rank, is_clearly_better
from isthmus.topology.planner.connections import first_connections
from isthmus.topology.planner.reductions import Candidate
from isthmus.topology.planner.search import Search
from isthmus.topology.planner.spreads import Split
from isthmus.topology.spec.compute import site_shares
from isthmus.topology.spec.errors import ConfigError
from isthmus.topology.spec.job import Job, Reduction
from isthmus.topology.spec.reduction_plan import ReductionPlan
from isthmus.topology.spec.world import Link, Topology
from isthmus.topology.trees.link_codecs import plan_codecs
from isthmus.topology.trees.tree_choice import plan_reduction

FORMS = 4
"""Number of other reductions that are listed, the fastest first."""
GBIT_BYTES_PER_S = 125e6


class Alternatives:
    """The best choice, and the alternatives that it was compared with."""

    def __init__(self, search: Search, best: Choice, *, is_fixed: bool = False) -> None:
        """Compare a choice with alternatives; adopt any that is better, unless it is fixed.

        A choice is fixed whose step is no measure: under its regime it is another.
        """
        self.search, self.choice, self._is_fixed = search, best, is_fixed
        better: Choice | None = best
        while better is not None:
            self.choice = better
            self._others = dict(self._permitted())
            self._by_site = {
                site.name: self._otherwise(site.name) for site in search.topology.sites
            }
            better = None if is_fixed else self._better()

    def _better(self) -> Choice | None:
        """Return the best permitted alternative if it is better than the choice; else None."""
        others = [*self._others.values(), *(self._by_site.values() if self.is_free else ())]
        compared = [self.compared(each) for each in others if each is not None]
        best = min(compared, key=lambda each: each.rank[0], default=self.choice)
        return best if is_clearly_better(best, self.choice) else None

    @property
    def is_free(self) -> bool:
        """Whether sites may be left out."""
        return self.search.wishes.sites != "all" and not self.search.job.placement

    @functools.cached_property
    def everybody(self) -> Choice | None:
        """A plan in which all sites take part."""
        return self.search.best_of(site.name for site in self.search.topology.sites)

    def compared(self, other: Choice) -> Choice:
        """Return another plan with a step that may be compared with the choice's."""
        ratio = self.choice.step_s / self.choice.modelled_s
        if len(other.sites) == 1:
            ratio = 1.0  # Nothing crosses, so the step model is exact.
        scaled = self.search.with_step(other, other.modelled_s * ratio)
        return self.search.judged(other) if is_clearly_better(scaled, self.choice) else scaled

    def listed(self) -> list[dict[str, Any]]:
        """Return other plans with their step time and cost, the best first."""
        found = [(what, self._no_better(other)) for what, other in self._others.items()]
        for what, other in self._not_permitted():
            compared = self.compared(other)
            is_marked = is_clearly_better(compared, self.choice)
            found.append((f"{what} (not permitted)" if is_marked else what, compared))
        found = [
            (f"{what} (over budget)" if each.is_over_budget else what, each) for what, each in found
        ]
        found.sort(key=lambda each: each[1].rank[:2])
        return [
            {"what": what, "step_s": each.step_s, "usd_per_step": each.usd_per_step}
            for what, each in found
        ]

    def over_budget(self) -> list[tuple[str, Choice]]:
        """Return permitted plans but for their egress, which costs more than the job permits."""
        compared = [(what, self.compared(other)) for what, other in self._others.items()]
        return [(what, each) for what, each in compared if each.is_over_budget]

    def _no_better(self, other: Choice) -> Choice:
        """Return a permitted plan as `compared`; what is better by rounding counts as equal."""
        compared, choice = self.compared(other), self.choice
        if self._is_fixed or compared.rank[0] >= choice.rank[0]:
            return compared
        if self.search.wishes.objective == "cost":
            return dataclasses.replace(compared, usd_per_step=choice.usd_per_step)
        return self.search.with_step(compared, choice.step_s)

    def _permitted(self) -> Iterator[tuple[str, Choice]]:
        """Yield plans that the search could have chosen: other sites, or one decision less."""
        search, choice, job = self.search, self.choice, self.search.job
        if self.is_free:
            yield from self._of_sites()
        if self._may_be_ring:
            yield from self._ring()
        if len(choice.sites) == 1:
            return
        here = search.set_of(choice.sites)
        candidate, coding, sizing, split = (
            choice.candidate,
            choice.coding,
            choice.sizing,
            choice.sequences,
        )
        for codec in search.codecs:
            if coding.codecs != (codec,):
                other = Coding(codec, job.exchange.codecs)
                for each in here.choices(candidate, other, sizing, split):
                    yield f"codec {codec}", each
        even = even_split(job, choice.topology(search.topology))
        if job.workload is None and not job.placement and even != split:
            for each in here.choices(candidate, coding, sizing, even):
                yield "equal sequences on all ranks", each
        if search.sizes[0] != sizing:
            for each in here.choices(candidate, coding, search.sizes[0], split):
                yield "the job's own chunk and bucket", each
        forms = here.best_forms(coding, sizing, split, FORMS + 1)
        others = [each for each in forms if each.candidate.plan.trees != candidate.plan.trees]
        for each in others[:FORMS]:
            yield each.candidate.form, each

    def _of_sites(self) -> Iterator[tuple[str, Choice]]:
        """Yield all sites, and the best one by itself."""
        names = tuple(site.name for site in self.search.topology.sites)
        if self.choice.sites != names and self.everybody is not None:
            yield "all sites", self.everybody
        if len(self.choice.sites) > 1:
            alone = [each for name in names if (each := self.search.best_of([name])) is not None]
            if alone:
                best = min(alone, key=by_rank)
                yield f"{best.sites[0]} alone", best

    def _ring(self) -> Iterator[tuple[str, Choice]]:
        """Yield equal replicas at all sites that reduce around a ring, as without a plan."""
        search, job, topology = self.search, self.search.job, self.search.topology
        names = tuple(site.name for site in topology.sites)
        if job.workload is not None or len(names) < 3 or job.global_batch < topology.num_ranks:
            return
        ring = Reduction(tree="ring")
        try:
            plan = plan_reduction(dataclasses.replace(job, reduction=ring), topology)
        except ConfigError:
            return
        how = (Candidate("ring", plan, ring), self.choice.coding, search.sizes[0])
        for each in search.set_of(names).choices(*how, even_split(job, topology)):
            yield "equal replicas, ring", each

    @property
    def _may_be_ring(self) -> bool:
        """Whether the job permits equal replicas and any reduction."""
        return self.search.job.reduction == Reduction() and not self.search.job.placement

    def _not_permitted(self) -> Iterator[tuple[str, Choice]]:
        """Yield choices outside the plan's freedom: the job without a plan, and other settings."""
        search, choice = self.search, self.choice
        job, topology = search.job, search.topology
        if not self.is_free and not job.placement:
            yield from self._of_sites()
        if not self._may_be_ring:
            yield from self._ring()
        if job.workload is not None and job.exchange.schedule == "overlap":
            exchange = dataclasses.replace(job.exchange, schedule="serial")
            serial = Search(dataclasses.replace(job, exchange=exchange), topology, search.sizes)
            found = serial.best_of(choice.sites) if len(choice.sites) > 1 else None
            if found is not None:
                yield "nothing hidden", found

    def _otherwise(self, name: str) -> Choice | None:
        """Return a plan with one site's participation reversed."""
        wanted = {*self.choice.sites} ^ {name}
        return None if self.search.job.placement else self.search.best_of(wanted, self.choice)

    def otherwise(self, name: str) -> Choice | None:
        """Return that plan as `compared`; None: it is impossible."""
        other = self._by_site[name]
        if other is None:
            return None
        return self._no_better(other) if self.is_free else self.compared(other)

    def sites(self) -> list[dict[str, Any]]:
        """Return each site with the step without it; or with it, if it takes no part."""
        choice = self.choice
        taken = dict(
            zip(choice.sites, zip(choice.sequences, choice.timings, strict=True), strict=True)
        )
        rows = []
        for site in self.search.topology.sites:
            mine, otherwise = taken.get(site.name), self.otherwise(site.name)
            rows.append(
                {
                    "site": site.name,
                    "sequences": 0 if mine is None else mine[0],
                    "compute_s": 0.0 if mine is None else mine[1].alone_s,
                    "step_s_otherwise": None if otherwise is None else otherwise.step_s,
                }
            )
        return rows

    def links(self, model: StepModel, sync_every: int) -> list[dict[str, Any]]:
        """Return the links between sites that take part: use, price, and the step if wider.

        Decisions stay as they are. What `model` sends crosses once in `sync_every` steps.
        """
        choice, search = self.choice, self.search
        job, topology = choice.job(search.job), choice.topology(search.topology)
        index = {site.name: site.index for site in topology.sites}
        rows: dict[frozenset[str], dict[str, Any]] = {}
        sent = sent_bytes(topology, model)
        for link in topology.links:
            pair = frozenset((link.source, link.target))
            if pair in rows:
                continue
            one, other = index[link.source], index[link.target]
            busy_s = max(model.link_s.get(hop, 0.0) for hop in ((one, other), (other, one)))
            wider = StepModel(
                job, widened(topology, pair, more=GBIT_BYTES_PER_S), choice.candidate.plan
            )
            wider_s = wider.step_s(choice.timings) * choice.step_s / choice.modelled_s
            rows[pair] = {
                "between": [link.source, link.target],
                "busy": busy_s / choice.step_s,
                # A wider link can be used as if it were not.
                "step_s_with_one_more_gbit_s": min(choice.step_s, wider_s),
                **_crossing(job, topology, choice.candidate.plan, link),
            }
            ways = [hop for hop in sent if frozenset(hop) == pair]
            if usd := egress_usd(topology, {hop: sent[hop] for hop in ways}):
                rows[pair]["egress_usd_per_step"] = usd / sync_every
        return list(rows.values())


def sent_bytes(topology: Topology, model: StepModel) -> dict[tuple[str, str], float]:
    """Return the bytes that an exchange sends over each directed link, by the sites' names."""
    names = {site.index: site.name for site in topology.sites}
    return {
        (names[source], names[target]): amount
        for (source, target), amount in model.link_bytes.items()
    }


def even_split(job: Job, topology: Topology) -> Split:
    """Return the sequences of each site if all ranks take equally many."""
    even = dataclasses.replace(job, placement=())
    return tuple(sum(site_shares(even, topology, site)) for site in topology.sites)


def _crossing(
    job: Job, topology: Topology, plan: ReductionPlan, link: Link
) -> dict[str, list[str] | int | str]:
    """Return how gradients cross a link: the codecs of its chunks, and its connections.

    Args:
        job: The job with the decided exchange.
        topology: Of the sites that take part.
        plan: Over them.
        link: Either direction of the link.
    """
    index = {site.name: site.index for site in topology.sites}
    hop = {index[link.source], index[link.target]}
    codecs = plan_codecs(job, topology, plan)
    crossed = [
        codec
        for tree, codec in enumerate(codecs)
        if any({*each} == hop for each in plan.hops(tree))
    ]
    count, why = first_connections(job, topology, link) if crossed else (0, "nothing crosses")
    return {
        "codecs": list(dict.fromkeys(crossed)),
        "connections": count,
        "connections_because": why,
    }


def widened(
    topology: Topology, pair: frozenset[str] | None, times: float = 1.0, more: float = 0.0
) -> Topology:
    """Return a topology with more bandwidth between two sites, or (None) on all links."""
    links = tuple(
        dataclasses.replace(link, bytes_per_s=link.bytes_per_s * times + more)
        if pair is None or {link.source, link.target} == pair
        else link
        for link in topology.links
    )
    return dataclasses.replace(topology, links=links)
