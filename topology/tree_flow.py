"""How chunks flow through trees that share links: when the last of them is where. Pure, by arrays.

A *leg* is one hop of one tree in one direction, up to the root or down from it; a directed link carries
the legs of several trees. Its chunks come in the order of their turns, those of all trees abreast.

- The first chunks of a leg begin it once those of all children are there. Early chunks go before later
  ones, so they wait for nobody: g c / r + t / 2, with g chunks abreast of c bytes, and what TCP's slow
  start still leaves unused of the link at that time.
- A link works without a pause from its first leg's beginning. So the share x of a leg's chunks has left
  it no earlier than that beginning and all that goes before: of a leg that began d later than this one,
  the share x - d / D, D being all of the link's work; of one that began earlier, more than x.
- Nor earlier than a leg's own chunks came, one behind the other.

Chunks are followed at a few shares x of each leg: the first and the last, and where TCP starts slowly some
between them, for there one link may be slow early and the next one late. What all this is worth against
the event-driven simulator: docs/simulator.md.

Legend of shapes, which end names in lower case: D directions (up, down), K trees, S sites (where something begins; of a leg, its lower
end), T sites where something ends, R loads, P shares.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from topology.tree_begins import DOWN, UP, Crossing, begun, begun_slowly, unused_of_s

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]
    Places = NDArray[np.intp]

_SHARES_OF_SLOW_START = 8
_NEVER_S = 1e12
"""When a leg begins that carries nothing."""


def flow_s(crossing: Crossing) -> Floats:
    """Return when the last of what depends on a site is at another, if that began at 0.

    Returns:
        Seconds, shape (R, S, T); -inf where nobody waits.
    """
    legs = _legs(crossing)
    shape = crossing.shape
    at_ksrp = _at_roots(crossing, legs)
    num_trees, num_sites = shape.parent_ks.shape
    every = np.arange(num_trees)
    at_ktsrp = np.empty((num_trees, num_sites, *at_ksrp.shape[1:]))
    at_ktsrp[every, shape.root_k] = at_ksrp
    for depth in shape.depths:
        trees, sites = shape.at(depth)
        above = at_ktsrp[trees, shape.parent_ks[trees, sites]]
        at_ktsrp[trees, sites] = legs.left_s(DOWN, trees, sites, above)
    ends_ktsr = at_ktsrp[..., -1]
    ends_ktsr[every, shape.root_k, shape.root_k] = -math.inf
    ends_ktsr = np.where(crossing.is_used_kr[:, None, None], ends_ktsr, -math.inf)
    times_s: Floats = ends_ktsr.max(axis=0).transpose(2, 1, 0)
    return times_s


@dataclass(frozen=True, slots=True)
class _Legs:
    """What it takes to cross each leg. Arrays have shape (D, K, S, R, P), `delay_s` (D, K, S)."""

    starts_s: Floats
    """Of its own chunks before a share's last granule, one behind the other."""
    ends_s: Floats
    """Of these and that granule."""
    waits_s: Floats
    """From the leg's beginning until a share can have left, for all that the link does; -inf: no wait."""
    delay_s: Floats

    def left_s(self, direction: int, trees: Places, sites: Places, at_s: Floats) -> Floats:
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
        link_s = at_s[..., :1] + self.waits_s[legs][middle]
        delay_s = self.delay_s[legs].reshape(-1, *[1] * (at_s.ndim - 1))
        left_s: Floats = np.maximum(own_s, link_s) + delay_s
        return left_s


def _at_roots(crossing: Crossing, legs: _Legs) -> Floats:
    """Return when what begins at each site is at the trees' roots; shape (K, S, R, P)."""
    shape = crossing.shape
    num_trees, num_sites = shape.parent_ks.shape
    at_ksrp = np.zeros((num_trees, num_sites, *legs.ends_s.shape[-2:]))
    place_ks = np.tile(np.arange(num_sites), (num_trees, 1))
    for _ in shape.depths:
        trees, sites = np.nonzero(place_ks != shape.root_k[:, None])
        places = place_ks[trees, sites]
        at_ksrp[trees, sites] = legs.left_s(UP, trees, places, at_ksrp[trees, sites])
        place_ks[trees, sites] = shape.parent_ks[trees, places]
    return at_ksrp


def _legs(crossing: Crossing) -> _Legs:
    num_shares = _SHARES_OF_SLOW_START if crossing.is_slow else 2
    if crossing.is_slow:
        begins_dksr, grown_dksr = begun_slowly(crossing)
    else:
        begins_dksr = grown_dksr = begun(crossing)
    first_kr = crossing.granule_kr / crossing.bytes_kr
    share_krp = first_kr[..., None] ** np.linspace(1.0, 0.0, num_shares)
    until_krp = share_krp * crossing.bytes_kr[..., None]
    before_krp = np.maximum(until_krp - crossing.granule_kr[..., None], 0.0)
    rate, rtt_s = crossing.rate_dks[..., None, None], crossing.rtt_dks[..., None, None]
    window_bytes = crossing.window_dksr[..., None]

    def work_s(num_bytes: Floats) -> Floats:
        """Return what so much of a leg, shape (K, 1, R, P), takes on a link that has sent before."""
        if not crossing.is_slow:
            return num_bytes / rate
        grown = grown_dksr[..., None]
        more_s = unused_of_s(grown + num_bytes, rate, rtt_s, window_bytes)
        return num_bytes / rate + more_s - unused_of_s(grown, rate, rtt_s, window_bytes)

    waits_s = np.full((*begins_dksr.shape, num_shares), -math.inf)
    for legs in crossing.shared_links:
        waits_s[legs] = _link_waits(crossing, legs, begins_dksr[legs], share_krp[legs[1]])
    waits_s[..., 0] = -math.inf  # the first chunks go before all others
    starts_s, ends_s = work_s(before_krp[:, None]), work_s(until_krp[:, None])
    return _Legs(starts_s, ends_s, waits_s, crossing.rtt_dks / 2)


def _link_waits(
    crossing: Crossing, legs: tuple[Places, Places, Places], begins_mr: Floats, share_mrp: Floats
) -> Floats:
    """Return from each leg's beginning until its shares can have left a link that M legs share.

    Shape (M, R, P).
    """
    is_used_mr = crossing.is_used_kr[legs[1]]
    begins_mr = np.where(is_used_mr, begins_mr, _NEVER_S)
    bytes_mr = np.where(is_used_mr, crossing.bytes_kr[legs[1]], 0.0)
    one = (legs[0][0], legs[1][0], legs[2][0])
    rate, rtt_s, window_r = crossing.rate_dks[one], crossing.rtt_dks[one], crossing.window_dksr[one]
    whole_r = np.maximum(bytes_mr.sum(axis=0), 1.0)
    work_r = whole_r / rate + unused_of_s(whole_r, rate, rtt_s, window_r)
    behind_mmr = begins_mr - begins_mr[:, None]
    done_mmrp = np.clip(share_mrp[:, None] - (behind_mmr / work_r)[..., None], 0.0, 1.0)
    done_mmrp = done_mmrp * bytes_mr[..., None]
    all_mrp = done_mmrp.sum(axis=1)
    all_s = all_mrp / rate + unused_of_s(all_mrp, rate, rtt_s, window_r[:, None])
    ahead_mr = begins_mr - begins_mr.min(axis=0)
    later_s = np.where((behind_mmr >= 0)[..., None], done_mmrp, 0.0).sum(axis=1) / rate
    waits_mrp: Floats = np.maximum(all_s - ahead_mr[..., None], later_s)
    return waits_mrp
