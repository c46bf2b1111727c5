"""Decides when a site that is catching up rejoins: by what that costs the others. Pure.

When it rejoins, the others wait for it once, in the round of the rejoin, until its ranks have made
the rounds that they are behind. So a site that is hardly behind rejoins at once. One that is
further behind goes on catching up, for its gradients count for nothing and it gets results without
waiting. A site as fast as the others never catches up that way. So where it gains too little, it
rejoins anyway: it would be as far behind later.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

NEAR_STEPS = 2
"""Steps that a site may be behind to rejoin at once."""
NEAR_EVERY = 16
"""Rounds between two announcements of that: the rejoin may fail."""
GAINS = 1 / 4
"""Catch-up rate, in rounds gained per round made, from which the site goes on catching up. At a
rate g it has caught up after 1/g times as long as the others would have to wait. While they wait,
all sites but one stand still; while it catches up, one is missing. So among five sites both cost
the same at a quarter."""
GAIN_ROUNDS = 16
"""The gain is measured in so many rounds, or in `patience_s`, ..."""
GAIN_S = 2.0
"""... and for no less than this long."""
LONGEST_WAIT = 4.0
"""Wait of the others, in multiples of `patience_s`, up to which the site rejoins as soon as it is
seen to gain too little. For a longer one it has to have been catching up for 1 / GAINS as long."""
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

    def __init__(self, patience_s: float, steps_per_round: int = 1) -> None:
        """Begin before the first round; `patience_s` is what the others' waits are measured by."""
        self._patience_s = patience_s
        self._near = NEAR_STEPS // steps_per_round
        """Rounds that the site may be behind to rejoin at once."""
        self._first_s = 0.0
        """When the ranks began their first round."""
        self._near_s = math.inf
        """When the site was first announced as near."""
        self._since: Mark | None = None
        self._silent_until = 0
        """First round at which the site may be announced as near again."""
        self.wait_s = LONGEST_WAIT * patience_s
        """For how long the others may have to wait."""

    def begins(self, round_: int, newest: int, now_s: float) -> int | None:
        """Decide at the beginning of a round; results of rounds up to `newest` have come.

        Returns:
            How many rounds the site may be behind when it rejoins: 0 if it has caught up, more if
                the others will have to wait. None: it should not rejoin now.
        """
        now = Mark(now_s, round_, max(0, newest - round_ + 1))
        if self._since is None:
            self._first_s, self._since = now_s, now
        since, past_s = self._since, now_s - self._since.at_s
        is_whole = round_ - since.round >= GAIN_ROUNDS or past_s >= self._patience_s
        if is_whole and past_s >= GAIN_S:
            self._since = now
            round_s = past_s / (round_ - since.round)
            gains = (since.num_behind - now.num_behind) / (round_ - since.round)
            wait_s = now.num_behind * round_s
            may_wait_s = max(self.wait_s, GAINS * (now_s - self._first_s))
            is_in_vain = now.num_behind > self._near or now_s - self._near_s >= self._patience_s
            if is_in_vain and gains < GAINS and wait_s <= may_wait_s:
                self.wait_s = may_wait_s
                return now.num_behind + int(LEEWAY_S / round_s)
        if now.num_behind > self._near or round_ < self._silent_until:
            return None
        self._silent_until, self._near_s = round_ + NEAR_EVERY, min(self._near_s, now_s)
        return now.num_behind


class OthersRounds:
    """The rounds that the others are in, as a gateway that is behind hears of them."""

    def __init__(self) -> None:
        self.newest = -1
        """Latest round of which a frame came before a rank had posted it; -1: none."""
        self._newest_s = math.inf
        """When that frame came."""
        self._longest_s = 0.0
        """Longest time between two such rounds."""
        self._awaited_since_s = math.inf
        """Since when the others may be waiting for this site to rejoin (monotonic)."""

    def note(self, round_: int, now_s: float) -> None:
        """A frame of a bucket has come that no rank has posted."""
        if round_ > self.newest:
            self._longest_s = max(self._longest_s, now_s - self._newest_s)
            self.newest, self._newest_s = round_, now_s

    def wait(self, since_s: float) -> None:
        """They may be waiting for this site from now on; infinity: they are not."""
        self._awaited_since_s = since_s

    def waited_s(self, now_s: float) -> float:
        """Return how long they may have waited; 0 or less: they do not."""
        return now_s - self._awaited_since_s

    @property
    def patience_s(self) -> float:
        """How long ranks that catch up may leave results waiting.

        Twice as long as the others have taken for a round, an evaluation in it included.
        """
        return 2 * self._longest_s
