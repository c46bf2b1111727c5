"""Searches the best plan, for the shipped trainer and for described models.

The first sets of sites are those joined by near or wide links. From each, sites are added or
removed while that improves a guess: one at a time, or two if there are few sites. For the most
promising sets, the reductions of the menu are tried with each codec. Then a local search changes
one decision at a time: sequences, sizes, codecs, trees and their weights. The step model evaluates
changes.

The simulator decides between the best few. It takes the best for each number of trees first,
because the step model errs alike for similar plans. The local search then continues with the
simulator for a few more changes, because the step model is least exact if several trees share
links. A plan reports the simulator's figures.

Numbers of tries limit the search. The step model takes longer with more sites, so fewer changes are
tried then.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from isthmus.topology.documents.placement import restricted
from isthmus.topology.model.buckets import gradient_bytes
from isthmus.topology.model.site_timing import SiteTiming
from isthmus.topology.model.step_model import ModelLinks, StepModel
from isthmus.topology.planner.bounds import Bounds
from isthmus.topology.planner.choice import (
    AS_GOOD,
    Choice,
    Coding,
    Sizing,
    by_rank,
    is_better,
    loss,
    over_budget,
    rank_of,
    recoded,
    usd_per_s,
)
from isthmus.topology.planner.local_search import improved
from isthmus.topology.planner.memory_fit import largest_micro_batch
from isthmus.topology.planner.reductions import (
    Candidate,
    TreeChanges,
    adapted,
    candidate_of,
    menu,
    tree_changes,
    weighted_stars,
)
from isthmus.topology.planner.site_options import SiteOptions
from isthmus.topology.planner.spreads import Split, moves
from isthmus.topology.simulator.settings import FLOWS_PER_STEP, Settings
from isthmus.topology.simulator.simulation import SimulatedRun, simulate
from isthmus.topology.spec.job import Job, Reduction
from isthmus.topology.spec.plan_wishes import PlanWishes
from isthmus.topology.spec.reduction_plan import Tree, shape_of
from isthmus.topology.spec.world import Topology
from isthmus.topology.trees.codec_costs import usual_ratio
from isthmus.topology.trees.link_codecs import plan_codecs
from isthmus.topology.trees.pairs import Pairs, pairs_of
from isthmus.topology.trees.wire_load import Hop, tree_ratios

CHUNKS = tuple(size << 10 for size in (1024, 256, 4096, 512, 2048, 128, 64))
BUCKETS = (4 << 20, 1 << 20, 16 << 20, 64 << 20)
"""Bucket sizes in bytes that are tried beside the job's own."""
EVERY_CUTS_MAX = 512
"""Number of combinations of sites' cuts up to which all are tried."""
_QUICK_CANDIDATES = 3
"""Reductions of a set that are tried for a first guess."""
_SETS = 4
"""Sets of sites that are examined closely."""
_GUESSED_PAIRS = 400_000
"""Number of pairs of sites, in all sets together, beyond which no more sets are guessed for."""
_CANDIDATES, _OF_EACH_SET = 10, 2
"""Reductions of these sets that are examined closely, and the minimum per set."""
_NEAR_ENOUGH = 1.2
"""Ratio to the best choice's step beyond which a choice is dropped."""
_BEGUN = 5
"""Number of choices from which local search begins, with many sites; with few: all of these."""
_IMPROVED = 3
"""Number of choices that are improved with many tries."""
_QUICK_TRIES, _FEW_TRIES, _MANY_TRIES = 40, 120, 480
"""Limits on tried changes: of the spread for a guess, at first, and for the best choices."""
_FEW_SITES = 6
"""Number of sites up to which the search is thorough. Beyond it single sites join or leave a set,
steps of other sets are guesses, simulations have fewer flows, and there are fewer tries: a model's
time grows with the pairs of sites."""
_SPREADS = 8
"""Number of best spreads of the batch, after single moves, that are examined."""
_CHANGES = 4000
"""Number of changes of one kind of trees that are looked at, most of which cannot be better."""
_WARM = 1.01
"""Ratio of warm steps up to which a change of trees may be better with slow start, too."""
_NEIGHBOURS = 600
"""Number of changes that the step model sorts for the simulator."""
_NEIGHBOURS_OF_TRY = 30
"""Those for each change that the simulator may try."""
_POOL = 12
"""Number of further trees that the simulator's changes may give weight to."""
_SIMULATED, _SIMULATED_LEAST, _POLISHED = 12, 4, 48
"""Largest and smallest number of choices that are simulated, and of simulated changes of the
best."""
_SIMULATED_ACTIONS, _POLISHED_ACTIONS = 400_000, 400_000
"""Limits on simulated actions for judging and polishing: about a second each."""
_JUDGED_WITHIN = 1.15
"""Ratio to the best modelled step beyond which a choice is not simulated."""
_FLOWS = 3000
"""Hops of flows in a simulated step with many sites. Steps are within about 1 % of those with
more."""
_STEPS, _SKIPPED = 12, 4
"""Simulated steps, and how many first ones are skipped as a warm-up."""

Names = tuple[str, ...]


class Search:
    """Finds the best choice for a job, over all sites or given ones; caches results."""

    def __init__(
        self,
        job: Job,
        topology: Topology,
        sizes: tuple[Sizing, ...] = (),
        allows: Callable[[Reduction], bool] = lambda _: True,
    ) -> None:
        """Take a job, whose placement is kept.

        Args:
            job: The job, whose `plan` section says what may be decided.
            topology: Described in full.
            sizes: Sizes of chunks and buckets to choose from; empty: all.
            allows: Whether a reduction may be chosen.
        """
        self.job, self.topology = job, topology
        self.wishes = job.plan or PlanWishes()
        self.codecs = self.wishes.codecs or (job.exchange.codec,)
        self.sizes = sizes or sizings(job)
        self.allows = allows
        self.options = SiteOptions(job, topology)
        self.bounds = Bounds(job, topology, self.options, self.codecs)
        self._sets: dict[Names, SiteSet] = {}
        self._simulated: dict[object, float | None] = {}
        self.is_large = len(topology.sites) > _FEW_SITES
        self._num_actions = 1
        """Largest number of actions of a simulated choice so far."""

    def best(self) -> Choice | None:
        """Return the best choice; None: no set of sites can run the job."""
        begun = self._begun()
        if not begun:
            return None
        if self.is_large:
            del begun[_BEGUN:]
        found = _distinct(self.set_of(each.sites).improved(each, _FEW_TRIES) for each in begun)
        found += [self.set_of(each.sites).improved(each, _MANY_TRIES) for each in found[:_IMPROVED]]
        best = self._judged_best(found)
        num_tries = min(_POLISHED, _POLISHED_ACTIONS // self._num_actions)
        if num_tries:
            best = improved(
                best,
                [functools.partial(self._neighbours, num_tries)],
                lambda one, other: is_better(self.judged(one), self.judged(other)),
                num_tries,
            )
        return self.judged(best)

    def _begun(self) -> list[Choice]:
        """Return the best choices of the best sets, as starting points of the local search."""
        guesses = self._guesses()
        near = [
            each.sites
            for each in guesses[:_SETS]
            if each.rank[0] <= _NEAR_ENOUGH * guesses[0].rank[0]
        ]
        promising = [self.set_of(names).promising() for names in near]
        kept = [each for mine in promising for each in mine[:_OF_EACH_SET]]
        return _distinct((*kept, *_distinct(itertools.chain(*promising))[:_CANDIDATES]))

    def _judged_best(self, choices: Iterable[Choice]) -> Choice:
        """Return the best of the best few choices, by the simulator."""
        near = _unlike_first(_distinct(choices))
        first = self.judged(near[0])
        most = max(_SIMULATED_LEAST, min(_SIMULATED, _SIMULATED_ACTIONS // self._num_actions))
        limit = _JUDGED_WITHIN * near[0].rank[0]
        others = [self.judged(each) for each in near[1:most] if each.rank[0] <= limit]
        return functools.reduce(
            lambda best, other: other if is_better(other, best) else best, others, first
        )

    def _neighbours(self, num_tries: int, choice: Choice) -> list[Choice]:
        """Return the results of single changes of a choice, the best by the step model first."""
        most = min(_NEIGHBOURS, _NEIGHBOURS_OF_TRY * num_tries)
        near = [
            each
            for each in self.set_of(choice.sites).neighbours(choice, most)
            if not self.is_judged(each)
        ]
        return sorted(near, key=by_rank)

    def is_judged(self, choice: Choice) -> bool:
        """Return whether a choice has been simulated."""
        return choice.decisions in self._simulated

    def judged(self, choice: Choice) -> Choice:
        """Return a choice with its simulated step, if simulation is possible."""
        key = choice.decisions
        if key not in self._simulated:
            here, is_large = self.set_of(choice.sites).topology, self.is_large
            run = simulated(choice.job(self.job), here, _FLOWS if is_large else FLOWS_PER_STEP)
            if run is not None:
                self._num_actions = max(self._num_actions, run.num_actions)
            self._simulated[key] = None if run is None else step_of(run)
        step_s = self._simulated[key]
        if step_s is None:
            return choice
        return self.with_step(self.set_of(choice.sites).modelled(choice), step_s)

    def with_step(self, choice: Choice, step_s: float) -> Choice:
        """Return a choice whose step takes `step_s` seconds, by a better source than the model."""
        usd_per_s = self.set_of(choice.sites).usd_per_s
        return choice.with_step(self.wishes.objective, step_s, usd_per_s)

    def best_of(self, names: Iterable[str], like: Choice | None = None) -> Choice | None:
        """Return a good choice in which exactly these sites take part; None: none exists.

        It is not searched for like the best one, but is the better of the menu's best and of
        `like`, a choice for other sites, as it is changed for these.
        """
        chosen = self._ordered(names)
        if not chosen or not self.is_possible(chosen):
            return None
        here = self.set_of(chosen)
        if not self.is_large:
            known = here.promising()[:1]
            known += [] if like is None else here.like(like)
        else:
            known = [] if like is None else here.like(like)
            guess = here.quick(min((each.rank[0] for each in known), default=math.inf))
            known += [] if guess is None else [guess]
        return min(known, key=by_rank, default=None)

    def set_of(self, names: Names) -> SiteSet:
        """Return the (cached) options for a set of sites."""
        if names not in self._sets:
            self._sets[names] = SiteSet(self, restricted(self.topology, names))
        return self._sets[names]

    def _guesses(self) -> list[Choice]:
        """Return quick guesses for promising sets of sites, the best first.

        From the best of the first sets, sites are added and removed while that helps.
        """
        everybody = tuple(site.name for site in self.topology.sites)
        if self.job.placement:
            everybody = self._ordered(each.site for each in self.job.placement)
        guesses = _Guesses(self)
        if self.job.placement or self.wishes.sites == "all":
            guesses.add([everybody])
        else:
            guesses.add(self._first_sets(everybody))
            counts = range(1, 3 if len(everybody) <= _FEW_SITES else 2)
            changes = [
                each for count in counts for each in itertools.combinations(everybody, count)
            ]
            before = None
            while guesses.best is not None and guesses.best is not before:
                before, now = guesses.best, set(guesses.best.sites)
                guesses.add(self._ordered(now ^ {*names}) for names in changes)
        return sorted(guesses.found, key=by_rank)

    def _first_sets(self, names: Names) -> Iterator[Names]:
        """Yield single sites, sets joined by near or by wide links, and the fastest sites."""
        yield from ((name,) for name in names)
        pairs = pairs_of(self.topology)
        for figure in (
            lambda each: pairs.rtt_ns[each],
            lambda each: -pairs.bytes_per_s[each],
        ):
            group = {index: frozenset([index]) for index in range(len(names))}
            for one, other in sorted(pairs.bytes_per_s, key=figure):
                if group[one] is not group[other]:
                    joined = group[one] | group[other]
                    group |= dict.fromkeys(joined, joined)
                    yield tuple(names[index] for index in sorted(joined))
        sequence_s = {site.name: self.options.site_sequence_s(site) for site in self.topology.sites}
        by_speed = sorted(names, key=sequence_s.__getitem__)
        for count in range(2, len(names) + 1):
            yield self._ordered(by_speed[:count])

    def is_possible(self, names: Names) -> bool:
        """Return whether these sites can run the job together."""
        if not names or not all(map(self.options.is_able, names)):
            return False
        least = sum(self.options.least(self.topology.site(name)) for name in names)
        return least <= self.job.global_batch and self.bounds.are_joined(names)

    def _ordered(self, names: Iterable[str]) -> Names:
        wanted = set(names)
        return tuple(site.name for site in self.topology.sites if site.name in wanted)


class _Guesses:
    """Quick guesses for sets of sites."""

    def __init__(self, search: Search) -> None:
        self._search = search
        self._seen: set[Names] = {()}
        self._num_pairs = 0
        """Pairs of sites in all sets that were guessed for."""
        self.found: list[Choice] = []

    @property
    def best(self) -> Choice | None:
        """The best guess."""
        return min(self.found, key=by_rank, default=None)

    def add(self, sets: Iterable[Names]) -> None:
        """Guess for new sets that may be better than the best so far, the promising ones first."""
        new = [names for names in dict.fromkeys(sets) if names not in self._seen]
        self._seen.update(new)
        for least, names in sorted((self._search.bounds.least(names), names) for names in new):
            best = min((each.rank[0] for each in self.found), default=math.inf)
            if least > _NEAR_ENOUGH * best:
                return
            if self._num_pairs > _GUESSED_PAIRS or not self._search.is_possible(names):
                continue
            self._num_pairs += len(names) ** 2
            guess = self._search.set_of(names).quick(_NEAR_ENOUGH * best)
            if guess is not None:
                self.found.append(guess)


class SiteSet:
    """All that can be decided for one set of sites: reduction, codecs, sizes, spread, cuts."""

    def __init__(self, search: Search, topology: Topology) -> None:
        """Consider only the sites of `topology`."""
        self._search, self.topology = search, topology
        self._options, self._objective = search.options, search.wishes.objective
        self._pairs: Pairs = pairs_of(topology, search.job.exchange)
        self._names = tuple(site.name for site in topology.sites)
        self._job = _with_micro_batch(search.job, topology)
        own = search.job.exchange.codecs
        self._codings = [Coding(each, own) for each in search.codecs]
        self.usd_per_s = usd_per_s(topology)
        self._splits = self._options.splits(topology)

    @functools.cached_property
    def _links(self) -> ModelLinks:
        return ModelLinks(self._job, self.topology)

    def quick(self, limit: float = math.inf) -> Choice | None:
        """Return a guess: the best of a few reductions with the lowest link time, in one size.

        None where the objective is quickly seen to be more than `limit`.
        """
        found = self._tried(self._quick_menu, most=_QUICK_CANDIDATES, limit=limit)
        if not found:
            return None
        begun, num_tries = min(found, key=by_rank), self._fewer(_QUICK_TRIES)
        return improved(begun, [self._respread], is_better, num_tries)

    @functools.cached_property
    def _quick_menu(self) -> list[Candidate]:
        """Return the menu without weighted trees but stars of a few hubs."""
        stars = weighted_stars(self._pairs) if self._job.reduction == Reduction() else None
        found = [*self._menu(packed=False)]
        if stars is not None and self._search.allows(stars.reduction):
            found.append(stars)
        return found

    def promising(self) -> list[Choice]:
        """Return the reductions and codecs of the menu that come near the best, in one size."""
        kept: dict[object, Choice] = {}
        for choice in sorted(self._tried(self._menu(packed=True)), key=by_rank):
            kept.setdefault((choice.candidate, choice.coding), choice)
        return list(kept.values())

    def like(self, other: Choice) -> list[Choice]:
        """Return the choice for other sites with its trees changed for these; empty: impossible."""
        trees = [adapted(tree, other.sites, self._pairs) for tree in other.candidate.plan.trees]
        is_gather = not trees and not any(map(self._pairs.missing, range(len(self._names))))
        found = tuple(tree for tree in trees if tree is not None)
        if len(found) < len(trees) or not (trees or is_gather) or len(self._names) == 1:
            return []
        candidate = candidate_of(self._names, found, "" if found else "gather")
        links = [each for each in other.coding.links if set(each.between) <= set(self._names)]
        if self._job.reduction != Reduction() or not self._search.allows(candidate.reduction):
            return []
        coding = Coding(other.coding.codec, tuple(links))
        how = (candidate, coding, other.sizing)
        return [each for split in self._splits for each in self.choices(*how, split)]

    def improved(self, choice: Choice, most_tries: int) -> Choice:
        """Return a choice improved by local search with the step model."""
        return improved(choice, self._changes(self._pool), is_better, self._fewer(most_tries))

    def neighbours(self, choice: Choice, most: int) -> Iterator[Choice]:
        """Yield choices that differ in one decision, `most` with few sites."""
        kinds = self._changes(self._pool[:_POOL])
        every = itertools.chain.from_iterable(kind(choice) for kind in kinds)
        return itertools.islice(every, self._fewer(most))

    def _fewer(self, most_tries: int) -> int:
        """Return the tries for this number of sites n, of which each takes time in n^2 and more."""
        return int(most_tries / max(1.0, len(self._names) / _FEW_SITES) ** 3)

    def _changes(self, pool: Sequence[Tree]) -> list[Callable[[Choice], Iterator[Choice]]]:
        """Return the kinds of changes; `pool` are trees that may get weight."""
        if len(self._names) == 1:
            return []
        trees = tree_changes(self._pairs, pool) if self._job.reduction == Reduction() else []
        return [
            self._respread,
            self._resized,
            self._recoded,
            *(functools.partial(self._with_trees, change) for change in trees),
        ]

    def _respread(self, choice: Choice) -> Iterator[Choice]:
        """Yield the best spreads of the batch after moving sequences."""
        if self._job.placement:
            return
        sites, unit = self.topology.sites, self._job.trainer.micro_batch
        least = [self._options.least(site) for site in sites]
        alone_s = [each.alone_s for each in choice.timings]
        splits = sorted(set(moves(choice.sequences, least, unit, alone_s)))
        how = (choice.candidate, choice.coding, choice.sizing)
        timed = zip(splits, self._fastest(*how, splits, most=_SPREADS), strict=True)
        able = [
            (step_s, split, timings)
            for split, (timings, step_s) in timed
            if timings and step_s < math.inf
        ]
        for step_s, split, timings in heapq.nsmallest(_SPREADS, able, key=lambda each: each[:2]):
            yield self._with_timings(*how, split, timings, step_s)

    def _resized(self, choice: Choice) -> Iterator[Choice]:
        """Yield the same in another size of chunks or buckets."""
        now, sizes = choice.sizing, self._search.sizes
        is_needed = self._may_gain(choice, choice.candidate.plan.trees)
        for sizing in sizes if is_needed else sizes[: sizes.index(now)]:
            if (sizing.chunk_bytes == now.chunk_bytes) != (sizing.bucket_bytes == now.bucket_bytes):
                yield from self.choices(choice.candidate, choice.coding, sizing, choice.sequences)

    def _recoded(self, choice: Choice) -> Iterator[Choice]:
        """Yield the same with other codecs: of all links, or of those of one tree."""
        plan, codings = choice.candidate.plan, self._codings
        if not self._search.job.exchange.codecs:
            job = self._decided_job(choice.coding, choice.sizing)
            now = plan_codecs(job, self.topology, plan)
            codings = [*codings, *recoded(now, plan, self._names, self._search.codecs)]
        for coding in codings:
            if coding != choice.coding:
                yield from self.choices(choice.candidate, coding, choice.sizing, choice.sequences)

    def _with_trees(self, change: TreeChanges, choice: Choice) -> Iterator[Choice]:
        """Yield the same over other trees, and cuts as they are."""
        if choice.candidate.plan.is_gather:
            return
        now = choice.candidate.plan.trees
        # Warm connections are quickly predicted: a lower bound of the step. With many sites slow
        # start is taken to add alike to all trees.
        limit_s = math.inf if choice.is_over_budget else choice.modelled_s
        if self._search.is_large and not choice.is_over_budget:
            warm_s = self._model_of(choice).warm_step_s(choice.timings)
            limit_s = min(limit_s, _WARM * warm_s)
        for trees in itertools.islice(change(choice.candidate.plan), self._fewer(_CHANGES)):
            if len(trees) >= len(now) and not self._may_gain(choice, trees):
                continue
            candidate = candidate_of(self._names, trees)
            if self._search.allows(candidate.reduction):
                how = (candidate, choice.coding, choice.sizing)
                model, _, _ = self._model(*how)
                step_s = math.inf
                if model.warm_step_s(choice.timings) < limit_s:
                    step_s = model.step_s(choice.timings)
                yield self._with_timings(*how, choice.sequences, choice.timings, step_s)

    def _may_gain(self, choice: Choice, trees: Sequence[Tree]) -> bool:
        """Return whether a choice may be better with other trees (none: gather) than it is.

        By a lower bound: what its sites compute, and the bytes on the busiest link.
        """
        if choice.coding.links:  # Trees may then have other codecs, which lose less.
            return True
        if choice.is_over_budget:  # A longer step may be within it.
            return True
        carried = self._carried(trees)
        sent_bytes = gradient_bytes(self._job) * usual_ratio(choice.coding.codec)
        busy_s = sent_bytes * self._busiest_s(carried)
        step_s = max(busy_s, *(each.alone_s for each in choice.timings))
        usd = self.usd_per_s * step_s
        if self._prices:
            usd += sent_bytes * math.fsum(self._prices[hop] * each for hop, each in carried.items())
        least = rank_of(self._objective, step_s, usd)[0]
        now = choice.usd_per_step if self._objective == "cost" else choice.modelled_s
        return least * AS_GOOD < now

    def _carried(self, trees: Sequence[Tree], ratios: Sequence[float] = (1.0,)) -> dict[Hop, float]:
        """Return the bytes on each directed link for a byte of the gradients; no trees: gather."""
        if not trees:
            hops = itertools.permutations(range(len(self._names)), 2)
            return dict.fromkeys(hops, ratios[0])
        total = sum(tree.weight for tree in trees)
        carried: dict[Hop, float] = {}
        for index, tree in enumerate(trees):
            part = ratios[index if len(ratios) > 1 else 0] * tree.weight / total
            for hop in tree.hops():
                carried[hop] = carried.get(hop, 0.0) + part
        return carried

    def _busiest_s(self, carried: Mapping[Hop, float]) -> float:
        """Return the seconds of the busiest link for these bytes."""
        rates = self._rates
        return max(each / rates[source][target] for (source, target), each in carried.items())

    @functools.cached_property
    def _rates(self) -> list[list[float]]:
        """Bytes per second from site to site."""
        rates: list[list[float]] = self._links.arrays.rate_st.tolist()
        return rates

    @functools.cached_property
    def _prices(self) -> dict[Hop, float]:
        """US dollars a byte of each directed link; empty: none has a price."""
        index = {name: site for site, name in enumerate(self._names)}
        prices = {
            (index[link.source], index[link.target]): link.egress_usd_per_byte
            for link in self.topology.links
        }
        return prices if any(prices.values()) else {}

    @functools.cached_property
    def _pool(self) -> list[Tree]:
        """Return trees that may get weight: those of the menu's reductions except rings."""
        trees = (
            tree
            for each in self._menu(packed=True)
            if not each.form.startswith("ring")
            for tree in each.plan.trees
        )
        return list({shape_of(tree): tree for tree in trees}.values())

    @functools.cache  # noqa: B019 - lives as long as the search does
    def _menu(self, *, packed: bool) -> list[Candidate]:
        """Return the candidate reductions."""
        found = menu(self._job, self.topology, packed=packed, pairs=self._pairs)
        return [each for each in found if self._search.allows(each.reduction)]

    def _tried(
        self, menu: Sequence[Candidate], most: int | None = None, limit: float = math.inf
    ) -> list[Choice]:
        """Return choices of a menu's reductions with each codec, in one size.

        Args:
            menu: Candidate reductions.
            most: Number of (reduction, codec) pairs to try with one spread; None: all, with each
                spread.
            limit: Objective beyond which choices do not matter.
        """
        order = sorted(
            (self._least_s(candidate, coding), index, place)
            for index, candidate in enumerate(menu)
            for place, coding in enumerate(self._codings)
        )
        choices: list[Choice] = []
        for least_s, index, place in order[:most]:
            if rank_of(self._objective, least_s, self.usd_per_s * least_s)[0] > limit:
                break
            how = (menu[index], self._codings[place], self._search.sizes[0])
            for split in self._splits[: most and 1]:
                found = list(self.choices(*how, split, limit))
                choices += found
                limit = min(limit, *(_NEAR_ENOUGH * each.rank[0] for each in found), math.inf)
        return choices

    def best_forms(self, coding: Coding, sizing: Sizing, split: Split, most: int) -> list[Choice]:
        """Return the best choices of the menu's reductions, with all else as it is said."""
        menu = self._menu(packed=False)
        order = sorted((self._least_s(each, coding), index) for index, each in enumerate(menu))
        found: list[Choice] = []
        for least_s, index in order:
            least = rank_of(self._objective, least_s, self.usd_per_s * least_s)[0]
            if len(found) == most and least > found[-1].rank[0]:
                break
            found += self.choices(menu[index], coding, sizing, split)
            found = sorted(found, key=by_rank)[:most]
        return found

    def _least_s(self, candidate: Candidate, coding: Coding) -> float:
        """Return a lower bound of the step: the busy time of its busiest link."""
        if candidate.plan.num_sites == 1:
            return 0.0
        job = self._decided_job(coding, self._search.sizes[0])
        ratios = tree_ratios(job, self.topology, candidate.plan, usual_ratio(coding.codec))
        return gradient_bytes(job) * self._busiest_s(self._carried(candidate.plan.trees, ratios))

    def choices(
        self,
        candidate: Candidate,
        coding: Coding,
        sizing: Sizing,
        split: Split,
        limit: float = math.inf,
    ) -> Iterator[Choice]:
        """Yield choices with these decisions and suitable cuts; none if impossible.

        Also none where the objective is quickly seen to be more than `limit`.
        """
        [(timings, step_s)] = self._fastest(candidate, coding, sizing, [split], limit=limit)
        if timings and step_s < math.inf:
            yield self._with_timings(candidate, coding, sizing, split, timings, step_s)

    def _with_timings(
        self,
        candidate: Candidate,
        coding: Coding,
        sizing: Sizing,
        split: Split,
        timings: tuple[SiteTiming, ...],
        step_s: float,
    ) -> Choice:
        """Return the choice with these decisions and cuts, and a step of `step_s`.

        Infinite: it is too long to be known. Then the choice has the price of its egress alone.
        """
        _, egress, lost = self._model(candidate, coding, sizing)
        is_known = step_s < math.inf
        usd = egress + (self.usd_per_s * step_s if is_known else 0.0)
        places = (self._search.codecs.index(coding.codec), len(candidate.plan.trees))
        rest = (len(self._names), lost, *places, self._search.sizes.index(sizing))
        budget = self._search.wishes.budget_usd_per_s
        usd_ranked = usd if is_known else math.inf
        over = over_budget(egress, step_s, budget)
        return Choice(
            sites=self._names,
            sequences=split,
            timings=timings,
            candidate=candidate,
            coding=coding,
            sizing=sizing,
            micro_batch=self._job.trainer.micro_batch,
            step_s=step_s,
            modelled_s=step_s,
            usd_per_step=usd,
            rank=rank_of(self._objective, step_s, usd_ranked, *rest, over=over),
            egress_usd_per_step=egress,
            budget_usd_per_s=budget,
        )

    def modelled(self, choice: Choice) -> Choice:
        """Return a choice with the step of the model, which may have been too long to be known."""
        if choice.modelled_s < math.inf:
            return choice
        return dataclasses.replace(choice, modelled_s=self._model_of(choice).step_s(choice.timings))

    def _decided_job(self, coding: Coding, sizing: Sizing) -> Job:
        exchange = sizing.of(coding.of(self._job.exchange))
        return dataclasses.replace(self._job, exchange=exchange)

    @functools.lru_cache(maxsize=64)  # noqa: B019 - lives as long as the search does
    def _model(
        self, candidate: Candidate, coding: Coding, sizing: Sizing
    ) -> tuple[StepModel, float, float]:
        """Return the step model, the US dollars of a step's egress, and the codecs' loss."""
        job, plan = self._decided_job(coding, sizing), candidate.plan
        model = StepModel(job, self.topology, plan, links=self._links)
        prices = self._prices
        egress = math.fsum(
            num_bytes * prices[hop] for hop, num_bytes in model.link_bytes.items() if prices
        )
        return model, egress, loss(plan_codecs(job, self.topology, plan), plan)

    def _model_of(self, choice: Choice) -> StepModel:
        return self._model(choice.candidate, choice.coding, choice.sizing)[0]

    def _fastest(
        self,
        candidate: Candidate,
        coding: Coding,
        sizing: Sizing,
        splits: Sequence[Split],
        most: int | None = None,
        limit: float = math.inf,
    ) -> list[tuple[tuple[SiteTiming, ...], float]]:
        """Return for each spread the timings with the shortest step; infinite: it is not exact.

        Args:
            candidate: Reduction.
            coding: Codecs.
            sizing: Sizes of chunks and buckets.
            splits: Spreads of the batch.
            most: Number of best spreads whose steps must be exact; None: all. With few sites, all.
            limit: Objective beyond which they need not be, with many sites.
        """
        job = self._decided_job(coding, sizing)
        model, _, _ = self._model(candidate, coding, sizing)
        fronts = [
            [
                self._options.timings(job, site, count)
                for site, count in zip(self.topology.sites, split, strict=True)
            ]
            for split in splits
        ]
        if self._job.workload is None and splits:
            alone = [tuple(front[0] for front in each) for each in fronts]
            if not self._search.is_large:
                return list(zip(alone, model.steps_s(alone), strict=True))
            if self._objective == "cost":
                limit = limit / self.usd_per_s if self.usd_per_s else math.inf
            return list(zip(alone, model.steps_s(alone, most, limit), strict=True))
        every = len(splits) == 1 or len(self._names) <= 2
        return [fastest_cuts(model, each, EVERY_CUTS_MAX if every else 1) for each in fronts]


def _distinct(choices: Iterable[Choice]) -> list[Choice]:
    """Return choices without duplicates, the best first."""
    return list({each.decisions: each for each in sorted(choices, key=by_rank)}.values())


def _unlike_first(choices: Iterable[Choice]) -> list[Choice]:
    """Return choices with the best for each number of trees first.

    Args:
        choices: The best first.
    """
    counts: Counter[int] = Counter()
    places = []
    for each in choices:
        num_trees = len(each.candidate.plan.trees)
        places.append((counts[num_trees], each))
        counts[num_trees] += 1
    return [each for _, each in sorted(places, key=lambda placed: placed[0])]


def fastest_cuts(
    model: StepModel, fronts: Sequence[tuple[SiteTiming, ...]], most: int = EVERY_CUTS_MAX
) -> tuple[tuple[SiteTiming, ...], float]:
    """Return the cuts that make a step shortest, and its seconds; infinite: there are none.

    Args:
        model: The step model.
        fronts: Each site's timings to choose from, the fastest alone first.
        most: Number of combinations up to which all are tried.
    """
    if not all(fronts):
        return (), math.inf
    if math.prod(map(len, fronts)) <= most:
        every = list(itertools.product(*fronts))
        timed = model.steps_s(every)
        place = min(range(len(timed)), key=timed.__getitem__)
        return every[place], timed[place]
    # Equal sites with equally many sequences share their cuts, and change together.
    best = tuple(front[0] for front in fronts)
    step_s = model.step_s(best)
    for front in {id(each): each for each in fronts}.values():
        others = [
            tuple(timing if mine is front else now for mine, now in zip(fronts, best, strict=True))
            for timing in front
        ]
        timed = model.steps_s(others)
        place = min(range(len(timed)), key=timed.__getitem__)
        if timed[place] < step_s:
            best, step_s = others[place], timed[place]
    return best, step_s


def simulated(
    job: Job, topology: Topology, flows_per_step: int = FLOWS_PER_STEP
) -> SimulatedRun | None:
    """Return a short simulated run; None if the model is unknown.

    Args:
        job: The job with all decisions.
        topology: Of the sites that take part.
        flows_per_step: Approximate number of hops of flows in a step, at most.
    """
    if job.entrypoint is not None and job.workload is None:
        return None
    return simulate(job, topology, Settings(steps=_STEPS, flows_per_step=flows_per_step))


def step_of(run: SimulatedRun) -> float:
    """Return the step of a short simulated run: that of its slowest site."""
    return max(run.step_s(site, _SKIPPED) for site in range(len(run.work.sites)))


def sizings(job: Job) -> tuple[Sizing, ...]:
    """Return the sizes of chunks and buckets to try, the job's own first."""
    own = Sizing(chunk_bytes=job.exchange.chunk_bytes, bucket_bytes=job.exchange.bucket_bytes)
    # With `serial` everything leaves at once, whatever the bucket size.
    buckets = () if job.exchange.schedule == "serial" else BUCKETS
    largest = max(gradient_bytes(job), own.bucket_bytes, min(BUCKETS))
    pairs = itertools.product(
        dict.fromkeys((own.bucket_bytes, *buckets)), dict.fromkeys((own.chunk_bytes, *CHUNKS))
    )
    others = [
        Sizing(chunk_bytes=chunk_bytes, bucket_bytes=bucket_bytes)
        for bucket_bytes, chunk_bytes in pairs
        if chunk_bytes <= min(bucket_bytes, job.exchange.window_bytes or bucket_bytes)
        and bucket_bytes < 4 * largest
    ]
    return tuple(dict.fromkeys((own, *others)))


def _with_micro_batch(job: Job, topology: Topology) -> Job:
    """Return the job with the largest micro-batch that fits these sites, if to be decided."""
    if job.plan is None or job.plan.micro_batch == "given" or job.workload is not None:
        return job
    most, _ = largest_micro_batch(job, topology)
    return dataclasses.replace(job, trainer=dataclasses.replace(job.trainer, micro_batch=most))
