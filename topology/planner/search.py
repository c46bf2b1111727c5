"""The search for the best plan: every set of up to ten sites, and for each all that can be decided.

For some sites a batch is spread so that the slowest is fastest (topology/planner/shares.py); then
all reductions, codecs and sizes are tried, the ones with the least lower bound first, and none
whose lower bound is no better than what was found. A step is never shorter than the slowest site
computes, or than the busiest link takes. Up to EXACT_SITES sites that is complete, where what there
is to choose from does not follow from rates (`_is_from_menu`): nothing within the choice is better;
single links get codecs of their own last, where there are more than EVERY_CODEC_SITES. For more,
only the reductions with the least bounds are looked at with all sizes; and of more than
EVERY_SET_SITES sites, one after another is left out for as long as that helps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence

from topology.cost.compute import sequence_s
from topology.documents.placement import restricted, unreached
from topology.job import Job, Reduction
from topology.model.wire_load import starts_slowly
from topology.plan_wishes import PlanWishes
from topology.planner.choice import Choice, Sizing, better, by_rank
from topology.planner.micro_batch import largest_micro_batch
from topology.planner.second_opinion import simulated_s
from topology.planner.set_bounds import SetBounds
from topology.planner.shares import balanced, every_split
from topology.planner.site_set import EVERY_CODEC_SITES, SiteSet
from topology.planner.tree_mixes import MIXED_SITES
from topology.planner.ways import ways
from topology.world import Topology

EXACT_SITES = 5
"""Of a topology of up to so many, the best of all that there is to choose from is found; of a
larger one, one that is probably that."""
EVERY_SET_SITES = 10
_SPREAD_SETS = 12
"""Sets of sites whose batch is spread anew, of those best with the slowest site fastest."""
_THOROUGH_SETS = 3
_NEAR_ENOUGH = 1.2
"""How many times the best's step or cost a guess may be for a thorough look at its sites."""

Names = tuple[str, ...]


class Search:
    """Finds the best choice for a job, of all sites or of some. Keeps what it has found."""

    def __init__(self, job: Job, topology: Topology, sizes: tuple[Sizing, ...] = ()) -> None:
        """Take the job without its placement: that is for the plan to decide.

        Args:
            job: Its `plan` says what may be decided.
            topology: Described in full.
            sizes: Of chunks and buckets, that may be chosen; empty: all.
        """
        self._sizes = sizes
        self.job = dataclasses.replace(job, placement=())
        self.topology = topology
        self.wishes = job.plan or PlanWishes()
        self.codecs = self.wishes.codecs or (job.exchange.codec,)
        self.sequence_s = {site.name: sequence_s(job, site) for site in topology.sites}
        self._bounds = SetBounds(self.job, topology, self.codecs, self.sequence_s)
        self._sets: dict[tuple[Names, bool], SiteSet | None] = {}
        self._thorough: dict[Names, Choice | None] = {}

    def best(self) -> Choice | None:
        """Return the best choice of all; None if the batch is too small for every set of sites."""
        names = tuple(site.name for site in self.topology.sites)
        if self.wishes.sites == "all":
            best = self.best_of(names)
        elif len(names) > EVERY_SET_SITES:
            best = self._by_leaving_out(names)
        else:
            best = self._of_every_set(names)
        return None if best is None else self._recoded(self._moved(self._completed(best)))

    def _of_every_set(self, names: Names) -> Choice | None:
        """Return the best choice of all sets of these sites, as far as bounds leave them."""
        best: Choice | None = None
        quick: list[Choice] = []
        for bound, chosen in self._bounds.of_every_set(names):
            if best is not None and bound > best.rank[:1]:
                break  # what may be as fast is looked at: with fewer sites, or more exact, it is better
            if len(names) <= EXACT_SITES:
                best = self._improved(best, chosen)
                continue
            found = self._quick(chosen)
            if found is not None:
                quick.append(found)
                best = better(best, found)
        begun = sorted(quick, key=by_rank)[:_SPREAD_SETS]
        spread = [self._quick(choice.sites, is_split=True) for choice in begun]
        for choice in sorted(filter(None, spread), key=by_rank)[:_THOROUGH_SETS]:
            best = self._improved(better(best, choice), choice.sites)
        if best is None or len(names) <= EXACT_SITES:
            return best
        return self._climbed(best)

    def _completed(self, best: Choice) -> Choice:
        """Look for the best choice of the best sites, if that has not been done."""
        if self._is_complete(best.sites) or len(best.sites) > EXACT_SITES:
            return best
        alone = Search(self.job, restricted(self.topology, best.sites), self._sizes)
        return better(best, alone.best_of(best.sites)) or best

    def _moved(self, best: Choice) -> Choice:
        """Let trees have other weights, where not all mixes of them were looked at.

        Of so many plans the best is also the one formulas flatter most: the simulator has to agree.
        """
        topology = restricted(self.topology, best.sites)
        if self.job.reduction != Reduction() or self._is_from_menu(topology):
            return best
        found = self._set(best.sites, with_packings=True)
        if found is None:
            return best
        moved = found.moved(best)
        before_s, after_s = (
            simulated_s(self.job, self.topology, choice) for choice in (best, moved)
        )
        is_slower = before_s is not None and after_s is not None and after_s > before_s
        return best if is_slower else moved

    def _is_from_menu(self, topology: Topology) -> bool:
        """Return whether what there is to choose from for some sites does not follow from rates."""
        names = [site.name for site in topology.sites]
        ranks = [site.num_ranks for site in topology.sites]
        return (
            self._is_complete(names)
            and len(names) in (1, 2, *MIXED_SITES)
            and every_split(ranks, self.job.trainer.global_batch) is not None
            and not starts_slowly(topology)
        )

    def _is_complete(self, names: Sequence[str]) -> bool:
        """Return whether all that there is to choose from for a set of sites is looked at.

        Of five among many others it is not: that takes seconds. Whether what there is to choose
        from follows from rates is another question: `_is_from_menu` answers it.
        """
        return len(self.topology.sites) <= EXACT_SITES or len(names) <= EVERY_CODEC_SITES

    def _recoded(self, best: Choice) -> Choice:
        """Let single links have codecs of their own where that is better."""
        if len(best.sites) <= EVERY_CODEC_SITES:
            return best
        found = self._set(best.sites, with_packings=True)
        return best if found is None else found.recoded(best)

    def _climbed(self, best: Choice) -> Choice:
        """Let single sites join or leave for as long as that is better."""
        while True:
            next_best = best
            for site in self.topology.sites:
                others = tuple(name for name in best.sites if name != site.name)
                chosen = others if len(others) < len(best.sites) else (*others, site.name)
                if chosen:
                    next_best = self._neighbour(next_best, self._ordered(chosen))
            if next_best is best:
                return best
            best = next_best

    def _neighbour(self, best: Choice, names: Names) -> Choice:
        """Return the better of `best` and what these sites can do; of many, only a good guess."""
        guess = self._quick(names, is_split=True)
        if guess is None or guess.rank[0] > _NEAR_ENOUGH * best.rank[0]:
            return best
        if len(names) <= EVERY_SET_SITES:
            return self._improved(best, names) or best
        return better(best, guess) or best

    def like(self, choice: Choice, topology: Topology) -> Search:
        """Return a search on a topology for choices with a known one's codecs and sizes."""
        own = bool(self.job.exchange.codecs)
        codecs = (choice.coding.codec,) if own else choice.coding.codecs
        wishes = dataclasses.replace(self.wishes, codecs=codecs)
        return Search(dataclasses.replace(self.job, plan=wishes), topology, (choice.sizing,))

    def best_of(self, names: Iterable[str]) -> Choice | None:
        """Return the best choice in which just these sites take part; None where there is none."""
        chosen = self._ordered(names)
        if chosen not in self._thorough:
            found = self._set(chosen, with_packings=True)
            self._thorough[chosen] = None if found is None else found.thorough()
        return self._thorough[chosen]

    def estimate(self, names: Iterable[str]) -> Choice | None:
        """Return a good choice for these sites, and of few sites the best."""
        chosen = self._ordered(names)
        if len(chosen) <= EVERY_CODEC_SITES or chosen in self._thorough:
            return self.best_of(chosen)
        return self._quick(chosen, is_split=True)

    def _improved(self, best: Choice | None, names: Names) -> Choice | None:
        """Return the best choice for these sites if it is better than `best`, else that."""
        found = self._set(names, with_packings=True)
        return best if found is None else found.thorough(best)

    def _quick(self, names: Names, *, is_split: bool = False) -> Choice | None:
        found = self._set(names, with_packings=self._is_complete(names))
        return None if found is None else found.quick(is_split=is_split)

    def _set(self, names: Names, *, with_packings: bool) -> SiteSet | None:
        key = (names, with_packings)
        if key not in self._sets:
            self._sets[key] = self._new_set(names, with_packings=with_packings)
        return self._sets[key]

    def _new_set(self, names: Names, *, with_packings: bool) -> SiteSet | None:
        topology = restricted(self.topology, names)
        ranks = [site.num_ranks for site in topology.sites]
        times_s = [self.sequence_s[name] for name in names]
        begin = balanced(ranks, times_s, self.job.trainer.global_batch)
        if begin is None or unreached(topology):
            return None
        found = ways(
            self.job,
            topology,
            with_packings=with_packings,
            by_rates=not self._is_from_menu(topology),
        )
        return SiteSet(
            self._with_micro_batch(topology),
            self.codecs,
            topology,
            begin,
            found,
            is_complete=self._is_complete(names),
            sizes=self._sizes,
        )

    def _with_micro_batch(self, topology: Topology) -> Job:
        """Return the job with the largest micro-batch that fits these sites, if to be decided."""
        if self.wishes.micro_batch == "given":
            return self.job
        most, _ = largest_micro_batch(self.job, topology)
        trainer = dataclasses.replace(self.job.trainer, micro_batch=most)
        return dataclasses.replace(self.job, trainer=trainer)

    def _ordered(self, names: Iterable[str]) -> Names:
        wanted = set(names)
        return tuple(site.name for site in self.topology.sites if site.name in wanted)

    def _by_leaving_out(self, names: Names) -> Choice | None:
        """Leave out the site it helps most to leave out, until half of all in a row do not help."""
        kept = self._with_sequences(names)
        best = self._quick(kept)
        num_worse = 0
        while len(kept) > 1 and num_worse < len(names) // 2:
            fewer = [self._quick(tuple(each for each in kept if each != left)) for left in kept]
            found = min((each for each in fewer if each is not None), key=by_rank, default=None)
            if found is None:
                break
            num_worse = num_worse + 1 if best is not None and best.rank <= found.rank else 0
            best, kept = better(best, found), found.sites
        for alone in map(self.best_of, _single(names)):
            best = better(best, alone)
        if best is None:
            return None
        climbed = self._climbed(best)
        return self._improved(climbed, climbed.sites) or climbed

    def _with_sequences(self, names: Names) -> Names:
        """Leave out sites until each rank has a sequence: first those slowest with as many."""
        kept = list(names)
        by_speed = sorted(
            names, key=lambda name: (self.sequence_s[name], self.topology.site(name).num_ranks)
        )
        while len(kept) > 1 and self._num_ranks(kept) > self.job.trainer.global_batch:
            rests = ([each for each in kept if each != left] for left in reversed(by_speed))
            joined = (
                rest
                for rest in rests
                if len(rest) < len(kept) and not unreached(restricted(self.topology, rest))
            )
            kept = next(joined, kept[:1])
        return tuple(kept)

    def _num_ranks(self, names: Iterable[str]) -> int:
        return sum(self.topology.site(name).num_ranks for name in names)


def _single(names: Names) -> Iterator[Names]:
    for name in names:
        yield (name,)
