"""All that can be decided for one set of sites that cut a model: reduction, codec, spread, cuts."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence

from topology.cost.model_shape import workload_described
from topology.documents.placement import unreached
from topology.job import Job, Reduction
from topology.model.wire_load import starts_slowly
from topology.planner.codings import Coding, by_link, one_for_all
from topology.planner.cut_choice import EVERY_CUTS_MAX, CutChoice
from topology.planner.cut_mixes import MIXED_SITES, Bounded
from topology.planner.cut_mixes_search import CutMixSearch
from topology.planner.cut_trial import CutTrial, Sized
from topology.planner.cuts import layers_together
from topology.planner.joint_crossings import gateways_s
from topology.planner.shares import EVERY_SPLIT_MAX, Split
from topology.planner.site_cuts import SiteCuts
from topology.planner.sizings import Sizes, crossing_bound_s
from topology.planner.ways import Way, named, ways
from topology.trees.pairs import pairs_of
from topology.trees.trees import ReductionPlan
from topology.world import Topology

CUT_EXACT_SITES = 4
"""Up to so many, the best is found, if spreads, cuts and connections permit; else a good one."""
_QUICK_WAYS = 3
"""Reductions and codecs of a set that are looked at, before it is known whether it is good."""
_MOVES_MAX = 60
_TAKERS = 3
_GAIN = 1e-3
"""Of the objective, that moving sequences has to bring."""
_MANY_WAYS_SITES = 6
"""Up to so many sites, weighted trees and codecs of single links are tried."""
_AFTER_ALL = 1 << 20
"""The place of a mix of trees in the order of reductions."""

_Bounded = tuple[float, int, int, Way, Coding]
"""Least seconds; which reduction and codecs; and these."""


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
        self._topology = topology
        self._cuts = cuts
        self._pairs = pairs_of(topology)
        self._batch = job.global_batch
        self._names = tuple(site.name for site in topology.sites)
        assert job.workload is not None, "there is a model to cut"
        self._leaving = functools.partial(layers_together, workload_described(job.workload))
        self._sizes = Sizes(job, topology, self._leaving)

    def best(self, *, thorough: bool, against: CutChoice | None = None) -> CutChoice | None:
        """Return the best choice; not thoroughly, of the most promising reductions and one spread.

        Args:
            thorough: All is looked at that may be the best.
            against: Of other sites; returned if nothing is better.
        """
        if unreached(self._topology) or not all(each.cuts for each in self._cuts):
            return against
        splits = sorted(self._splits(thorough=thorough), key=self._alone_s)
        best = against
        for trial in self._trials(thorough=thorough):
            if best is not None and not trial.may_beat(best):
                continue
            for split in splits:
                best = trial.with_spread(split, best)
            if thorough and best is not None and trial.is_of(best):
                best = self._moved(best, trial)
        return self._mixed(best, splits) if thorough and best is not None else best

    def _mixed(self, best: CutChoice, splits: Sequence[Split]) -> CutChoice:
        """Return the best choice over weighted trees of the menu, or `best`."""
        num_sites, num_links = len(self._names), len(self._pairs.bytes_per_s)
        has_mixes = num_sites in MIXED_SITES and num_links >= num_sites
        able = [split for split in splits if math.isfinite(self._alone_s(split))]
        if not has_mixes or not able or self._job.reduction != Reduction():
            return best
        if best.sites == self._names and best.sequences not in able:
            able.append(best.sequences)
        codings = one_for_all(self._codecs, self._job.exchange)
        mixes = CutMixSearch(
            self._job,
            self._topology,
            self._pairs,
            self._cuts,
            [(coding, self._sized(coding, thorough=True)) for coding in codings],
            able,
            is_complete=self._is_complete,
        )
        return mixes.best(best, self._with_mix)

    def _with_mix(
        self,
        best: CutChoice,
        plan: ReductionPlan,
        coded: tuple[int, Coding],
        sizes: Sequence[Sized],
        bounded: Sequence[Bounded],
    ) -> CutChoice:
        """Return the best choice over a mix, or `best`."""
        coding_index, coding = coded
        way = Way(plan.why, plan, named(plan, self._pairs.names))
        least_s = self._least_s(way, coding)
        trial = self._trial((least_s, _AFTER_ALL, coding_index, way, coding), sizes)
        for least_of_split_s, split in bounded:
            best = trial.with_spread(split, best, least_of_split_s) or best
        return self._moved(best, trial) if trial.is_of(best) else best

    def balanced(self) -> tuple[Split, float]:
        """Return the spread whose slowest site is fastest by itself, and its seconds."""
        split = min(self._splits(thorough=True), key=self._alone_s)
        return split, self._alone_s(split)

    def _trials(self, *, thorough: bool) -> list[CutTrial]:
        """Return reductions and their codecs, by what no step of them is shorter than."""
        exact = thorough and len(self._names) <= _MANY_WAYS_SITES
        by_rates = not (thorough and self._is_complete)
        every = ways(self._job, self._topology, with_packings=exact, by_rates=by_rates)
        found: list[_Bounded] = []
        for index, way in enumerate(every):
            for coding_index, coding in enumerate(self._codings(way, exact=exact)):
                least_s = self._least_s(way, coding)
                found.append((least_s, index, coding_index, way, coding))
        found.sort(key=lambda each: each[:3])
        return [
            self._trial(each, self._sized(each[-1], thorough=thorough))
            for each in found[: None if thorough else _QUICK_WAYS]
        ]

    def _trial(self, bounded: _Bounded, sizes: Sequence[Sized]) -> CutTrial:
        least_s, way_index, coding_index, way, coding = bounded
        return CutTrial(
            self._job,
            self._topology,
            self._cuts,
            (way, coding),
            sizes,
            (least_s, (coding.loss, coding_index, way_index)),
        )

    @functools.cached_property
    def _is_complete(self) -> bool:
        """Whether the best of all is found: with trees of the menu, and whatever else there is."""
        if len(self._names) not in MIXED_SITES or self._num_splits() > EVERY_SPLIT_MAX:
            return False
        together = {self._leaving(each.bucket_bytes) for each in self._sizes.all}
        return not starts_slowly(self._topology) and all(
            self._num_cuts(split, layers) <= EVERY_CUTS_MAX
            for split, layers in itertools.product(self._splits(thorough=True), together)
        )

    def _num_cuts(self, split: Split, together: int) -> int:
        """Return how many combinations of cuts there are."""
        sites = zip(self._cuts, split, strict=True)
        return math.prod(len(cuts.timings(count, together)) for cuts, count in sites)

    def _least_s(self, way: Way, coding: Coding) -> float:
        """Return what no step is shorter than, however sites cut: for compute, links, gateways."""
        compute_s = compute_bound_s(self._cuts, self._batch)
        if len(self._names) == 1:
            return compute_s
        job = dataclasses.replace(self._job, exchange=coding.of(self._job.exchange))
        of_nodes = [
            cuts.node_share * one_s
            for cuts, one_s in zip(
                self._cuts, gateways_s(job, self._topology, way.plan), strict=True
            )
        ]
        return max(compute_s, crossing_bound_s(job, self._topology, way.plan), *of_nodes)

    def _sized(self, coding: Coding, *, thorough: bool) -> list[Sized]:
        """Return the sizes that come to something else; not thoroughly, the job's own."""
        sizes = self._sizes.all if thorough and len(self._names) > 1 else self._sizes.all[:1]
        return [
            Sized(
                sizing=each,
                place=self._sizes.all.index(each),
                together=self._leaving(each.bucket_bytes),
            )
            for each in self._sizes.different(coding, sizes)
        ]

    def _codings(self, way: Way, *, exact: bool) -> list[Coding]:
        """Return the codecs for all links; of few sites, also those of single links."""
        exchange = self._job.exchange
        found = one_for_all(self._codecs, exchange)
        if exact:
            found += by_link(way.plan, self._pairs, self._codecs, exchange)
        return found

    def _moved(self, best: CutChoice, trial: CutTrial) -> CutChoice:
        """Move sequences from one site to another for as long as that gains something worth it.

        Where the exchange is most of a step, spreads differ by next to nothing: the even one stays.
        """
        if self._num_splits() <= EVERY_SPLIT_MAX:
            return best
        for _ in range(_MOVES_MAX):
            found: CutChoice | None = best
            for split in self._moves(best.sequences):
                found = trial.with_spread(split, found)
            if found is None or found.rank[0] > (1 - _GAIN) * best.rank[0]:
                break
            best = found
        return best

    def _moves(self, split: Split) -> Iterator[Split]:
        """Yield splits with sequences moved: of many sites, from the slowest to the fastest."""
        givers: Sequence[int] = range(len(split))
        takers = givers
        if len(split) > CUT_EXACT_SITES:
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
