"""The search for the best plan of a job that describes its model: sites, cuts, batch, reduction, codec.

As topology/planner/search.py does it for the trainer that ships: sets of sites in the order of what they
cannot be better than, and none whose bound is no better than what was found. For up to EXACT_SITES
sites nothing that can be decided is better, where there are at most EVERY_SPLIT_MAX ways to spread the
batch and EVERY_CUTS_MAX combinations of cuts; of more, single moves lead on from the best guess.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from topology.cost.workload import workload_described
from topology.job import Job, Placed, PlanWishes
from topology.placement import restricted, unreached
from topology.planner.choice import Choice, Rank, Sizing, money, rank_of
from topology.planner.joint_step import JointModel
from topology.planner.parallelism import parallel_of
from topology.planner.shares import EVERY_SPLIT_MAX, Split
from topology.planner.site_cuts import SiteCuts, Timing
from topology.planner.ways import Way, ways
from topology.world import Site, Topology

EXACT_SITES = 3
EVERY_SET_SITES = 10
EVERY_CUTS_MAX = 512
_QUICK_WAYS = 3
_THOROUGH_SETS = 3
_MOVES_MAX = 60
_TAKERS = 3
_GAIN = 1e-3
"""Of the objective, that moving sequences has to bring."""

Names = tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CutChoice(Choice):
    """A choice with the cut of each site."""

    timings: tuple[Timing, ...]

    def job(self, job: Job) -> Job:
        """Return `job` with these decisions in it."""
        decided = Choice.job(self, job)
        placement = tuple(
            Placed(
                site=each.site,
                sequences=each.sequences,
                parallel=parallel_of(timing.cut.degrees),
            )
            for each, timing in zip(decided.placement, self.timings, strict=True)
        )
        return dataclasses.replace(decided, placement=placement)

    def joint(self, job: Job, topology: Topology) -> JointModel:
        """Return the model of this choice's steps; `topology` is described in full."""
        return JointModel(self.job(job), self.topology(topology), self.way.plan)


class ParallelSearch:
    """Finds the best choice for a job that describes its model. Keeps what it has found."""

    def __init__(self, job: Job, topology: Topology) -> None:
        """Work out what each site can do.

        Args:
            job: With a `workload`; its `plan` says what may be decided, its placement does not count.
            topology: Described in full.
        """
        assert job.workload is not None, "there is a model to cut"
        self.job = dataclasses.replace(job, placement=())
        self.topology = topology
        self.model = job.workload
        self.workload = workload_described(job.workload)
        self.wishes = job.plan or PlanWishes()
        self.codecs = self.wishes.codecs or (job.exchange.codec,)
        self.cuts: dict[str, SiteCuts] = {}
        """By the names of sites; the same object for equal ones."""
        for site in topology.sites:
            self.cuts[site.name] = self._cuts_of(site)
        self._found: dict[tuple[Names, bool], CutChoice | None] = {}

    def _cuts_of(self, site: Site) -> SiteCuts:
        for known in self.cuts.values():
            if _hardware(known.site) == _hardware(site):
                return known
        serial = self.job.exchange.schedule == "serial"
        return SiteCuts(self.model, self.workload, site, serial=serial)

    def best(self) -> CutChoice | None:
        """Return the best choice of all; None where no sites can train the model."""
        names = tuple(site.name for site in self.topology.sites)
        if self.wishes.sites == "all":
            return self.best_of(names)
        able = tuple(name for name in names if self.cuts[name].cuts)
        if len(able) > EVERY_SET_SITES:
            return self._by_leaving_out(able)
        best: CutChoice | None = None
        looked: list[CutChoice] = []
        for bound, chosen in self._bounded_sets(able):
            if best is not None and bound >= best.rank[:1]:
                break
            found = self._of(chosen, thorough=len(able) <= EXACT_SITES)
            if found is not None:
                looked.append(found)
                best = _better(best, found)
        for choice in sorted(looked, key=_by_rank)[:_THOROUGH_SETS]:
            best = _better(best, self.best_of(choice.sites))
        return best

    def best_of(self, names: Iterable[str]) -> CutChoice | None:
        """Return the best choice in which exactly these sites take part; None where there is none."""
        wanted = set(names)
        chosen = tuple(site.name for site in self.topology.sites if site.name in wanted)
        return self._of(chosen, thorough=True)

    def estimate(self, names: Iterable[str]) -> CutChoice | None:
        """Return a good choice for these sites, and of few sites the best."""
        wanted = set(names)
        chosen = tuple(site.name for site in self.topology.sites if site.name in wanted)
        return self._of(chosen, thorough=len(chosen) <= EXACT_SITES)

    def balanced(self, names: Names) -> tuple[Split, float]:
        """Return the spread over sites that is fastest if nothing has to cross, and its seconds."""
        return _Sites(self, names).balanced()

    def _by_leaving_out(self, names: Names) -> CutChoice | None:
        """Leave out whichever site it helps most to leave out, until none does."""
        best = self._of(names, thorough=False)
        while len(names) > 1:
            fewer = [
                self._of(tuple(each for each in names if each != left), thorough=False)
                for left in names
            ]
            found = min((each for each in fewer if each is not None), key=_by_rank, default=None)
            if found is None or (best is not None and best.rank <= found.rank):
                break
            best, names = found, found.sites
        return None if best is None else _better(best, self.best_of(best.sites))

    def _of(self, names: Names, *, thorough: bool) -> CutChoice | None:
        key = (names, thorough)
        if key not in self._found:
            self._found[key] = _Sites(self, names).best(thorough=thorough) if names else None
        return self._found[key]

    def _bounded_sets(self, names: Names) -> list[tuple[Rank, Names]]:
        """Return every set of sites with what it cannot be better than, the most promising first."""
        found = [
            (self._bound(chosen), chosen)
            for count in range(len(names), 0, -1)
            for chosen in itertools.combinations(names, count)
        ]
        return sorted(found, key=lambda each: (each[0], -len(each[1])))

    def _bound(self, names: Names) -> Rank:
        """No set is faster than all its sites with their best micro-batches and nothing else."""
        least_s = self.compute_bound_s(names)
        per_s = math.fsum(
            site.num_ranks * (site.accelerator.price_usd_per_h or 0.0) / 3600
            for site in map(self.topology.site, names)
        )
        return rank_of(self.wishes.objective, least_s, per_s * least_s)[:1]

    def compute_bound_s(self, names: Iterable[str]) -> float:
        """Return the seconds that no step of these sites is shorter than."""
        per_s = math.fsum(1 / self.cuts[name].sequence_s for name in names)
        return self.model.global_batch / per_s if per_s else math.inf

    def fastest_cuts(
        self, model: JointModel, fronts: Sequence[tuple[Timing, ...]]
    ) -> tuple[tuple[Timing, ...], float]:
        """Return the cuts that make a step shortest, and its seconds.

        Args:
            model: Of the step.
            fronts: What each site has to choose from, the fastest by itself first.
        """
        if math.prod(map(len, fronts)) <= EVERY_CUTS_MAX:
            timed = [(model.step_s(each), each) for each in itertools.product(*fronts)]
            step_s, best = min(timed, key=lambda each: each[0])
            return best, step_s
        # Equal sites with as many sequences have the same cuts to choose from, and change them together.
        best = tuple(front[0] for front in fronts)
        step_s = model.step_s(best)
        for front in {id(each): each for each in fronts}.values():
            for timing in front[1:]:
                other = tuple(
                    timing if mine is front else now for mine, now in zip(fronts, best, strict=True)
                )
                other_s = model.step_s(other)
                if other_s < step_s:
                    best, step_s = other, other_s
        return best, step_s


class _Sites:
    """All that can be decided for one set of sites."""

    def __init__(self, search: ParallelSearch, names: Names) -> None:
        self._search = search
        self._names = names
        self._topology = restricted(search.topology, names)
        self._cuts = [search.cuts[name] for name in names]
        self._batch = search.model.global_batch

    def best(self, *, thorough: bool) -> CutChoice | None:
        """Return the best choice; not thoroughly, of the most promising reductions and one spread."""
        if unreached(self._topology) or not all(each.cuts for each in self._cuts):
            return None
        splits = list(self._splits(thorough=thorough))
        best: CutChoice | None = None
        for least_s, way, codec, places in self._bounded(thorough=thorough):
            best = self._best_split(best, splits, way, codec, (least_s, places), thorough=thorough)
        return best

    def balanced(self) -> tuple[Split, float]:
        """Return the spread whose slowest site is fastest by itself, and its seconds."""
        split = min(self._splits(thorough=True), key=self._alone_s)
        return split, self._alone_s(split)

    def _bounded(self, *, thorough: bool) -> list[tuple[float, Way, str, tuple[float, ...]]]:
        """Return reductions and codecs with the seconds that they cannot beat, the shortest first."""
        search = self._search
        exact = thorough and len(self._names) <= 2 * EXACT_SITES
        found = []
        for index, way in enumerate(ways(search.job, self._topology, with_packings=exact)):
            for codec_index, codec in enumerate(search.codecs):
                least_s = search.compute_bound_s(self._names)
                if len(self._names) > 1:
                    model = self._model(way, codec)
                    least_s = max(least_s, model.links_s)
                found.append((least_s, index, codec_index, way, codec))
        found.sort(key=lambda each: each[:3])
        if not thorough:
            found = found[:_QUICK_WAYS]
        return [
            (least_s, way, codec, (float(codec_index), float(index)))
            for least_s, index, codec_index, way, codec in found
        ]

    def _model(self, way: Way, codec: str) -> JointModel:
        job = self._search.job
        exchange = dataclasses.replace(job.exchange, codec=codec)
        return JointModel(dataclasses.replace(job, exchange=exchange), self._topology, way.plan)

    def _best_split(
        self,
        best: CutChoice | None,
        splits: list[Split],
        way: Way,
        codec: str,
        bound: tuple[float, tuple[float, ...]],
        *,
        thorough: bool,
    ) -> CutChoice | None:
        """Return the best spread of the batch with one reduction and codec, or `best`."""
        search = self._search
        exchange = dataclasses.replace(search.job.exchange, codec=codec)
        per_s, egress = money(
            dataclasses.replace(search.job, exchange=exchange), self._topology, way
        )
        model = self._model(way, codec)

        def rank(step_s: float) -> Rank:
            rest = (len(self._names), *bound[1])
            return rank_of(search.wishes.objective, step_s, per_s * step_s + egress, *rest)

        def looked_at(split: Split, best: CutChoice | None) -> CutChoice | None:
            least_s = max(bound[0], self._alone_s(split))
            if math.isinf(least_s) or (best is not None and rank(least_s) >= best.rank):
                return best
            fronts = [cuts.timings(count) for cuts, count in zip(self._cuts, split, strict=True)]
            timings, step_s = search.fastest_cuts(model, fronts)
            usd = per_s * step_s + egress
            choice = CutChoice(
                sites=self._names,
                sequences=split,
                way=way,
                codec=codec,
                sizing=_sizing(search.job),
                step_s=step_s,
                usd_per_step=usd,
                rank=rank(step_s),
                timings=timings,
            )
            return _better(best, choice)

        mine: CutChoice | None = None
        for split in sorted(splits, key=self._alone_s):
            mine = looked_at(split, mine if best is None else _better(best, mine))
        if thorough and mine is not None and mine.way is way and mine.codec == codec:
            mine = self._moved(mine, looked_at)
        return _better(best, mine)

    def _moved(
        self,
        best: CutChoice,
        looked_at: Callable[[Split, CutChoice | None], CutChoice | None],
    ) -> CutChoice:
        """Move sequences from one site to another for as long as that gains something worth it.

        Where the exchange is most of a step, spreads differ by next to nothing: the even one is kept.
        """
        if self._num_splits() <= EVERY_SPLIT_MAX:
            return best
        for _ in range(_MOVES_MAX):
            found: CutChoice | None = best
            for split in self._moves(best.sequences):
                found = looked_at(split, found)
            if found is None or found.rank[0] > (1 - _GAIN) * best.rank[0]:
                break
            best = found
        return best

    def _moves(self, split: Split) -> Iterator[Split]:
        """Yield splits with sequences moved: of many sites, from the slowest to the fastest ones."""
        givers: Sequence[int] = range(len(split))
        takers = givers
        if len(split) > EXACT_SITES:
            order = sorted(givers, key=lambda site: self._cuts[site].alone_s(split[site]))
            givers, takers = order[-1:], order[:_TAKERS]
        for giver, taker in itertools.product(givers, takers):
            count = 1
            while giver != taker and count < split[giver]:
                moved = list(split)
                moved[giver] -= count
                moved[taker] += count
                yield tuple(moved)
                count *= 2

    def _alone_s(self, split: Split) -> float:
        return max(cuts.alone_s(count) for cuts, count in zip(self._cuts, split, strict=True))

    def _num_splits(self) -> int:
        return math.comb(self._batch - 1, len(self._names) - 1)

    def _splits(self, *, thorough: bool) -> Iterator[Split]:
        """Yield all spreads of the batch if they are few; else by speed, and by number of ranks."""
        if thorough and self._num_splits() <= EVERY_SPLIT_MAX:
            for bars in itertools.combinations(range(1, self._batch), len(self._names) - 1):
                ends = (0, *bars, self._batch)
                yield tuple(end - begin for begin, end in itertools.pairwise(ends))
            return
        speeds = [1 / cuts.sequence_s for cuts in self._cuts]
        ranks = [float(site.num_ranks) for site in self._topology.sites]
        for weights in (speeds, ranks):
            for unit in (1, 8, 64):
                split = _in_proportion(weights, self._batch, unit)
                if min(split) > 0:
                    yield split


def _in_proportion(weights: Sequence[float], batch: int, unit: int) -> Split:
    """Return a batch spread by weight in multiples of `unit`; the heaviest has the rest."""
    total = math.fsum(weights)
    split = [int(batch * weight / total / unit) * unit for weight in weights]
    split[weights.index(max(weights))] += batch - sum(split)
    return tuple(split)


def _hardware(site: Site) -> tuple[object, ...]:
    """Return what equal sites have in common."""
    return (site.nodes, site.accelerators_per_node, site.accelerator, site.fabric)


def _sizing(job: Job) -> Sizing:
    return Sizing(chunk_bytes=job.exchange.chunk_bytes, bucket_bytes=job.exchange.bucket_bytes)


def _better(one: CutChoice | None, other: CutChoice | None) -> CutChoice | None:
    if one is None or other is None:
        return one or other
    return min(one, other, key=_by_rank)


def _by_rank(choice: CutChoice) -> Rank:
    return choice.rank
