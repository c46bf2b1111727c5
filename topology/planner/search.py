"""The search for the best plan: every set of up to ten sites, and for each all that can be decided.

For some sites a batch is spread so that the slowest is fastest (topology/planner/shares.py); then all
reductions, codecs and sizes are tried, the ones with the least lower bound first, and none whose lower
bound is no better than what was found. A step is never shorter than the slowest site computes, or
than the busiest link takes. Up to EXACT_SITES sites that is complete: nothing within the choice is
better. For more, only the reductions with the least bounds are looked at with all sizes; and of more
than EVERY_SET_SITES sites, one after another is left out for as long as that helps.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator

from topology.codec_costs import usual_ratio
from topology.job import Job, PlanWishes
from topology.placement import restricted, unreached
from topology.planner.choice import Choice, Rank, Sizing, money, rank_of
from topology.planner.shares import Split, balanced, busiest, improved
from topology.planner.ways import Way, ways
from topology.step_time import StepModel, gradient_bytes, sequence_s
from topology.tree_times import seconds_per_byte
from topology.wire_load import tree_ratios
from topology.world import Topology

EVERY_SET_SITES = 10
EXACT_SITES = 4
_QUICK_WAYS = 3
"""Reductions of a larger set of sites that are looked at, before it is known whether the set is good."""
_THOROUGH_WAYS = 6
"""And once it is."""
_SPREAD_SETS = 12
"""Sets of sites whose batch is spread anew, of those that are best with the slowest site fastest."""
_THOROUGH_SETS = 3
CHUNKS = (1 << 20, 256 << 10, 4 << 20)
BUCKETS = (4 << 20, 1 << 20, 16 << 20, 64 << 20)
"""Sizes that are tried beside the job's own."""

Names = tuple[str, ...]
Bounded = tuple[float, int, int]
"""Least seconds, and which reduction and codec."""


class Search:
    """Finds the best choice for a job, of all sites or of some. Keeps what it has found."""

    def __init__(self, job: Job, topology: Topology) -> None:
        """Take the job without its placement: that is for the plan to decide.

        Args:
            job: Its `plan` says what may be decided.
            topology: Described in full.
        """
        self.job = dataclasses.replace(job, placement=())
        self.topology = topology
        self.wishes = job.plan or PlanWishes()
        self.codecs = self.wishes.codecs or (job.exchange.codec,)
        self.sequence_s = {site.name: sequence_s(job, site) for site in topology.sites}
        self._settings: dict[tuple[Names, bool], _Setting | None] = {}
        self._thorough: dict[Names, Choice | None] = {}

    def best(self) -> Choice | None:
        """Return the best choice of all; None where the batch is too small for every set of sites."""
        names = tuple(site.name for site in self.topology.sites)
        if self.wishes.sites == "all":
            return self.best_of(names)
        if len(names) > EVERY_SET_SITES:
            return self._by_leaving_out(names)
        best: Choice | None = None
        quick: list[Choice] = []
        for bound, chosen in self._bounded_sets(names):
            if best is not None and bound >= best.rank[:1]:
                break
            if len(names) <= EXACT_SITES:
                best = self._improved(best, chosen)
                continue
            found = self._quick(chosen)
            if found is not None:
                quick.append(found)
                best = _better(best, found)
        begun = sorted(quick, key=_by_rank)[:_SPREAD_SETS]
        spread = [self._quick(choice.sites, is_split=True) for choice in begun]
        for choice in sorted(filter(None, spread), key=_by_rank)[:_THOROUGH_SETS]:
            best = self._improved(_better(best, choice), choice.sites)
        return best if best is None or len(names) <= EXACT_SITES else self._climbed(best)

    def _climbed(self, best: Choice) -> Choice:
        """Let single sites join or leave for as long as that is better."""
        while True:
            better = best
            for site in self.topology.sites:
                others = tuple(name for name in best.sites if name != site.name)
                chosen = others if len(others) < len(best.sites) else (*others, site.name)
                if chosen:
                    better = self._neighbour(better, self._ordered(chosen))
            if better is best:
                return best
            best = better

    def _neighbour(self, best: Choice, names: Names) -> Choice:
        """Return the better of `best` and what these sites can do; of many sites, only a good guess."""
        if len(names) <= EVERY_SET_SITES:
            return self._improved(best, names) or best
        return _better(best, self._quick(names, is_split=True)) or best

    def best_of(self, names: Iterable[str]) -> Choice | None:
        """Return the best choice in which exactly these sites take part; None where there is none."""
        chosen = self._ordered(names)
        if chosen not in self._thorough:
            setting = self._setting(chosen, with_packings=True)
            self._thorough[chosen] = None if setting is None else setting.thorough()
        return self._thorough[chosen]

    def estimate(self, names: Iterable[str]) -> Choice | None:
        """Return a good choice for these sites, and of few sites the best."""
        chosen = self._ordered(names)
        if len(chosen) <= EXACT_SITES or chosen in self._thorough:
            return self.best_of(chosen)
        return self._quick(chosen, is_split=True)

    def _improved(self, best: Choice | None, names: Names) -> Choice | None:
        """Return the best choice for these sites if it is better than `best`, else that."""
        setting = self._setting(names, with_packings=True)
        return best if setting is None else setting.thorough(best)

    def _quick(self, names: Names, *, is_split: bool = False) -> Choice | None:
        setting = self._setting(names, with_packings=len(names) <= EXACT_SITES)
        return None if setting is None else setting.quick(is_split=is_split)

    def _setting(self, names: Names, *, with_packings: bool) -> _Setting | None:
        key = (names, with_packings)
        if key not in self._settings:
            self._settings[key] = self._new_setting(names, with_packings=with_packings)
        return self._settings[key]

    def _new_setting(self, names: Names, *, with_packings: bool) -> _Setting | None:
        topology = restricted(self.topology, names)
        ranks = [site.num_ranks for site in topology.sites]
        times_s = [self.sequence_s[name] for name in names]
        begin = balanced(ranks, times_s, self.job.trainer.global_batch)
        if begin is None or unreached(topology):
            return None
        found = ways(self.job, topology, with_packings=with_packings)
        return _Setting(self, topology, begin, found)

    def _ordered(self, names: Iterable[str]) -> Names:
        wanted = set(names)
        return tuple(site.name for site in self.topology.sites if site.name in wanted)

    def _bounded_sets(self, names: Names) -> list[tuple[Rank, Names]]:
        """Return every set of sites with what it cannot be better than, the most promising first."""
        found = []
        for count in range(len(names), 0, -1):
            for chosen in itertools.combinations(names, count):
                bound = self._bound(chosen)
                if bound is not None:
                    found.append((bound, chosen))
        return sorted(found, key=lambda each: (each[0], -len(each[1])))

    def _bound(self, names: Names) -> Rank | None:
        sites = [self.topology.site(name) for name in names]
        ranks = [site.num_ranks for site in sites]
        times_s = [self.sequence_s[name] for name in names]
        split = balanced(ranks, times_s, self.job.trainer.global_batch)
        if split is None:
            return None
        least_s = max(
            count * each for count, each in zip(busiest(split, ranks), times_s, strict=True)
        )
        least_s = max(least_s, self._crossing_bound_s(names))
        per_s = math.fsum(
            site.num_ranks * (site.accelerator.price_usd_per_h or 0.0) / 3600 for site in sites
        )
        return rank_of(self.wishes.objective, least_s, per_s * least_s)[:1]

    def _crossing_bound_s(self, names: Names) -> float:
        """Every byte leaves every site once at least, encoded, over all of its links together."""
        if len(names) == 1:
            return 0.0
        num_bytes = gradient_bytes(self.job) * min(map(usual_ratio, self.codecs))
        rates = dict.fromkeys(names, 0.0)
        for link in self.topology.links:
            if link.source in rates and link.target in rates:
                rates[link.source] += link.bytes_per_s
        return max(num_bytes / rate if rate else math.inf for rate in rates.values())

    def _by_leaving_out(self, names: Names) -> Choice | None:
        """Leave out whichever site it helps most to leave out, until none does; or until one is left."""
        found: list[Choice] = []
        kept, current = names, self._quick(names)
        while len(kept) > 1:
            fewer = [self._quick(tuple(each for each in kept if each != left)) for left in kept]
            best = min((each for each in fewer if each is not None), key=_by_rank, default=None)
            if best is None or (current is not None and best.rank > current.rank):
                break
            current, kept = best, best.sites
            found.append(best)
        found += [each for each in (current, *map(self.best_of, _single(names))) if each]
        best = min(found, key=_by_rank, default=None)
        if best is None:
            return None
        climbed = self._climbed(best)
        return self._improved(climbed, climbed.sites)


class _Setting:
    """All that can be decided for one set of sites."""

    def __init__(
        self, search: Search, topology: Topology, begin: Split, choices: list[Way]
    ) -> None:
        self._search = search
        self._topology = topology
        self._begin = begin
        self._ways = choices
        self._ranks = [site.num_ranks for site in topology.sites]
        self._sizings = sizings(search.job)

    def quick(self, *, is_split: bool) -> Choice | None:
        """Return a good choice: the reductions with the least bounds, in one size.

        Args:
            is_split: The batch is spread for the step's sake, not only for the slowest site's.
        """
        bounded = self._bounded()[:_QUICK_WAYS]
        return self._best(None, bounded, self._sizings[:1], is_split=is_split)

    def thorough(self, against: Choice | None = None) -> Choice | None:
        """Return the best choice; for more than EXACT_SITES sites one that is probably that.

        Args:
            against: Of other sites; returned if nothing is better.
        """
        bounded = self._bounded()
        if len(self._ranks) > EXACT_SITES:
            one_size = [
                self._best(None, [each], self._sizings[:1], is_split=False) for each in bounded
            ]
            order = sorted(
                (choice.rank, index) for index, choice in enumerate(one_size) if choice is not None
            )
            bounded = [bounded[index] for _, index in order[:_THOROUGH_WAYS]]
            return self._best_few(against, bounded)
        return self._best(against, bounded, self._sizings, is_split=True)

    def _best_few(self, best: Choice | None, bounded: list[Bounded]) -> Choice | None:
        """Spread the batch anew for each reduction and codec, in the size that is best before that."""
        for each in bounded:
            begun = self._best(None, [each], self._sizings, is_split=False)
            if begun is not None:
                best = self._best(best, [each], (begun.sizing,), is_split=True)
        return best

    def _bounded(self) -> list[Bounded]:
        """Return the least seconds of each reduction and codec, the shortest first."""
        job, topology = self._search.job, self._topology
        compute_s = max(
            count * sequence_s(job, site)
            for count, site in zip(busiest(self._begin, self._ranks), topology.sites, strict=True)
        )
        found = []
        for index, way in enumerate(self._ways):
            for codec_index, codec in enumerate(self._search.codecs):
                crossing_s = 0.0
                if way.plan.num_sites > 1:
                    tried = dataclasses.replace(
                        job, exchange=dataclasses.replace(job.exchange, codec=codec)
                    )
                    ratios = tree_ratios(tried, topology, way.plan, usual_ratio(codec))
                    per_byte_s = max(seconds_per_byte(way.plan, topology, ratios).values())
                    crossing_s = gradient_bytes(job) * per_byte_s
                found.append((max(compute_s, crossing_s), index, codec_index))
        return sorted(found)

    def _best(
        self,
        best: Choice | None,
        bounded: list[Bounded],
        sizes: tuple[Sizing, ...],
        *,
        is_split: bool,
    ) -> Choice | None:
        """Return the best choice of these, or `best`."""
        for least_s, way_index, codec_index in bounded:
            for sizing in sizes:
                size_index = self._sizings.index(sizing)
                places = (float(codec_index), float(way_index), float(size_index))
                choice = self._choice(least_s, sizing, places, best, is_split=is_split)
                best = _better(best, choice)
        return best

    def _choice(
        self,
        least_s: float,
        sizing: Sizing,
        places: tuple[float, float, float],
        best: Choice | None,
        *,
        is_split: bool,
    ) -> Choice | None:
        """Return the best spread of the batch with everything else decided; None if `best` is better."""
        search, way = self._search, self._ways[int(places[1])]
        draft = Choice(
            sites=tuple(site.name for site in self._topology.sites),
            sequences=self._begin,
            way=way,
            codec=search.codecs[int(places[0])],
            sizing=sizing,
            step_s=math.inf,
            usd_per_step=math.inf,
            rank=(math.inf,),
        )
        job = draft.job(search.job)
        per_s, egress = money(job, self._topology, way)

        def rank(step_s: float) -> Rank:
            usd = per_s * step_s + egress
            rest = (len(draft.sites), *places)
            return rank_of(search.wishes.objective, step_s, usd, *rest)

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

        def step_s(split: Split) -> float:
            return model.step_s(busiest(split, self._ranks))

        split, begun_s = self._begin, step_s(self._begin)
        if begun_s <= shortest_s:
            return split, begun_s
        split = improved(split, self._ranks, self._search.job.trainer.micro_batch, step_s)
        return split, step_s(split)


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


def _better(one: Choice | None, other: Choice | None) -> Choice | None:
    if one is None or other is None:
        return one or other
    return min(one, other, key=_by_rank)


def _by_rank(choice: Choice) -> Rank:
    return choice.rank


def _single(names: Names) -> Iterator[Names]:
    for name in names:
        yield (name,)
