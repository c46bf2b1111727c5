"""Tells a rank that hangs from ranks that wait for it, over all sites.

A gateway knows only that a rank does not come. That is a hang when ranks anywhere wait meanwhile;
where all are away, they evaluate, say. Of several that do not come those that wait for another rank
of their own site are not to blame. Nobody waits for a site that catches up: there it is a hang when
results do, which its gateway says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class AbsentRank:
    """A rank that has not moved for failure.stall_within, and has handed nothing over."""

    rank: int
    for_s: float
    round: int
    is_stopped: bool
    """Its process is stopped."""
    is_in_collective: bool
    doing: str
    """One line."""
    stack_path: str


class StallWatch:
    """Names the ranks that hang. Pure; what a site says replaces what it said before."""

    def __init__(self) -> None:
        self._absent: dict[str, Sequence[AbsentRank]] = {}
        self._waiting: set[str] = set()
        self._named: set[tuple[str, int]] = set()

    def forget(self, site: str) -> None:
        """Nobody there comes, or waits, any more; who comes later may hang again."""
        self._absent.pop(site, None)
        self._waiting.discard(site)
        self._named = {each for each in self._named if each[0] != site}

    def report(
        self,
        site: str,
        absent: Sequence[AbsentRank],
        *,
        is_waiting: bool,
        is_behind: bool = False,
    ) -> list[tuple[str, AbsentRank]]:
        """Take what a site says; return the ranks that hang, by site, each once."""
        self._absent[site] = absent
        (self._waiting.add if is_waiting else self._waiting.discard)(site)
        if not (self._waiting or is_behind):
            return []
        to_blame = {site: absent} if is_behind else self._absent
        pairs = [(name, each) for name, ranks in to_blame.items() for each in ranks]
        stopped = [pair for pair in pairs if pair[1].is_stopped]
        elsewhere = [pair for pair in pairs if not pair[1].is_in_collective]
        found = [
            pair
            for pair in stopped or elsewhere or pairs
            if (pair[0], pair[1].rank) not in self._named
        ]
        self._named |= {(name, each.rank) for name, each in found}
        return found
