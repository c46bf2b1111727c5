"""Tells whether a connection still gets anything across. Pure: times and counts are arguments.

A peer may be gone though nothing breaks: a proxy between answers for it, takes what it has room
for, and passes nothing on. And a connection may be slow: a frame of 8 MiB takes 70 s at 1 Mbit/s,
during which no answer comes. So silence counts from the latest answer, and from the latest bytes
that were taken while more were left to send. The very last ones prove nothing: a question that was
asked of a peer that is gone is taken, too.
"""

from __future__ import annotations

from dataclasses import dataclass

from isthmus.sites.silence import Silence, Standstills


@dataclass(frozen=True, slots=True)
class Traffic:
    """What TCP has done on a connection so far."""

    taken_bytes: int
    """Sent, and acknowledged by who is at TCP's other end."""
    left_bytes: int
    """Written, and not acknowledged yet."""
    received_bytes: int


class Progress:
    """The progress of one connection."""

    def __init__(self, now_s: float, lease_s: float) -> None:
        """`lease_s`: after how long without progress it is given up."""
        self._silence = Silence(now_s)
        self._standstills = Standstills(now_s, lease_s)
        self._taken_bytes = 0
        self._num_answers = 0

    def begin_anew(self, now_s: float) -> None:
        """Nothing was wanted from the peer until now."""
        self._silence = Silence(now_s)

    def look(self, now_s: float, longest_s: float, traffic: Traffic, num_answers: int) -> float:
        """Return for how long there has been none.

        Args:
            now_s: now.
            longest_s: by when the caller would have looked again at the latest. If it is later,
                this process stood still, and the peer is given time anew.
            traffic: of the connection, with what waits to be written counted as left.
            num_answers: what counts as an answer, so far.
        """
        is_taken = traffic.left_bytes > 0 and traffic.taken_bytes != self._taken_bytes
        if is_taken or num_answers != self._num_answers:
            self._silence.hear(now_s)
        self._taken_bytes, self._num_answers = traffic.taken_bytes, num_answers
        if self._standstills.look(now_s, longest_s):
            self._silence.begin_anew(now_s)
        return self._silence.lasts_s(now_s)
