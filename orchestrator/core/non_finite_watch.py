"""Finds whose gradient was the first that was not finite, of all that ranks tell of one."""

from __future__ import annotations

from isthmus.orchestrator.core.run_events import NonFiniteReported

MAX_NOTES = 8
"""So many are noted of a run: a GradScaler finds out now and then how large its scale may be."""


def note_of(found: NonFiniteReported) -> str:
    """Return what people are to know of it, in a line."""
    place = f"site {found.site}, rank {found.rank}: " if found.rank >= 0 else ""
    return f"NON_FINITE: {place}{found.message}; `exchange.non_finite: carry` lets it cross"


class NonFiniteWatch:
    """Notes each site's first report of the first such step. Pure.

    From the next step on all sites have it, for it is in their parameters: what they tell then
    is no news, until steps were finite again. An average that is not finite is seen by all, so it
    is noted only where no rank has told of its own gradient within `wait_s`.
    """

    def __init__(self, wait_s: float) -> None:
        self._wait_s = wait_s
        self._first_step = self._last_step = -2
        """The latest steps in a row whose gradients were not finite, as far as is known."""
        self._sites: set[str] = set()
        """Those that were noted of the first step."""
        self._average: tuple[NonFiniteReported, float] | None = None
        """What waits for a better explanation, and until when."""
        self._num_notes = 0

    def report(self, found: NonFiniteReported, now_s: float) -> NonFiniteReported | None:
        """Take what a rank tells; return what is to be noted at once."""
        if found.step > self._last_step + 1:
            self._first_step = self._last_step = found.step
            self._sites.clear()
            self._average = None
        self._last_step = max(self._last_step, found.step)
        if found.step != self._first_step or found.site in self._sites:
            return None
        if found.rank >= 0:
            self._average = None
            self._sites.add(found.site)
            return self._counted(found)
        if not self._sites and self._average is None:
            self._average = found, now_s + self._wait_s
        return None

    def explained(self, now_s: float) -> NonFiniteReported | None:
        """Return an average that no rank's gradient explains, once it has waited."""
        if self._average is None or now_s < self._average[1]:
            return None
        found, self._average = self._average[0], None
        self._sites.add(found.site)
        return self._counted(found)

    def _counted(self, found: NonFiniteReported) -> NonFiniteReported | None:
        self._num_notes += 1
        return found if self._num_notes <= MAX_NOTES else None
