"""Everything that can be decided for one set of sites that cut a model: reduction, codec, spread, cuts."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from topology.documents.placement import unreached
from topology.job import Job, Placed
from topology.plan_wishes import PlanWishes
from topology.planner.choice import Choice, Rank, Sizing, better, money, rank_of
from topology.planner.codings import Coding, by_link, one_for_all
from topology.planner.cuts import Timing
from topology.planner.joint_step import JointModel
from topology.planner.parallelism import parallel_of
from topology.planner.shares import EVERY_SPLIT_MAX, Split
from topology.planner.site_cuts import SiteCuts
from topology.planner.ways import Way, ways
from topology.trees.pairs import pairs_of
from topology.world import Topology

EXACT_SITES = 3
"""Up to so many, the best is found, if the limits on spreads and cuts permit; of more, a good one."""
EVERY_CUTS_MAX = 512
"""Combinations of the sites' cuts that are all tried."""
_QUICK_WAYS = 3
"""Reductions and codecs of a set that are looked at, before it is known whether it is good."""
_MOVES_MAX = 60
_TAKERS = 3
_GAIN = 1e-3
"""Of the objective, that moving sequences has to bring."""


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


class CutSet:
    """All that can be decided for one set of sites."""

    def __init__(
        self, job: Job, codecs: Sequence[str], topology: Topology, cuts: Sequence[SiteCuts]
    ) -> None:
        """Look at these sites only.

        Args:
            job: Without a placement.
            codecs: That may be chosen.
            topology: Of the sites that take part.
            cuts: Of each of them.
        """
        self._job = job
        self._codecs = codecs
        self._objective = (job.plan or PlanWishes()).objective
        self._topology = topology
        self._cuts = cuts
        self._batch = job.global_batch
        self._names = tuple(site.name for site in topology.sites)

    def best(self, *, thorough: bool) -> CutChoice | None:
        """Return the best choice; not thoroughly, of the most promising reductions and one spread."""
        if unreached(self._topology) or not all(each.cuts for each in self._cuts):
            return None
        splits = list(self._splits(thorough=thorough))
        best: CutChoice | None = None
        for least_s, way, coding, places in self._bounded(thorough=thorough):
            best = self._best_split(best, splits, way, coding, (least_s, places), thorough=thorough)
        return best

    def balanced(self) -> tuple[Split, float]:
        """Return the spread whose slowest site is fastest by itself, and its seconds."""
        split = min(self._splits(thorough=True), key=self._alone_s)
        return split, self._alone_s(split)

    def _bounded(self, *, thorough: bool) -> list[tuple[float, Way, Coding, tuple[float, ...]]]:
        """Return reductions and their codecs with the seconds that they cannot beat, the shortest first."""
        exact = thorough and len(self._names) <= 2 * EXACT_SITES
        found = []
        for index, way in enumerate(ways(self._job, self._topology, with_packings=exact)):
            for coding_index, coding in enumerate(self._codings(way, exact=exact)):
                least_s = compute_bound_s(self._cuts, self._batch)
                if len(self._names) > 1:
                    model = self._model(way, coding)
                    least_s = max(least_s, model.links_s)
                found.append((least_s, index, coding_index, way, coding))
        found.sort(key=lambda each: each[:3])
        if not thorough:
            found = found[:_QUICK_WAYS]
        return [
            (least_s, way, coding, (coding.loss, coding_index, index))
            for least_s, index, coding_index, way, coding in found
        ]

    def _codings(self, way: Way, *, exact: bool) -> list[Coding]:
        """Return the codecs for all links; of few sites, also those of single links."""
        exchange = self._job.exchange
        found = one_for_all(self._codecs, exchange)
        if exact:
            found += by_link(way.plan, pairs_of(self._topology), self._codecs, exchange)
        return found

    def _model(self, way: Way, coding: Coding) -> JointModel:
        return JointModel(self._with(coding), self._topology, way.plan)

    def _with(self, coding: Coding) -> Job:
        return dataclasses.replace(self._job, exchange=coding.of(self._job.exchange))

    def _best_split(
        self,
        best: CutChoice | None,
        splits: list[Split],
        way: Way,
        coding: Coding,
        bound: tuple[float, tuple[float, ...]],
        *,
        thorough: bool,
    ) -> CutChoice | None:
        """Return the best spread of the batch with one reduction and its codecs, or `best`."""
        per_s, egress = money(self._with(coding), self._topology, way)
        model = self._model(way, coding)

        def rank(step_s: float) -> Rank:
            rest = (len(self._names), *bound[1])
            return rank_of(self._objective, step_s, per_s * step_s + egress, *rest)

        def looked_at(split: Split, best: CutChoice | None) -> CutChoice | None:
            least_s = max(bound[0], self._alone_s(split))
            if math.isinf(least_s) or (best is not None and rank(least_s) >= best.rank):
                return best
            fronts = [cuts.timings(count) for cuts, count in zip(self._cuts, split, strict=True)]
            timings, step_s = fastest_cuts(model, fronts)
            usd = per_s * step_s + egress
            choice = CutChoice(
                sites=self._names,
                sequences=split,
                way=way,
                coding=coding,
                sizing=_sizing(self._job),
                micro_batch=self._job.trainer.micro_batch,
                step_s=step_s,
                usd_per_step=usd,
                rank=rank(step_s),
                timings=timings,
            )
            return better(best, choice)

        mine: CutChoice | None = None
        for split in sorted(splits, key=self._alone_s):
            mine = looked_at(split, mine if best is None else better(best, mine))
        if thorough and mine is not None and mine.way is way and mine.coding is coding:
            mine = self._moved(mine, looked_at)
        return better(best, mine)

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
    split = [max(1, int(batch * weight / total / unit) * unit) for weight in weights]
    split[weights.index(max(weights))] += batch - sum(split)
    return tuple(split)


def compute_bound_s(cuts: Iterable[SiteCuts], batch: int) -> float:
    """Return the seconds that no step of these sites is shorter than."""
    per_s = math.fsum(1 / each.sequence_s for each in cuts)
    return batch / per_s if per_s else math.inf


def fastest_cuts(
    model: JointModel, fronts: Sequence[tuple[Timing, ...]]
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


def _sizing(job: Job) -> Sizing:
    return Sizing(chunk_bytes=job.exchange.chunk_bytes, bucket_bytes=job.exchange.bucket_bytes)
