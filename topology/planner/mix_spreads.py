"""How much of a batch sites can take, by how late exchanges are, of many mixes. Pure, by arrays.

Legend of shapes, which end names in lower case: N mixes, S sites (sources), T sites (targets).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from topology.cost.compute import sequence_s
from topology.job import Job
from topology.world import Topology

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

_EXACT, _MORE = 1 - 1e-12, 1 + 1e-12
"""What sums in another order may differ by."""


class SpreadRoom:
    """Of a batch that may be spread in any way, or of one spread."""

    def __init__(self, job: Job, topology: Topology, only: Sequence[int] | None) -> None:
        """Take a job's batch; `only` is the one spread that counts, of each site's busiest rank."""
        self.sequence_s = np.array([sequence_s(job, site) for site in topology.sites])
        self._ranks = np.array([site.num_ranks for site in topology.sites])
        self._batch = job.trainer.global_batch
        self._only = None if only is None else np.array(only)

    def fits(self, late_nst: Floats, at_most_s: float) -> NDArray[np.bool_]:
        """Return whether there may be a spread with which no cycle of one site or two takes longer.

        Args:
            late_nst: How much later than the end of a site's computing another has all that depends
                on it; -inf where nobody waits.
            at_most_s: Of a step.
        """
        if math.isinf(at_most_s):
            return np.ones(len(late_nst), dtype=np.bool_)
        if self._only is not None:
            compute_s = self._only * self.sequence_s
            cycles = late_nst + late_nst.swapaxes(1, 2) + compute_s[:, None] + compute_s
            fits: NDArray[np.bool_] = (cycles <= 2 * at_most_s * _MORE).all(axis=(1, 2))
            return fits
        return self._any_fits(late_nst, at_most_s)

    def _any_fits(self, late_nst: Floats, at_most_s: float) -> NDArray[np.bool_]:
        """Return the same of any spread.

        A site computes for no longer than a step less what its own bytes are late, and two sites
        together for no longer than two steps less what each other's are. So two sites take a
        limited part of the batch, and all sites are two pairs, in three ways; or a pair and one.
        """
        rate = self._ranks / self.sequence_s
        room_ns = np.minimum(at_most_s - np.einsum("nss->ns", late_nst), at_most_s)
        most_ns = np.floor(room_ns / self.sequence_s * _MORE) * self.sequence_s
        fits_n: NDArray[np.bool_] = (most_ns > 0).all(axis=1)
        taken = {}
        for one, other in itertools.combinations(range(len(rate)), 2):
            both_n = 2 * at_most_s - late_nst[:, one, other] - late_nst[:, other, one]
            first, second = (one, other) if rate[one] >= rate[other] else (other, one)
            first_n = np.minimum(most_ns[:, first], both_n)
            second_n = np.minimum(most_ns[:, second], both_n - first_n)
            taken[one, other] = rate[first] * first_n + rate[second] * second_n
        for pairs in _matchings(range(len(rate))):
            alone = [site for site in range(len(rate)) if not any(site in pair for pair in pairs)]
            taken_n = most_ns[:, alone] @ rate[alone] + sum(taken[pair] for pair in pairs)
            fits_n = fits_n & (taken_n * _MORE >= self._batch)
        return fits_n

    def least_s(self, late_nst: Floats) -> Floats:
        """Return what no step is shorter than, however the batch is spread; shape (N,).

        With n sequences in its busiest rank a site takes n t + a, a being what its own bytes are
        late; and of all sites r n, r being their ranks, add up to the batch. So the mean of all
        t n + a, weighted by r / t, is no more than a step. Where the whole n that fit are too few,
        the next one that fits decides.
        """
        waits_ns = np.maximum(np.einsum("nss->ns", late_nst), 0.0)
        rate = self._ranks / self.sequence_s
        least_n = (self._batch + waits_ns @ rate) / rate.sum()
        for _ in range(len(self._ranks)):
            whole_ns = np.floor((least_n[:, None] - waits_ns) / self.sequence_s * _MORE)
            next_n = (waits_ns + (whole_ns + 1) * self.sequence_s).min(axis=1)
            least_n = np.where(whole_ns @ self._ranks < self._batch, next_n, least_n)
        found: Floats = least_n * _EXACT
        return found


def _matchings(sites: Sequence[int]) -> Iterator[tuple[tuple[int, int], ...]]:
    """Yield every way to make pairs of sites, as many as there can be."""
    if len(sites) < 2:
        yield ()
        return
    if len(sites) % 2:
        for alone in sites:
            yield from _matchings([site for site in sites if site != alone])
        return
    first, *others = sites
    for other in others:
        for rest in _matchings([site for site in others if site != other]):
            yield ((first, other), *rest)
