"""How many bytes of frames may be on the way to a peer, so that others keep their part. Pure.

TCP decides how much is on the way, up to this window. BBR takes no heed of lost packets, and keeps
two bandwidth-delay products on the way. Where a router's queue holds one, nothing is left to a flow
that takes lost packets for a full queue, as CUBIC does.

In a queue each flow gets what it has on the way of all that is on the way. So beside others the
window is what the link holds, and they, who fill the link and its queue, come to about as much.
Alone it is somewhat more, so that the link is never idle.

Only the queue towards the peer counts. The one on the way back is full whenever the peer sends as
much, which in an all-reduce is most of the time.

A frame counts until it is acknowledged as a whole, and leaves only if all of it fits.

All times are in seconds, sizes in bytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

_QUEUE_FROM, _QUEUE_TO = 1.2, 1.45
"""Round trips without a queue on the way back, as multiples of the idle one. Frames of one's own
wait for one another up to the first. From the second on, packets of others wait there too."""
_FULL = 1.6
"""Here a queue may be full, so that packets are lost there."""
_JITTER_S = 0.003
_ALONE = 0.85
"""Part of what the link is believed to carry: who is carried so much is alone there, or nearly."""
_SLACK = 0.3
"""Part of what a link holds: it is full with so much more, for frames count until they are
acknowledged as a whole."""
_LOSSY = 4
"""Looks that find packets lost, and no full queue since the first: the link loses them by chance.
It gets all the window, for what follows a lost packet counts until that is repaired."""
_ROOM_S = 1.0
"""A loss is told a round trip late, when the queue that it ran over has drained. So queues must
have had room for so long."""
_LOSSY_S = 10.0
"""It counts as such a link for so long."""
_RTT_MIN_S = 0.01
"""On shorter links gateways take as long to acknowledge as packets do."""


@dataclass(frozen=True, slots=True)
class Path:
    """What is known of the connections to a peer while something is on the way."""

    rtt_s: float
    """Without what acknowledgements wait on their way back."""
    shortest_rtt_s: float
    """Lately: it has waited in no queue."""
    sent_again: int
    """Segments, up to now."""
    carried: float
    """Part of what the link is believed to carry: so much it carried lately."""


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
        self._full_s = -math.inf
        """When a queue may have been full last."""
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
        if path.carried >= _ALONE:
            free = 1.0
        if queue > _FULL:
            self._full_s, self._num_lossy = now_s, 0
        elif has_lost and now_s > self._full_s + _ROOM_S:
            self._num_lossy += 1
            if self._num_lossy >= _LOSSY:
                self._lossy_until_s = now_s + _LOSSY_S
        held_bytes = bytes_per_s * max(path.shortest_rtt_s, self._rtt_s, _RTT_MIN_S)
        is_open = free == 1.0 and not is_measured
        if is_open or self.is_lossy(now_s) or held_bytes >= self._most_bytes:
            return self._most_bytes
        frame_bytes = max(1.0, frame_bytes)
        num_held = held_bytes / frame_bytes
        alone = (1 + _SLACK) * num_held + 2
        beside = max(2, round(num_held))
        return int(min(self._most_bytes, (free * alone + (1 - free) * beside) * frame_bytes))
