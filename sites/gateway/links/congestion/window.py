"""How many bytes of frames may be on the way to a peer, so that others keep their part. Pure.

TCP decides how much is on the way, up to this window. Without a window BBR keeps twice what the
link holds (rate times round trip) on the way, whatever is lost. CUBIC takes a lost packet for a
full queue and slows down. So where the router's queue holds no more than the link, nothing is left
to a CUBIC flow of somebody else.

Flows that wait in one queue divide the link by how much each has on the way. So there are two
widths:

- beside others, somewhat less than the link holds: the others fill the queue, and come to about
  as much. Who gets less than half of the link beside them has more on the way, little by little;
- alone, somewhat more, so that the link is never idle.

Which it is, round trips tell. One's own frames make packets wait a little. Where packets wait
longer, others are in the queue. Who is carried at nearly the link's rate is alone all the same.

Some others do not slow down when the queue overflows. Beside them, and where packets are lost by
chance, there is no limit but memory.

A round trip passes two queues. Only the one towards the peer counts here. The one on the way back
is full whenever the peer sends as much, which in an all-reduce is most of the time. Frames whose
acknowledgement waits there have left the way towards the peer, so alone they do not count.

A frame counts until it is acknowledged as a whole. It leaves only if all of it fits.

All times are in seconds, sizes in bytes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from isthmus.sites.gateway.links.congestion.losses import ChanceLosses

_OWN_QUEUE = 0.2
"""Up to so much longer than the idle one, as a part of that, one's own frames explain a round trip.
Where the link holds less than five frames it is more: the last packet of a frame waits for those
before it, as long as the link takes for the frame."""
_GRADUALLY = 0.25
"""From so much more on, packets of others are in the queue too. The window goes from one width to
the other between them."""
_FOLLOWS = 0.03
_NEAR = 0.01
"""In each look the window goes by the part _FOLLOWS of the way to the width that the look asks for,
and all of it from _NEAR on. What a window does to a queue is seen a round trip later. One that
follows each look fills the queue, takes it for that of others, lets it run empty, and so on."""
_FULL = 1.6
"""From this multiple on, the queue may be full, and packets may be lost there."""
_JITTER_S = 0.003
"""So much is taken off a round trip first: it varies by so much without a queue."""
_VARIES = 1.2
"""Where round trips vary by themselves, the shortest says too little of an empty queue. So the
description is believed up to so many times that."""
_ALONE = 0.85
"""Who is carried at this part of the believed rate is alone on the link, or nearly."""
_FAIR = 0.45
"""Beside others, this part of the believed rate is enough: half of the link, but for headers and
the beginnings of rounds."""
_LEAVES = 0.85
"""Beside others, the window begins with this part of what the link holds. CUBIC takes back three
tenths of its own whenever the queue overflows. So who keeps as much on the way as the link holds
has more than others have on average."""
_WIDEST = 6.0
"""Beside others, the window is at most so many times as wide as it begins."""
_WIDENS = 0.05
"""In each look the window beside others changes by this part of what the link holds, times what is
missing. Once one is alone, it goes back to how it began by this part in each look."""
_STARVED = 0.4
_OFTEN = 0.4
_AVERAGED = 0.03
_LOSS_IGNORED_S = 30.0
"""Beside others who slow down when the queue overflows, one gets more than _STARVED of the link.
Where one gets less, and a full queue loses packets in a part of _OFTEN of the looks, some others do
not slow down, as BBR does not. That counts for so long. Each look is _AVERAGED of that part, so it
takes a second at least."""
_SLACK = 0.3
_SLACK_FRAMES = 2
"""Alone, the window is wider than what the link holds by this part of that, and by so many frames.
For of a frame all counts, also what has arrived already, until the whole is acknowledged."""
_FEW_FRAMES = 3.0
_OVERFLOWED_S = 10.0
"""A queue often holds as much as its link. Where that is less than so many frames, two more than
the link holds overflow it. So it is one more for so long after a queue overflowed."""
_RTT_MIN_S = 0.01
"""The shortest round trip by which the window goes. On shorter links gateways take as long to
acknowledge a frame as packets take."""


@dataclass(frozen=True, slots=True)
class Path:
    """What is known of the connections to a peer while something is on the way."""

    rtt_s: float
    """The round trip now, without what acknowledgements wait on their way back."""
    shortest_rtt_s: float
    """The shortest of the last minutes: that of a packet which waited in no queue."""
    sent_again: int
    """Segments sent again, up to now."""
    carried: float
    """What the link carried lately, as a part of the most that it is known to carry."""
    sent: int
    """Segments sent, up to now; those that were sent again count again."""
    back_s: float
    """How long acknowledgements wait on their way back."""


class LinkWindow:
    """The window of one link."""

    def __init__(self, most_bytes: int, rtt_s: float) -> None:
        """The window is never wider than `most_bytes`, a limit of memory.

        The link is described to have a round trip of `rtt_s`. The kernel may measure a shorter one:
        where a relay ends connections, it measures the way to the relay.
        """
        self._most_bytes = most_bytes
        self._rtt_s = rtt_s
        self.losses = ChanceLosses()
        self._free = 1.0
        """Alone 1, beside others 0, and in between on the way from one to the other."""
        self._width = 1.0
        """Beside others, the window as a multiple of what it begins with."""
        self._starved = 0.0
        """The part of the latest looks that found too little carried, and a full queue's losses."""
        self._loss_ignored_until_s = -math.inf
        """Until then others count as not slowing down."""

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
            bytes_per_s: what the link is believed to carry.
            frame_bytes: length of the longest frame.
            now_s: monotonic.
            is_measured: whether `bytes_per_s` was measured. Before that there is no limit.
        """
        idle_rtt_s = min(max(path.shortest_rtt_s, self._rtt_s), _VARIES * path.shortest_rtt_s)
        queue = (path.rtt_s - _JITTER_S) / idle_rtt_s
        held_bytes = bytes_per_s * max(path.shortest_rtt_s, self._rtt_s, _RTT_MIN_S)
        frame_bytes = max(1.0, frame_bytes)
        num_held = held_bytes / frame_bytes
        own = 1 + max(_OWN_QUEUE, 0.5 / num_held)
        asked = min(1.0, max(0.0, 1 - (queue - own) / _GRADUALLY))
        self._follow_asked(1.0 if path.carried >= _ALONE else asked, path.carried)
        is_overflowing = self.losses.follow(
            path.sent,
            path.sent_again,
            now_s,
            is_full=queue > _FULL,
            knows_empty=path.shortest_rtt_s - _JITTER_S <= _VARIES * self._rtt_s,
        )
        self._find_flows_that_ignore_loss(is_overflowing and path.carried < _STARVED, now_s)
        is_open = (
            not is_measured or self.losses.is_lossy(now_s) or now_s < self._loss_ignored_until_s
        )
        # What follows a lost packet counts as on the way until that one, sent again, has arrived.
        if is_open or held_bytes >= self._most_bytes:
            return self._most_bytes
        num_back = bytes_per_s * path.back_s / frame_bytes
        has_overflowed = now_s < self.losses.overflowed_s + _OVERFLOWED_S
        num_more = 1 if has_overflowed and num_held < _FEW_FRAMES else _SLACK_FRAMES
        alone = max(2.0, (1 + _SLACK) * num_held + num_back + num_more)
        beside = max(2, round(_LEAVES * self._width * num_held))
        num_frames = self._free * alone + (1 - self._free) * beside
        return int(min(self._most_bytes, num_frames * frame_bytes))

    def _follow_asked(self, asked: float, carried: float) -> None:
        self._free += _FOLLOWS * (asked - self._free)
        if abs(asked - self._free) < _NEAR:
            self._free = asked
        is_alone = self._free == 1.0
        change = 1.0 - self._width if is_alone else (1 - self._free) * (_FAIR - carried)
        self._width = min(_WIDEST, max(1.0, self._width + _WIDENS * change))

    def _find_flows_that_ignore_loss(self, is_starved: bool, now_s: float) -> None:
        self._starved += _AVERAGED * (is_starved - self._starved)
        if self._starved > _OFTEN:
            self._loss_ignored_until_s = now_s + _LOSS_IGNORED_S
