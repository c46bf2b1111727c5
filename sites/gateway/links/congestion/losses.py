"""Which packets a link loses by chance, and which because a queue was full. Pure.

Where packets wait long, a router's queue may be full, and what is lost then is lost there. A queue
that holds less than six tenths of what the link holds is never seen as full, so its losses pass for
chance. A queue that was not empty since the connections began seems shorter than it is. Until it
was, many packets that are lost at once are a full queue's, too.

All times are in seconds.
"""

from __future__ import annotations

import math

_MANY = 3
_MANY_SHARE = 0.05
"""A queue that overflows loses many packets at once. As long as nobody knows how short round trips
are while it is empty, more than so many between two looks, and than such a share of those sent,
were lost there."""
_LOOKS = 4
"""So many looks that find packets lost, and no full queue since the first of them, are chance: the
link loses packets by itself."""
_ROOM_S = 1.0
"""A loss becomes known when the queue that overflowed has drained already. So a loss counts as
chance only if no queue was full for so long before."""
_LASTS_S = 10.0
"""How long a link counts as one that loses packets by itself."""
_SENT_MAX = 200_000
"""So many segments tell how many are lost by chance. What came before counts less and less."""


class ChanceLosses:
    """The losses of one link."""

    def __init__(self) -> None:
        self.overflowed_s = -math.inf
        """When packets were lost in a full queue, the last time."""
        self._counts: tuple[int, int] | None = None
        """Segments sent, and sent again, at the latest look; None: the link was at rest."""
        self._full_s = -math.inf
        """When the queue may have been full, the last time."""
        self._num_looks = 0
        """How many looks since then found packets lost."""
        self._until_s = -math.inf
        self._num_sent = self._num_lost = 0
        """Segments sent while no queue was full, and losses among them."""

    def is_lossy(self, now_s: float) -> bool:
        """Return whether the link loses packets by itself, and not because a queue is full."""
        return now_s < self._until_s

    @property
    def share(self) -> float:
        """The share of packets that the link loses by chance, and rather less than that.

        Several that are lost between two looks count as one, as they do for a connection. Of few
        losses as much is taken off as chance makes of them.
        """
        lost = self._num_lost
        return (lost - math.sqrt(lost)) / self._num_sent if lost else 0.0

    def rest(self) -> None:
        """Nothing is on the way, or what is counted is not what was counted before."""
        self._counts = None

    def follow(
        self, sent: int, sent_again: int, now_s: float, *, is_full: bool, knows_empty: bool
    ) -> bool:
        """Look at a link with frames on the way; return whether a full queue lost packets.

        Args:
            sent: segments sent up to now; those that were sent again count again.
            sent_again: of them.
            now_s: monotonic.
            is_full: whether a router's queue may be full, by how long round trips are.
            knows_empty: whether it is known how long they are while it is empty.
        """
        before, self._counts = self._counts or (sent, sent_again), (sent, sent_again)
        num_sent, num_lost = sent - before[0], sent_again - before[1]
        if not 0 <= num_lost <= num_sent:
            num_sent = num_lost = 0  # a connection has ended
        are_many = num_lost > max(_MANY, _MANY_SHARE * num_sent)
        if is_full or (are_many and not knows_empty):
            self._full_s, self._num_looks = now_s, 0
        if now_s <= self._full_s + _ROOM_S:
            if num_lost:
                self.overflowed_s = now_s
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
