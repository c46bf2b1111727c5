"""The best of all weighted stars of three sites: bounds for all at once, then a few of them one by one."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from topology.job import Job, Reduction
from topology.planner.choice import DIGITS, Choice, Sizing, better, money
from topology.planner.codings import Coding
from topology.planner.mix_bounds import MixBounds, paces_s, shares_nk, single_stars
from topology.planner.sizings import Sizes
from topology.planner.ways import Way
from topology.timing.releases import gradient_bytes
from topology.traffic.wire_load import wire_load
from topology.world import Topology

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Counts = NDArray[np.int64]

_FEW = 3
"""Mixes of a codec and sizes that are looked at where bounds say little of a step."""
_BLOCK = 256
"""Mixes whose bounds for all spreads are worked out together."""
_SAME = 10.0 ** (1 - DIGITS) / 2
"""How much what comes to the same after rounding may differ by."""

Try = Callable[[Choice | None, float, int, int, Sizing], Choice | None]
"""(best, least seconds, mix, which coding, sizes) -> the better of that and the best."""


@dataclass(frozen=True, slots=True)
class _Group:
    """All mixes with one codec and one size of chunks and buckets, as far as they may be best."""

    coding_index: int
    sizing: Sizing
    bounds: MixBounds
    mixes: Counts
    """Shape (N,), as all else."""
    least_s: Floats
    egress_usd: Floats


class MixSearch:
    """Looks for weights for three sites that all have links with each other."""

    def __init__(
        self,
        job: Job,
        topology: Topology,
        codings: Sequence[Coding],
        compute_s: float,
        spreads: Sequence[Sequence[int]],
        *,
        are_all: bool,
    ) -> None:
        """Look at these sites only.

        Args:
            job: Without a placement.
            topology: Of the three sites.
            codings: Codecs for all links.
            compute_s: That no step is shorter than.
            spreads: Of the busiest rank of each site: all that there are, or one to judge by.
            are_all: Which of the two.
        """
        self._job, self._topology, self._codings = job, topology, codings
        self._compute_s, self._spreads = compute_s, spreads
        raw_bytes = gradient_bytes(job)
        self._jobs = [dataclasses.replace(job, exchange=each.of(job.exchange)) for each in codings]
        ways = [Way("", plan, Reduction()) for plan in single_stars()]
        load = wire_load(self._jobs[0], topology, ways[0].plan, raw_bytes, 1.0)
        are_slow = any(math.isfinite(load.window_of(link)) for link in topology.links)
        self._is_exact = are_all and not are_slow
        self._costs = [[money(each, topology, way) for way in ways] for each in self._jobs]
        self._paces = [paces_s(each, topology) for each in self._jobs]

    def guesses(self) -> Iterator[tuple[float, int, int]]:
        """Yield of each codec the mix whose bytes take least: least seconds, mix, which coding."""
        for coding_index in range(len(self._codings)):
            floor_n = self._floor_s(coding_index)
            mix = int(floor_n.argmin())
            yield float(floor_n[mix]), mix, coding_index

    def best(self, best: Choice, sizes: Sizes, try_one: Try) -> Choice:
        """Return the best of all mixes, or `best`.

        Of links that start slowly, and where not all spreads are tried, only the most promising are
        looked at.
        """
        groups = list(self._groups(best, sizes))
        for group in sorted(groups, key=lambda each: each.least_s.min()):
            best = self._best_of(best, group, try_one)
        return best

    def _floor_s(self, coding_index: int) -> Floats:
        link_n, gateway_n = self._paces[coding_index]
        return np.maximum(np.maximum(link_n, gateway_n), self._compute_s)

    def _groups(self, best: Choice, sizes: Sizes) -> Iterator[_Group]:
        for index, (coding, job) in enumerate(zip(self._codings, self._jobs, strict=True)):
            floor_n = self._floor_s(index)
            egress_n = shares_nk() @ np.array([egress for _, egress in self._costs[index]])
            mixes = np.flatnonzero(self._may_win(best, index, floor_n, egress_n))
            for sizing in sizes.different(coding, self._sizings(sizes)) if mixes.size else ():
                exchange = dataclasses.replace(
                    job.exchange, chunk_bytes=sizing.chunk_bytes, bucket_bytes=sizing.bucket_bytes
                )
                sized = dataclasses.replace(job, exchange=exchange)
                gateway_n = self._paces[index][1][mixes]
                bounds = MixBounds(sized, self._topology, mixes, gateway_n)
                least_n = np.maximum(floor_n[mixes], bounds.least_s())
                yield _Group(index, sizing, bounds, mixes, least_n, egress_n[mixes])

    def _sizings(self, sizes: Sizes) -> list[Sizing]:
        """Return all sizes of chunks with the job's own buckets: more of these gained nothing."""
        own = sizes.all[0].bucket_bytes
        return [each for each in sizes.all if each.bucket_bytes == own]

    def _best_of(self, best: Choice, group: _Group, try_one: Try) -> Choice:
        """Return the best mix of a group, or `best`."""
        index = group.coding_index
        may_win = self._may_win(best, index, group.least_s, group.egress_usd)
        rows = np.flatnonzero(may_win)
        if rows.size and not self._is_exact:
            judged = group.bounds.least_of_spreads_s(rows, self._spreads)
            # Those that share out the chunks alike are judged alike: one of them is enough.
            _, first = np.unique(judged, return_index=True)
            rows = rows[first[:_FEW]]
        rows = rows[group.least_s[rows].argsort(kind="stable")]
        for begin in range(0, len(rows), _BLOCK):
            block = rows[begin : begin + _BLOCK]
            block = block[self._may_win(best, index, group.least_s[block], group.egress_usd[block])]
            if not block.size:
                continue
            least_n = group.least_s[block]
            if self._is_exact:
                of_spreads_n = group.bounds.least_of_spreads_s(block, self._spreads)
                least_n = np.maximum(least_n, of_spreads_n)
            best = self._best_of_block(best, group, block, least_n, try_one)
        return best

    def _best_of_block(
        self, best: Choice, group: _Group, block: Counts, least_n: Floats, try_one: Try
    ) -> Choice:
        """Return the best of these mixes, or `best`."""
        index = group.coding_index
        is_left = np.ones(len(block), dtype=np.bool_)
        while True:
            wins = self._may_win(best, index, least_n, group.egress_usd[block]) & is_left
            if not wins.any():
                return best
            place = int(np.where(wins, least_n, math.inf).argmin())
            mix = int(group.mixes[block[place]])
            found = try_one(best, float(least_n[place]), mix, index, group.sizing)
            best = better(best, found) or best
            is_left[place] = False

    def _may_win(
        self, best: Choice, coding_index: int, least_n: Floats, egress_n: Floats
    ) -> NDArray[np.bool_]:
        """Return which mixes may be better than the best, by these seconds; its rank's entries, by arrays."""
        mine = (len(self._topology.sites), self._codings[coding_index].loss, coding_index)
        objectives = best.rank[: -len(_REST)]
        wins = np.full(len(least_n), mine < best.rank[len(objectives) :][: len(mine)])
        per_s, _ = self._costs[coding_index][0]
        keys = [least_n] if len(objectives) == 1 else [per_s * least_n + egress_n, least_n]
        for key_n, value in reversed([*zip(keys, objectives, strict=True)]):
            is_same = np.abs(key_n - value) <= _SAME * value
            wins = np.where(is_same, wins, key_n < value)
        return wins


_REST = ("sites", "loss", "coding", "reduction", "sizes")
"""What orders choices that are equal by their objective."""
