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
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from isthmus.topology.trees.link_arrays import DOWN, UP, LinkArrays, TreeArrays

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from isthmus.topology.trees.wire_load import Load

    Floats = NDArray[np.float64]
    Places = NDArray[np.intp]

_SHARES_OF_SLOW_START = 8
_NEVER_S = 1e12
"""Assumed beginning, in seconds, of a leg that carries nothing."""


class Ramps:
    """The slow start of links: isthmus.topology.trees.slow_start.Ramp for arrays."""

    def __init__(self, rate: Floats, rtt_s: Floats, window_bytes: Floats) -> None:
        """Take the links' rates, round trips and first windows; all broadcast together."""
        self._rate, self._rtt_s, self._window_bytes = rate, rtt_s, window_bytes
        held = np.maximum(rate * rtt_s / window_bytes, 1.0)
        self._num_windows = np.ceil(np.log2(held)).astype(np.int32)
        """Windows that do not fill the link."""
        self._finite_bytes = np.where(np.isfinite(window_bytes), window_bytes, 0.0)

    def unused_s(self, num_bytes: Floats) -> Floats:
        """Return the seconds that links wait for windows in a burst's first bytes.

        The first m windows, of w, 2 w, 4 w, ... bytes, leave m t - (2^m - 1) w / r unused.
        """
        more = (slice(None),) * self._rate.ndim + (None,) * (num_bytes.ndim - self._rate.ndim)
        fraction, exponent = np.frexp(num_bytes / self._window_bytes[more] + 1.0)
        not_last = exponent - 1 - (fraction == 0.5)
        num_windows = np.minimum(self._num_windows[more], np.maximum(not_last, 0))
        window = self._finite_bytes[more]
        sent_bytes = np.ldexp(window, num_windows) - window
        unused_s: Floats = num_windows * self._rtt_s[more] - sent_bytes / self._rate[more]
        return unused_s

    def sent_bytes(self, since_s: Floats) -> Floats:
        """Return upper bounds on the bytes sent in a burst's first seconds, as windows double."""
        passed = np.floor(since_s / np.maximum(self._rtt_s, 1e-12))
        doubled = np.minimum(passed, self._num_windows).astype(np.int32)
        grown = np.ldexp(self._finite_bytes, doubled)
        full = np.where(doubled < self._num_windows, grown, math.inf)
        latest: Floats = np.minimum((since_s - doubled * self._rtt_s) * self._rate, full)
        return grown - self._finite_bytes + latest


class Crossing:
    """Loads on the links of a plan's trees."""

    def __init__(self, trees: TreeArrays, links: LinkArrays, loads: Sequence[Load]) -> None:
        """Take loads of one exchange over a plan of trees; all load the same links."""
        self.trees = trees
        hops = (trees.source_dks, trees.target_dks)
        self.rate_dks = links.rate_st[hops]
        self.rtt_dks = links.rtt_st[hops]
        self.window_dksr = np.stack([links.window_st(load)[hops] for load in loads], axis=-1)
        """Bytes of the first window; infinite where connections do not start slowly."""
        count_kr = trees.num_chunks_kr([load.num_chunks for load in loads])
        chunk_kr = np.array([load.chunk_bytes for load in loads]).T
        self.is_used_kr = count_kr > 0
        count_kr = np.maximum(count_kr, 1)
        self.bytes_kr = count_kr * chunk_kr
        """Bytes of each tree; positive even for an unused one."""
        in_flight_dks1 = links.in_flight_st(loads[0])[hops][..., None]
        self.granule_dksr = np.minimum(in_flight_dks1, count_kr[:, None]) * chunk_kr[:, None]
        """Bytes that are in flight on a leg's link."""
        self.share_kr = self.granule_dksr.min(axis=(0, 2)) / self.bytes_kr
        """Share of a tree's bytes: the least that is in flight on any of its links."""

    def with_windows(self, window_st: Floats) -> Crossing:
        """Return this crossing, of one load, with other first windows by a link's sites.

        Some are finite, as here.
        """
        _ = self.is_slow, self.parts, self.shared  # are the same for all windows
        other = copy.copy(self)
        other.__dict__.pop("ramps", None)
        other.window_dksr = window_st[self.trees.source_dks, self.trees.target_dks][..., None]
        return other

    @functools.cached_property
    def is_slow(self) -> bool:
        """Whether any link starts slowly."""
        return bool(np.isfinite(self.window_dksr).any())

    @functools.cached_property
    def ramps(self) -> Ramps:
        """The slow start of the legs' links."""
        return Ramps(self.rate_dks[..., None], self.rtt_dks[..., None], self.window_dksr)

    @functools.cached_property
    def parts(self) -> tuple[Floats, Floats]:
        """The bytes of each leg up to a few shares, and before their last granule.

        Shape (D, K, S, R, P).
        """
        granule_dksrp = self.granule_dksr[..., None]
        shares = np.linspace(1.0, 0.0, _SHARES_OF_SLOW_START if self.is_slow else 2)
        until_krp = self.share_kr[..., None] ** shares * self.bytes_kr[..., None]
        # The first share is the chunks in flight, which differs by link.
        until_dksrp = np.maximum(until_krp[:, None], granule_dksrp)
        return until_dksrp, np.maximum(until_krp[:, None] - granule_dksrp, 0.0)

    @functools.cached_property
    def shared(self) -> _SharedLinks | None:
        """The links that several legs share; None: there are none."""
        is_there_hm, legs = self.trees.shared_links
        return _SharedLinks(self, legs, is_there_hm) if is_there_hm.size else None

    def work_s(self, num_bytes: Floats, grown_dksr: Floats | None) -> Floats:
        """Return the links' time for `num_bytes`, after earlier bytes have opened the windows.

        Args:
            num_bytes: Shape (D, K, S, R, ...).
            grown_dksr: The earlier bytes; None: none on any link.
        """
        more = (..., *[None] * (num_bytes.ndim - 3))
        found: Floats = num_bytes / self.rate_dks[more]
        if self.is_slow and grown_dksr is None:
            found += self.ramps.unused_s(num_bytes)
        elif self.is_slow and grown_dksr is not None:
            grown = grown_dksr[(..., *[None] * (num_bytes.ndim - 4))]
            found += self.ramps.unused_s(grown + num_bytes) - self.ramps.unused_s(grown)
        return found


def _begun(arrays: TreeArrays, first_dksr: Floats) -> Floats:
    """Return when legs begin, given the times of their first chunks."""
    begins_dksr = np.zeros(first_dksr.shape)
    up_ksr, down_ksr = begins_dksr[UP], begins_dksr[DOWN]
    for trees, sites in reversed(arrays.levels[UP]):
        there = up_ksr[trees, sites] + first_dksr[UP, trees, sites]
        np.maximum.at(up_ksr, (trees, arrays.parent_dks[UP, trees, sites]), there)
    roots = (np.arange(len(arrays.root_k)), arrays.root_k)
    there_ksr = np.zeros_like(up_ksr)
    there_ksr[roots] = up_ksr[roots]
    for trees, sites in arrays.levels[DOWN]:
        begin = there_ksr[trees, arrays.parent_dks[DOWN, trees, sites]]
        down_ksr[trees, sites] = begin
        there_ksr[trees, sites] = begin + first_dksr[DOWN, trees, sites]
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
    legs, trees = _legs(crossing), crossing.trees
    [times_st], ends_dksr = _flow(crossing, legs)
    first_st, last_st = np.full_like(times_st, math.inf), np.zeros_like(times_st)
    is_used = crossing.is_used_kr[trees.legs[1], 0]
    used, hops = (
        tuple(each[is_used] for each in trees.legs),
        tuple(each[is_used] for each in trees.hops),
    )
    np.minimum.at(first_st, hops, legs.begins_s[(*used, 0)])
    np.maximum.at(last_st, hops, ends_dksr[(*used, 0)])
    return times_st, np.maximum(last_st - first_st, 0.0)


def _flow(crossing: Crossing, legs: _Legs) -> tuple[Floats, Floats]:
    """Return `flow_s`, and when the last chunk of each leg has left it; shape (D, K, S, R)."""
    arrays = crossing.trees
    ends_dksr = np.zeros(legs.begins_s.shape)
    at_ksrp = _at_roots(crossing, legs, ends_dksr[UP])
    _, num_trees, num_sites = arrays.parent_dks.shape
    every = np.arange(num_trees)
    at_ktsrp = np.empty((num_trees, num_sites, *at_ksrp.shape[1:]))
    at_ktsrp[every, arrays.root_k] = at_ksrp
    for trees, sites in arrays.levels[DOWN]:
        above = at_ktsrp[trees, arrays.parent_dks[DOWN, trees, sites]]
        left = at_ktsrp[trees, sites] = legs.passed_s(DOWN, trees, sites, above)
        delay_s = legs.delay_s[DOWN, trees, sites]
        ends_dksr[DOWN, trees, sites] = left[..., -1].max(axis=1) - delay_s[:, None]
    ends_ktsr = at_ktsrp[..., -1]
    ends_ktsr[every, arrays.root_k, arrays.root_k] = -math.inf
    ends_ktsr = np.where(crossing.is_used_kr[:, None, None], ends_ktsr, -math.inf)
    times_s: Floats = ends_ktsr.max(axis=0).transpose(2, 1, 0)
    return times_s, ends_dksr


def _at_roots(crossing: Crossing, legs: _Legs, ends_ksr: Floats) -> Floats:
    """Return when data of each site reaches the trees' roots; shape (K, S, R, P).

    Writes the ends of the legs up into `ends_ksr`.
    """
    at_ksrp = np.zeros((*ends_ksr.shape, legs.ends_s.shape[-1]))
    for trees, sites, places in crossing.trees.climbs:
        left = at_ksrp[trees, sites] = legs.passed_s(UP, trees, places, at_ksrp[trees, sites])
        last_s = left[..., -1] - legs.delay_s[UP, trees, places][:, None]
        np.maximum.at(ends_ksr, (trees, places), last_s)
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
    delay_s, grown_dksr = crossing.rtt_dks / 2, None
    first_s = crossing.work_s(crossing.granule_dksr, None)
    begins_s = _begun(crossing.trees, first_s + delay_s[..., None])
    left_s = np.full(first_s.shape, -math.inf)
    waits_s = left_s.copy()
    shared = crossing.shared
    if shared is not None:
        links = shared.ramps(crossing)
        if crossing.is_slow:  # earlier traffic grows the windows
            grown_dksr = np.zeros(first_s.shape)
            grown_dksr[shared.there] = shared.grown_hmr(begins_s, links)[shared.is_there_hm]
            first_s = crossing.work_s(crossing.granule_dksr, grown_dksr)
            begins_s = _begun(crossing.trees, first_s + delay_s[..., None])
        for known, found in zip((left_s, waits_s), shared.emptied_s(begins_s, links), strict=True):
            known[shared.there] = found[shared.is_there_hm]
    until_dksrp, before_dksrp = crossing.parts
    starts_s = crossing.work_s(before_dksrp, grown_dksr)
    ends_s = crossing.work_s(until_dksrp, grown_dksr)
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
        self.is_there_hm = is_there_hm
        self.there = tuple(each[is_there_hm] for each in legs)
        """The legs of the valid entries."""
        self._legs, self._is_used_hmr = legs, crossing.is_used_kr[legs[1]] & is_there_hm[..., None]
        self._bytes_hmr = np.where(self._is_used_hmr, crossing.bytes_kr[legs[1]], 0.0)
        self._is_one_hmr = crossing.granule_dksr[legs] >= crossing.bytes_kr[legs[1]]
        """Whether a leg's chunks are all in flight, so that they do not wait for later ones."""
        rate, rtt_s = (each[legs][:, :1, None] for each in (crossing.rate_dks, crossing.rtt_dks))
        self._rate, self._rtt_s = rate, rtt_s
        self._whole_h1r = np.maximum(self._bytes_hmr.sum(axis=1, keepdims=True), 1.0)
        delay_s = np.broadcast_to(crossing.rtt_dks[..., None] / 2, crossing.window_dksr.shape)
        self._soonest_hmr = self._of_legs(_begun(crossing.trees, delay_s))

    def ramps(self, crossing: Crossing) -> Ramps:
        """Return the slow start of the links, by their windows in a crossing."""
        return Ramps(self._rate, self._rtt_s, crossing.window_dksr[self._legs][:, :1])

    def _of_legs(self, begins_dksr: Floats) -> Floats:
        found: Floats = np.where(self._is_used_hmr, begins_dksr[self._legs], _NEVER_S)
        return found

    def grown_hmr(self, begins_dksr: Floats, links: Ramps) -> Floats:
        """Return the bytes that links have sent when legs begin, as far as windows allow."""
        begins_hmr = self._of_legs(begins_dksr)
        is_before = begins_hmr[:, None] < begins_hmr[:, :, None]
        given_hmr = (is_before * self._bytes_hmr[:, None]).sum(axis=2)
        since_hmr = begins_hmr - begins_hmr.min(axis=1, keepdims=True)
        grown_hmr: Floats = np.minimum(given_hmr, links.sent_bytes(since_hmr))
        return grown_hmr

    def emptied_s(self, begins_dksr: Floats, links: Ramps) -> tuple[Floats, Floats]:
        """Return when links have sent everything before each leg's last chunk, and that work.

        Another leg that begins d later counts except for its share d / D: D is the link's total
        work, and d at least its value with infinitely wide links. The result is the latest end over
        all beginnings up to the leg's own.

        Returns:
            Shape (H, M, R) each.
        """
        begins_hmr, rate = self._of_legs(begins_dksr), self._rate
        work_h1r = self._whole_h1r / rate + links.unused_s(self._whole_h1r)
        late_hmmr = self._soonest_hmr[:, None] - begins_hmr[:, :, None]
        own = np.arange(late_hmmr.shape[1])
        late_hmmr[:, own, own] = 0.0
        share_hmmr = np.clip(1.0 - late_hmmr / work_h1r[:, None], 0.0, 1.0)
        share_hmmr[self._is_one_hmr[:, :, None] & (late_hmmr > 0)] = 0.0
        bytes_hmmr = share_hmmr * self._bytes_hmr[:, None]
        all_hmr = bytes_hmmr.sum(axis=2)
        all_s = all_hmr / rate + links.unused_s(all_hmr)
        order_h1mr = begins_hmr.argsort(axis=1)[:, None]
        begins_h1mr = np.take_along_axis(begins_hmr[:, None], order_h1mr, axis=2)
        work_hmmr = np.take_along_axis(bytes_hmmr, order_h1mr, axis=2) / rate[:, None]
        rest_hmmr = work_hmmr[:, :, ::-1].cumsum(axis=2)[:, :, ::-1]
        emptied_hmr = (np.minimum(begins_h1mr, begins_hmr[:, :, None]) + rest_hmmr).max(axis=2)
        return np.maximum(emptied_hmr, begins_hmr.min(axis=1, keepdims=True) + all_s), all_s
