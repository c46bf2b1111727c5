"""Everything that can be decided for one set of sites: reduction, codecs, sizes, spread of the batch.

Tried in the order of their lower bounds, and only as long as these are better than what was found.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from topology.cost.compute import sequence_s
from topology.job import Job, Reduction
from topology.plan_wishes import PlanWishes
from topology.planner.choice import Choice, Rank, Sizing, better, money, rank_of
from topology.planner.codings import Coding, by_link, one_for_all
from topology.planner.mix_search import MixSearch
from topology.planner.shares import Split, busiest, every_split, improved
from topology.planner.sizings import Sizes, crossing_bound_s, sizings
from topology.planner.tree_mixes import MIXED_SITES
from topology.planner.ways import Way, named
from topology.timing.releases import releases
from topology.timing.step_time import StepModel
from topology.trees.pairs import pairs_of
from topology.trees.trees import ReductionPlan
from topology.world import Topology

EVERY_CODEC_SITES = 4
"""Up to so many, single links may have codecs of their own with every reduction; of more, with the best one."""
_QUICK_WAYS = 3
"""Reductions of a larger set of sites that are looked at, before it is known whether the set is good."""
_THOROUGH_WAYS = 6
"""And once it is."""

Bounded = tuple[float, int, int]
"""Least seconds, and which reduction and codecs."""


class SiteSet:
    """All that can be decided for one set of sites."""

    def __init__(
        self,
        job: Job,
        codecs: Sequence[str],
        topology: Topology,
        begin: Split,
        choices: list[Way],
        *,
        is_complete: bool,
        sizes: tuple[Sizing, ...] = (),
    ) -> None:
        """Look at these sites only.

        Args:
            job: Without a placement.
            codecs: That may be chosen.
            topology: Of the sites that take part.
            begin: The batch, spread so that the slowest site is fastest.
            choices: The reductions that come into question.
            is_complete: The best is to be found; else one that is probably that.
            sizes: Of chunks and buckets, that may be chosen; empty: all.
        """
        self._is_complete = is_complete
        self._job = job
        self._codecs = codecs
        self._pairs = pairs_of(topology)
        self._objective = (job.plan or PlanWishes()).objective
        self._topology = topology
        self._begin = begin
        self._ways = choices
        self._ranks = [site.num_ranks for site in topology.sites]
        self._codings = [self._codings_of(way) for way in choices]
        self._sizes = Sizes(job, topology, None if sizes else _alike(job).__getitem__, sizes)
        self._compute_s = max(
            count * sequence_s(job, site)
            for count, site in zip(busiest(begin, self._ranks), topology.sites, strict=True)
        )
        self._mixed = self._mixes()
        self._mixes_looked_at: list[ReductionPlan] = []
        """They come after all other reductions."""

    def quick(self, *, is_split: bool) -> Choice | None:
        """Return a good choice: the reductions with the least bounds, in one size.

        Args:
            is_split: The batch is spread for the step's sake, not only for the slowest site's.
        """
        guesses = [] if self._mixed is None else self._mixed.guesses()
        mixed = [
            (max(self._compute_s, least_s), self._index_of(plan), place)
            for least_s, plan, place in guesses
        ]
        bounded = sorted([*self._bounded(), *mixed])[:_QUICK_WAYS]
        return self._best(None, bounded, self._sizes.all[:1], is_split=is_split)

    def thorough(self, against: Choice | None = None) -> Choice | None:
        """Return the best choice, or one that is probably that.

        Args:
            against: Of other sites; returned if nothing is better.
        """
        bounded = self._bounded()
        if not self._is_complete:
            one_size = [
                self._best(None, [each], self._sizes.all[:1], is_split=False) for each in bounded
            ]
            order = sorted(
                (choice.rank, index) for index, choice in enumerate(one_size) if choice is not None
            )
            bounded = [bounded[index] for _, index in order[:_THOROUGH_WAYS]]
            return self._best_few(against, bounded)
        best = self._best(against, bounded, self._sizes.all, is_split=True)
        if self._mixed is None:
            return best
        for least_s, plan, place in self._mixed.single_trees() if best is None else ():
            best = self._mix(best, least_s, plan, place, self._sizes.all[0])
        return None if best is None else self._mixed.best(best, self._sizes, self._mix)

    def _mix(
        self, best: Choice | None, least_s: float, plan: ReductionPlan, place: int, sizing: Sizing
    ) -> Choice | None:
        """Return the best spread of the batch with one of the weighted sets of trees."""
        return self._choice((least_s, self._index_of(plan), place), sizing, best, is_split=True)

    def _index_of(self, plan: ReductionPlan) -> int:
        """Return the number of a mix that is looked at."""
        self._mixes_looked_at.append(plan)
        return len(self._ways) + len(self._mixes_looked_at) - 1

    def recoded(self, choice: Choice) -> Choice:
        """Return what is better than a choice of these sites with codecs of single links, or the choice."""
        codings = by_link(choice.way.plan, self._pairs, self._codecs, self._job.exchange)
        if choice.way not in self._ways:
            self._ways.append(choice.way)
            self._codings.append(one_for_all(self._codecs, self._job.exchange))
        way_index = self._ways.index(choice.way)
        self._codings[way_index] = [*self._codings[way_index], *codings]
        best: Choice | None = choice
        for place in range(len(self._codecs), len(self._codings[way_index])):
            bounded = [(self._least_s(way_index, place), way_index, place)]
            best = self._best(best, bounded, (choice.sizing,), is_split=True)
        return best or choice

    def _codings_of(self, way: Way) -> list[Coding]:
        """Return the codecs for all links; of few sites, also those of single links."""
        exchange = self._job.exchange
        found = one_for_all(self._codecs, exchange)
        if len(self._ranks) <= EVERY_CODEC_SITES:
            found += by_link(way.plan, self._pairs, self._codecs, exchange)
        return found

    def _best_few(self, best: Choice | None, bounded: list[Bounded]) -> Choice | None:
        """Spread the batch anew for each reduction and its codecs, in the size that is best before that."""
        for each in bounded:
            begun = self._best(None, [each], self._sizes.all, is_split=False)
            if begun is not None:
                best = self._best(best, [each], (begun.sizing,), is_split=True)
        return best

    def _way_and_coding(self, way_index: int, coding_index: int) -> tuple[Way, Coding]:
        """Return a reduction and its codecs."""
        if way_index < len(self._ways):
            return self._ways[way_index], self._codings[way_index][coding_index]
        plan = self._mixes_looked_at[way_index - len(self._ways)]
        names = self._pairs.names
        form = plan.why if len(plan.trees) > 1 else f"tree at {names[plan.trees[0].root]}"
        return Way(form, plan, named(plan, names)), one_for_all(self._codecs, self._job.exchange)[
            coding_index
        ]

    def _mixes(self) -> MixSearch | None:
        """Return what looks for weighted trees; None where there are too many sites, or too few links."""
        num_sites = len(self._ranks)
        has_mixes = self._is_complete and num_sites in MIXED_SITES
        if not has_mixes or self._job.reduction != Reduction():
            return None
        batch, begun = self._job.trainer.global_batch, busiest(self._begin, self._ranks)
        every = every_split(self._ranks, batch)
        spreads = [begun] if every is None else [busiest(each, self._ranks) for each in every]
        return MixSearch(
            self._job,
            self._topology,
            self._pairs,
            one_for_all(self._codecs, self._job.exchange),
            spreads,
            are_all=every is not None,
        )

    def _bounded(self) -> list[Bounded]:
        """Return the least seconds of each reduction and its codecs, the shortest first."""
        return sorted(
            (self._least_s(way_index, coding_index), way_index, coding_index)
            for way_index, codings in enumerate(self._codings)
            for coding_index in range(len(codings))
        )

    def _least_s(self, way_index: int, coding_index: int) -> float:
        """Return what no step is shorter than: the slowest site computes so long, or its bytes take so long."""
        plan, coding = self._ways[way_index].plan, self._codings[way_index][coding_index]
        if plan.num_sites == 1:
            return self._compute_s
        job = dataclasses.replace(self._job, exchange=coding.of(self._job.exchange))
        return max(self._compute_s, crossing_bound_s(job, self._topology, plan))

    def _best(
        self,
        best: Choice | None,
        bounded: list[Bounded],
        sizes: tuple[Sizing, ...],
        *,
        is_split: bool,
    ) -> Choice | None:
        """Return the best choice of these, or `best`."""
        for each in bounded:
            _, way_index, coding_index = each
            _, coding = self._way_and_coding(way_index, coding_index)
            for sizing in self._sizes.different(coding, sizes):
                best = better(best, self._choice(each, sizing, best, is_split=is_split))
        return best

    def _choice(
        self,
        bounded: Bounded,
        sizing: Sizing,
        best: Choice | None,
        *,
        is_split: bool,
    ) -> Choice | None:
        """Return the best spread of the batch with everything else decided; None if `best` is better."""
        least_s, way_index, coding_index = bounded
        way, coding = self._way_and_coding(way_index, coding_index)
        draft = Choice(
            sites=tuple(site.name for site in self._topology.sites),
            sequences=self._begin,
            way=way,
            coding=coding,
            sizing=sizing,
            micro_batch=self._job.trainer.micro_batch,
            step_s=math.inf,
            usd_per_step=math.inf,
            rank=(math.inf,),
        )
        job = draft.job(self._job)
        per_s, egress = money(job, self._topology, way)

        def rank(step_s: float) -> Rank:
            usd = per_s * step_s + egress
            places = (coding_index, way_index, self._sizes.all.index(sizing))
            return rank_of(self._objective, step_s, usd, len(draft.sites), coding.loss, *places)

        if best is not None and rank(least_s) >= best.rank:
            return None
        model = StepModel(job, self._topology, way.plan)
        # Of no spread is the step shorter than with a single sequence in each rank.
        shortest_s = max(least_s, model.floor_s, model.step_s([1] * len(self._ranks)))
        if best is not None and rank(shortest_s) >= best.rank:
            return None
        split, step_s = self._spread(model, shortest_s if is_split else math.inf)
        return dataclasses.replace(
            draft,
            sequences=split,
            step_s=step_s,
            usd_per_step=per_s * step_s + egress,
            rank=rank(step_s),
        )

    def _spread(self, model: StepModel, shortest_s: float) -> tuple[Split, float]:
        """Return a spread of the batch and its step: a better one than the first, if that is longer."""
        begun = busiest(self._begin, self._ranks)
        # Of many sites there are many spreads: TCP's windows are taken for those of the first one.
        like = None if self._is_complete else begun

        def steps_s(splits: Sequence[Split]) -> list[float]:
            return model.steps_s([busiest(split, self._ranks) for split in splits], like)

        begun_s = model.step_s(begun)
        if begun_s <= shortest_s:
            return self._begin, begun_s
        split, _ = improved(self._begin, self._ranks, self._job.trainer.micro_batch, steps_s)
        step_s = model.step_s(busiest(split, self._ranks))
        return (split, step_s) if step_s < begun_s else (self._begin, begun_s)


def _alike(job: Job) -> dict[int, int]:
    """Return the first of the sizes of buckets with which the same leaves together, of each size."""
    first: dict[object, int] = {}
    found = {}
    for bucket_bytes in dict.fromkeys(each.bucket_bytes for each in sizings(job)):
        exchange = dataclasses.replace(job.exchange, bucket_bytes=bucket_bytes)
        leaving = releases(dataclasses.replace(job, exchange=exchange))
        found[bucket_bytes] = first.setdefault(leaving, bucket_bytes)
    return found
