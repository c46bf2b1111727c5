"""How long many mixes' exchanges take, with all that trees do to each other. Pure, by arrays.

Legend of shapes, which end names in lower case: N mixes, J trees of one, K trees of all, S sites
(sources), T sites (targets), P releases, F mixes of a few sets.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from topology.model.tree_flow import Crossing, flow_s
from topology.model.wire_load import Load
from topology.planner.tree_mixes import Mixes, chunks_pnj
from topology.trees.trees import ReductionPlan, Tree
from topology.world import Topology

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Counts = NDArray[np.int64]

_ABREAST = 4
"""Sets of trees followed together, each as if it were alone: of more, arrays are mostly zeros."""


@dataclass(frozen=True, slots=True)
class Crossed:
    """How long exchanges of mixes take."""

    there_npst: Floats
    """Of all that has not left before a knot, on trees; -inf where nobody waits."""
    gateway_n: Floats
    """That no exchange of all is shorter than."""

    def of(self, rows: NDArray[np.bool_]) -> Crossed:
        """Return those of some of the mixes."""
        return Crossed(self.there_npst[rows], self.gateway_n[rows])

    def at_least(self, there_npst: Floats, left_p: Floats) -> Floats:
        """Return crossings of such parts of the bytes, none shorter than gateways take for them."""
        least_np11 = (self.gateway_n[:, None] * left_p)[..., None, None]
        return np.where(np.isinf(there_npst), -math.inf, np.maximum(there_npst, least_np11))


class MixCrossings:
    """Exchanges over warm connections, of all bytes and of parts.

    Parts are what has not left before each of some releases.
    """

    def __init__(self, topology: Topology, trees: Sequence[Tree], loads: Sequence[Load]) -> None:
        """Take what crosses.

        Args:
            topology: Of the sites that take part.
            trees: That are mixed.
            loads: Of all bytes first; with the chunks of each of the trees.
        """
        self._topology, self._trees, self.loads = topology, trees, loads

    def of_counts(self, trees: Sequence[int], loads: Sequence[int], counts: Counts) -> Floats:
        """Return how long some trees take with so many chunks; shape (N, S, T).

        Args:
            trees: Which, J of them.
            loads: Which each of the N is.
            counts: Of chunks; shape (N, J). A tree with none is not there.
        """
        plan = ReductionPlan(
            len(self._topology.sites), tuple(self._trees[each] for each in trees), ""
        )
        chosen = {place: _of_trees(self.loads[place], trees) for place in {*loads}}
        which = [chosen[place] for place in loads]
        return flow_s(Crossing(plan, self._topology, which, counts.tolist()))

    def of_all_bytes(self, mixes: Mixes) -> Floats:
        """Return how long mixes of several sets take with all bytes; shape (N, S, T).

        Args:
            mixes: Those of one set side by side.
        """
        [counts_nj] = chunks_pnj(mixes.weights_nj, [self.loads[0].num_chunks])
        changes = np.flatnonzero(np.diff(mixes.set_n)) + 1
        begins = [0, *changes.tolist()][::_ABREAST]
        found = []
        for begin, end in zip(begins, [*begins[1:], len(counts_nj)], strict=True):
            trees_fj = mixes.trees_nj[begin:end]
            trees, place_f = np.unique(trees_fj, return_inverse=True)
            counts = np.zeros((end - begin, len(trees)), dtype=np.int64)
            place_fj = place_f.reshape(trees_fj.shape)
            np.put_along_axis(counts, place_fj, counts_nj[begin:end], axis=1)
            found.append(self.of_counts(trees.tolist(), [0] * (end - begin), counts))
        return np.concatenate(found)

    def of_set(self, mixes: Mixes) -> Floats:
        """Return how long mixes of one set take, with each of the loads; shape (N, P, S, T)."""
        trees = mixes.sets_uj[mixes.set_n[0]].tolist()
        counts_pnj = chunks_pnj(mixes.weights_nj, [load.num_chunks for load in self.loads])
        place_pn1 = np.indices(counts_pnj.shape[:2])[0][..., None]
        # Of few chunks, many mixes give trees as many.
        cases = np.concatenate([place_pn1, counts_pnj], axis=2).reshape(-1, len(trees) + 1)
        cases, which = np.unique(cases, axis=0, return_inverse=True)
        there = self.of_counts(trees, cases[:, 0].tolist(), cases[:, 1:])
        return there[which.reshape(counts_pnj.shape[:2]).T]


def _of_trees(load: Load, trees: Sequence[int]) -> Load:
    """Return the same with only some of the trees."""
    sizes = load.chunk_bytes
    chosen = tuple(sizes[each] for each in trees) if len(sizes) > 1 else sizes
    return dataclasses.replace(load, chunk_bytes=chosen)
