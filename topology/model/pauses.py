"""The effect of pauses on TCP's windows, and the time of exchanges with them. Pure, vectorised.

Steps repeat themselves: a link sends, rests until the next step's gradients come, and begins again
with a part of the window that it had (topology/trees/slow_start.py). How long it rests depends on
the step, and the step on the windows: topology/model/step_model.py begins with the first windows,
as a run does, and goes on until windows stay as they are.

Legend of shapes, which end names in lower case: B spreads of a batch, S sites (sources), T sites
(targets), H directed links that a plan uses, R releases. Of a link whose connections do not start
slowly the window is infinite.
"""

from __future__ import annotations

import functools
import math
from typing import TYPE_CHECKING

import numpy as np

from isthmus.topology.spec.tcp_constants import RTO_MIN_S
from isthmus.topology.trees.link_arrays import LinkArrays, TreeArrays
from isthmus.topology.trees.tree_flow import Crossing, Ramps, flow_and_uses_s
from isthmus.topology.trees.wire_load import Load

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Places = NDArray[np.intp]

_LATE_RELEASES = 8
"""Number of last releases of a step whose pauses are modelled; earlier ones matter less."""


class RestedLinks:
    """The links of a plan, which rest between the exchanges of one load."""

    def __init__(
        self, trees: TreeArrays | None, links: LinkArrays, load: Load, sent_bytes_st: Floats
    ) -> None:
        """Take the links that carry something.

        Args:
            trees: Of the plan; None: a gather.
            links: Between its sites.
            load: The exchange; without a first window no link starts slowly.
            sent_bytes_st: Bytes of the load on each link.
        """
        self._trees, self._links, self._load = trees, links, load
        self._num_sites = links.num_sites
        sources, targets = np.nonzero(sent_bytes_st)
        self._hop_h: tuple[Places, Places] = sources, targets
        self._rate_h = links.rate_st[self._hop_h]
        self._rtt_h = links.rtt_st[self._hop_h]
        self._rto_h = self._rtt_h + RTO_MIN_S
        self._bytes_h = sent_bytes_st[self._hop_h]
        self.busy_st: Floats = sent_bytes_st / links.rate_st
        """Seconds of an exchange's bytes on each link; 0 where nothing is sent."""
        self.first_h: Floats = links.window_st(load)[self._hop_h]
        """Bytes of the windows that connections begin with when the run starts; shape (H,)."""
        self.full_h: Floats = np.maximum(self.first_h, self._rate_h * self._rtt_h)
        """Bytes of the windows that fill the links; shape (H,)."""
        self._known: dict[bytes, tuple[Floats, Floats]] = {}

    @property
    def are_slow(self) -> bool:
        """Whether any of the links starts slowly."""
        return bool(np.isfinite(self.first_h).any())

    def of_links(self, each_bst: Floats) -> Floats:
        """Select the links' entries from values for all pairs of sites; shape (B, H)."""
        sources, targets = self._hop_h
        return each_bst[:, sources, targets]

    def crossings_s(self, window_bh: Floats) -> tuple[Floats, Floats]:
        """Return how long an exchange takes from site to site, and how long each link is in use.

        Args:
            window_bh: Bytes of the initial window of each link.

        Returns:
            Seconds, shape (B, S, T) and (B, H); crossings are -inf where no site waits.
        """
        if self._trees is None:
            used_bh = self._bytes_h / self._rate_h
            used_bh = used_bh + Ramps(self._rate_h, self._rtt_h, window_bh).unused_s(self._bytes_h)
            there_bst = np.full((len(window_bh), self._num_sites, self._num_sites), -math.inf)
            there_bst[:, *self._hop_h] = used_bh + self._rtt_h / 2
            return there_bst, used_bh
        if (window_bh == window_bh[0]).all():
            there_st, used_h = self._over_trees(window_bh[0])
            return there_st[None].copy(), used_h[None]
        as_one = np.dtype((np.void, window_bh[0].nbytes))
        keys = np.ascontiguousarray(window_bh).view(as_one).ravel()
        _, first, which = np.unique(keys, return_index=True, return_inverse=True)
        found = [self._over_trees(window_bh[each]) for each in first.tolist()]
        there_bst, used_bh = (np.stack(each)[which] for each in zip(*found, strict=True))
        return there_bst, used_bh

    def _over_trees(self, window_h: Floats) -> tuple[Floats, Floats]:
        key = window_h.tobytes()
        if key not in self._known:
            window_st = np.full((self._num_sites, self._num_sites), math.inf)
            window_st[self._hop_h] = window_h
            times_st, uses_st = flow_and_uses_s(self._crossing.with_windows(window_st))
            self._known[key] = times_st, uses_st[self._hop_h]
        return self._known[key]

    @functools.cached_property
    def _crossing(self) -> Crossing:
        """The load on the plan's trees."""
        assert self._trees is not None, "a gather has no trees"
        return Crossing(self._trees, self._links, [self._load])

    def windows_after(self, window_bh: Floats, idle_bh: Floats) -> Floats:
        """Return the windows of the next exchange, after pauses of `idle_bh` seconds."""
        opened_bh = _opened(self._bytes_h, window_bh, self.full_h)
        return _left(opened_bh, idle_bh, self._rto_h, self.first_h)

    def late_s(self, source: int, at_s: Floats, left_share: Floats) -> Floats:
        """Return when releases after a pause within one step arrive, in a gather.

        Args:
            source: The site.
            at_s: When each release leaves, shape (R,).
            left_share: Share of all gradients in a release and all later ones, shape (R,).

        Returns:
            Seconds, shape (T,): the latest arrival of one of the last releases; -inf if none leaves
            after a pause.
        """
        latest_t = np.full(self._num_sites, -math.inf)
        if np.diff(at_s).max(initial=0.0) <= RTO_MIN_S:
            return latest_t
        mine = self._hop_h[0] == source
        rate, rtt_s, rto_s = self._rate_h[mine], self._rtt_h[mine], self._rto_h[mine]
        left_rh = left_share[:, None] * self._bytes_h[mine]
        own_rh = -np.diff(left_rh, axis=0, append=0.0)
        window, grown, latest = (
            self.full_h[mine],
            np.zeros_like(rate),
            np.full_like(rate, -math.inf),
        )
        first = max(0, len(at_s) - _LATE_RELEASES - 1)
        free_s = np.full_like(rate, at_s[first])
        for release in range(first, len(at_s)):
            idle_s = at_s[release] - free_s
            rests = idle_s > rto_s
            opened = _opened(grown, window, self.full_h[mine])
            window = np.where(rests, _left(opened, idle_s, rto_s, self.first_h[mine]), window)
            grown = np.where(rests, 0.0, grown)
            begins_s = np.maximum(at_s[release], free_s)
            begins_s -= Ramps(rate, rtt_s, window).unused_s(grown)
            all_s = left_rh[release] / rate
            all_s += Ramps(rate, rtt_s, window).unused_s(grown + left_rh[release])
            latest = np.where(rests, np.maximum(latest, begins_s + all_s + rtt_s / 2), latest)
            grown = grown + own_rh[release]
            own_s = own_rh[release] / rate + Ramps(rate, rtt_s, window).unused_s(grown)
            free_s = begins_s + own_s
        latest_t[self._hop_h[1][mine]] = latest
        return latest_t


def _opened(num_bytes: Floats, window: Floats, full: Floats) -> Floats:
    """Return the windows after bursts: `window_after` (trees/slow_start.py), vectorised."""
    doubled = np.floor(np.log2(num_bytes / window + 1.0))
    opened: Floats = np.minimum(full, window * 2.0**doubled)
    return opened


def _left(opened: Floats, idle_s: Floats, rto_s: Floats, first: Floats) -> Floats:
    """Return the windows after pauses: `num_halvings` (trees/slow_start.py), vectorised."""
    num_halvings = np.maximum(np.ceil(idle_s / rto_s).astype(np.int32) - 1, 0)
    left: Floats = np.maximum(first, np.ldexp(opened, -num_halvings))
    return left
