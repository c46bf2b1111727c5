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
from collections.abc import Callable, Iterable, Iterator, Sequence

from isthmus.topology.cost.money import egress_usd
from isthmus.topology.documents.placement import restricted, unreached
from isthmus.topology.model.buckets import gradient_bytes
from isthmus.topology.model.site_timing import SiteTiming
from isthmus.topology.model.step_model import StepModel
from isthmus.topology.planner.choice import (
    Choice,
    Coding,
    Sizing,
    by_rank,
    is_better,
    loss,
    rank_of,
    recoded,
    usd_per_s,
)
from isthmus.topology.planner.local_search import improved
from isthmus.topology.planner.memory_fit import largest_micro_batch
from isthmus.topology.planner.reductions import (
    Candidate,
    TreeChanges,
    candidate_of,
    menu,
    tree_changes,
)
from isthmus.topology.planner.site_options import SiteOptions
from isthmus.topology.planner.spreads import Split, moves
from isthmus.topology.simulator.settings import Settings
from isthmus.topology.simulator.simulation import SimulatedRun, simulate
from isthmus.topology.spec.job import Job, Reduction
from isthmus.topology.spec.plan_wishes import PlanWishes
from isthmus.topology.spec.reduction_plan import Tree, shape_of
from isthmus.topology.spec.world import Topology
from isthmus.topology.trees.codec_costs import usual_ratio
from isthmus.topology.trees.link_codecs import plan_codecs
from isthmus.topology.trees.pairs import Pairs, pairs_of
from isthmus.topology.trees.tree_times import seconds_per_byte
from isthmus.topology.trees.wire_load import tree_ratios

CHUNKS = tuple(size << 10 for size in (1024, 256, 4096, 512, 2048, 128, 64))
BUCKETS = (4 << 20, 1 << 20, 16 << 20, 64 << 20)
"""Bucket sizes in bytes that are tried beside the job's own."""
EVERY_CUTS_MAX = 512
"""Number of combinations of sites' cuts up to which all are tried."""
_QUICK_CANDIDATES = 3
"""Reductions of a set that are tried for a first guess."""
_SETS = 4
"""Sets of sites that are examined closely."""
_SITES_OF_PAIRS = 6
"""Number of sites up to which two at once may join or leave a set."""
_GUESSED_SITES = 12
"""Number of sites beyond which the step without a site, or with one more, is a guess."""
_CANDIDATES, _OF_EACH_SET = 10, 2
"""Reductions of these sets that are examined closely, and the minimum per set."""
_NEAR_ENOUGH = 1.2
"""Ratio to the best choice's step beyond which a choice is dropped."""
_BETTERED = 3
"""Number of choices that are improved with many tries."""
_QUICK_TRIES, _FEW_TRIES, _MANY_TRIES = 40, 120, 480
"""Limits on tried changes: of the spread for a guess, at first, and for the best choices."""
_SITES_OF_TRIES = 6
"""Number of sites beyond which there are fewer tries: a model's time grows with the pairs of
sites."""
_SPREADS = 8
"""Number of best spreads of the batch, after single moves, that are examined."""
_NEIGHBOURS = 600
"""Number of changes that the step model sorts for the simulator."""
_POOL = 12
"""Number of further trees that the simulator's changes may give weight to."""
_JUDGED, _JUDGED_LEAST, _POLISHED = 12, 4, 48
"""Largest and smallest number of choices that are simulated, and of simulated changes of the
best."""
_JUDGED_ACTIONS, _POLISHED_ACTIONS = 400_000, 200_000
"""Limits on simulated actions for judging and polishing: about half a second."""
_JUDGED_WITHIN = 1.15
"""Ratio to the best modelled step beyond which a choice is not simulated."""
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
        self._sets: dict[Names, SiteSet] = {}
        self._simulated: dict[object, float | None] = {}
        self._num_actions = 1
        """Largest number of actions of a simulated choice so far."""

    def best(self) -> Choice | None:
        """Return the best choice; None: no set of sites can run the job."""
        begun = self._begun()
        if not begun:
            return None
        found = _distinct(self.set_of(each.sites).improved(each, _FEW_TRIES) for each in begun)
        found += [self.set_of(each.sites).improved(each, _MANY_TRIES) for each in found[:_BETTERED]]
        best = self._judged_best(found)
        num_tries = min(_POLISHED, _POLISHED_ACTIONS // self._num_actions)
        polished = improved(
            best,
            [self._neighbours],
            lambda one, other: is_better(self.judged(one), self.judged(other)),
            num_tries,
        )
        return self.judged(polished)

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
        most = max(_JUDGED_LEAST, min(_JUDGED, _JUDGED_ACTIONS // self._num_actions))
        limit = _JUDGED_WITHIN * near[0].rank[0]
        others = [self.judged(each) for each in near[1:most] if each.rank[0] <= limit]
        return functools.reduce(
            lambda best, other: other if is_better(other, best) else best, others, first
        )

    def _neighbours(self, choice: Choice) -> list[Choice]:
        """Return the results of single changes of a choice, the best by the step model first."""
        near = [
            each
            for each in self.set_of(choice.sites).neighbours(choice)
            if each.decisions not in self._simulated
        ]
        return sorted(near, key=by_rank)

    def judged(self, choice: Choice) -> Choice:
        """Return a choice with its simulated step, if simulation is possible."""
        key, here = choice.decisions, choice.topology(self.topology)
        if key not in self._simulated:
            run = simulated(choice.job(self.job), here)
            if run is not None:
                self._num_actions = max(self._num_actions, run.num_actions)
            self._simulated[key] = None if run is None else step_of(run)
        step_s = self._simulated[key]
        return choice if step_s is None else self.lasting(choice, step_s)

    def lasting(self, choice: Choice, step_s: float) -> Choice:
        """Return a choice whose step takes `step_s` seconds, by a better source than the model."""
        return choice.lasting(
            self.wishes.objective, step_s, usd_per_s(choice.topology(self.topology))
        )

    def best_of(self, names: Iterable[str]) -> Choice | None:
        """Return a good choice in which exactly these sites take part; None: none exists."""
        chosen = self._ordered(names)
        if not chosen or not self._is_possible(chosen):
            return None
        return self.set_of(chosen).good

    def set_of(self, names: Names) -> SiteSet:
        """Return the (cached) options for a set of sites."""
        if names not in self._sets:
            self._sets[names] = SiteSet(self, restricted(self.topology, names))
        return self._sets[names]

    def _guesses(self) -> list[Choice]:
        """Return quick guesses for promising sets of sites, the best first.

        From the best of the first sets, sites are added and removed while that helps.
        """
        guesses: dict[Names, Choice | None] = {}

        def guess(sets: Iterable[Names]) -> Choice | None:
            for names in sets:
                if names not in guesses:
                    guesses[names] = self.set_of(names).quick if self._is_possible(names) else None
            return min(filter(None, guesses.values()), key=by_rank, default=None)

        everybody = tuple(site.name for site in self.topology.sites)
        if self.job.placement:
            guess([self._ordered(each.site for each in self.job.placement)])
        elif self.wishes.sites == "all":
            guess([everybody])
        else:
            best = guess(self._first_sets(everybody))
            counts = range(1, 3 if len(everybody) <= _SITES_OF_PAIRS else 2)
            changes = [
                each for count in counts for each in itertools.combinations(everybody, count)
            ]
            before = None
            while best is not None and best is not before:
                before, now = best, set(best.sites)
                best = guess(self._ordered(now ^ {*names}) for names in changes)
        return sorted(filter(None, guesses.values()), key=by_rank)

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

    def _is_possible(self, names: Names) -> bool:
        here = restricted(self.topology, names)
        if not names or unreached(here) or not all(map(self.options.is_able, names)):
            return False
        return sum(map(self.options.least, here.sites)) <= self.job.global_batch

    def _ordered(self, names: Iterable[str]) -> Names:
        wanted = set(names)
        return tuple(site.name for site in self.topology.sites if site.name in wanted)


class SiteSet:
    """All that can be decided for one set of sites: reduction, codecs, sizes, spread, cuts."""

    def __init__(self, search: Search, topology: Topology) -> None:
        """Consider only the sites of `topology`."""
        self._search, self._topology = search, topology
        self._options, self._objective = search.options, search.wishes.objective
        self._pairs: Pairs = pairs_of(topology, search.job.exchange)
        self._names = tuple(site.name for site in topology.sites)
        self._job = _with_micro_batch(search.job, topology)
        own = search.job.exchange.codecs
        self._codings = [Coding(each, own) for each in search.codecs]
        self._usd_per_s = usd_per_s(topology)
        self._splits = self._options.splits(topology)

    @functools.cached_property
    def quick(self) -> Choice | None:
        """A guess: the best of a few reductions with the lowest link time, in one size."""
        found = self._tried(packed=False, most=_QUICK_CANDIDATES)
        if not found:
            return None
        begun, num_tries = min(found, key=by_rank), self._fewer(_QUICK_TRIES)
        return improved(begun, [self._respread], is_better, num_tries)

    @functools.cached_property
    def good(self) -> Choice | None:
        """A good choice: the best of the menu, with few changes. With many sites, the guess."""
        if len(self._names) > _GUESSED_SITES:
            return self.quick
        return next((self.improved(each, _FEW_TRIES) for each in self.promising()), None)

    def promising(self) -> list[Choice]:
        """Return the reductions and codecs of the menu that come near the best, in one size."""
        kept: dict[object, Choice] = {}
        for choice in sorted(self._tried(packed=True), key=by_rank):
            kept.setdefault((choice.candidate, choice.coding), choice)
        return list(kept.values())

    def improved(self, choice: Choice, most_tries: int) -> Choice:
        """Return a choice improved by local search with the step model."""
        return improved(choice, self._changes(self._pool), is_better, self._fewer(most_tries))

    def neighbours(self, choice: Choice) -> Iterator[Choice]:
        """Yield choices that differ in one decision."""
        kinds = self._changes(self._pool[:_POOL])
        every = itertools.chain.from_iterable(kind(choice) for kind in kinds)
        return itertools.islice(every, self._fewer(_NEIGHBOURS))

    def _fewer(self, most_tries: int) -> int:
        """Return the tries for this number of sites n: a try takes time in n^2."""
        return int(most_tries / max(1.0, len(self._names) / _SITES_OF_TRIES) ** 2)

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
        sites, unit = self._topology.sites, self._job.trainer.micro_batch
        least = [self._options.least(site) for site in sites]
        alone_s = [each.alone_s for each in choice.timings]
        splits = sorted(set(moves(choice.sequences, least, unit, alone_s)))
        how = (choice.candidate, choice.coding, choice.sizing)
        timed = zip(splits, self._fastest(*how, splits), strict=True)
        able = [(step_s, split, timings) for split, (timings, step_s) in timed if timings]
        for step_s, split, timings in heapq.nsmallest(_SPREADS, able, key=lambda each: each[:2]):
            yield self._with_timings(*how, split, timings, step_s)

    def _resized(self, choice: Choice) -> Iterator[Choice]:
        """Yield the same in other sizes of chunks and buckets."""
        for sizing in self._search.sizes:
            if sizing != choice.sizing:
                yield from self.choices(choice.candidate, choice.coding, sizing, choice.sequences)

    def _recoded(self, choice: Choice) -> Iterator[Choice]:
        """Yield the same with other codecs: of all links, or of those of one tree."""
        plan, codings = choice.candidate.plan, self._codings
        if not self._search.job.exchange.codecs:
            job = self._decided_job(choice.coding, choice.sizing)
            now = plan_codecs(job, self._topology, plan)
            codings = [*codings, *recoded(now, plan, self._names, self._search.codecs)]
        for coding in codings:
            if coding != choice.coding:
                yield from self.choices(choice.candidate, coding, choice.sizing, choice.sequences)

    def _with_trees(self, change: TreeChanges, choice: Choice) -> Iterator[Choice]:
        """Yield the same over other trees, and cuts as they are."""
        if choice.candidate.plan.is_gather:
            return
        for trees in change(choice.candidate.plan):
            candidate = candidate_of(self._names, trees)
            if self._search.allows(candidate.reduction):
                how = (candidate, choice.coding, choice.sizing)
                model, _, _ = self._model(*how)
                step_s = model.warm_step_s(choice.timings)
                if step_s < choice.modelled_s:  # A longer step need not be exact.
                    step_s = model.step_s(choice.timings)
                yield self._with_timings(*how, choice.sequences, choice.timings, step_s)

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
        found = menu(self._job, self._topology, packed=packed)
        return [each for each in found if self._search.allows(each.reduction)]

    def _tried(self, *, packed: bool, most: int | None = None) -> list[Choice]:
        """Return choices of the menu's reductions with each codec, in one size.

        Args:
            packed: Also weighted trees of a linear program.
            most: Number of (reduction, codec) pairs to try with one spread; None: all, with each
                spread.
        """
        order = sorted(
            (self._least_s(candidate, coding), index, place)
            for index, candidate in enumerate(self._menu(packed=packed))
            for place, coding in enumerate(self._codings)
        )
        choices: list[Choice] = []
        best = math.inf
        for least_s, index, place in order[:most]:
            if rank_of(self._objective, least_s, self._usd_per_s * least_s)[0] > best:
                break
            candidate, coding = self._menu(packed=packed)[index], self._codings[place]
            for split in self._splits[: most and 1]:
                choices += self.choices(candidate, coding, self._search.sizes[0], split)
            best = min((_NEAR_ENOUGH * each.rank[0] for each in choices), default=best)
        return choices

    def best_forms(self, coding: Coding, sizing: Sizing, split: Split, most: int) -> list[Choice]:
        """Return the best choices of the menu's reductions, with all else as it is said."""
        menu = self._menu(packed=False)
        order = sorted((self._least_s(each, coding), index) for index, each in enumerate(menu))
        found: list[Choice] = []
        for least_s, index in order:
            least = rank_of(self._objective, least_s, self._usd_per_s * least_s)[0]
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
        ratios = tree_ratios(job, self._topology, candidate.plan, usual_ratio(coding.codec))
        busy_s = seconds_per_byte(candidate.plan, self._topology, ratios)
        return gradient_bytes(job) * max(busy_s.values())

    def choices(
        self, candidate: Candidate, coding: Coding, sizing: Sizing, split: Split
    ) -> Iterator[Choice]:
        """Yield choices with these decisions and suitable cuts; none if impossible."""
        [(timings, step_s)] = self._fastest(candidate, coding, sizing, [split])
        if timings:
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
        """Return the choice with these decisions and cuts, and a step of `step_s`."""
        _, egress, lost = self._model(candidate, coding, sizing)
        usd = self._usd_per_s * step_s + egress
        places = (self._search.codecs.index(coding.codec), len(candidate.plan.trees))
        rest = (len(self._names), lost, *places, self._search.sizes.index(sizing))
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
            rank=rank_of(self._objective, step_s, usd, *rest),
        )

    def _decided_job(self, coding: Coding, sizing: Sizing) -> Job:
        exchange = sizing.of(coding.of(self._job.exchange))
        return dataclasses.replace(self._job, exchange=exchange)

    @functools.lru_cache(maxsize=64)  # noqa: B019 - lives as long as the search does
    def _model(
        self, candidate: Candidate, coding: Coding, sizing: Sizing
    ) -> tuple[StepModel, float, float]:
        """Return the step model, the US dollars of a step's egress, and the codecs' loss."""
        job, plan = self._decided_job(coding, sizing), candidate.plan
        model = StepModel(job, self._topology, plan)
        sent_bytes = {
            (self._names[source], self._names[target]): num_bytes
            for (source, target), num_bytes in model.link_bytes.items()
        }
        lost = loss(plan_codecs(job, self._topology, plan), plan)
        return model, egress_usd(self._topology, sent_bytes), lost

    def _fastest(
        self, candidate: Candidate, coding: Coding, sizing: Sizing, splits: Sequence[Split]
    ) -> list[tuple[tuple[SiteTiming, ...], float]]:
        """Return for each spread the timings with the shortest step."""
        job, (model, _, _) = (
            self._decided_job(coding, sizing),
            self._model(candidate, coding, sizing),
        )
        fronts = [
            [
                self._options.timings(job, site, count)
                for site, count in zip(self._topology.sites, split, strict=True)
            ]
            for split in splits
        ]
        if self._job.workload is None and splits:
            alone = [tuple(front[0] for front in each) for each in fronts]
            return list(zip(alone, model.steps_s(alone), strict=True))
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


def simulated(job: Job, topology: Topology) -> SimulatedRun | None:
    """Return a short simulated run; None if the model is unknown.

    Args:
        job: The job with all decisions.
        topology: Of the sites that take part.
    """
    if job.entrypoint is not None and job.workload is None:
        return None
    return simulate(job, topology, Settings(steps=_STEPS))


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
