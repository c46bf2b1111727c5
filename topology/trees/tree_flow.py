"""Computes arrival times of chunks that flow through trees with shared links. Pure.

A *leg* is one hop of one tree in one direction, up to the root or down from it; a directed link
carries the legs of several trees.

- The first chunks of a leg begin once those of all children have arrived. Early chunks have
  priority, so they never wait: they take g c / r + t / 2, with g chunks in flight of c bytes, plus
  the link time that TCP's slow start leaves unused.
- A leg ends only after its own chunks have passed one behind the other. They are followed at a few
  shares of the leg: the first and the last, and with slow start some in between, because one link
  may be slow early and the next one late.
- A link works without pause while it has chunks to send. So a leg's last chunk has left once all
  chunks before it have: those of another leg except the share d / D, with D the link's total work
  and d the time by which the other leg begins later.

A leg that begins earlier because of a wider link elsewhere would delay others through d. So d is
never less than with infinitely wide links: the other leg's beginning counts round trips only. Then
all times grow with the links' times, and on warm connections a wider link never makes an exchange
slower. The accuracy against the simulator is in docs/measurements/predictions.md.

Legend of shapes, which end names in lower case: D directions (up, down), K trees, S sites (where
something begins; of a leg, its lower end), T sites where something ends, R loads, P shares, H
links, M legs of one.
"""

from __future__ import annotations

import copy
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from isthmus.topology.spec.reduction_plan import ReductionPlan
from isthmus.topology.spec.world import Link, Topology

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from isthmus.topology.trees.wire_load import Load

    Floats = NDArray[np.float64]
    Places = NDArray[np.intp]

UP, DOWN = 0, 1
_SHARES_OF_SLOW_START = 8
_NEVER_S = 1e12
"""Assumed beginning, in seconds, of a leg that carries nothing."""
Leg = tuple[int, int, int]
"""The direction, tree and lower end of a leg."""


class Shape:
    """The trees of a plan as arrays; a root is its own parent."""

    def __init__(self, plan: ReductionPlan) -> None:
        """Take the trees of a plan that has some."""
        sites = range(plan.num_sites)
        self.root_k = np.array([tree.root for tree in plan.trees])
        self.parent_dks = np.array(
            [
                [[way.get(site, site) for site in sites] for way in ways]
                for ways in (
                    [tree.parent for tree in plan.trees],
                    [tree.giver for tree in plan.trees],
                )
            ]
        )
        """Next site towards the root (up), and the site that sends the result (down)."""
        self.depth_dks = np.zeros_like(self.parent_dks)
        above_dks = np.tile(np.arange(plan.num_sites), (2, len(plan.trees), 1))
        while (above_dks != self.root_k[:, None]).any():
            self.depth_dks += above_dks != self.root_k[:, None]
            above_dks = np.take_along_axis(self.parent_dks, above_dks, axis=2)

    def depths(self, direction: int) -> range:
        """Return the depths of sites below a root, the highest first."""
        return range(1, int(self.depth_dks[direction].max()) + 1)

    def at(self, direction: int, depth: int) -> tuple[Places, Places]:
        """Return the trees and sites at a depth below the root."""
        trees, sites = np.nonzero(self.depth_dks[direction] == depth)
        return trees, sites

    def hop(self, leg: Leg) -> tuple[int, int]:
        """Return the sites from and to which a leg goes."""
        direction, tree, lower = leg
        upper = int(self.parent_dks[direction, tree, lower])
        return (lower, upper) if direction == UP else (upper, lower)


class Crossing:
    """Loads on the links of a plan's trees."""

    def __init__(self, plan: ReductionPlan, topology: Topology, loads: Sequence[Load]) -> None:
        """Take loads of one exchange over a plan of trees."""
        self.shape = Shape(plan)
        index = {site.name: site.index for site in topology.sites}
        links = {(index[each.source], index[each.target]): each for each in topology.links}
        self.legs = [
            (direction, tree, lower)
            for direction in (UP, DOWN)
            for tree, each in enumerate(plan.trees)
            for lower in each.parent
        ]
        of_leg = {leg: links[self.shape.hop(leg)] for leg in self.legs}
        self.rate_dks = self._filled(of_leg, 1.0, lambda link: link.bytes_per_s)
        self.rtt_dks = self._filled(of_leg, 0.0, lambda link: link.rtt_s)
        self.window_dksr = np.stack(
            [self._filled(of_leg, math.inf, load.window_of) for load in loads], axis=-1
        )
        """Bytes of the first window; infinite where connections do not start slowly."""
        counts = [chunks_of_trees(plan, load.num_chunks) for load in loads]
        count_kr = np.array([[each[tree] for each in counts] for tree in range(len(plan.trees))])
        chunk_kr = np.array([load.chunk_bytes for load in loads]).T
        self.is_used_kr = count_kr > 0
        count_kr = np.maximum(count_kr, 1)
        self.bytes_kr = count_kr * chunk_kr
        """Bytes of each tree; positive even for an unused one."""
        in_flight_dksr = np.full(self.window_dksr.shape, math.inf)
        for leg in self.legs:
            # Of one exchange's loads, all have the same links.
            in_flight_dksr[leg] = loads[0].in_flight_on(self.shape.hop(leg))
        self.granule_dksr = np.minimum(in_flight_dksr, count_kr[:, None]) * chunk_kr[:, None]
        """Bytes that are in flight on a leg's link."""
        self.share_kr = self.granule_dksr.min(axis=(0, 2)) / self.bytes_kr
        """Share of a tree's bytes: the least that is in flight on any of its links."""

    def _filled(
        self, of_leg: dict[Leg, Link], otherwise: float, figure: Callable[[Link], float]
    ) -> Floats:
        found = np.full(self.shape.parent_dks.shape, otherwise)
        for leg, link in of_leg.items():
            found[leg] = figure(link)
        return found

    def with_windows(self, window_st: Floats) -> Crossing:
        """Return this crossing with other first windows, indexed by a link's sites."""
        other = copy.copy(self)
        other.window_dksr = np.full_like(self.window_dksr, math.inf)
        for leg in self.legs:
            other.window_dksr[leg] = window_st[self.shape.hop(leg)]
        return other

    @property
    def is_slow(self) -> bool:
        """Whether any link starts slowly."""
        return bool(np.isfinite(self.window_dksr).any())

    def work_s(self, num_bytes: Floats, grown_bytes: Floats) -> Floats:
        """Return the links' time for `num_bytes`, after `grown_bytes` have opened the windows.

        Args:
            num_bytes: Shape (D, K, S, R, ...).
            grown_bytes: The same shape, or one that broadcasts to it.
        """
        more = (slice(None), slice(None), slice(None), *[None] * (num_bytes.ndim - 3))
        window_bytes = self.window_dksr.reshape(
            *self.window_dksr.shape, *[1] * (num_bytes.ndim - 4)
        )
        link = (self.rate_dks[more], self.rtt_dks[more], window_bytes)
        waited_s = unused_of_s(grown_bytes + num_bytes, *link) - unused_of_s(grown_bytes, *link)
        found: Floats = num_bytes / link[0] + waited_s
        return found

    def shared_links(self) -> tuple[NDArray[np.bool_], tuple[Places, Places, Places]]:
        """Return the legs of directed links that carry several legs: H links, up to M legs each.

        Returns:
            A mask of valid entries, and the legs' indices; shape (H, M) each. Invalid entries
            repeat a link's first leg.
        """
        by_hop: defaultdict[tuple[int, int], list[Leg]] = defaultdict(list)
        for leg in self.legs:
            by_hop[self.shape.hop(leg)].append(leg)
        several = [legs for legs in by_hop.values() if len(legs) > 1]
        most = max(map(len, several), default=0)
        is_there_hm = np.array([[each < len(legs) for each in range(most)] for legs in several])
        full = np.array([legs + legs[:1] * (most - len(legs)) for legs in several], dtype=np.intp)
        full = full.reshape(len(several), most, 3)
        return is_there_hm, (full[..., 0], full[..., 1], full[..., 2])


def chunks_of_trees(plan: ReductionPlan, num_chunks: int) -> Counter[int]:
    """Return how many of the first `num_chunks` each tree carries, in constant time."""
    periods, rest = divmod(num_chunks, len(plan.turns))
    counts = Counter(plan.turns[:rest])
    if periods:
        for index, count in Counter(plan.turns).items():
            counts[index] += periods * count
    return counts


def unused_of_s(num_bytes: Floats, rate: Floats, rtt_s: Floats, window_bytes: Floats) -> Floats:
    """Return isthmus.topology.trees.slow_start.unused_s for arrays that broadcast together.

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


def sent_of_bytes(since_s: Floats, rate: Floats, rtt_s: Floats, window_bytes: Floats) -> Floats:
    """Return upper bounds on the bytes sent in a burst's first seconds, as windows double."""
    not_full = np.ceil(np.log2(np.maximum(rate * rtt_s / window_bytes, 1.0)))
    doubled = np.minimum(np.floor(since_s / np.maximum(rtt_s, 1e-12)), not_full)
    window = np.where(np.isfinite(window_bytes), window_bytes, 0.0)
    full = np.where(doubled < not_full, window * 2.0**doubled, math.inf)
    latest: Floats = np.minimum((since_s - doubled * rtt_s) * rate, full)
    return window * (2.0**doubled - 1.0) + latest


def _begun(shape: Shape, first_dksr: Floats) -> Floats:
    """Return when legs begin, given the times of their first chunks."""
    begins_dksr = np.zeros(first_dksr.shape)
    up_ksr, down_ksr = begins_dksr[UP], begins_dksr[DOWN]
    for depth in reversed(shape.depths(UP)):
        trees, sites = shape.at(UP, depth)
        there = up_ksr[trees, sites] + first_dksr[UP, trees, sites]
        np.maximum.at(up_ksr, (trees, shape.parent_dks[UP, trees, sites]), there)
    roots = (np.arange(len(shape.root_k)), shape.root_k)
    there_ksr = np.zeros_like(up_ksr)
    there_ksr[roots] = up_ksr[roots]
    for depth in shape.depths(DOWN):
        trees, sites = shape.at(DOWN, depth)
        down_ksr[trees, sites] = there_ksr[trees, shape.parent_dks[DOWN, trees, sites]]
        there_ksr[trees, sites] = down_ksr[trees, sites] + first_dksr[DOWN, trees, sites]
    return begins_dksr


def flow_s(crossing: Crossing) -> Floats:
    """Return when the last data that depends on a site reaches another, if it began at 0.

    Returns:
        Seconds, shape (R, S, T); -inf where no site waits.
    """
    times_rst, _ = _flow(crossing, _legs(crossing))
    return times_rst


def flow_and_uses_s(crossing: Crossing) -> tuple[Floats, Floats]:
    """Return `flow_s` of a crossing with one load, and how long each link is in use.

    Returns:
        Shape (S, T) each; 0 for a link that no tree uses.
    """
    legs = _legs(crossing)
    [times_st], ends_dksr = _flow(crossing, legs)
    first_st, last_st = np.full_like(times_st, math.inf), np.zeros_like(times_st)
    for leg in crossing.legs:
        if crossing.is_used_kr[leg[1], 0]:
            hop = crossing.shape.hop(leg)
            first_st[hop] = min(first_st[hop], legs.begins_s[(*leg, 0)])
            last_st[hop] = max(last_st[hop], ends_dksr[(*leg, 0)])
    return times_st, np.maximum(last_st - first_st, 0.0)


def _flow(crossing: Crossing, legs: _Legs) -> tuple[Floats, Floats]:
    """Return `flow_s`, and when the last chunk of each leg has left it; shape (D, K, S, R)."""
    shape = crossing.shape
    ends_dksr = np.zeros(legs.begins_s.shape)
    at_ksrp = _at_roots(crossing, legs, ends_dksr[UP])
    _, num_trees, num_sites = shape.parent_dks.shape
    every = np.arange(num_trees)
    at_ktsrp = np.empty((num_trees, num_sites, *at_ksrp.shape[1:]))
    at_ktsrp[every, shape.root_k] = at_ksrp
    for depth in shape.depths(DOWN):
        trees, sites = shape.at(DOWN, depth)
        above = at_ktsrp[trees, shape.parent_dks[DOWN, trees, sites]]
        left = at_ktsrp[trees, sites] = legs.passed_s(DOWN, trees, sites, above)
        delay_s = legs.delay_s[DOWN, trees, sites]
        ends_dksr[DOWN, trees, sites] = left[..., -1].max(axis=1) - delay_s[:, None]
    ends_ktsr = at_ktsrp[..., -1]
    ends_ktsr[every, shape.root_k, shape.root_k] = -math.inf
    ends_ktsr = np.where(crossing.is_used_kr[:, None, None], ends_ktsr, -math.inf)
    times_s: Floats = ends_ktsr.max(axis=0).transpose(2, 1, 0)
    return times_s, ends_dksr


def _at_roots(crossing: Crossing, legs: _Legs, ends_ksr: Floats) -> Floats:
    """Return when data of each site reaches the trees' roots; shape (K, S, R, P).

    Writes the ends of the legs up into `ends_ksr`.
    """
    shape = crossing.shape
    _, num_trees, num_sites = shape.parent_dks.shape
    at_ksrp = np.zeros((*ends_ksr.shape, legs.ends_s.shape[-1]))
    place_ks = np.tile(np.arange(num_sites), (num_trees, 1))
    for _ in shape.depths(UP):
        trees, sites = np.nonzero(place_ks != shape.root_k[:, None])
        places = place_ks[trees, sites]
        left = at_ksrp[trees, sites] = legs.passed_s(UP, trees, places, at_ksrp[trees, sites])
        last_s = left[..., -1] - legs.delay_s[UP, trees, places][:, None]
        np.maximum.at(ends_ksr, (trees, places), last_s)
        place_ks[trees, sites] = shape.parent_dks[UP, trees, places]
    return at_ksrp


@dataclass(frozen=True, slots=True)
class _Legs:
    """The times to cross each leg.

    Shapes are (D, K, S, R, P), of times of whole legs (D, K, S, R), and of `delay_s` (D, K, S).
    """

    starts_s: Floats
    """Seconds of the leg's own chunks before a share's last granule."""
    ends_s: Floats
    """Seconds of these chunks including that granule."""
    left_s: Floats
    """Seconds at which the link has sent all its legs; -inf: it has only one."""
    waits_s: Floats
    """Seconds of the link's work for all these legs."""
    delay_s: Floats
    begins_s: Floats
    """Seconds at which the first chunks come."""

    def passed_s(self, direction: int, trees: Places, sites: Places, at_s: Floats) -> Floats:
        """Return when shares arrive at the end of legs, given when they start.

        Args:
            direction: UP or DOWN.
            trees: Shape (N,).
            sites: Shape (N,): the lower end.
            at_s: Shape (N, ..., R, P).
        """
        legs = (direction, trees, sites)
        middle = (slice(None), *[None] * (at_s.ndim - 3))
        behind_s = np.maximum.accumulate(at_s - self.starts_s[legs][middle], axis=-1)
        passed_s: Floats = behind_s + self.ends_s[legs][middle]
        # A share that arrives early does not wait for legs that begin late.
        link_s = np.minimum(self.left_s[legs][middle], at_s[..., 0] + self.waits_s[legs][middle])
        passed_s[..., -1] = np.maximum(passed_s[..., -1], link_s)
        passed_s += self.delay_s[legs].reshape(-1, *[1] * (at_s.ndim - 1))
        return passed_s


def _legs(crossing: Crossing) -> _Legs:
    delay_s, grown_dksr = crossing.rtt_dks / 2, np.zeros(crossing.window_dksr.shape)
    first_s = crossing.work_s(crossing.granule_dksr, grown_dksr)
    begins_s = _begun(crossing.shape, first_s + delay_s[..., None])
    left_s = np.full(first_s.shape, -math.inf)
    waits_s = left_s.copy()
    is_there_hm, legs = crossing.shared_links()
    if is_there_hm.size:
        there = tuple(each[is_there_hm] for each in legs)
        shared = _SharedLinks(crossing, legs, is_there_hm)
        if crossing.is_slow:  # earlier traffic grows the windows
            grown_dksr[there] = shared.grown_hmr(begins_s)[is_there_hm]
            first_s = crossing.work_s(crossing.granule_dksr, grown_dksr)
            begins_s = _begun(crossing.shape, first_s + delay_s[..., None])
        for known, found in zip((left_s, waits_s), shared.emptied_s(begins_s), strict=True):
            known[there] = found[is_there_hm]
    granule_dksrp, grown_dksrp = crossing.granule_dksr[..., None], grown_dksr[..., None]
    shares = np.linspace(1.0, 0.0, _SHARES_OF_SLOW_START if crossing.is_slow else 2)
    until_krp = crossing.share_kr[..., None] ** shares * crossing.bytes_kr[..., None]
    # The first share is the chunks in flight, which differs by link.
    until_dksrp = np.maximum(until_krp[:, None], granule_dksrp)
    before_dksrp = np.maximum(until_krp[:, None] - granule_dksrp, 0.0)
    starts_s = crossing.work_s(before_dksrp, grown_dksrp)
    ends_s = crossing.work_s(until_dksrp, grown_dksrp)
    return _Legs(starts_s, ends_s, left_s, waits_s, delay_s, begins_s)


class _SharedLinks:
    """The links that several legs share."""

    def __init__(
        self,
        crossing: Crossing,
        legs: tuple[Places, Places, Places],
        is_there_hm: NDArray[np.bool_],
    ) -> None:
        """Take H links with up to M legs each; `is_there_hm` masks the valid ones."""
        self._legs, self._is_used_hmr = legs, crossing.is_used_kr[legs[1]] & is_there_hm[..., None]
        self._bytes_hmr = np.where(self._is_used_hmr, crossing.bytes_kr[legs[1]], 0.0)
        self._is_one_hmr = crossing.granule_dksr[legs] >= crossing.bytes_kr[legs[1]]
        """Whether a leg's chunks are all in flight, so that they do not wait for later ones."""
        rate, rtt_s = (each[legs][:, :1, None] for each in (crossing.rate_dks, crossing.rtt_dks))
        self._link = (rate, rtt_s, crossing.window_dksr[legs][:, :1])
        delay_s = np.broadcast_to(crossing.rtt_dks[..., None] / 2, crossing.window_dksr.shape)
        self._soonest_hmr = self._of_legs(_begun(crossing.shape, delay_s))

    def _of_legs(self, begins_dksr: Floats) -> Floats:
        found: Floats = np.where(self._is_used_hmr, begins_dksr[self._legs], _NEVER_S)
        return found

    def grown_hmr(self, begins_dksr: Floats) -> Floats:
        """Return the bytes that links have sent when legs begin, as far as windows allow."""
        begins_hmr = self._of_legs(begins_dksr)
        is_before = begins_hmr[:, None] < begins_hmr[:, :, None]
        given_hmr = (is_before * self._bytes_hmr[:, None]).sum(axis=2)
        since_hmr = begins_hmr - begins_hmr.min(axis=1, keepdims=True)
        grown_hmr: Floats = np.minimum(given_hmr, sent_of_bytes(since_hmr, *self._link))
        return grown_hmr

    def emptied_s(self, begins_dksr: Floats) -> tuple[Floats, Floats]:
        """Return when links have sent everything before each leg's last chunk, and that work.

        Another leg that begins d later counts except for its share d / D: D is the link's total
        work, and d at least its value with infinitely wide links. The result is the latest end over
        all beginnings up to the leg's own.

        Returns:
            Shape (H, M, R) each.
        """
        begins_hmr, (rate, *_) = self._of_legs(begins_dksr), self._link
        whole_h1r = np.maximum(self._bytes_hmr.sum(axis=1, keepdims=True), 1.0)
        work_h1r = whole_h1r / rate + unused_of_s(whole_h1r, *self._link)
        late_hmmr = self._soonest_hmr[:, None] - begins_hmr[:, :, None]
        own = np.arange(late_hmmr.shape[1])
        late_hmmr[:, own, own] = 0.0
        share_hmmr = np.clip(1.0 - late_hmmr / work_h1r[:, None], 0.0, 1.0)
        share_hmmr[self._is_one_hmr[:, :, None] & (late_hmmr > 0)] = 0.0
        bytes_hmmr = share_hmmr * self._bytes_hmr[:, None]
        all_hmr = bytes_hmmr.sum(axis=2)
        all_s = all_hmr / rate + unused_of_s(all_hmr, *self._link)
        order_h1mr = begins_hmr.argsort(axis=1)[:, None]
        begins_h1mr = np.take_along_axis(begins_hmr[:, None], order_h1mr, axis=2)
        work_hmmr = np.take_along_axis(bytes_hmmr, order_h1mr, axis=2) / rate[:, None]
        rest_hmmr = work_hmmr[:, :, ::-1].cumsum(axis=2)[:, :, ::-1]
        emptied_hmr = (np.minimum(begins_h1mr, begins_hmr[:, :, None]) + rest_hmmr).max(axis=2)
        return np.maximum(emptied_hmr, begins_hmr.min(axis=1, keepdims=True) + all_s), all_s
