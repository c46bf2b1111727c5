"""Which packets a link loses by chance, and which because a queue was full. Pure.

When packets wait long, a router's queue may be full, and losses count as the queue's. A queue that
holds less than six tenths of a BDP is never seen as full, so its losses pass for chance. A queue
that was never empty since the connections began seems shorter than it is. Until it was, many losses
at once also count as a full queue's.

All times are in seconds.
"""

from __future__ import annotations

import math

_MANY_SHARE = 0.05
"""An overflowing queue loses many packets at once. Until the round trip over an empty queue is
known, a sample with a larger share of lost packets counts as an overflow."""
_LOOKS = 4
"""After this many samples with losses and without a full queue, the link counts as lossy by
itself."""
_ROOM_S = 1.0
"""A loss becomes known when the queue has already drained. So it counts as chance only if no queue
was full for this long before."""
_LASTS_S = 10.0
"""How long a link counts as lossy after its latest random loss."""
_SENT_MAX = 200_000
"""Number of segments over which the loss rate is averaged; older ones count less and less."""


class ChanceLosses:
    """Tells random losses of one link from those of a full queue, and estimates their rate."""

    def __init__(self) -> None:
        self._counts: tuple[int, int] | None = None
        """Segments sent and retransmitted, at the latest sample; None: the link was idle."""
        self._full_s = -math.inf
        """When the queue may last have been full."""
        self._num_looks = 0
        """Samples with losses since then."""
        self._until_s = -math.inf
        self._num_sent = self._num_lost = 0
        """Segments sent while no queue was full, and random losses among them."""

    def is_lossy(self, now_s: float) -> bool:
        """Return whether the link loses packets by itself, and not because a queue is full."""
        return now_s < self._until_s

    @property
    def share(self) -> float:
        """A low estimate of the share of packets that the link loses by chance.

        Several losses in one sample count as one, as they do for a connection. Few losses are
        reduced by their statistical error.
        """
        lost = self._num_lost
        return (lost - math.sqrt(lost)) / self._num_sent if lost else 0.0

    def rest(self) -> None:
        """Forget the latest sample: nothing is in flight, or other connections are counted."""
        self._counts = None

    def follow(
        self, sent: int, sent_again: int, now_s: float, *, is_full: bool, knows_empty: bool
    ) -> bool:
        """Take a sample of a link with frames in flight; return whether a full queue lost packets.

        Args:
            sent: segments sent up to now, retransmissions included.
            sent_again: retransmitted segments up to now.
            now_s: monotonic.
            is_full: whether round trips are so long that a router's queue may be full.
            knows_empty: whether the round trip over an empty queue is known.
        """
        before, self._counts = self._counts or (sent, sent_again), (sent, sent_again)
        num_sent, num_lost = sent - before[0], sent_again - before[1]
        if not 0 <= num_lost <= num_sent:
            num_sent = num_lost = 0  # a connection has ended
        are_many = num_lost > _MANY_SHARE * num_sent
        if is_full or (are_many and not knows_empty):
            self._full_s, self._num_looks = now_s, 0
        if now_s <= self._full_s + _ROOM_S:
            return num_lost > 0
        self._num_sent += num_sent
        if num_lost:
            self._num_lost += 1
            self._num_looks += 1
            if self._num_looks >= _LOOKS:
                self._until_s = now_s + _LASTS_S
        if self._num_sent > _SENT_MAX:
            self._num_sent //= 2
            self._num_lost //= 2
        return False
