"""All that can be decided for one set of sites: reduction, codecs, sizes, spread of the batch.

Tried in the order of their lower bounds, and only as long as these are better than what was found.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from topology.cost.compute import sequence_s
from topology.job import Job, Reduction
from topology.model.step_model import StepModel
from topology.plan_wishes import PlanWishes
from topology.planner.choice import Choice, Rank, Sizing, better, money, rank_of
from topology.planner.codings import Coding, by_link, one_for_all
from topology.planner.mix_search import MixSearch
from topology.planner.shares import Split, busiest, every_split
from topology.planner.sizings import Sizes, crossing_bound_s, leaving_alike
from topology.planner.spread_trial import SpreadTrial
from topology.planner.tree_mixes import MIXED_SITES
from topology.planner.ways import Way, named
from topology.planner.weight_moves import WeightMoves
from topology.trees.pairs import pairs_of
from topology.trees.trees import ReductionPlan, Tree, shape_of
from topology.world import Topology

EVERY_CODEC_SITES = 4
"""Up to so many, single links may have codecs of their own with every reduction; of more, with the
best one."""
POOLED_SITES = 8
"""Up to so many, all mixes are looked at of a few of the trees that came into question."""
_QUICK_WAYS = 3
"""Reductions of a larger set that are looked at, before it is known whether the set is good."""
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
            is_complete: All that there is to choose from is looked at; else the most promising of
                it. Whether that follows from rates is not said by this, but by
                `Search._is_from_menu`.
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
        self._sizes = Sizes(job, topology, None if sizes else leaving_alike(job).__getitem__, sizes)
        self._compute_s = max(
            count * sequence_s(job, site)
            for count, site in zip(busiest(begin, self._ranks), topology.sites, strict=True)
        )
        self._trial = SpreadTrial(job, topology, begin, is_complete=is_complete)
        is_mixed = is_complete and len(self._ranks) in MIXED_SITES
        self._mixed = self._mixes(begin) if is_mixed and job.reduction == Reduction() else None
        self._mixes_looked_at: list[ReductionPlan] = []
        """They come after all other reductions."""

    def quick(self, *, is_split: bool) -> Choice | None:
        """Return a good choice: the reductions with the least bounds, in one size.

        Args:
            is_split: The batch is spread for the step's sake, not only for the slowest site's.
        """
        guesses = [] if self._mixed is None else [*self._mixed.guesses()]
        if self._mixed is not None and not guesses and not self._ways:
            guesses = [*self._mixed.single_trees()]
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
        # Where nothing but egress costs, no mix is cheaper than its cheapest tree by itself.
        is_about_cost = self._objective == "cost"
        for least_s, plan, place in (
            self._mixed.single_trees() if best is None or is_about_cost else ()
        ):
            found = self._mix(best, least_s, plan, place, self._sizes.all[0])
            best = better(best, found)
        return None if best is None else self._mixed.best(best, self._sizes, self._mix)

    def _mix(
        self, best: Choice | None, least_s: float, plan: ReductionPlan, place: int, sizing: Sizing
    ) -> Choice | None:
        """Return the best spread of the batch with one mix of trees; None if `best` is better."""
        return self._choice((least_s, self._index_of(plan), place), sizing, best, is_split=True)

    def _index_of(self, plan: ReductionPlan) -> int:
        """Return the number of a mix that is looked at."""
        self._mixes_looked_at.append(plan)
        return len(self._ways) + len(self._mixes_looked_at) - 1

    def moved(self, choice: Choice) -> Choice:
        """Return what beats a choice of these sites with other weights of trees, or the choice.

        First of all mixes of a few trees that came into question; then chunks are moved to others.
        """
        pool = {shape_of(tree): tree for way in self._ways for tree in way.plan.trees}
        trees = tuple(pool.values())
        if self._mixed is None and 2 < len(choice.sites) <= POOLED_SITES and trees:
            sizes = Sizes(self._job, self._topology, only=(choice.sizing,))
            choice = self._mixes(choice.sequences, trees).best(choice, sizes, self._mix)
        codings = one_for_all(self._codecs, self._job.exchange)
        if len(choice.sites) < 3 or choice.way.plan.is_gather or choice.coding not in codings:
            return choice
        job, counts = choice.job(self._job), busiest(choice.sequences, self._ranks)

        def rank(plan: ReductionPlan) -> Rank:
            step_s = StepModel(job, self._topology, plan).step_s(counts)
            per_s, egress = money(job, self._topology, Way("", plan, Reduction()))
            return rank_of(self._objective, step_s, per_s * step_s + egress)

        plan = WeightMoves(trees, rank).best(choice.way.plan)
        if plan is choice.way.plan:
            return choice
        bounded = (0.0, self._index_of(plan), codings.index(choice.coding))
        return self._best(choice, [bounded], (choice.sizing,), is_split=True) or choice

    def recoded(self, choice: Choice) -> Choice:
        """Return what beats a choice of these sites with codecs of single links, or the choice."""
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
        """Spread the batch anew for each reduction and its codecs, in the size best before that."""
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

    def _mixes(self, begin: Split, trees: tuple[Tree, ...] = ()) -> MixSearch:
        """Return what looks for weighted trees; no trees: all that there are.

        Args:
            begin: A spread of the batch, to judge by where there are too many.
            trees: That may carry something.
        """
        every = every_split(self._ranks, self._job.trainer.global_batch)
        spreads = (
            [busiest(begin, self._ranks)]
            if every is None
            else [busiest(each, self._ranks) for each in every]
        )
        return MixSearch(
            self._job,
            self._topology,
            self._pairs,
            one_for_all(self._codecs, self._job.exchange),
            spreads,
            are_all=every is not None,
            trees=trees,
        )

    def _bounded(self) -> list[Bounded]:
        """Return the least seconds of each reduction and its codecs, the shortest first."""
        return sorted(
            (self._least_s(way_index, coding_index), way_index, coding_index)
            for way_index, codings in enumerate(self._codings)
            for coding_index in range(len(codings))
        )

    def _least_s(self, way_index: int, coding_index: int) -> float:
        """Return what no step is shorter than: the slowest site's computing, or its bytes' time."""
        plan, coding = self._ways[way_index].plan, self._codings[way_index][coding_index]
        if plan.num_sites == 1:
            return self._compute_s
        job = dataclasses.replace(self._job, exchange=coding.of(self._job.exchange))
        return max(self._compute_s, crossing_bound_s(job, self._topology, plan))

    def _choice(
        self, bounded: Bounded, sizing: Sizing, best: Choice | None, *, is_split: bool
    ) -> Choice | None:
        """Return the best spread of the batch with all else decided; None if `best` is better."""
        least_s, way_index, coding_index = bounded
        way, coding = self._way_and_coding(way_index, coding_index)
        places = (coding_index, way_index, self._sizes.all.index(sizing))
        return self._trial.choice((way, coding, sizing), places, least_s, best, is_split=is_split)

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
