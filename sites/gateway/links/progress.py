"""Detects connections that transfer nothing any more. Pure: times and counts are arguments.

A peer may be gone though no connection breaks: a proxy in between acknowledges bytes until its
buffers are full, and passes nothing on. And a connection may be slow: a frame of 8 MiB takes 70 s
at 1 Mbit/s, during which no answer comes. So silence counts from the latest answer, or from the
latest acknowledged bytes while more were left to send. The very last bytes prove nothing: a ping to
a peer that is gone is acknowledged, too.
"""

from __future__ import annotations

from dataclasses import dataclass

from isthmus.sites.silence import Silence, Standstills


@dataclass(frozen=True, slots=True)
class Traffic:
    """TCP's byte counts of a connection so far."""

    taken_bytes: int
    """Bytes acknowledged by the other end of the TCP connection."""
    left_bytes: int
    """Bytes written and not acknowledged yet."""
    received_bytes: int


class Progress:
    """The progress of one connection."""

    def __init__(self, now_s: float, lease_s: float) -> None:
        """`lease_s`: time without progress after which the connection is given up."""
        self._silence = Silence(now_s)
        self._standstills = Standstills(now_s, lease_s)
        self._taken_bytes = 0
        self._num_answers = 0

    def begin_anew(self, now_s: float) -> None:
        """Restart the clock: nothing was expected of the peer until now."""
        self._silence = Silence(now_s)

    def look(self, now_s: float, longest_s: float, traffic: Traffic, num_answers: int) -> float:
        """Take a sample; return how long there has been no progress.

        Args:
            now_s: now.
            longest_s: latest time at which the caller meant to sample again. If it is past, this
                process was suspended, and the clock restarts.
            traffic: byte counts; bytes still to be written count as left.
            num_answers: answers received so far.
        """
        is_taken = traffic.left_bytes > 0 and traffic.taken_bytes != self._taken_bytes
        if is_taken or num_answers != self._num_answers:
            self._silence.hear(now_s)
        self._taken_bytes, self._num_answers = traffic.taken_bytes, num_answers
        if self._standstills.look(now_s, longest_s):
            self._silence.begin_anew(now_s)
        return self._silence.lasts_s(now_s)
