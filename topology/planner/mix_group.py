"""All weighted sets of trees with one codec, one size of chunks and buckets, that bounds leave."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from topology.planner.choice import Sizing
from topology.planner.mix_bounds import MixBounds
from topology.planner.tree_mixes import Mixes, Part, mixes_within, sets_of
from topology.trees.trees import Tree

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Counts = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class MixGroup:
    """All mixes of some trees with one codec, chunk and bucket."""

    coding_index: int
    """Which codec."""
    sizing: Sizing
    trees: Sequence[Tree]
    bounds: MixBounds
    menu: Sequence[Part]
    egress_k1: Floats
    """US dollars a step, if one tree carries all."""

    def looked(self, part: Part, limit_s: float, size: int = 1) -> Iterator[tuple[Mixes, Floats]]:
        """Yield mixes whose bounds are at most so many seconds, and these, some sets at a time.

        The most promising first, of sets of trees and of the mixes of each. At least `size` mixes,
        but at the end.
        """
        bounds = self.bounds
        most_k = bounds.largest_weights(part.total, limit_s)
        sets_uj = sets_of(len(self.trees), part.num_trees)
        sets_uj = sets_uj[(most_k[sets_uj] > 0).all(axis=1)]
        sets_uj = bounds.sets_that_fit(sets_uj, limit_s)
        most_ur = bounds.may_be_busy_s(sets_uj, limit_s)
        mixes = mixes_within(part, sets_uj, bounds.busy_kr, most_ur, most_k)
        least_n = bounds.least_s(mixes, limit_s)
        rows = np.flatnonzero(least_n <= limit_s)
        rows = rows[least_n[rows].argsort(kind="stable")]
        _, first, which = np.unique(mixes.set_n[rows], return_index=True, return_inverse=True)
        by_set = np.split(rows[which.argsort(kind="stable")], np.bincount(which).cumsum()[:-1])
        some: list[Counts] = []
        for place in first.argsort(kind="stable").tolist():
            some.append(by_set[place])
            if sum(map(len, some)) >= size:
                rows, some = np.concatenate(some), []
                yield mixes.of(rows), least_n[rows]
        if some:
            rows = np.concatenate(some)
            yield mixes.of(rows), least_n[rows]
