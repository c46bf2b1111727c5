"""When the first chunks of a load come to each link of a plan's trees. Pure, by arrays.

Shapes as in topology/traffic/tree_flow.py: D directions, K trees, S sites (of a leg, its lower
end), R loads.
"""

from __future__ import annotations

import copy
import heapq
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from topology.traffic.slow_start import sent_bytes, unused_s
from topology.trees.trees import ReductionPlan
from topology.world import Link, Topology

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from topology.traffic.tree_load import Load

    Floats = NDArray[np.float64]
    Places = NDArray[np.intp]

UP, DOWN = 0, 1
_WIDEST = np.array(1e15)
"""Bytes per second that nothing takes time with."""
Leg = tuple[int, int, int]
"""Direction, tree, lower end."""


class Shape:
    """A plan's trees as arrays; a root is its own parent."""

    def __init__(self, plan: ReductionPlan) -> None:
        """Take the trees of a plan that has some."""
        sites = range(plan.num_sites)
        self.root_k = np.array([tree.root for tree in plan.trees])
        self.parent_ks = np.array(
            [[tree.parent.get(site, site) for site in sites] for tree in plan.trees]
        )
        self.is_leaf_ks = np.array(
            [[site not in tree.parent.values() for site in sites] for tree in plan.trees]
        )
        self.depth_ks = np.zeros_like(self.parent_ks)
        above_ks = np.tile(np.arange(plan.num_sites), (len(plan.trees), 1))
        while (above_ks != self.root_k[:, None]).any():
            self.depth_ks += above_ks != self.root_k[:, None]
            above_ks = np.take_along_axis(self.parent_ks, above_ks, axis=1)
        self.depths = range(1, int(self.depth_ks.max()) + 1)
        """Of sites below a root, the highest first."""

    def at(self, depth: int) -> tuple[Places, Places]:
        """Return the trees and sites that are so far below their roots."""
        trees, sites = np.nonzero(self.depth_ks == depth)
        return trees, sites

    def hop(self, leg: Leg) -> tuple[int, int]:
        """Return the sites from and to which a leg goes."""
        direction, tree, lower = leg
        upper = int(self.parent_ks[tree, lower])
        return (lower, upper) if direction == UP else (upper, lower)


class Crossing:
    """Loads on the links of a plan's trees."""

    def __init__(
        self,
        plan: ReductionPlan,
        topology: Topology,
        loads: Sequence[Load],
        counts: Sequence[Sequence[int]],
    ) -> None:
        """Take what crosses.

        Args:
            plan: Of trees; no gather.
            topology: Has the links of all of them.
            loads: Either all with a first window, or none.
            counts: Of chunks, by load, then tree.
        """
        self.plan = plan
        self.num_loads = len(loads)
        self.shape = Shape(plan)
        index = {site.name: site.index for site in topology.sites}
        links = {(index[each.source], index[each.target]): each for each in topology.links}
        self._legs = [
            (direction, tree, lower)
            for direction in (UP, DOWN)
            for tree, each in enumerate(plan.trees)
            for lower in each.parent
        ]
        of_leg = {leg: links[self.shape.hop(leg)] for leg in self._legs}
        self.rate_dks = self._filled(of_leg, 1.0, lambda link: link.bytes_per_s)
        self.rtt_dks = self._filled(of_leg, 0.0, lambda link: link.rtt_s)
        # What does not start slowly has a first window that nothing is larger than.
        self.window_dksr = np.full((*self.rate_dks.shape, len(loads)), math.inf)
        for place, load in enumerate(loads):
            if load.first_window_bytes is not None:
                self.window_dksr[..., place] = self._filled(of_leg, math.inf, load.window_of)
        self.is_slow = bool(np.isfinite(self.window_dksr).any())
        count_kr = np.array(counts, dtype=np.float64).T
        chunk_kr = np.array([load.chunk_bytes for load in loads]).T
        self.is_used_kr = count_kr > 0
        count_kr = np.maximum(count_kr, 1.0)
        self.bytes_kr = count_kr * chunk_kr
        """Of each tree; of one that is not used, more than none."""
        abreast_dksr = np.full(self.window_dksr.shape, math.inf)
        for leg in self._legs:
            # Of one exchange's loads, all have the same links.
            abreast_dksr[leg] = loads[0].abreast_on(self.shape.hop(leg))
        self.count_kr = count_kr
        """Of each tree's chunks; of one that is not used, 1."""
        self.granule_dksr = np.minimum(abreast_dksr, count_kr[:, None]) * chunk_kr[:, None]
        """Of the chunks that are abreast on a leg's link."""
        self.share_kr = self.granule_dksr.min(axis=(0, 2)) / self.bytes_kr
        """Of a tree's bytes, the least that is abreast on a link."""

    def _filled(
        self, of_leg: dict[Leg, Link], otherwise: float, figure: Callable[[Link], float]
    ) -> Floats:
        found = np.full((2, *self.shape.parent_ks.shape), otherwise)
        for leg, link in of_leg.items():
            found[leg] = figure(link)
        return found

    def used_legs(self, load: int) -> Iterator[Leg]:
        """Yield the legs that carry something of a load."""
        return (leg for leg in self._legs if self.is_used_kr[leg[1], load])

    def with_windows(self, window_st: Floats) -> Crossing:
        """Return the same with other first windows, by the sites from and to which links go."""
        other = copy.copy(self)
        other.window_dksr = np.full_like(self.window_dksr, math.inf)
        for leg in self._legs:
            other.window_dksr[leg] = window_st[self.shape.hop(leg)]
        other.is_slow = bool(np.isfinite(other.window_dksr).any())
        return other

    def shared_links(self) -> tuple[NDArray[np.bool_], tuple[Places, Places, Places]]:
        """Return the legs of the directed links that carry several: H links of M legs at most.

        Returns:
            Which of these there are, and their indices; shape (H, M) each. Those that there are not
            repeat a link's first.
        """
        by_hop: defaultdict[tuple[int, int], list[Leg]] = defaultdict(list)
        for leg in self._legs:
            by_hop[self.shape.hop(leg)].append(leg)
        several = [legs for legs in by_hop.values() if len(legs) > 1]
        most = max(map(len, several), default=0)
        is_there_hm = np.array([[each < len(legs) for each in range(most)] for legs in several])
        full = np.array([legs + legs[:1] * (most - len(legs)) for legs in several], dtype=np.intp)
        full = full.reshape(len(several), most, 3)
        return is_there_hm, (full[..., 0], full[..., 1], full[..., 2])

    def sent_bytes(self, leg: Leg, load: int, since_s: float) -> float:
        """Return what a leg's link sends at most in its first seconds."""
        window_bytes = self.window_dksr[(*leg, load)]
        return sent_bytes(since_s, self.rate_dks[leg], self.rtt_dks[leg], window_bytes)

    def first_s(self, leg: Leg, load: int, grown_bytes: float) -> float:
        """Return how long a leg's first chunks take, its link having sent so much before."""
        granule, link = self.granule_dksr[(*leg, load)], (self.rate_dks[leg], self.rtt_dks[leg])
        window_bytes = self.window_dksr[(*leg, load)]
        waited_s = unused_s(grown_bytes + granule, *link, window_bytes)
        waited_s -= unused_s(grown_bytes, *link, window_bytes)
        return float(granule / link[0] + waited_s + link[1] / 2)


def unused_of_s(num_bytes: Floats, rate: Floats, rtt_s: Floats, window_bytes: Floats) -> Floats:
    """Return what topology.traffic.slow_start.unused_s does, of arrays that go together.

    The first m windows, of w, 2 w, 4 w, ... bytes, leave m t - (2^m - 1) w / r unused.
    """
    not_full = np.ceil(np.log2(np.maximum(rate * rtt_s / window_bytes, 1.0)))
    not_last = np.maximum(np.ceil(np.log2(num_bytes / window_bytes + 1.0)) - 1.0, 0.0)
    num_windows = np.minimum(not_full, not_last)
    sent_bytes = np.where(num_windows > 0, (2.0**num_windows - 1.0), 0.0) * np.where(
        np.isfinite(window_bytes), window_bytes, 0.0
    )
    unused_s: Floats = num_windows * rtt_s - sent_bytes / rate
    return unused_s


def begun(crossing: Crossing) -> Floats:
    """Return when each leg begins if all sites do at 0 and links are warm; shape (D, K, S, R)."""
    granules_dksr = crossing.granule_dksr / crossing.rate_dks[..., None]
    return _begun(crossing.shape, granules_dksr + crossing.rtt_dks[..., None] / 2)


def soonest(crossing: Crossing) -> Floats:
    """Return when legs begin at the soonest, however wide links are; shape (D, K, S, R)."""
    first_dksr = np.zeros(crossing.window_dksr.shape) + crossing.rtt_dks[..., None] / 2
    if crossing.is_slow:
        # What leaves at once waits for windows, if these are small; what comes later may find them
        # open.
        up_ksr = (crossing.granule_dksr[UP], _WIDEST, crossing.rtt_dks[UP][..., None])
        waits_ksr = unused_of_s(*up_ksr, crossing.window_dksr[UP])
        first_dksr[UP] += np.where(crossing.shape.is_leaf_ks[..., None], waits_ksr, 0.0)
    return _begun(crossing.shape, first_dksr)


def _begun(shape: Shape, first_dksr: Floats) -> Floats:
    """Return when legs begin, whose first chunks take so long."""
    begins_dksr = np.zeros(first_dksr.shape)
    up_ksr, down_ksr = begins_dksr[UP], begins_dksr[DOWN]
    for depth in reversed(shape.depths):
        trees, sites = shape.at(depth)
        there = up_ksr[trees, sites] + first_dksr[UP, trees, sites]
        np.maximum.at(up_ksr, (trees, shape.parent_ks[trees, sites]), there)
    roots = (np.arange(len(shape.root_k)), shape.root_k)
    there_ksr = np.zeros_like(up_ksr)
    there_ksr[roots] = up_ksr[roots]
    for depth in shape.depths:
        trees, sites = shape.at(depth)
        down_ksr[trees, sites] = there_ksr[trees, shape.parent_ks[trees, sites]]
        there_ksr[trees, sites] = down_ksr[trees, sites] + first_dksr[DOWN, trees, sites]
    return begins_dksr


def begun_slowly(crossing: Crossing) -> tuple[Floats, Floats]:
    """Return the same where windows open, and what links have sent by then, in order of time."""
    begins_dksr = np.zeros(crossing.window_dksr.shape)
    grown_dksr = np.zeros(crossing.window_dksr.shape)
    for load in range(crossing.num_loads):
        for leg, (begins_s, grown_bytes) in _first_granules(crossing, load).items():
            begins_dksr[(*leg, load)] = begins_s
            grown_dksr[(*leg, load)] = grown_bytes
    return begins_dksr, grown_dksr


def _first_granules(crossing: Crossing, load: int) -> dict[Leg, tuple[float, float]]:
    """Return when each leg of a load begins, and what its link has sent by then.

    A link sends what it was given before as fast as its windows allow.
    """
    used = np.flatnonzero(crossing.is_used_kr[:, load]).tolist()
    sites = range(crossing.plan.num_sites)
    children = {tree: [crossing.plan.trees[tree].children(site) for site in sites] for tree in used}
    missing = {tree: [len(each) for each in children[tree]] for tree in used}
    there_s = {tree: [0.0 for _ in sites] for tree in used}
    coming = [(0.0, tree, UP, site) for tree in used for site in sites if not missing[tree][site]]
    found: dict[Leg, tuple[float, float]] = {}
    opened_s: dict[tuple[int, int], float] = {}
    given_bytes: defaultdict[tuple[int, int], float] = defaultdict(float)
    while coming:
        now_s, tree, direction, site = heapq.heappop(coming)
        is_root = site == crossing.plan.trees[tree].root
        goes = UP if direction == UP and not is_root else DOWN
        for lower in (site,) if goes == UP else children[tree][site]:
            leg = (goes, tree, lower)
            hop = crossing.shape.hop(leg)
            since_s = now_s - opened_s.setdefault(hop, now_s)
            grown = min(given_bytes[hop], crossing.sent_bytes(leg, load, since_s))
            found[leg] = now_s, grown
            given_bytes[hop] += float(crossing.bytes_kr[tree, load])
            arrives_s, other = now_s + crossing.first_s(leg, load, grown), hop[1]
            if goes == DOWN:
                heapq.heappush(coming, (arrives_s, tree, DOWN, other))
                continue
            there_s[tree][other] = max(there_s[tree][other], arrives_s)
            missing[tree][other] -= 1
            if missing[tree][other] == 0:
                heapq.heappush(coming, (there_s[tree][other], tree, UP, other))
    return found
