"""How many bytes of frames may be on the way to a peer, so that others keep their part. Pure.

TCP decides how much is on the way, up to this window. BBR takes no heed of lost packets, and keeps
two bandwidth-delay products on the way. Where a router's queue holds one, nothing is left to a flow
that takes lost packets for a full queue, as CUBIC does.

In a queue each flow gets what it has on the way of all that is on the way. So the window holds what
the link does, and not more than it takes to keep it full: then others, who fill the link and its
queue, come to about as much. A link of one's own is full with that window, too.

A frame counts until it is acknowledged as a whole, and leaves only if all of it fits. So a link is
full while as many frames are on the way as it holds, rounded up, and one more. With one less it is
idle after each until that is acknowledged: where it holds just one, half of the time.

All times are in seconds, sizes in bytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

_QUEUE_FROM, _QUEUE_TO = 1.35, 1.6
"""Round trips, as multiples of the idle one. Frames of one's own wait for one another up to the
first. From the second on, packets of others wait there too."""
_JITTER_S = 0.003
_SLACK = 0.3
"""Share of what a link holds: it is full with so much more, for frames count until they are
acknowledged as a whole."""
_LOSSY = 4
"""Looks that find packets lost, and no queue since the first of them: the link loses them by chance.
It gets all the window, for what follows a lost packet counts until that is repaired."""
_ROOM_S = 1.0
"""A loss is told a round trip late, when the queue that it ran over has drained. So a queue must
have had room for so long."""
_LOSSY_S = 10.0
"""It counts as such a link for so long."""
_RTT_MIN_S = 0.01
"""On shorter links gateways take as long to acknowledge as packets do."""


@dataclass(frozen=True, slots=True)
class Path:
    """What the kernel says of the connections to a peer while something is on the way."""

    rtt_s: float
    shortest_rtt_s: float
    """Lately: it has waited in no queue."""
    sent_again: int
    """Segments, up to now."""


class LinkWindow:
    """The window of one link."""

    def __init__(self, most_bytes: int, rtt_s: float) -> None:
        """Begin with `most_bytes`, a limit of memory, which it never exceeds.

        The link is said to have a round trip of `rtt_s`. What the kernel measures can be shorter:
        where others take over connections on their way, it is only as long as to them.
        """
        self._most_bytes = most_bytes
        self._rtt_s = rtt_s
        self._sent_again = 0
        self._queued_s = -math.inf
        """When packets waited last."""
        self._num_lossy = 0
        """Looks since then that found packets lost."""
        self._lossy_until_s = 0.0

    def is_lossy(self, now_s: float) -> bool:
        """Return whether the link loses packets by chance."""
        return now_s < self._lossy_until_s

    def follow(
        self,
        path: Path,
        bytes_per_s: float,
        frame_bytes: float,
        now_s: float,
        *,
        is_measured: bool = True,
    ) -> int:
        """Look at the link; return its window from now on.

        Args:
            path: as it is now.
            bytes_per_s: what the link is believed to carry; infinite: not known.
            frame_bytes: of the longest frame.
            now_s: monotonic.
            is_measured: whether that was measured. Until then all may be on the way, unless packets
                wait in a queue.
        """
        has_lost = path.sent_again > self._sent_again
        self._sent_again = path.sent_again
        queue = (path.rtt_s - _JITTER_S) / path.shortest_rtt_s
        free = min(1.0, max(0.0, (_QUEUE_TO - queue) / (_QUEUE_TO - _QUEUE_FROM)))
        if free < 1.0:
            self._queued_s, self._num_lossy = now_s, 0
        elif has_lost and now_s > self._queued_s + _ROOM_S:
            self._num_lossy += 1
        if self._num_lossy >= _LOSSY and has_lost:
            self._lossy_until_s = now_s + _LOSSY_S
        is_open = free == 1.0 and not is_measured
        if is_open or self.is_lossy(now_s):
            return self._most_bytes
        held_bytes = bytes_per_s * max(path.shortest_rtt_s, self._rtt_s, _RTT_MIN_S)
        if held_bytes >= self._most_bytes:
            return self._most_bytes
        window = (1 + _SLACK * free) * held_bytes + 2 * free * frame_bytes
        full = (math.ceil(held_bytes / max(1, frame_bytes)) + 1) * frame_bytes
        if full > _QUEUE_FROM * held_bytes:
            window = max(window, full)
        return int(min(self._most_bytes, window))
