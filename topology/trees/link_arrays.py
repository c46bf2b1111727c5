"""The figures of a topology's links, and the trees of a plan, as arrays. Pure.

Legend of shapes, which end names in lower case: D directions (up, down), K trees, S sites (of a
leg, its lower end), T sites where something ends, L legs. A leg is one hop of one tree in one
direction.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from isthmus.topology.spec.reduction_plan import ReductionPlan
from isthmus.topology.spec.world import Topology
from isthmus.topology.trees.slow_start import is_rested_slow

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from isthmus.topology.trees.wire_load import Hop, Load

    Floats = NDArray[np.float64]
    Bools = NDArray[np.bool_]
    Places = NDArray[np.intp]

UP, DOWN = 0, 1


class LinkArrays:
    """The links of a topology by source and target; worth keeping for many plans."""

    def __init__(self, topology: Topology) -> None:
        """Take all links. Where there is none, figures are those of a link that takes no time."""
        self.num_sites = len(topology.sites)
        shape = (self.num_sites, self.num_sites)
        index = {site.name: site.index for site in topology.sites}
        sources = [index[link.source] for link in topology.links]
        targets = [index[link.target] for link in topology.links]
        self.rate_st = np.ones(shape)
        self.rate_st[sources, targets] = [link.bytes_per_s for link in topology.links]
        self.rtt_st = np.zeros(shape)
        self.rtt_st[sources, targets] = [link.rtt_s for link in topology.links]
        self._is_slow_st = np.zeros(shape, dtype=np.bool_)
        self._is_slow_st[sources, targets] = [
            is_rested_slow(link.assumed_congestion) for link in topology.links
        ]
        self._in_flight: tuple[Mapping[Hop, float], Floats] | None = None

    def window_st(self, load: Load) -> Floats:
        """Return the first windows in bytes; infinite where connections do not start slowly."""
        if load.first_window_bytes is None:
            return np.full_like(self.rate_st, np.inf)
        return np.where(self._is_slow_st, load.first_window_bytes, np.inf)

    def in_flight_st(self, load: Load) -> Floats:
        """Return the chunks in flight, if there are enough; infinite where there is no link."""
        known = load.in_flight_of_links
        if known is None:
            return np.full_like(self.rate_st, load.num_in_flight)
        if self._in_flight is None or self._in_flight[0] is not known:
            found = np.full_like(self.rate_st, np.inf)
            sources, targets = zip(*known, strict=True)
            found[sources, targets] = list(known.values())
            self._in_flight = known, found
        return self._in_flight[1] * load.num_gateways


class TreeArrays:
    """The trees of a plan as arrays; a root is its own parent."""

    def __init__(self, plan: ReductionPlan) -> None:
        """Take the trees of a plan that has some."""
        num_trees = len(plan.trees)
        self.num_sites = plan.num_sites
        own = np.arange(plan.num_sites)
        self.root_k = np.array([tree.root for tree in plan.trees])
        self.weight_k = np.array([tree.weight for tree in plan.trees])
        self._turns = np.array(plan.turns)
        self.parent_dks = np.tile(own, (2, num_trees, 1))
        """Next site towards the root (up), and the site that sends the result (down)."""
        for index, tree in enumerate(plan.trees):
            self.parent_dks[UP, index, [*tree.parent]] = [*tree.parent.values()]
            self.parent_dks[DOWN, index, [*tree.giver]] = [*tree.giver.values()]
        self.source_dks = np.stack(
            (np.broadcast_to(own, self.parent_dks[UP].shape), self.parent_dks[DOWN])
        )
        """Site from which a leg goes; a root has a leg to itself, over no link."""
        self.target_dks = np.stack(
            (self.parent_dks[UP], np.broadcast_to(own, self.parent_dks[DOWN].shape))
        )
        depth_dks = np.zeros_like(self.parent_dks)
        above_dks = np.tile(own, (2, num_trees, 1))
        while (is_below := above_dks != self.root_k[:, None]).any():
            depth_dks += is_below
            above_dks = np.take_along_axis(self.parent_dks, above_dks, axis=2)
        self.levels = tuple(
            tuple(
                (*np.nonzero(depth_dks[direction] == depth),)
                for depth in range(1, int(depth_dks[direction].max()) + 1)
            )
            for direction in (UP, DOWN)
        )
        """By direction, the trees and sites of each depth below a root, the highest first."""

    @functools.cached_property
    def legs(self) -> tuple[Places, Places, Places]:
        """The direction, tree and lower end of each leg; shape (L,) each."""
        direction, tree, lower = np.nonzero(self.source_dks != self.target_dks)
        return direction, tree, lower

    @functools.cached_property
    def hops(self) -> tuple[Places, Places]:
        """The sites from and to which each leg goes; shape (L,) each."""
        return self.source_dks[self.legs], self.target_dks[self.legs]

    @functools.cached_property
    def shared_links(self) -> tuple[Bools, tuple[Places, Places, Places]]:
        """The legs of directed links that carry several legs: H links, up to M legs each.

        A mask of valid entries, and the legs' indices; shape (H, M) each. Invalid entries repeat a
        link's first leg.
        """
        link = self.hops[0] * self.num_sites + self.hops[1]
        order = np.argsort(link, kind="stable")
        _, first, counts = np.unique(link[order], return_index=True, return_counts=True)
        several = counts > 1
        first, counts = first[several], counts[several]
        column = np.arange(counts.max(initial=0))
        is_there_hm = column < counts[:, None]
        leg_hm = order[np.where(is_there_hm, first[:, None] + column, first[:, None])]
        direction, tree, lower = self.legs
        return is_there_hm, (direction[leg_hm], tree[leg_hm], lower[leg_hm])

    @functools.cached_property
    def climbs(self) -> tuple[tuple[Places, Places, Places], ...]:
        """The way of all parts to the roots, hop by hop: trees, sites, and where the parts are."""
        place_ks = np.tile(np.arange(self.num_sites), (len(self.root_k), 1))
        found = []
        for _ in self.levels[UP]:
            trees, sites = np.nonzero(place_ks != self.root_k[:, None])
            places = place_ks[trees, sites]
            found.append((trees, sites, places))
            place_ks[trees, sites] = self.parent_dks[UP, trees, places]
        return tuple(found)

    def num_chunks_kr(self, nums_chunks: Sequence[int]) -> Places:
        """Return how many of the first chunks of R loads each tree carries; shape (K, R)."""
        counts = []
        for num_chunks in nums_chunks:
            periods, rest = divmod(num_chunks, len(self._turns))
            count_k = np.bincount(self._turns[:rest], minlength=len(self.root_k))
            if periods:
                count_k = count_k + periods * (self.weight_k // np.gcd.reduce(self.weight_k))
            counts.append(count_k)
        return np.stack(counts, axis=1)
