"""Decides how many bytes may be on the way to one peer, and how fast they may leave. Pure.

A link is full when as much is on the way as it carries in a round trip. What goes beyond waits in a
router's queue. What goes beyond that is dropped, which costs TCP far more than it brings: CUBIC at
1 Gbit/s and 20 ms takes ten seconds to recover from one overflow. Three mechanisms keep links full
and queues short:

- `Window`: at most a fifth more than rate times round trip is unacknowledged, plus what streams are
  in the midst of. Frames leave a quarter faster than the link carries them, and not all at once:
  a whole window that leaves at once after a pause overflows the same queue.
- `Startup`: finds out within a few round trips that a link is faster than described.
- `LimitedRate`: adds up what the link carried while it was the limit, for plans to come.

The rate and the round trip are the configured ones at first, and then what is measured.

All times are monotonic seconds. Bytes are counted from the link's beginning.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from statistics import median_low

from protos.frame import HEADER_BYTES
from sites.gateway.config import GatewayConfig, PeerLink

_GAIN = 1.2
"""Times what the link carries in a round trip: the window."""
_SLACK_S = 0.003
"""Time that both gateways take for a frame, and that a thread waits for its turn."""
_PACE = 1.25
"""Times the link's rate: how fast frames leave."""
_PACKETS_PACE = 1.15
"""Times the link's rate: how fast the kernel lets packets leave. On a link that is faster than
described it has to be fast enough for `Startup` to see that."""
_WINDOW_MIN_BYTES = 32 << 20
"""A window may always grow up to here, however slow the link is said to be."""
_FEW_FRAMES = 4
"""A window of fewer frames is rounded up to whole ones, and may always grow to so many: with one
frame at a time the link rests while it is taken over."""
_EPOCH_SAMPLES = 64
_EPOCH_S = 5.0
"""The measured rate is the fastest of this epoch and the one before: so it can fall, too."""
_LEAST_SHARE = 1 / 8
"""The measured rate counts as at least this share of the configured one. Else a peer that took
nothing for a while would be left waiting."""
_IDLE_ROUND_TRIPS = 8
"""The idle round trip is the shortest of this many latest ones that found the link idle."""

_EVIDENCE = 1.1
"""A round trip this many times faster than described is evidence of a faster link. It is half of
what the window's and the pace's gains allow."""
_EVIDENCE_ROUNDS = 2
"""Round trips in a row that have to be so fast. One whose acknowledgements only came late looks
fast, but then the one before it looked slow."""
_GROWTH = 1.25
"""A round trip has grown if it is so many times faster than the fastest before it."""
_FLAT_ROUNDS = 3
"""Round trips in a row without growth end the search."""
_FLAT_S = 0.1
"""And they take so long at least: on a short link, three round trips may pass while a thread waits
for its turn."""
_SEARCH_GAIN = 2.0
"""The gain of window and pace during the search: enough to double the rate in a round trip."""

WARM_ROUND_TRIPS = 8
"""After a pause, connections start slowly for so many round trips: ten packets, doubled in each,
are 2 MB in the last of them."""


class Startup:
    """Finds out, within a few round trips, how much faster a link is than its description says.

    The idea is BBR's startup (draft-ietf-ccwg-bbr, section 5.3.1), with a condition before it. A
    window and a pace that are a little too large bring acknowledgements no faster than the link
    carries: on a link as described, at the described rate. If they come a tenth faster two round
    trips in a row, the link is a faster one, and the search begins. Then window and pace are
    doubled in each round trip, until three in a row bring hardly more. A link that is as described
    never gets more than before.

    A round trip counts only if every frame of it had to wait for the window or its turn. Otherwise
    its rate is the sender's, and not the link's.
    """

    def __init__(self, bytes_per_s: float) -> None:
        """Begin with the described rate."""
        self.bytes_per_s = bytes_per_s
        """The rate of the fastest round trip; at first the described rate."""
        self.is_searching = False
        """Whether the link is faster than described, and by how much is not known yet."""
        self.is_over = False
        """Whether the search has ended: what is measured from now on is as good."""
        self._described_bytes_per_s = bytes_per_s
        self._num_fast = 0
        self._num_flat = 0
        self._grew_s = 0.0
        self._round_ends_bytes = 0
        """The round ends with the first frame that left when so much had been delivered."""
        self._began_bytes = 0
        self._began_s: float | None = None
        self._is_limited = True
        """Whether the link was what held back the frames of this round."""

    def arrive(
        self, delivered_bytes: int, left_at_bytes: int, now_s: float, *, was_held: bool
    ) -> None:
        """A frame was acknowledged, with which so much is delivered.

        When it left, `left_at_bytes` had been. `was_held`: it had waited for room or its turn.
        """
        if self.is_over:
            return
        self._is_limited = self._is_limited and was_held
        if left_at_bytes < self._round_ends_bytes:
            return
        if self._began_s is not None and self._is_limited and now_s > self._began_s:
            self._round((delivered_bytes - self._began_bytes) / (now_s - self._began_s), now_s)
        self._began_s, self._began_bytes = now_s, delivered_bytes
        self._round_ends_bytes = delivered_bytes
        self._is_limited = True

    def _round(self, bytes_per_s: float, now_s: float) -> None:
        if not self.is_searching:
            is_fast = bytes_per_s >= _EVIDENCE * self._described_bytes_per_s
            self._num_fast = self._num_fast + 1 if is_fast else 0
            if self._num_fast < _EVIDENCE_ROUNDS:
                return
            self.is_searching = True
            self._grew_s = now_s
        has_grown = bytes_per_s >= _GROWTH * self.bytes_per_s
        self._num_flat = 0 if has_grown else self._num_flat + 1
        self._grew_s = now_s if has_grown else self._grew_s
        self.bytes_per_s = max(self.bytes_per_s, bytes_per_s)
        if self._num_flat >= _FLAT_ROUNDS and now_s - self._grew_s >= _FLAT_S:
            self.is_over = True
            self.is_searching = False


@dataclass(frozen=True, slots=True)
class Departure:
    """How things stood when a frame left."""

    left_s: float
    delivered_bytes: int
    delivered_s: float
    """When the latest frame before was acknowledged; `left_s` if nothing else was on the way."""
    delivered_left_s: float
    """When that frame had left; `left_s` if nothing else was on the way."""
    was_held: bool
    """Whether this frame had to wait, and every frame of a round trip before it. Only then the link
    was the limit, and not the sender."""


class Window:
    """The window and the pace of one link.

    The round trip is the shortest of the greetings that found the link idle, for they wait in no
    queue. The rate is the fastest at which acknowledgements came, once frames have waited for the
    window long enough to tell. What is sent in short bursts says nothing about a link, nor does
    what left within a round trip after them (draft-ietf-ccwg-bbr, section 4.1.2.4, has the same
    rule). A rate that was taken for too small grows by a fifth in each round trip; at a link's
    first use `Startup` finds it faster.
    """

    def __init__(
        self,
        *,
        bytes_per_s: float,
        rtt_s: float,
        most_bytes: int,
        num_streams: int = 1,
        fixed_bytes: int | None = None,
    ) -> None:
        """Begin with what is configured.

        Args:
            bytes_per_s: what the link is said to carry.
            rtt_s: its round trip, as described.
            most_bytes: the window's limit, whatever is measured.
            num_streams: how many connections carry frames side by side.
            fixed_bytes: the window itself, if nothing is to be measured.
        """
        self.num_streams = num_streams
        self._configured_bytes_per_s = bytes_per_s
        self._most_bytes = most_bytes
        self._fixed_bytes = fixed_bytes
        self._rtts_s = deque([rtt_s], maxlen=_IDLE_ROUND_TRIPS)
        self._is_rtt_measured = False
        self._frame_bytes = 0
        self._next_s = 0.0
        self._delivered = Departure(0.0, 0, 0.0, 0.0, was_held=False)
        self._dry_until_bytes = 0
        """Until so much is delivered, acknowledgements tell of a sender that had nothing to
        send, and not of the link."""
        self._epoch_s: float | None = None
        self._num_samples = 0
        self._fastest = 0.0
        self._fastest_before = 0.0
        self._startup = Startup(bytes_per_s)

    @property
    def rtt_s(self) -> float:
        """The round trip of the idle link."""
        return min(self._rtts_s)

    @property
    def idle_rtt_s(self) -> float | None:
        """The median of the latest greetings that found the link idle; None before the first.

        The median of two is the shorter one: the other may have had to connect, which takes two or
        three round trips.
        """
        return median_low(self._rtts_s) if self._is_rtt_measured else None

    @property
    def bytes_per_s(self) -> float:
        """What the link carries."""
        if not self._fastest_before:
            found = self._startup.bytes_per_s
            return max(found, self._fastest) if self._startup.is_over else found
        measured = max(self._fastest, self._fastest_before)
        return max(measured, _LEAST_SHARE * self._configured_bytes_per_s)

    @property
    def num_bytes(self) -> int:
        """Bytes that may be unacknowledged."""
        if self._fixed_bytes is not None:
            return self._fixed_bytes
        gain = _SEARCH_GAIN if self._startup.is_searching else _GAIN
        on_the_way = int(self.bytes_per_s * (gain * self.rtt_s + _SLACK_S))
        # A frame is acknowledged as a whole. Of those that streams are in the midst of, half has
        # arrived on average. Very many streams are there for the sake of losses: then each fills
        # but a small part of the link.
        in_the_midst = (self.num_streams + 1) * self._frame_bytes // 2
        most = max(2 * self._frame_bytes, on_the_way // 4)
        window = on_the_way + min(in_the_midst, most)
        if window < _FEW_FRAMES * self._frame_bytes:
            # Only whole frames leave. Of so few, a part of one would be missed; and the last chunk
            # of a bucket, however small, would take the place of a whole one.
            window = -(-(window + self._frame_bytes // 2) // self._frame_bytes) * self._frame_bytes
        return min(window, self._most_bytes)

    @property
    def paced_bytes_per_s(self) -> float | None:
        """How fast packets of one connection may leave; None: as fast as TCP would have it.

        Nothing holds packets back while `Startup` searches. A link that seems slower than described
        is paced as if it were as described: losses look the same, and to slow down for them would
        have it seem slower still.
        """
        if self._startup.is_searching:
            return None
        return _PACKETS_PACE * max(self.bytes_per_s, self._configured_bytes_per_s)

    def delay_s(self, now_s: float) -> float:
        """Return for how long the next frame must wait for its turn; none if not above 0."""
        return self._next_s - now_s

    def note_round_trip(self, rtt_s: float, *, is_idle: bool) -> None:
        """A greeting was answered. One that waited in a queue can only be too long."""
        if is_idle and not self._is_rtt_measured:
            # Replaced at once: whoever asks for the window meanwhile holds no lock.
            self._rtts_s = deque([rtt_s], maxlen=_IDLE_ROUND_TRIPS)
            self._is_rtt_measured = True
        elif is_idle or rtt_s < self.rtt_s:
            self._rtts_s.append(rtt_s)

    def run_dry(self, unacknowledged_bytes: int) -> None:
        """A frame could leave now, but there is none."""
        self._dry_until_bytes = self._delivered.delivered_bytes + unacknowledged_bytes

    def depart(self, size_bytes: int, now_s: float, *, is_alone: bool, was_held: bool) -> Departure:
        """A frame leaves; return what `arrive` needs.

        `is_alone`: nothing else is on the way. `was_held`: it had to wait for room or its turn.
        """
        self._frame_bytes = max(self._frame_bytes, size_bytes)
        pace = _SEARCH_GAIN if self._startup.is_searching else _PACE
        # A turn that was taken late is made up for. Else every wake-up would cost some of the pace.
        began_s = max(self._next_s, now_s - _SLACK_S)
        self._next_s = began_s + size_bytes / (pace * self.bytes_per_s)
        latest = self._delivered
        return Departure(
            left_s=now_s,
            delivered_bytes=latest.delivered_bytes,
            delivered_s=now_s if is_alone else latest.delivered_s,
            delivered_left_s=now_s if is_alone else latest.left_s,
            was_held=was_held and latest.delivered_bytes >= self._dry_until_bytes,
        )

    def arrive(self, size_bytes: int, departure: Departure, now_s: float) -> None:
        """A frame was acknowledged."""
        delivered_bytes = self._delivered.delivered_bytes + size_bytes
        self._delivered = Departure(departure.left_s, delivered_bytes, now_s, 0.0, was_held=False)
        self._startup.arrive(
            delivered_bytes, departure.delivered_bytes, now_s, was_held=departure.was_held
        )
        if not departure.was_held:
            return
        # Acknowledgements may come late and all together; but not faster than the frames left.
        elapsed_s = max(
            now_s - departure.delivered_s, departure.left_s - departure.delivered_left_s, 1e-6
        )
        self._sample((delivered_bytes - departure.delivered_bytes) / elapsed_s, now_s)

    def _sample(self, bytes_per_s: float, now_s: float) -> None:
        self._fastest = max(self._fastest, bytes_per_s)
        self._num_samples += 1
        if self._epoch_s is None:
            self._epoch_s = now_s
        elif now_s - self._epoch_s >= _EPOCH_S and self._num_samples >= _EPOCH_SAMPLES:
            self._fastest_before, self._fastest = self._fastest, 0.0
            self._epoch_s, self._num_samples = now_s, 0


class LimitedRate:
    """Adds up what a link carried while it was the limit, and not a sender with nothing to send.

    A frame that left a round trip before the acknowledgement of the one before it was at the link
    when that one was through. From then until its own acknowledgement, the link had something to
    carry all the time. So what passes between two such acknowledgements is what the link carries,
    whatever window or sender were up to. After a pause the first round trips do not count:
    connections start slowly, and plans know that.
    """

    def __init__(self) -> None:
        self.limited_bytes = 0
        self.limited_s = 0.0
        self._warm_s = 0.0
        self._acknowledged_s = 0.0
        """The latest."""

    def begin(self, now_s: float, rtt_s: float) -> None:
        """A frame leaves, and nothing else is on the way."""
        self._warm_s = now_s + WARM_ROUND_TRIPS * rtt_s

    def arrive(self, size_bytes: int, left_s: float, now_s: float, rtt_s: float) -> None:
        """A frame was acknowledged."""
        before_s, self._acknowledged_s = self._acknowledged_s, now_s
        if before_s >= max(self._warm_s, left_s + rtt_s):
            self.limited_bytes += size_bytes
            self.limited_s += now_s - before_s


def window_of(config: GatewayConfig, link: PeerLink) -> Window:
    """Return the window of a link to one gateway."""
    return Window(
        bytes_per_s=link.bytes_per_s,
        rtt_s=link.rtt_s,
        most_bytes=widest_window_bytes(config, link),
        fixed_bytes=config.window_bytes,
    )


def widest_window_bytes(config: GatewayConfig, link: PeerLink) -> int:
    """Return how many bytes to a peer may be unacknowledged at most, whatever is measured."""
    if config.window_bytes is not None:
        return config.window_bytes
    frames_bytes = _FEW_FRAMES * (config.chunk_bytes + HEADER_BYTES)
    return max(int(4 * link.bytes_per_s * link.rtt_s), _WINDOW_MIN_BYTES, frames_bytes)
