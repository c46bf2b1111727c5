"""Finds ranks of a gateway that are late, and whether others wait for them.

A rank *waits* from when its script has submitted a bucket until it has the result. A rank that has
submitted nothing computes, or hangs: only the coordinator can tell, which knows whether ranks
elsewhere wait. During an evaluation at all sites, all ranks are absent and none waits. A bucket
reaches the gateway once all ranks of the site have added it up. If it does not come, the rank waits
for others of its site, or hangs on the way.

Pure: times are arguments, of one monotonic clock. Callers hold a lock.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from isthmus.sites.gateway.config import StallLimits
from isthmus.sites.silence import Standstills

_ROUNDS = 16
"""Number of recent rounds whose median time sets the limit."""
_FIRST_ROUNDS = 3
"""First rounds, in which ranks compile and warm up for an unknown time."""


@dataclass(frozen=True, slots=True)
class StalledRanks:
    """The ranks of a gateway that have not moved for too long."""

    absent: tuple[int, ...]
    """Ranks with no open bucket, or whose bucket has not reached the gateway."""
    waiting: tuple[int, ...]
    """Ranks with an open bucket; they may be absent, too."""
    is_behind: bool = False
    """The site catches up, and others have made the rounds by now that absent ranks have not."""


@dataclass(slots=True)
class _Rank:
    moved_s: float
    num_open: int = 0
    num_posted: int = 0
    """Number of open buckets that have reached the gateway."""
    round: int = -1
    round_began_s: float = 0.0


class StallWatch:
    """Tracks the progress of the ranks of one gateway."""

    def __init__(
        self, ranks: Iterable[int], limits: StallLimits, lease_s: float, now_s: float
    ) -> None:
        """Begin when all ranks have just joined."""
        self._ranks = {rank: _Rank(now_s) for rank in ranks}
        self._limits = limits
        self._standstills = Standstills(now_s, lease_s)
        self._rounds_s: deque[float] = deque(maxlen=_ROUNDS)
        self._reported = StalledRanks((), ())

    def begin_anew(self, now_s: float) -> None:
        """Count from now on: until now no rank could move."""
        for each in self._ranks.values():
            each.moved_s = now_s

    def handed(self, rank: int, round_: int, now_s: float) -> None:
        """A rank's script has submitted a bucket."""
        each = self._ranks[rank]
        if round_ > each.round:
            if each.round >= 0:
                self._rounds_s.append(now_s - each.round_began_s)
            each.round, each.round_began_s = round_, now_s
        each.num_open += 1
        each.moved_s = now_s

    def moved(self, rank: int, now_s: float) -> None:
        """A rank does not hang: it waits for a checkpoint, or has taken a step without a round."""
        self._ranks[rank].moved_s = now_s

    def posted(self, rank: int, now_s: float) -> None:
        """A bucket that a rank has submitted has reached the gateway."""
        each = self._ranks[rank]
        each.num_posted += 1
        each.moved_s = now_s

    def returned(self, rank: int, now_s: float) -> None:
        """A rank has got a result."""
        each = self._ranks.get(rank)
        if each is not None:
            each.num_open -= 1
            each.num_posted -= 1
            each.moved_s = now_s

    def left(self, rank: int) -> None:
        """A rank has left cleanly."""
        self._ranks.pop(rank, None)

    @property
    def limit_s(self) -> float:
        """Seconds without progress after which a rank counts as late."""
        limits = self._limits
        if len(self._rounds_s) < _FIRST_ROUNDS:
            return max(limits.least_s, limits.first_s)
        return max(limits.least_s, limits.rounds * statistics.median(self._rounds_s))

    def silent_s(self, rank: int, now_s: float) -> float:
        """Return the seconds since a rank's latest progress."""
        return now_s - self._ranks[rank].moved_s

    def round_of(self, rank: int) -> int:
        """Return the latest round that a rank has begun; -1 before the first."""
        return self._ranks[rank].round

    def look(
        self, now_s: float, longest_s: float, results_wait_s: float = math.inf
    ) -> StalledRanks | None:
        """Return the late ranks; None: unchanged since the previous call.

        Args:
            now_s: the time.
            longest_s: latest time at which the caller meant to call again.
            results_wait_s: how long a rank may be late while the others' results wait for it;
                infinity: none wait.
        """
        if self._standstills.look(now_s, longest_s):
            self.begin_anew(now_s)
        late = {
            rank: each
            for rank, each in self._ranks.items()
            if now_s - each.moved_s > self.limit_s
            and (each.round >= 0 or results_wait_s < math.inf)
        }
        stalled = StalledRanks(
            tuple(
                rank
                for rank, each in late.items()
                if each.num_open == 0 or each.num_posted < each.num_open
            ),
            tuple(rank for rank, each in late.items() if each.num_open > 0),
            any(now_s - each.moved_s > results_wait_s for each in late.values()),
        )
        is_new = stalled != self._reported
        self._reported = stalled
        return stalled if is_new else None
