"""The flow of chunks through trees that share links: when the last of them is where. Pure.

A *leg* is one hop of one tree in one direction, up to the root or down from it; a directed link
carries the legs of several trees. Its chunks come in the order of their turns, those of all trees
abreast.

- The first chunks of a leg begin it once those of all children are there. Early chunks go before
  later ones, so of several they wait for nobody: g c / r + t / 2, with g chunks abreast of c bytes,
  and what TCP's slow start still leaves unused of the link at that time. Where they are all that a
  leg has, they wait for those of other legs that are there before them and have earlier turns.
- A link works without a pause while it has something to send. So the share x of a leg's chunks has
  left it when all that goes before has: of another leg the share x - d / D, D being all of the
  link's work and d how much later that one begins; of one that begins earlier, more than x.
- Nor earlier than a leg's own chunks came, one behind the other.

What begins earlier because of a wider link elsewhere gets in the way of others: with d as it is,
they would be later for that. So d is never less than what it would be if all links were as wide as
can be: the beginning of the other leg counts with round trips alone. Then everything only grows
with what links take, and of warm connections no exchange is ever slower for a wider link. Against
the event-driven simulator that is no less exact, for what is slightly early elsewhere in fact waits
there.

Chunks are followed at a few shares x of each leg: the first and the last, and where TCP starts
slowly some between them, for there one link may be slow early and the next one late. What all this
is worth against the simulator: docs/measurements/predictions.md.

Legend of shapes, which end names in lower case: D directions (up, down), K trees, S sites (where
something begins; of a leg, its lower end), T sites where something ends, R loads, P shares, H
links, M legs of one.
"""

from __future__ import annotations

import copy
import heapq
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from topology.cost.slow_start import sent_bytes, unused_s
from topology.trees.trees import ReductionPlan
from topology.world import Link, Topology

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from topology.model.wire_load import Load

    Floats = NDArray[np.float64]
    Places = NDArray[np.intp]

UP, DOWN = 0, 1
_SHARES_OF_SLOW_START = 8
_NEVER_S = 1e12
"""Seconds at which a leg is taken to begin that carries nothing."""
_WIDEST = np.array(1e15)
"""Bytes per second of a link on which nothing takes time."""
Leg = tuple[int, int, int]
"""The direction, tree and lower end of a leg."""


class Shape:
    """The trees of a plan as arrays; a root is its own parent."""

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
        """The depths of sites below a root, the highest first."""

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
        """Bytes of each tree; of one that is not used, more than none."""
        abreast_dksr = np.full(self.window_dksr.shape, math.inf)
        for leg in self._legs:
            # Of one exchange's loads, all have the same links.
            abreast_dksr[leg] = loads[0].abreast_on(self.shape.hop(leg))
        self.count_kr = count_kr
        """Number of each tree's chunks; of one that is not used, 1."""
        self.granule_dksr = np.minimum(abreast_dksr, count_kr[:, None]) * chunk_kr[:, None]
        """Number of chunks that are abreast on a leg's link."""
        self.share_kr = self.granule_dksr.min(axis=(0, 2)) / self.bytes_kr
        """Share of a tree's bytes: the least that is abreast on any of its links."""

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
    """Return what topology.cost.slow_start.unused_s does, of arrays that go together.

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


def flow_s(crossing: Crossing) -> Floats:
    """Return when the last of what depends on a site is at another, if that began at 0.

    Returns:
        Seconds, shape (R, S, T); -inf where nobody waits.
    """
    times_rst, _ = _flow(crossing, _legs(crossing))
    return times_rst


def flow_and_uses_s(crossing: Crossing) -> tuple[Floats, Floats]:
    """Return the same of a crossing's only load, and for how long each link is in use.

    Returns:
        Shape (S, T) each; a link that no tree uses is in use for no time.
    """
    legs = _legs(crossing)
    [times_st], ends_dksr = _flow(crossing, legs)
    begins_dks, ends_dks = legs.begins_s[..., 0], ends_dksr[..., 0]
    first_st, last_st = np.full_like(times_st, math.inf), np.zeros_like(times_st)
    for leg in crossing.used_legs(0):
        hop = crossing.shape.hop(leg)
        first_st[hop] = min(first_st[hop], begins_dks[leg])
        last_st[hop] = max(last_st[hop], ends_dks[leg])
    return times_st, np.maximum(last_st - first_st, 0.0)


def _flow(crossing: Crossing, legs: _Legs) -> tuple[Floats, Floats]:
    """Return what `flow_s` does, and when the last of each leg has left it; shape (D, K, S, R)."""
    shape = crossing.shape
    ends_dksr = np.zeros(legs.begins_s.shape)
    at_ksrp = _at_roots(crossing, legs, ends_dksr[UP])
    num_trees, num_sites = shape.parent_ks.shape
    every = np.arange(num_trees)
    at_ktsrp = np.empty((num_trees, num_sites, *at_ksrp.shape[1:]))
    at_ktsrp[every, shape.root_k] = at_ksrp
    for depth in shape.depths:
        trees, sites = shape.at(depth)
        above = at_ktsrp[trees, shape.parent_ks[trees, sites]]
        left = at_ktsrp[trees, sites] = legs.passed_s(DOWN, trees, sites, above)
        delay_s = legs.delay_s[DOWN, trees, sites]
        ends_dksr[DOWN, trees, sites] = left[..., -1].max(axis=1) - delay_s[:, None]
    ends_ktsr = at_ktsrp[..., -1]
    ends_ktsr[every, shape.root_k, shape.root_k] = -math.inf
    ends_ktsr = np.where(crossing.is_used_kr[:, None, None], ends_ktsr, -math.inf)
    times_s: Floats = ends_ktsr.max(axis=0).transpose(2, 1, 0)
    return times_s, ends_dksr


@dataclass(frozen=True, slots=True)
class _Legs:
    """The times to cross each leg. Arrays have shape (D, K, S, R, P), `delay_s` (D, K, S)."""

    starts_s: Floats
    """Seconds of the leg's own chunks before a share's last granule, one behind the other."""
    ends_s: Floats
    """Seconds of these chunks and that granule."""
    left_s: Floats
    """Seconds at which a share can have left, for all that the link does; -inf: no wait."""
    waits_s: Floats
    """Seconds that the link works for all that."""
    delay_s: Floats
    begins_s: Floats
    """Seconds at which the first chunks come; shape (D, K, S, R)."""

    def passed_s(self, direction: int, trees: Places, sites: Places, at_s: Floats) -> Floats:
        """Return when shares are at the end of legs, given when they are at the beginning.

        Args:
            direction: UP or DOWN.
            trees: Shape (N,).
            sites: Shape (N,): the lower end.
            at_s: Shape (N, ..., R, P).
        """
        legs = (direction, trees, sites)
        middle = (slice(None), *[None] * (at_s.ndim - 3))
        behind_s = np.maximum.accumulate(at_s - self.starts_s[legs][middle], axis=-1)
        own_s = behind_s + self.ends_s[legs][middle]
        # Whoever comes early to a leg that others are late for need not wait for these.
        link_s = np.minimum(self.left_s[legs][middle], at_s[..., :1] + self.waits_s[legs][middle])
        delay_s = self.delay_s[legs].reshape(-1, *[1] * (at_s.ndim - 1))
        passed_s: Floats = np.maximum(own_s, link_s) + delay_s
        return passed_s


def _at_roots(crossing: Crossing, legs: _Legs, ends_ksr: Floats) -> Floats:
    """Return when what begins at each site is at the trees' roots; shape (K, S, R, P).

    Writes into `ends_ksr` when the last of each leg up has left it.
    """
    shape = crossing.shape
    num_trees, num_sites = shape.parent_ks.shape
    at_ksrp = np.zeros((num_trees, num_sites, *legs.ends_s.shape[-2:]))
    place_ks = np.tile(np.arange(num_sites), (num_trees, 1))
    for _ in shape.depths:
        trees, sites = np.nonzero(place_ks != shape.root_k[:, None])
        places = place_ks[trees, sites]
        left = at_ksrp[trees, sites] = legs.passed_s(UP, trees, places, at_ksrp[trees, sites])
        last_s = left[..., -1] - legs.delay_s[UP, trees, places][:, None]
        np.maximum.at(ends_ksr, (trees, places), last_s)
        place_ks[trees, sites] = shape.parent_ks[trees, places]
    return at_ksrp


def _legs(crossing: Crossing) -> _Legs:
    num_shares = _SHARES_OF_SLOW_START if crossing.is_slow else 2
    if crossing.is_slow:
        begins_dksr, grown_dksr = begun_slowly(crossing)
    else:
        begins_dksr = grown_dksr = begun(crossing)
    granule_dksrp = crossing.granule_dksr[..., None]
    share_krp = crossing.share_kr[..., None] ** np.linspace(1.0, 0.0, num_shares)
    until_krp = share_krp * crossing.bytes_kr[..., None]
    # The first share is the chunks that are abreast: on each link its own.
    until_dksrp = np.maximum(until_krp[:, None], granule_dksrp)
    before_dksrp = np.maximum(until_krp[:, None] - granule_dksrp, 0.0)
    rate, rtt_s = crossing.rate_dks[..., None, None], crossing.rtt_dks[..., None, None]
    window_bytes = crossing.window_dksr[..., None]

    def work_s(num_bytes: Floats) -> Floats:
        """Return what so much of a leg, (D, K, S, R, P), takes on a link that has sent before."""
        if not crossing.is_slow:
            return num_bytes / rate
        grown = grown_dksr[..., None]
        more_s = unused_of_s(grown + num_bytes, rate, rtt_s, window_bytes)
        return num_bytes / rate + more_s - unused_of_s(grown, rate, rtt_s, window_bytes)

    left_s = np.full((*begins_dksr.shape, num_shares), -math.inf)
    waits_s = left_s.copy()
    is_there_hm, legs = crossing.shared_links()
    if is_there_hm.size:
        there = tuple(each[is_there_hm] for each in legs)
        is_all = np.broadcast_to(granule_dksrp >= crossing.bytes_kr[:, None, :, None], left_s.shape)
        followed = (share_krp[legs[1]], is_all[legs])
        shared = _shared(crossing, legs, is_there_hm, begins_dksr, followed)
        left_s[there], waits_s[there] = (each_s[is_there_hm] for each_s in shared)
        # Of several, the first chunks go before all others.
        is_first = ~is_all & (np.arange(num_shares) == 0)
        left_s[is_first] = waits_s[is_first] = -math.inf
    starts_s, ends_s = work_s(before_dksrp), work_s(until_dksrp)
    return _Legs(starts_s, ends_s, left_s, waits_s, crossing.rtt_dks / 2, begins_dksr)


def _before(
    crossing: Crossing,
    legs: tuple[Places, Places, Places],
    share_hmrp: Floats,
    is_all_hmrp: NDArray[np.bool_],
) -> Floats:
    """Return which share of another leg's chunks has turns before one of a leg's; (H, M, M, R, P).

    The last chunk of a tree is due at the end, as those of others are (topology.trees.trees): where
    a leg's chunks are all abreast, the last of them comes after all of an earlier tree's, and after
    all but one of a later tree's.

    Args:
        crossing: Of which these are.
        legs: Of H links, M of each.
        share_hmrp: Which shares are followed.
        is_all_hmrp: Whether these are all that a leg has, at once.
    """
    count_hmr = crossing.count_kr[legs[1]]
    is_earlier_hmm1 = (legs[1][:, None] <= legs[1][:, :, None])[..., None]
    ahead_hmmr = np.where(is_earlier_hmm1, 1.0, 1.0 - 1.0 / count_hmr[:, None])
    return np.where(is_all_hmrp[:, :, None], ahead_hmmr[..., None], share_hmrp[:, :, None])


def _shared(
    crossing: Crossing,
    legs: tuple[Places, Places, Places],
    is_there_hm: NDArray[np.bool_],
    begins_dksr: Floats,
    followed: tuple[Floats, NDArray[np.bool_]],
) -> tuple[Floats, Floats]:
    """Return when shares of legs have left the links that they share, and those links' work for it.

    Args:
        crossing: Of which these are.
        legs: Of H links, M of each.
        is_there_hm: Which of them there are.
        begins_dksr: When legs begin.
        followed: Which shares of legs, and whether these are all that a leg has, at once.

    Returns:
        Shape (H, M, R, P) each; the first from all sites' beginning on.
    """
    is_used_hmr = crossing.is_used_kr[legs[1]] & is_there_hm[..., None]
    begins_hmr = np.where(is_used_hmr, begins_dksr[legs], _NEVER_S)
    soonest_hmr = np.where(is_used_hmr, soonest(crossing)[legs], _NEVER_S)
    bytes_hmr = np.where(is_used_hmr, crossing.bytes_kr[legs[1]], 0.0)
    rate_h1, rtt_h1 = crossing.rate_dks[legs][:, :1], crossing.rtt_dks[legs][:, :1]
    window_hr = crossing.window_dksr[legs][:, 0]
    whole_hr = np.maximum(bytes_hmr.sum(axis=1), 1.0)
    work_hr = whole_hr / rate_h1 + unused_of_s(whole_hr, rate_h1, rtt_h1, window_hr)
    late_hmmr = (soonest_hmr[:, None] - begins_hmr[:, :, None]) / work_hr[:, None, None]
    own = np.arange(late_hmmr.shape[1])
    late_hmmr[:, own, own] = 0.0
    # What is alone on its way waits for those that are there before it, and for nobody else.
    is_alone_hmmrp = followed[1][:, :, None] & (late_hmmr > 0)[..., None]
    done_hmmrp = np.clip(_before(crossing, legs, *followed) - late_hmmr[..., None], 0.0, 1.0)
    done_hmmrp[is_alone_hmmrp] = 0.0
    done_hmmrp = done_hmmrp * bytes_hmr[:, None, ..., None]
    all_hmrp = done_hmmrp.sum(axis=2)
    rate, rtt_s = rate_h1[..., None, None], rtt_h1[..., None, None]
    all_s = all_hmrp / rate + unused_of_s(all_hmrp, rate, rtt_s, window_hr[:, None, :, None])
    left_hmrp = _emptied_s(begins_hmr, done_hmmrp / rate[..., None])
    first_hr = begins_hmr.min(axis=1)
    return np.maximum(left_hmrp, first_hr[:, None, :, None] + all_s), all_s


def _emptied_s(begins_hmr: Floats, work_hmmrp: Floats) -> Floats:
    """Return when links are done with what leaves before each leg's shares; shape (H, M, R, P).

    Of all beginnings up to the leg's own, the latest end of what begins from then on.

    Args:
        begins_hmr: Of each leg.
        work_hmmrp: Seconds that the second leg's part takes of what leaves before the first leg's
            share.
    """
    order_hmr = begins_hmr.argsort(axis=1)
    work_hmmrp = np.take_along_axis(work_hmmrp, order_hmr[:, None, ..., None], axis=2)
    rest_hmmrp = work_hmmrp[:, :, ::-1].cumsum(axis=2)[:, :, ::-1]
    begins_hmmr = np.take_along_axis(begins_hmr, order_hmr, axis=1)[:, None]
    begins_hmmr = np.minimum(begins_hmmr, begins_hmr[:, :, None])
    emptied_s: Floats = (begins_hmmr[..., None] + rest_hmmrp).max(axis=2)
    return emptied_s
