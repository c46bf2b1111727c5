"""The cuts that sites choose from, as arrays: what the best of them comes to. Pure.

Legend of shapes, which end names in lower case: N mixes, F cuts of one site, one after another for
all numbers of its sequences that come into question, C of these numbers, T sites (targets), P parts
of a step's bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from topology.planner.cuts import Timing

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

Front = Mapping[int, Sequence[Timing]]
"""The cuts of a site that come into question, by its number of sequences."""


class SiteFront:
    """The cuts of one site."""

    def __init__(self, site: int, front: Front, shares: Sequence[float]) -> None:
        """Take the cuts.

        Args:
            site: Its index.
            front: With one cut at least for each number of sequences.
            shares: Of all gradients, what may leave last: the parts that are worked out.
        """
        self._site = site
        self.place = {count: place for place, count in enumerate(front)}
        """Of each number of sequences, along C."""
        timings = [each for cuts in front.values() for each in cuts]
        self._begin_c = np.cumsum([0, *map(len, front.values())])[:-1]
        self._last_f = [shares.index(each.last_share) for each in timings]
        times = [(each.first_s, each.head_s, each.cut.tail_s, each.alone_s) for each in timings]
        self._first_f, self._head_f, self._tail_f, self._alone_f = np.array(times).T
        self.alone_c = np.minimum.reduceat(self._alone_f, self._begin_c)
        """Of a step by itself, at least, by numbers of sequences."""
        of_node = [(each.node_first_s, each.node_last_share) for each in timings]
        self._node_first_f, self._node_last_f = np.array(of_node).T
        self.lightest = min(timings, key=lambda each: each.cut.node_share)
        """Of whose gradients least crosses the fullest node."""
        self.least_s = float((self._first_f + self._tail_f).min())
        """Until the first gradients of a step leave, and after its last ones, at least."""

    def soonest_s(self, all_nt: Floats, last_pnt: Floats, pace_n: Floats) -> Floats:
        """Return when sites have what this one sends, and its tail after that; shape (N, C, T).

        Of its own step, that all of it is over.

        Args:
            all_nt: What an exchange of everything takes from here; -inf where nobody waits.
            last_pnt: And of each part.
            pace_n: What no exchange is shorter than.
        """
        left = self._first_f[:, None] + all_nt[:, None]
        there = np.maximum(left, self._head_f[:, None] + last_pnt[self._last_f].swapaxes(0, 1))
        paced_nf = np.maximum(
            self._node_first_f + pace_n[:, None],
            self._head_f + self._node_last_f * pace_n[:, None],
        )
        there = np.where(np.isinf(there), -math.inf, np.maximum(there, paced_nf[..., None]))
        there = there + self._tail_f[:, None]
        own_nf = there[..., self._site]
        there[..., self._site] = np.maximum(own_nf, self._alone_f)
        found: Floats = np.minimum.reduceat(there, self._begin_c, axis=1)
        return found
