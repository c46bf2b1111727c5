"""When a site that follows may take part: it is level with the others, or never will be. Pure.

It is level when its ranks begin a round of which no result has come yet. Where a step takes a few
milliseconds, or the site computes as much as the others, it may never be, or not for long. So if it
gains too little on them in a while, it enters all the same. The others wait for it once, in the
round with which it enters. It enters only where its ranks can make up soon enough for the rounds
that they lack.
"""

from __future__ import annotations

from dataclasses import dataclass

LEVEL_EVERY = 16
"""Rounds between two times that it is said: what follows from it may fail."""
GAINS = 1 / 4
"""It goes on to follow where its ranks gain at least so much of a round with each that they make.

With a gain of g rounds a round it is level after 1/g times as long as the others would have to
wait. While they wait, all sites but one stand still. While it follows, one is missing. So among
five sites both cost the same at a quarter."""
LONGEST_WAIT = 4.0
"""Times `patience_s`: so long may the others have to wait."""
LEEWAY_S = 1.0
"""More, in which they come to hear of it."""


@dataclass(frozen=True, slots=True)
class Mark:
    """How far the ranks were at a time."""

    at_s: float
    round: int
    num_behind: int


class Following:
    """How far the ranks of a site that follows are behind the results of the others."""

    def __init__(self, patience_s: float) -> None:
        """Begin before the first round. Every `patience_s` it is looked how much the site gains."""
        self._patience_s = patience_s
        self._since: Mark | None = None
        self._silent_until = 0
        """The round of which it may be said again that the site is level."""

    @property
    def longest_wait_s(self) -> float:
        """The longest that the others may have to wait for the site."""
        return LONGEST_WAIT * self._patience_s

    def begins(self, round_: int, newest: int, now_s: float) -> int | None:
        """The ranks begin a round, and there are results of rounds up to `newest`.

        Returns:
            How many rounds the site may be behind when it is let in: 0 where it is level, more
            where it never is; None: it is not to be let in now.
        """
        now = Mark(now_s, round_, max(0, newest - round_ + 1))
        since = self._since = self._since or now
        if now_s - since.at_s >= self._patience_s:
            self._since = now
            round_s = (now_s - since.at_s) / (round_ - since.round)
            gains = (since.num_behind - now.num_behind) / (round_ - since.round)
            if gains < GAINS and now.num_behind * round_s <= self.longest_wait_s:
                return now.num_behind + int(LEEWAY_S / round_s)
        if now.num_behind or round_ < self._silent_until:
            return None
        self._silent_until = round_ + LEVEL_EVERY
        return 0
