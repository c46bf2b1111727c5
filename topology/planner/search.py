"""The search for the best plan, for the trainer that ships and for models that jobs describe.

Of few sites all sets are looked at, in the order of what they cannot be better than; of more, those
that near or wide links join, and what single sites that join or leave make of them. For a set, the
reductions of the menu are tried with each codec; the most promising ones get other sizes, another
spread of the batch, other cuts and other weights of trees, one after another, for as long as that
helps. The simulator decides between the best few, for the step model is least true of several trees
that share links; and what it says of a plan is what the plan says of itself.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

from topology.codec_costs import usual_ratio
from topology.cost.compute import sequence_s
from topology.cost.model_shape import workload_described
from topology.documents.placement import restricted, unreached
from topology.job import Job, Reduction
from topology.model.buckets import gradient_bytes, releases
from topology.model.site_timing import SiteTiming, layers_together, trainer_timing
from topology.model.step_model import StepModel
from topology.model.tree_times import seconds_per_byte
from topology.model.wire_load import chunk_bytes_of, tree_ratios
from topology.plan_wishes import PlanWishes
from topology.planner.choice import (
    Choice,
    Coding,
    Rank,
    Sizing,
    Split,
    better,
    by_link,
    by_rank,
    egress_usd_per_step,
    one_for_all,
    rank_of,
    usd_per_s,
)
from topology.planner.cuts import SiteCuts, site_cuts
from topology.planner.memory_fit import largest_micro_batch
from topology.planner.reductions import (
    Way,
    WeightMoves,
    menu,
    other_roots,
    other_trees,
    rehung,
    rounded_weights,
    way_of,
)
from topology.planner.spreads import balanced, improved, in_proportion, neighbours
from topology.simulator.settings import Settings
from topology.simulator.simulation import SimulatedRun, simulate
from topology.trees.pairs import Pairs, pairs_of
from topology.trees.trees import ReductionPlan, Tree, shape_of
from topology.world import Site, Topology

EVERY_SET_SITES = 8
"""Up to so many sites, all sets of them are looked at."""
CHUNKS = tuple(size << 10 for size in (1024, 256, 4096, 512, 2048, 128, 64))
BUCKETS = (4 << 20, 1 << 20, 16 << 20, 64 << 20)
"""Sizes that are tried beside the job's own."""
EVERY_CUTS_MAX = 512
"""Combinations of the sites' cuts that are all tried."""
_FEW_SPLITS = 8
"""With so many at once, all combinations of cuts are tried for each."""
_QUICK_WAYS = 3
"""Reductions of a set that are looked at, before it is known whether the set is good."""
_THOROUGH_SETS = 6
_EVERY_ROOT_SITES = 4
_THOROUGH_WAYS = 4
_THOROUGH_TREES = 2
"""Of these, single trees at least: what other trees, and weights, begin with."""
_NEAR_ENOUGH = 1.2
"""How many times the best's rank a guess may be for a thorough look."""
_BETTERED = 3
"""Choices whose trees get other weights."""
_MOVES_A_SITE = 40
"""Weighted trees that are tried, at most, times sites."""
_JUDGED, _POLISHED = 12, 48
"""Choices that the simulator decides between, and neighbours of the best that it looks at, at
most."""
_JUDGED_ACTIONS, _POLISHED_ACTIONS = 400_000, 200_000
"""Actions that are simulated for that, about: half a second."""
_FASTER = 1 - 1e-4
"""Times a step: what is no faster than that is no better."""
_JUDGED_LEAST = 4
_OF_A_FAMILY = 3
"""Of these, with the same trees."""
_SMALL_TOTALS = (3, 6, 12)
"""Of weights, that are tried beside those that the step model finds best."""
_JUDGED_WITHIN = 1.15
"""How many times the best's modelled step theirs may be."""
_AS_GOOD = 1e-4
"""Of a simulated step: what differs by less is as fast."""
_STEPS, _SKIPPED = 12, 4
"""Steps that are simulated, and the first of them, which begin as no later one does."""

Names = tuple[str, ...]


class SiteOptions:
    """What sites can compute: a timing for the trainer that ships, else one for each useful cut."""

    def __init__(self, job: Job, topology: Topology) -> None:
        """Work out the cuts, where the job describes its model."""
        self._placed = {each.site: each for each in job.placement}
        self._timings: dict[object, tuple[SiteTiming, ...]] = {}
        self.cuts: dict[str, SiteCuts] = {}
        """By the names of sites; the same object for equal ones. Empty for the trainer."""
        self._job, self._topology = job, topology
        known: list[tuple[object, SiteCuts]] = []
        for site in topology.sites if job.workload is not None else ():
            mine = self._placed.get(site.name)
            key = (_hardware(site), None if mine is None else mine.parallel)
            alike = next((cuts for other, cuts in known if other == key), None)
            self.cuts[site.name] = alike or site_cuts(job, site, mine)
            known.append((key, self.cuts[site.name]))

    def timings(self, job: Job, site: Site, num_sequences: int) -> tuple[SiteTiming, ...]:
        """Return what a site could do, the fastest by itself first; none: it cannot.

        Args:
            job: Gives buckets and the trainer's micro-batch.
            site: Which one.
            num_sequences: Of a step, at least one for each rank of the trainer that ships.
        """
        if job.workload is not None:
            together = layers_together(workload_described(job.workload), job.exchange.bucket_bytes)
            return self.cuts[site.name].timings(num_sequences, together)
        most = -(-num_sequences // site.num_ranks)
        key = (site.name, most, job.exchange.bucket_bytes, job.trainer.micro_batch)
        if key not in self._timings:
            self._timings[key] = (trainer_timing(job, site, most),)
        return self._timings[key]

    def site_sequence_s(self, site: Site) -> float:
        """Return how long a site takes for a sequence, at least; infinite if it cannot."""
        if self.cuts:
            return self.cuts[site.name].sequence_s
        return sequence_s(self._job, site) / site.num_ranks

    def is_able(self, name: str) -> bool:
        """Return whether the model fits a site at all."""
        return not self.cuts or bool(self.cuts[name].cuts)

    def least(self, site: Site) -> int:
        """Return how many sequences a site has at least."""
        return 1 if self.cuts else site.num_ranks

    def splits(self, topology: Topology) -> list[Split]:
        """Return spreads of the batch to begin with; none if it is too small."""
        sites, batch = topology.sites, self._job.global_batch
        if self._job.placement:
            return [tuple(self._placed[site.name].sequences for site in sites)]
        ranks = [site.num_ranks for site in sites]
        if not self.cuts:
            split = balanced(ranks, [sequence_s(self._job, site) for site in sites], batch)
            return [] if split is None else [split]
        speeds = [1 / self.site_sequence_s(site) for site in sites]
        found = [
            in_proportion(weights, batch, unit)
            for weights in (speeds, [float(each) for each in ranks])
            for unit in (1, 8, 64)
        ]
        return [each for each in dict.fromkeys(found) if min(each) > 0]


class Search:
    """Finds the best choice for a job, of all sites or of some. Keeps what it has found."""

    def __init__(
        self,
        job: Job,
        topology: Topology,
        sizes: tuple[Sizing, ...] = (),
        allows: Callable[[Reduction], bool] = lambda _: True,
        options: SiteOptions | None = None,
    ) -> None:
        """Take a job; what its placement says is kept.

        Args:
            job: Its `plan` says what may be decided.
            topology: Described in full.
            sizes: Of chunks and buckets, that may be chosen; empty: all.
            allows: Whether a reduction comes into question.
            options: Of the same job's sites, where they are known.
        """
        self.job, self.topology = job, topology
        self.wishes = job.plan or PlanWishes()
        self.codecs = self.wishes.codecs or (job.exchange.codec,)
        self.sizes = sizes or sizings(job)
        self.is_sized = bool(sizes)
        self.allows = allows
        self.options = options or SiteOptions(job, topology)
        self._sets: dict[Names, SiteSet] = {}
        self._simulated: dict[object, float | None] = {}
        self._num_actions = 0
        """That simulating a choice takes at most, as far as known."""

    def best(self) -> Choice | None:
        """Return the best choice of all; None where no set of sites can run the job."""
        found: list[Choice] = []
        guesses = self.guesses()
        for guess in guesses[:_THOROUGH_SETS]:
            if guess.rank[0] <= _NEAR_ENOUGH * guesses[0].rank[0]:
                found += self.set_of(guess.sites).thorough()
        if not found:
            return None
        if len(self.topology.sites) > EVERY_SET_SITES and len(self._all_sets()) > 1:
            found += self._climbed(min(found, key=by_rank))
        found.sort(key=by_rank)
        for choice in found[:_BETTERED]:
            found += self.set_of(choice.sites).bettered(choice)
        return self._polished(self._decided(found))

    def guesses(self) -> list[Choice]:
        """Return a quick guess for each set of sites that may be best, the most promising first."""
        best: Choice | None = None
        found: list[Choice] = []
        for bound, names in sorted((self._bound(names), names) for names in self._all_sets()):
            if best is not None and bound > best.rank[0]:
                break  # what may be as fast is looked at: with fewer sites it is better
            guess = self.set_of(names).quick
            if guess is not None:
                found.append(guess)
                best = better(best, guess)
        return sorted(found, key=by_rank)

    def _decided(self, choices: Iterable[Choice]) -> Choice:
        """Return the best of some choices: of the best few, by the simulator."""
        order = list({_decisions(each): each for each in sorted(choices, key=by_rank)}.values())
        families: Counter[object] = Counter()
        near: list[Choice] = []
        for choice in order:
            # Choices that differ in weights and sizes alone are simulated alike: some are enough.
            families[_family(choice)] += 1
            if families[_family(choice)] <= _OF_A_FAMILY:
                near.append(choice)
        judged = [self.judged(near[0])]
        judged += [
            self.judged(choice)
            for choice in near[1 : self._affordable(_JUDGED_ACTIONS, _JUDGED)]
            if choice.rank[0] <= _JUDGED_WITHIN * near[0].rank[0]
        ]
        best = min(judged, key=by_rank)
        as_good = [each for each in judged if each.rank[0] <= best.rank[0] * (1 + _AS_GOOD)]
        return min(as_good, key=lambda each: each.rank[1:])

    def _polished(self, best: Choice) -> Choice:
        """Return what single moves make of a choice, by the simulator, as far as that is cheap."""
        num_tries = min(_POLISHED, _POLISHED_ACTIONS // max(self._num_actions, 1))
        tried = {_decisions(best)}
        while num_tries > 0:
            near = [
                each
                for each in sorted(self.set_of(best.sites).neighbours(best), key=by_rank)
                if _decisions(each) not in tried
            ]
            before = best
            for other in near[: max(num_tries // 2, 1)]:
                num_tries -= 1
                tried.add(_decisions(other))
                judged = self.judged(other)
                if judged.rank[0] < _FASTER * best.rank[0]:
                    best = judged
                    break
            if best is before:
                break
        return best

    def _affordable(self, num_actions: int, most: int) -> int:
        """Return how many more choices may be simulated, by what the first one took."""
        return max(_JUDGED_LEAST, min(most, num_actions // max(self._num_actions, 1)))

    def judged(self, choice: Choice) -> Choice:
        """Return a choice with its step as simulated, if it can be."""
        key = _decisions(choice)
        if key not in self._simulated:
            run = simulated(choice.job(self.job), choice.topology(self.topology))
            if run is not None:
                self._num_actions = max(self._num_actions, run.num_actions)
            self._simulated[key] = None if run is None else step_of(run)
        step_s = self._simulated[key]
        if step_s is None:
            return choice
        here = choice.topology(self.topology)
        return choice.lasting(self.wishes.objective, step_s, usd_per_s(here))

    def best_of(self, names: Iterable[str]) -> Choice | None:
        """Return a good choice in which just these sites take part; None where there is none."""
        chosen = self._ordered(names)
        if not chosen or not all(map(self.options.is_able, chosen)):
            return None
        return self.set_of(chosen).good

    def set_of(self, names: Names) -> SiteSet:
        """Return what can be decided for some sites."""
        if names not in self._sets:
            self._sets[names] = SiteSet(self, restricted(self.topology, names))
        return self._sets[names]

    def like(self, choice: Choice) -> Search:
        """Return a search for other sets of sites with a choice's codecs and sizes."""
        own = bool(self.job.exchange.codecs)
        codecs = (choice.coding.codec,) if own else choice.coding.codecs
        job = dataclasses.replace(self.job, plan=dataclasses.replace(self.wishes, codecs=codecs))
        return Search(job, self.topology, (choice.sizing,), self.allows, self.options)

    def looked_at(self) -> list[Choice]:
        """Return a guess for each set of sites that was looked at, and for all of them together."""
        everybody = tuple(site.name for site in self.topology.sites)
        if everybody in self._all_sets():
            self.set_of(everybody)
        return [each.quick for each in self._sets.values() if each.quick is not None]

    def _all_sets(self) -> list[Names]:
        """Return the sets of sites that come into question."""
        names = tuple(site.name for site in self.topology.sites)
        if self.job.placement:
            return [self._ordered(each.site for each in self.job.placement)]
        if self.wishes.sites == "all":
            return [names] if all(map(self.options.is_able, names)) else []
        able = tuple(filter(self.options.is_able, names))
        if len(able) <= EVERY_SET_SITES:
            sizes = range(len(able), 0, -1)
            found: Iterable[Names] = itertools.chain.from_iterable(
                itertools.combinations(able, count) for count in sizes
            )
        else:
            found = self._clusters(able)
        return [chosen for chosen in dict.fromkeys(found) if self._is_possible(chosen)]

    def _is_possible(self, names: Names) -> bool:
        here = restricted(self.topology, names)
        fewest = sum(self.options.least(site) for site in here.sites)
        return fewest <= self.job.global_batch and not unreached(here)

    def _clusters(self, names: Names) -> Iterator[Names]:
        """Yield each site alone, those that links join which are near, or wide; and the fastest."""
        pairs = pairs_of(restricted(self.topology, names))
        for figure in (
            lambda each: pairs.rtt_ns[each],
            lambda each: -pairs.bytes_per_s[each],
        ):
            group = {index: frozenset([index]) for index in range(len(names))}
            yield from ((name,) for name in names)
            for one, other in sorted(pairs.bytes_per_s, key=figure):
                if group[one] is not group[other]:
                    joined = group[one] | group[other]
                    group |= dict.fromkeys(joined, joined)
                    yield tuple(names[index] for index in sorted(joined))
        by_speed = sorted(
            names, key=lambda name: self.options.site_sequence_s(self.topology.site(name))
        )
        for count in range(2, len(names) + 1):
            yield self._ordered(by_speed[:count])

    def _climbed(self, best: Choice) -> list[Choice]:
        """Return what is better once single sites join or leave, for as long as that helps."""
        found: list[Choice] = []
        allowed = tuple(
            site.name for site in self.topology.sites if self.options.is_able(site.name)
        )
        guess, is_better = self.set_of(best.sites).quick, True
        while is_better:
            is_better = False
            for name in allowed:
                now = (guess or best).sites
                others = tuple(each for each in now if each != name)
                chosen = self._ordered(others if name in now else (*now, name))
                if not chosen or not self._is_possible(chosen):
                    continue
                other = self.set_of(chosen).quick
                if other is not None and guess is not None and other.rank < guess.rank:
                    guess, is_better = other, True
        if guess is not None and guess.sites != best.sites:
            found += self.set_of(guess.sites).thorough()
        return found

    def _bound(self, names: Names) -> float:
        """Return what no choice of these sites is better than, seconds or dollars.

        All sites compute all the time; every byte leaves every site once at least, encoded, over
        all of its links together.
        """
        here = restricted(self.topology, names)
        rates = [1 / self.options.site_sequence_s(site) for site in here.sites]
        least_s = self.job.global_batch / math.fsum(rates)
        if len(names) > 1:
            num_bytes = gradient_bytes(self.job) * min(map(usual_ratio, self.codecs))
            leaving = dict.fromkeys(names, 0.0)
            for link in here.links:
                leaving[link.source] += link.bytes_per_s
            least_s = max(least_s, *(num_bytes / each for each in leaving.values()))
        return rank_of(self.wishes.objective, least_s, usd_per_s(here) * least_s)[0]

    def _ordered(self, names: Iterable[str]) -> Names:
        wanted = set(names)
        return tuple(site.name for site in self.topology.sites if site.name in wanted)


class SiteSet:
    """All that can be decided for one set of sites: reduction, codecs, sizes, spread, cuts."""

    def __init__(self, search: Search, topology: Topology) -> None:
        """Look at these sites only."""
        self._search, self._topology = search, topology
        self._options, self._objective = search.options, search.wishes.objective
        self._pairs: Pairs = pairs_of(topology, search.job.exchange)
        self._names = tuple(site.name for site in topology.sites)
        self._job = _with_micro_batch(search.job, topology)
        self._codings = one_for_all(search.codecs, search.job.exchange)
        self._usd_per_s = usd_per_s(topology)
        self._models: dict[object, tuple[StepModel, float]] = {}
        self._splits = self._options.splits(topology)

    @functools.cached_property
    def quick(self) -> Choice | None:
        """A guess: the reductions that links allow most of, in one size, over a first spread."""
        found = [
            self._choice(way, coding, self._search.sizes[0], self._splits[0])
            for way, coding in self._bounded(packed=False)[:_QUICK_WAYS]
            if self._splits
        ]
        return min(filter(None, found), key=by_rank, default=None)

    @functools.cached_property
    def good(self) -> Choice | None:
        """A good choice: the best of `thorough` for few sites, else of what is tried first."""
        found = self.thorough() if len(self._names) <= 4 else self._begun()[:1]
        return min(found, key=by_rank, default=None)

    def thorough(self) -> list[Choice]:
        """Return good choices: the most promising reductions, each with its sizes and spread."""
        found: dict[object, Choice] = {}
        for choice in self._begun():
            for begun in (choice, self._rerooted(choice), self._rehung(choice)):
                bettered = self._spread(self._resized(begun))
                found[_decisions(bettered)] = bettered
            for other in self._every_root(choice):
                bettered = self._spread(other)
                found[_decisions(bettered)] = bettered
        return list(found.values())

    def _every_root(self, choice: Choice) -> Iterator[Choice]:
        """Yield a choice of one tree over few sites with each other root: spreads follow roots."""
        plan = choice.way.plan
        if len(plan.trees) != 1 or len(self._names) > _EVERY_ROOT_SITES:
            return
        for trees in (
            other_roots(plan, self._pairs, 0) if self._job.reduction == Reduction() else ()
        ):
            form = f"tree at {self._pairs.names[trees[0].root]}"
            way = way_of(form, self._pairs.names, trees)
            if self._search.allows(way.reduction):
                yield self._with_timings(choice, way)

    def _begun(self) -> list[Choice]:
        """Return the most promising reductions and codecs, in one size."""
        best: Choice | None = None
        found: list[Choice] = []
        for way, coding in self._bounded(packed=True):
            for split in self._splits:
                least = self._rank(coding, self._search.sizes[0], way, self._least_s(way, coding))
                if best is not None and least[0] > _NEAR_ENOUGH * best.rank[0]:
                    continue
                choice = self._choice(way, coding, self._search.sizes[0], split)
                if choice is not None:
                    found.append(choice)
                    best = better(best, choice)
        order = sorted(found, key=by_rank)
        kept: dict[object, Choice] = {}
        for choice in order:
            kept.setdefault((choice.way, choice.coding), choice)
        ways = list(kept.values())
        trees = [each for each in ways if len(each.way.plan.trees) == 1]
        return list(dict.fromkeys((*ways[:_THOROUGH_WAYS], *trees[:_THOROUGH_TREES])))

    def _bounded(self, *, packed: bool) -> list[tuple[Way, Coding]]:
        """Return reductions with codecs, in the order of what links allow."""
        ways = [
            way
            for way in menu(self._job, self._topology, packed=packed)
            if self._search.allows(way.reduction)
        ]
        order = sorted(
            (self._least_s(way, coding), index, place)
            for index, way in enumerate(ways)
            for place, coding in enumerate(self._codings)
        )
        return [(ways[index], self._codings[place]) for _, index, place in order]

    def _least_s(self, way: Way, coding: Coding) -> float:
        """Return how long a step's bytes keep some link busy at least."""
        if way.plan.num_sites == 1:
            return 0.0
        job = dataclasses.replace(self._job, exchange=coding.of(self._job.exchange))
        ratios = tree_ratios(job, self._topology, way.plan, usual_ratio(coding.codec))
        busy_s = seconds_per_byte(way.plan, self._topology, ratios)
        return gradient_bytes(job) * max(busy_s.values())

    def bettered(self, choice: Choice) -> list[Choice]:
        """Return what other weights of trees make of a choice, and then other sizes and spreads.

        Few turns share out few chunks better than the step model knows: so smaller weights, too.
        """
        other = self._reweighed(choice)
        if other is not choice:
            other = self._spread(self._resized(self._rerooted(other)))
        found = [self._recoded(other)]
        if len(other.way.plan.trees) > 1:
            for total in _SMALL_TOTALS:
                trees = rounded_weights(other.way.plan, total)
                way = way_of(f"{len(trees)} weighted trees", self._pairs.names, trees)
                if self._search.allows(way.reduction):
                    found.append(self._with_timings(other, way))
        return found

    def _resized(self, choice: Choice) -> Choice:
        """Return the best of all sizes of chunks and buckets."""
        if len(self._names) == 1:
            return choice
        for sizing in self._different(choice.coding):
            other = self._choice(choice.way, choice.coding, sizing, choice.sequences)
            choice = better(choice, other) or choice
        return choice

    def _different(self, coding: Coding) -> list[Sizing]:
        """Return the first of sizes that are alike: links may make chunks smaller than is asked."""
        found: dict[object, Sizing] = {}
        for sizing in self._search.sizes:
            job = dataclasses.replace(self._job, exchange=sizing.of(coding.of(self._job.exchange)))
            leaving: object = None
            if job.workload is None:
                leaving = releases(job)
            elif job.exchange.schedule != "serial":
                workload = workload_described(job.workload)
                leaving = layers_together(workload, sizing.bucket_bytes)
            found.setdefault((chunk_bytes_of(job, self._topology), leaving), sizing)
        return [*found.values()]

    def _spread(self, choice: Choice) -> Choice:
        """Return what another spread of the batch makes of a choice."""
        if len(self._names) == 1 or self._job.placement:
            return choice
        job = self._decided_job(choice.coding, choice.sizing)
        model, _ = self._model(choice.way, choice.coding, choice.sizing)
        sites = self._topology.sites

        def steps_s(splits: Sequence[Split]) -> list[float]:
            return [step_s for _, step_s in self._fastest(job, model, splits, choice.timings)]

        def order_s(split: Split) -> list[float]:
            timings = [self._options.timings(job, *each) for each in zip(sites, split, strict=True)]
            return [each[0].alone_s if each else math.inf for each in timings]

        micro_batch = 1 if self._job.workload is not None else self._job.trainer.micro_batch
        split = improved(
            choice.sequences,
            [self._options.least(site) for site in sites],
            (1, micro_batch),
            steps_s,
            order_s,
        )
        other = self._choice(choice.way, choice.coding, choice.sizing, split)
        return better(choice, other) or choice

    def _rerooted(self, choice: Choice) -> Choice:
        """Return a choice whose trees have other roots: where that is slow, others wait less."""
        if self._job.reduction != Reduction():
            return choice
        for place in range(len(choice.way.plan.trees)):
            for trees in other_roots(choice.way.plan, self._pairs, place):
                form = choice.way.form
                if len(trees) == 1:
                    form = f"tree at {self._pairs.names[trees[0].root]}"
                way = way_of(form, self._pairs.names, trees)
                if self._search.allows(way.reduction):
                    other = self._with_timings(choice, way, choice.rank[0])
                    choice = min(choice, other, key=by_rank)
        return choice

    def _rehung(self, choice: Choice) -> Choice:
        """Return a choice of one tree with its sites below others, for as long as that helps."""
        if len(choice.way.plan.trees) != 1 or self._job.reduction != Reduction():
            return choice
        for _ in self._names:
            before = choice
            for trees in rehung(choice.way.plan, self._pairs):
                form = f"tree at {self._pairs.names[trees[0].root]}"
                way = way_of(form, self._pairs.names, trees)
                if self._search.allows(way.reduction):
                    other = self._with_timings(choice, way, choice.rank[0])
                    choice = min(choice, other, key=by_rank)
            if choice is before:
                break
        return self._rerooted(choice)

    def _reweighed(self, choice: Choice) -> Choice:
        """Return what other weights of trees make of a choice."""
        is_free = self._job.reduction == Reduction()
        if len(self._names) < 3 or choice.way.plan.is_gather or not is_free:
            return choice
        ratio = usual_ratio(choice.coding.codec)
        raw_bytes = gradient_bytes(self._job)

        def score(plan: ReductionPlan, below: float) -> float:
            way = way_of("", self._pairs.names, plan.trees)
            if not self._search.allows(way.reduction):
                return math.inf
            return self._with_timings(choice, way, below).rank[0]

        def least(seconds_a_byte: float) -> float:
            if self._objective == "cost":
                return 0.0
            return raw_bytes * ratio * seconds_a_byte

        moves = WeightMoves(
            self._pool, self._topology, score, least, _MOVES_A_SITE * len(self._names)
        )
        plan = moves.best(choice.way.plan)
        if plan is choice.way.plan:
            return choice
        form = plan.why
        if len(plan.trees) == 1:
            form = f"tree at {self._pairs.names[plan.trees[0].root]}"
        return self._with_timings(choice, way_of(form, self._pairs.names, plan.trees))

    def neighbours(self, choice: Choice) -> Iterator[Choice]:
        """Yield what differs from a choice in a single thing: trees, or the spread."""
        plan = choice.way.plan
        if self._job.reduction == Reduction() and plan.trees:
            for trees in other_trees(plan, self._pairs, self._pool):
                form = f"{len(trees)} weighted trees"
                if len(trees) == 1:
                    form = f"tree at {self._pairs.names[trees[0].root]}"
                way = way_of(form, self._pairs.names, trees)
                if self._search.allows(way.reduction):
                    yield self._with_timings(choice, way)
        if not self._job.placement:
            least = [self._options.least(site) for site in self._topology.sites]
            for split in neighbours(choice.sequences, least):
                other = self._choice(choice.way, choice.coding, choice.sizing, split)
                if other is not None:
                    yield other

    @functools.cached_property
    def _pool(self) -> list[Tree]:
        """Trees that may carry something: those of all reductions of the menu."""
        ways = menu(self._job, self._topology)
        return [
            dataclasses.replace(tree, weight=1)
            for way in ways
            for tree in way.plan.trees
            if not way.form.startswith("ring")
        ]

    def _recoded(self, choice: Choice) -> Choice:
        """Let single links have codecs of their own where that is better."""
        plan, exchange = choice.way.plan, self._search.job.exchange
        for coding in by_link(plan, self._pairs, self._search.codecs, exchange):
            other = self._choice(choice.way, coding, choice.sizing, choice.sequences)
            choice = better(choice, other) or choice
        return choice

    def _with_timings(self, choice: Choice, way: Way, below: float = math.inf) -> Choice:
        """Return a choice with another reduction, and cuts as they are.

        Args:
            choice: Gives all but the reduction.
            way: The reduction.
            below: Steps that are no better than that need not be exact.
        """
        model, egress = self._model(way, choice.coding, choice.sizing, keep=False)
        step_s = model.warm_step_s(choice.timings)
        if self._objective == "cost" or step_s < below:
            step_s = model.step_s(choice.timings)
        return self._made(choice.sequences, choice.timings, way, choice, step_s, egress)

    def _choice(self, way: Way, coding: Coding, sizing: Sizing, split: Split) -> Choice | None:
        """Return what comes of decisions, with the cuts that suit them; None: it is impossible."""
        job = self._decided_job(coding, sizing)
        model, egress = self._model(way, coding, sizing)
        [(timings, step_s)] = self._fastest(job, model, [split], None)
        if math.isinf(step_s):
            return None
        how = _How(coding, sizing)
        return self._made(split, timings, way, how, step_s, egress)

    def _made(
        self,
        split: Split,
        timings: tuple[SiteTiming, ...],
        way: Way,
        how: Choice | _How,
        step_s: float,
        egress: float,
    ) -> Choice:
        usd = self._usd_per_s * step_s + egress
        return Choice(
            sites=self._names,
            sequences=split,
            timings=timings,
            way=way,
            coding=how.coding,
            sizing=how.sizing,
            micro_batch=self._job.trainer.micro_batch,
            step_s=step_s,
            modelled_s=step_s,
            usd_per_step=usd,
            rank=self._rank(how.coding, how.sizing, way, step_s, usd),
        )

    def _rank(
        self, coding: Coding, sizing: Sizing, way: Way, step_s: float, usd: float | None = None
    ) -> Rank:
        known = self._usd_per_s * step_s if usd is None else usd
        places = (self._search.codecs.index(coding.codec), len(way.plan.trees))
        rest = (len(self._names), coding.loss, *places, self._search.sizes.index(sizing))
        return rank_of(self._objective, step_s, known, *rest)

    def _decided_job(self, coding: Coding, sizing: Sizing) -> Job:
        exchange = sizing.of(coding.of(self._job.exchange))
        return dataclasses.replace(self._job, exchange=exchange)

    def _model(
        self, way: Way, coding: Coding, sizing: Sizing, *, keep: bool = True
    ) -> tuple[StepModel, float]:
        """Return the model of steps, and the US dollars of a step's egress."""
        key = (way, coding, sizing)
        if key in self._models:
            return self._models[key]
        job = self._decided_job(coding, sizing)
        egress = egress_usd_per_step(job, self._topology, way.plan)
        found = StepModel(job, self._topology, way.plan), egress
        if keep:
            self._models[key] = found
        return found

    def _fastest(
        self,
        job: Job,
        model: StepModel,
        splits: Sequence[Split],
        like: tuple[SiteTiming, ...] | None,
    ) -> list[tuple[tuple[SiteTiming, ...], float]]:
        """Return for each spread the timings that make a step shortest, and its seconds."""
        fronts = [
            [
                self._options.timings(job, site, count)
                for site, count in zip(self._topology.sites, split, strict=True)
            ]
            for split in splits
        ]
        if self._job.workload is None:
            alone = [tuple(front[0] for front in each) for each in fronts]
            near = like if len(self._names) > 4 else None
            return list(zip(alone, model.steps_s(alone, near), strict=True))
        every = len(splits) <= _FEW_SPLITS or len(self._names) <= 2
        return [fastest_cuts(model, each, EVERY_CUTS_MAX if every else 1) for each in fronts]


@dataclasses.dataclass(frozen=True, slots=True)
class _How:
    """How gradients are encoded and cut up."""

    coding: Coding
    sizing: Sizing


def fastest_cuts(
    model: StepModel, fronts: Sequence[tuple[SiteTiming, ...]], most: int = EVERY_CUTS_MAX
) -> tuple[tuple[SiteTiming, ...], float]:
    """Return the cuts that make a step shortest, and its seconds; infinite: there are none.

    Args:
        model: Of the step.
        fronts: What each site has to choose from, the fastest by itself first.
        most: Combinations that are all tried.
    """
    if not all(fronts):
        return (), math.inf
    if math.prod(map(len, fronts)) <= most:
        every = list(itertools.product(*fronts))
        timed = model.steps_s(every)
        place = min(range(len(timed)), key=timed.__getitem__)
        return every[place], timed[place]
    # Equal sites with as many sequences choose from the same cuts, and change them together.
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
    """Return a short simulated run; None where nobody knows its model.

    Args:
        job: With all decisions in it.
        topology: Of the sites that take part.
    """
    if job.entrypoint is not None and job.workload is None:
        return None
    return simulate(job, topology, Settings(steps=_STEPS))


def step_of(run: SimulatedRun) -> float:
    """Return the step of a short simulated run: that of its slowest site."""
    return max(run.step_s(site, _SKIPPED) for site in range(len(run.work.sites)))


def sizings(job: Job) -> tuple[Sizing, ...]:
    """Return chunks and buckets that are tried, the job's own first."""
    own = Sizing(chunk_bytes=job.exchange.chunk_bytes, bucket_bytes=job.exchange.bucket_bytes)
    # With `serial` everything leaves at once, whatever fills a bucket.
    buckets = () if job.exchange.schedule == "serial" else BUCKETS
    largest = max(gradient_bytes(job), own.bucket_bytes, min(BUCKETS))
    pairs = itertools.product(
        dict.fromkeys((own.bucket_bytes, *buckets)), dict.fromkeys((own.chunk_bytes, *CHUNKS))
    )
    found = [
        Sizing(chunk_bytes=chunk_bytes, bucket_bytes=bucket_bytes)
        for bucket_bytes, chunk_bytes in pairs
        if chunk_bytes <= min(bucket_bytes, job.exchange.window_bytes or bucket_bytes)
        and bucket_bytes < 4 * largest
    ]
    return tuple(dict.fromkeys((own, *found)))


def _with_micro_batch(job: Job, topology: Topology) -> Job:
    """Return the job with the largest micro-batch that fits these sites, if to be decided."""
    if job.plan is None or job.plan.micro_batch == "given" or job.workload is not None:
        return job
    most, _ = largest_micro_batch(job, topology)
    return dataclasses.replace(job, trainer=dataclasses.replace(job.trainer, micro_batch=most))


def _decisions(choice: Choice) -> object:
    """Return what tells choices apart."""
    cuts = tuple(None if each.cut is None else each.cut.degrees for each in choice.timings)
    trees = tuple((*shape_of(tree), tree.weight) for tree in choice.way.plan.trees)
    how = (choice.coding, choice.sizing, choice.micro_batch, cuts)
    return (choice.sites, choice.sequences, trees, *how)


def _family(choice: Choice) -> object:
    """Return what is told of a choice but for weights, sizes and the spread."""
    trees = frozenset(shape_of(tree) for tree in choice.way.plan.trees)
    return (choice.sites, choice.coding.codec, trees)


def _hardware(site: Site) -> object:
    """Return what equal sites have in common."""
    return (site.nodes, site.accelerators_per_node, site.accelerator, site.fabric)
