"""The search for the best plan, for the shipped trainer and for models that jobs describe.

Of few sites all sets are looked at, in the order of what they cannot be better than; of more, those
that near or wide links join, and what single sites that join or leave make of them. For a set, the
reductions of the menu are tried with each codec. The most promising ones get other sizes, another
spread of the batch, other cuts, and small changes of their trees for as long as these help. The
simulator decides between the best few, and looks at what small changes make of the best: the step
model is least exact where several trees share links. What the simulator says of a plan is what the
plan says of itself.

All of this is limited by numbers of tries. A model of a step takes longer the more sites there are,
so of many sites fewer sets and fewer changes are looked at.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
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
    Candidate,
    candidate_of,
    improved_trees,
    menu,
    tree_changes,
)
from topology.planner.spreads import balanced, improved, in_proportion, neighbours
from topology.simulator.settings import Settings
from topology.simulator.simulation import SimulatedRun, simulate
from topology.trees.pairs import Pairs, pairs_of
from topology.trees.trees import ReductionPlan, Tree, shape_of
from topology.world import Site, Topology

EVERY_SET_SITES = 8
"""The most sites of which all sets are looked at."""
CHUNKS = tuple(size << 10 for size in (1024, 256, 4096, 512, 2048, 128, 64))
BUCKETS = (4 << 20, 1 << 20, 16 << 20, 64 << 20)
"""Bytes of buckets that are tried beside the job's own size."""
EVERY_CUTS_MAX = 512
"""The most combinations of the sites' cuts that are all tried."""
_FEW_SPLITS = 8
"""The most spreads at once for each of which all combinations of cuts are tried."""
_QUICK_CANDIDATES = 3
"""Reductions of a set that are looked at before it is known whether the set is good."""
_THOROUGH_SETS, _THOROUGH_SETS_OF_MANY = 6, 2
"""Sets that are looked at closely: of few sites, and of more than EVERY_SET_SITES."""
_GUESSED_SITES = 12
"""Number of sites beyond which the step without a site, or with one more, is a guess."""
_THOROUGH_CANDIDATES, _THOROUGH_TREES = 4, 2
"""Reductions of a set that are looked at closely, and how many of a single tree are among them at
least: small changes lead far from these."""
_NEAR_ENOUGH = 1.2
"""Ratio to the best choice's step beyond which a choice is not looked at closely."""
_BETTERED = 3
"""Number of choices whose trees are changed with many tries."""
_FEW_TRIES, _MANY_TRIES = 40, 240
"""The most changes of a choice's trees that are tried: at first, and for the best choices."""
_SITES_OF_TRIES = 6
"""Number of sites beyond which there are fewer tries: a model takes as long as there are pairs of
sites."""
_NEIGHBOURS = 600
"""Neighbours of a choice that the step model sorts for the simulator."""
_POOL = 12
"""Trees that neighbours may give weight to, beside a plan's own."""
_JUDGED, _JUDGED_LEAST, _POLISHED = 12, 4, 48
"""How many choices the simulator decides between, at most and at least, and how many neighbours of
the best it looks at."""
_JUDGED_ACTIONS, _POLISHED_ACTIONS = 400_000, 200_000
"""The most simulated actions that judging and polishing may take: half a second, about."""
_JUDGED_WITHIN = 1.15
"""Ratio to the best modelled step beyond which a choice is not simulated."""
_FASTER, _AS_GOOD = 1 - 1e-4, 1 + 1e-4
"""Ratios of simulated steps: below the first another is faster, up to the second it is as fast."""
_STEPS, _SKIPPED = 12, 4
"""Steps that are simulated, and how many of them are skipped, for they begin as no later one
does."""

Names = tuple[str, ...]


class SiteOptions:
    """The timings that sites can have: one for the shipped trainer, or one for each useful cut."""

    def __init__(self, job: Job, topology: Topology) -> None:
        """Work out the cuts, where the job describes its model."""
        self._placed = {each.site: each for each in job.placement}
        self._timings: dict[object, tuple[SiteTiming, ...]] = {}
        self.cuts: dict[str, SiteCuts] = {}
        """The cuts by the names of sites; the same object for equal ones. Empty for the trainer."""
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
        self.allows = allows
        self.options = options or SiteOptions(job, topology)
        self._sets: dict[Names, SiteSet] = {}
        self._simulated: dict[object, float | None] = {}
        self._num_actions = 0
        """Number of actions that simulating a choice takes at most, as far as known."""

    def best(self) -> Choice | None:
        """Return the best choice of all; None where no set of sites can run the job."""
        found: list[Choice] = []
        guesses = self.guesses()
        is_large = len(self.topology.sites) > EVERY_SET_SITES
        for guess in guesses[: _THOROUGH_SETS_OF_MANY if is_large else _THOROUGH_SETS]:
            if guess.rank[0] <= _NEAR_ENOUGH * guesses[0].rank[0]:
                found += self.set_of(guess.sites).thorough()
        if not found:
            return None
        if is_large and len(self._all_sets()) > 1:
            found += self._climbed(min(found, key=by_rank))
        found.sort(key=by_rank)
        found += [self.set_of(each.sites).bettered(each) for each in found[:_BETTERED]]
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
        near = list({_decisions(each): each for each in sorted(choices, key=by_rank)}.values())
        judged = [self.judged(near[0])]
        judged += [
            self.judged(choice)
            for choice in near[1 : self._affordable(_JUDGED_ACTIONS, _JUDGED)]
            if choice.rank[0] <= _JUDGED_WITHIN * near[0].rank[0]
        ]
        best = min(judged, key=by_rank)
        as_good = [each for each in judged if each.rank[0] <= best.rank[0] * _AS_GOOD]
        return min(as_good, key=lambda each: each.rank[1:])

    def _polished(self, best: Choice) -> Choice:
        """Return what single moves make of a choice, by the simulator, as far as that is cheap."""
        num_tries = min(_POLISHED, _POLISHED_ACTIONS // max(self._num_actions, 1))
        tried = {_decisions(best)}
        while num_tries > 0:
            near = self.set_of(best.sites).neighbours(best)
            order = [each for each in sorted(near, key=by_rank) if _decisions(each) not in tried]
            before = best
            for other in order[: max(num_tries // 2, 1)]:
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
        """Return good choices of the sites that joining and leaving, one by one, leads to."""
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
            self._choice(candidate, coding, self._search.sizes[0], self._splits[0])
            for candidate, coding in self._bounded(packed=False)[:_QUICK_CANDIDATES]
            if self._splits
        ]
        return min(filter(None, found), key=by_rank, default=None)

    @functools.cached_property
    def good(self) -> Choice | None:
        """A good choice: the best of `thorough` for few sites, else of what is tried first.

        Of many sites it is the guess: it is asked for with and without each site.
        """
        if len(self._names) > _GUESSED_SITES:
            return self.quick
        found = self.thorough() if len(self._names) <= 4 else self._begun()[:1]
        return min(found, key=by_rank, default=None)

    def thorough(self) -> list[Choice]:
        """Return good choices: the most promising reductions, each with its sizes and spread."""
        found: dict[object, Choice] = {}
        for choice in self._begun():
            for begun in (choice, self._with_better_trees(choice, _FEW_TRIES)):
                bettered = self._spread(self._resized(begun))
                found[_decisions(bettered)] = bettered
        return list(found.values())

    def _begun(self) -> list[Choice]:
        """Return the most promising reductions and codecs, in one size."""
        best: Choice | None = None
        found: list[Choice] = []
        for candidate, coding in self._bounded(packed=True):
            for split in self._splits:
                least = self._rank(
                    coding, self._search.sizes[0], candidate, self._least_s(candidate, coding)
                )
                if best is not None and least[0] > _NEAR_ENOUGH * best.rank[0]:
                    continue
                choice = self._choice(candidate, coding, self._search.sizes[0], split)
                if choice is not None:
                    found.append(choice)
                    best = better(best, choice)
        kept: dict[object, Choice] = {}
        for choice in sorted(found, key=by_rank):
            kept.setdefault((choice.candidate, choice.coding), choice)
        candidates = list(kept.values())
        trees = [each for each in candidates if len(each.candidate.plan.trees) == 1]
        return list(dict.fromkeys((*candidates[:_THOROUGH_CANDIDATES], *trees[:_THOROUGH_TREES])))

    @functools.cache  # noqa: B019 - lives as long as the search does
    def _menu(self, *, packed: bool) -> list[Candidate]:
        """Return the reductions that come into question."""
        found = menu(self._job, self._topology, packed=packed)
        return [each for each in found if self._search.allows(each.reduction)]

    def _bounded(self, *, packed: bool) -> list[tuple[Candidate, Coding]]:
        """Return reductions with codecs, in the order of what links allow."""
        candidates = self._menu(packed=packed)
        order = sorted(
            (self._least_s(candidate, coding), index, place)
            for index, candidate in enumerate(candidates)
            for place, coding in enumerate(self._codings)
        )
        return [(candidates[index], self._codings[place]) for _, index, place in order]

    def _least_s(self, candidate: Candidate, coding: Coding) -> float:
        """Return how long a step's bytes keep some link busy at least."""
        if candidate.plan.num_sites == 1:
            return 0.0
        job = dataclasses.replace(self._job, exchange=coding.of(self._job.exchange))
        ratios = tree_ratios(job, self._topology, candidate.plan, usual_ratio(coding.codec))
        busy_s = seconds_per_byte(candidate.plan, self._topology, ratios)
        return gradient_bytes(job) * max(busy_s.values())

    def bettered(self, choice: Choice) -> Choice:
        """Return what other trees make of a choice, and then other sizes, spreads and codecs."""
        other = self._with_better_trees(choice, _MANY_TRIES)
        if other is not choice:
            other = self._spread(self._resized(other))
        return self._recoded(other)

    def _resized(self, choice: Choice) -> Choice:
        """Return the best of all sizes of chunks and buckets."""
        if len(self._names) == 1:
            return choice
        for sizing in self._different(choice.coding):
            other = self._choice(choice.candidate, choice.coding, sizing, choice.sequences)
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
        model, _ = self._model(choice.candidate, choice.coding, choice.sizing)
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
        other = self._choice(choice.candidate, choice.coding, choice.sizing, split)
        return better(choice, other) or choice

    def _with_better_trees(self, choice: Choice, most_tries: int) -> Choice:
        """Return what small changes of trees make of a choice, by the step model.

        Args:
            choice: With any reduction; a gather stays.
            most_tries: Changes that are looked at; fewer of many sites.
        """
        if choice.candidate.plan.is_gather or self._job.reduction != Reduction():
            return choice
        ratio, raw_bytes = usual_ratio(choice.coding.codec), gradient_bytes(self._job)

        def score(plan: ReductionPlan, below: float) -> float:
            candidate = candidate_of(self._names, plan.trees)
            if not self._search.allows(candidate.reduction):
                return math.inf
            if self._objective != "cost":
                busy_s = max(seconds_per_byte(plan, self._topology).values())
                if (least_s := raw_bytes * ratio * busy_s) >= below:
                    return least_s
            return self._with_candidate(choice, candidate, below).rank[0]

        plan, most_tries = choice.candidate.plan, self._fewer(most_tries)
        best = improved_trees(plan, self._pairs, self._pool, score, most_tries)
        if best is plan:
            return choice
        return self._with_candidate(choice, candidate_of(self._names, best.trees))

    def _fewer(self, most_tries: int) -> int:
        """Return how many tries there are for so many sites: each takes as long as n^2."""
        return int(most_tries / max(1.0, len(self._names) / _SITES_OF_TRIES) ** 2)

    def neighbours(self, choice: Choice) -> Iterable[Choice]:
        """Return choices that differ in a single thing, the spread or trees: the first of many."""
        return itertools.islice(self._neighbours(choice), self._fewer(_NEIGHBOURS))

    def _neighbours(self, choice: Choice) -> Iterator[Choice]:
        if not self._job.placement:
            least = [self._options.least(site) for site in self._topology.sites]
            for split in neighbours(choice.sequences, least):
                other = self._choice(choice.candidate, choice.coding, choice.sizing, split)
                if other is not None:
                    yield other
        if self._job.reduction == Reduction() and choice.candidate.plan.trees:
            for change in tree_changes(self._pairs, self._pool[:_POOL]):
                for trees in change(choice.candidate.plan):
                    candidate = candidate_of(self._names, trees)
                    if self._search.allows(candidate.reduction):
                        yield self._with_candidate(choice, candidate)

    @functools.cached_property
    def _pool(self) -> list[Tree]:
        """Return trees that may carry something: those of all reductions of the menu but rings."""
        trees = (
            tree
            for each in self._menu(packed=True)
            if not each.form.startswith("ring")
            for tree in each.plan.trees
        )
        return list({shape_of(tree): tree for tree in trees}.values())

    def _recoded(self, choice: Choice) -> Choice:
        """Let single links have codecs of their own where that is better."""
        plan, exchange = choice.candidate.plan, self._search.job.exchange
        for coding in by_link(plan, self._pairs, self._search.codecs, exchange):
            other = self._choice(choice.candidate, coding, choice.sizing, choice.sequences)
            choice = better(choice, other) or choice
        return choice

    def _with_candidate(
        self, choice: Choice, candidate: Candidate, below: float = math.inf
    ) -> Choice:
        """Return a choice with another reduction, and cuts as they are.

        Args:
            choice: Gives all but the reduction.
            candidate: The reduction.
            below: Steps that are no better than that need not be exact.
        """
        model, egress = self._model(candidate, choice.coding, choice.sizing, keep=False)
        step_s = model.warm_step_s(choice.timings)
        if self._objective == "cost" or step_s < below:
            step_s = model.step_s(choice.timings)
        return self._made(
            choice.sequences,
            choice.timings,
            candidate,
            choice.coding,
            choice.sizing,
            step_s,
            egress,
        )

    def _choice(
        self, candidate: Candidate, coding: Coding, sizing: Sizing, split: Split
    ) -> Choice | None:
        """Return what comes of decisions, with the cuts that suit them; None: it is impossible."""
        job = self._decided_job(coding, sizing)
        model, egress = self._model(candidate, coding, sizing)
        [(timings, step_s)] = self._fastest(job, model, [split], None)
        if math.isinf(step_s):
            return None
        return self._made(split, timings, candidate, coding, sizing, step_s, egress)

    def _made(
        self,
        split: Split,
        timings: tuple[SiteTiming, ...],
        candidate: Candidate,
        coding: Coding,
        sizing: Sizing,
        step_s: float,
        egress: float,
    ) -> Choice:
        usd = self._usd_per_s * step_s + egress
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
            rank=self._rank(coding, sizing, candidate, step_s, usd),
        )

    def _rank(
        self,
        coding: Coding,
        sizing: Sizing,
        candidate: Candidate,
        step_s: float,
        usd: float | None = None,
    ) -> Rank:
        known = self._usd_per_s * step_s if usd is None else usd
        places = (self._search.codecs.index(coding.codec), len(candidate.plan.trees))
        rest = (len(self._names), coding.loss, *places, self._search.sizes.index(sizing))
        return rank_of(self._objective, step_s, known, *rest)

    def _decided_job(self, coding: Coding, sizing: Sizing) -> Job:
        exchange = sizing.of(coding.of(self._job.exchange))
        return dataclasses.replace(self._job, exchange=exchange)

    def _model(
        self, candidate: Candidate, coding: Coding, sizing: Sizing, *, keep: bool = True
    ) -> tuple[StepModel, float]:
        """Return the model of steps, and the US dollars of a step's egress."""
        key = (candidate, coding, sizing)
        if key in self._models:
            return self._models[key]
        job = self._decided_job(coding, sizing)
        egress = egress_usd_per_step(job, self._topology, candidate.plan)
        found = StepModel(job, self._topology, candidate.plan), egress
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
    trees = tuple((*shape_of(tree), tree.weight) for tree in choice.candidate.plan.trees)
    how = (choice.coding, choice.sizing, choice.micro_batch, cuts)
    return (choice.sites, choice.sequences, trees, *how)


def _hardware(site: Site) -> object:
    """Return what equal sites have in common."""
    return (site.nodes, site.accelerators_per_node, site.accelerator, site.fabric)
