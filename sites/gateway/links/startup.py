"""Finds out, within a few round trips, how much faster a link is than its description says.

Pure. The idea is BBR's startup (draft-ietf-ccwg-bbr, section 5.3.1), with a condition before it. A
window that is a little too large, sent a little too fast, brings acknowledgements no faster than
the link carries: on a link as described, at the described rate. If they come a tenth faster two
round trips in a row, the link is a faster one, and the search begins: twice as much, twice as fast,
in each round trip, until three in a row bring hardly more. A link that is as described is never
sent more than before.

A round trip counts only if every frame of it had to wait for the window or its turn: otherwise its
rate is the sender's, not the link's.
"""

from __future__ import annotations

_EVIDENCE = 1.1
"""Times the described rate: half of what a window and pace that are too large allow."""
_EVIDENCE_ROUNDS = 2
"""In a row: one whose acknowledgements only came late looks fast, but the one before it slow."""
_GROWTH = 1.25
_FLAT_ROUNDS = 3
_FLAT_S = 0.1
"""And so long at least: on a short link, three round trips may pass while a thread waits for its
turn."""
GAIN = 2.0
"""Of window and pace, while it searches: enough to double the rate in a round trip."""


class Startup:
    """One link's search. Bytes are counted from the link's beginning; times are monotonic."""

    def __init__(self, bytes_per_s: float) -> None:
        """Begin with the described rate."""
        self.bytes_per_s = bytes_per_s
        """The fastest of a whole round trip; at first the described."""
        self.is_searching = False
        """The link is faster than described, and how much is not known yet."""
        self.is_over = False
        """It has searched: what is measured from now on is as good."""
        self._described_bytes_per_s = bytes_per_s
        self._num_fast = 0
        self._num_flat = 0
        self._grew_s = 0.0
        self._round_ends_bytes = 0
        """The round ends with the first frame that left when so much had been delivered."""
        self._began_bytes = 0
        self._began_s: float | None = None
        self._is_limited = True
        """Whether the link was what held the frames of this round back."""

    def arrive(
        self, delivered_bytes: int, left_at_bytes: int, now_s: float, *, was_held: bool
    ) -> None:
        """A frame was acknowledged.

        Args:
            delivered_bytes: with it.
            left_at_bytes: what had been delivered when it left.
            now_s: now.
            was_held: it had to wait for the window, or for its turn.
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
