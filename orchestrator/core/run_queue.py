"""Which run begins next: by priority, then by age, and only where all its sites are free. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

MAX_WAITING = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """A run that was submitted and has not begun."""

    run_id: str
    priority: int
    """Higher begins first."""
    sequence: int
    """Number of its submission: of the same priority, the older begins first."""
    sites: frozenset[str]
    """The sites that it needs for itself."""


class RunQueue:
    """Runs that wait, in the order in which they shall begin."""

    def __init__(self) -> None:
        self._waiting: list[Waiting] = []

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def run_ids(self) -> frozenset[str]:
        """The runs that wait."""
        return frozenset(each.run_id for each in self._waiting)

    def add(self, run: Waiting) -> None:
        """Have a run wait; one that waits already stays where it is."""
        if all(each.run_id != run.run_id for each in self._waiting):
            self._waiting.append(run)
            self._waiting.sort(key=lambda each: (-each.priority, each.sequence))

    def remove(self, run_id: str) -> bool:
        """Have a run wait no longer; False: it did not."""
        kept = [each for each in self._waiting if each.run_id != run_id]
        is_removed = len(kept) < len(self._waiting)
        self._waiting = kept
        return is_removed

    def position(self, run_id: str) -> int:
        """Return a run's place, from 1; 0: it does not wait."""
        places = (at for at, each in enumerate(self._waiting, 1) if each.run_id == run_id)
        return next(places, 0)

    def startable(self, occupied: Iterable[str]) -> list[str]:
        """Return the runs that may begin now, in order.

        Nobody overtakes a run at a site that it waits for, so a run of many sites has its turn.

        Args:
            occupied: Sites that runs going on have for themselves.
        """
        taken, found = set(occupied), []
        for run in self._waiting:
            if taken.isdisjoint(run.sites):
                found.append(run.run_id)
            taken |= run.sites
        return found
