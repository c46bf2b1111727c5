"""Decides when a site that is catching up rejoins: once caught up, or if it never will. Pure.

A site has caught up when its ranks begin a round of which no result has come yet. A site as fast as
the others never catches up, or not for long, because they train on meanwhile. So if it gains too
little in a while, it rejoins anyway. The others then wait for it once, in the round of the rejoin,
if its ranks can make up the missing rounds soon enough.
"""

from __future__ import annotations

from dataclasses import dataclass

LEVEL_EVERY = 16
"""Rounds between two announcements that the site has caught up: the rejoin may fail."""
GAINS = 1 / 4
"""Catch-up rate, in rounds gained per round made, from which the site goes on catching up. At a
rate g it has caught up after 1/g times as long as the others would have to wait. While they wait,
all sites but one stand still; while it catches up, one is missing. So among five sites both cost
the same at a quarter."""
LONGEST_WAIT = 4.0
"""Longest wait of the others, in multiples of `patience_s`."""
LEEWAY_S = 1.0
"""Extra wait for the rejoin to become known at the others."""


@dataclass(frozen=True, slots=True)
class Mark:
    """The progress of the ranks at a time."""

    at_s: float
    round: int
    num_behind: int


class Following:
    """Tracks how far the ranks of a site that is catching up are behind the others."""

    def __init__(self, patience_s: float) -> None:
        """Begin before the first round. The gain is measured every `patience_s`."""
        self._patience_s = patience_s
        self._since: Mark | None = None
        self._silent_until = 0
        """First round at which the site may be announced as caught up again."""

    @property
    def longest_wait_s(self) -> float:
        """Longest time that the others may have to wait for the site."""
        return LONGEST_WAIT * self._patience_s

    def begins(self, round_: int, newest: int, now_s: float) -> int | None:
        """Decide at the beginning of a round; results of rounds up to `newest` have come.

        Returns:
            How many rounds the site may be behind when it rejoins: 0 if it has caught up, more if
                it never will. None: it should not rejoin now.
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
