"""What an exporter is: speaks to one tool, from one thread that does nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from isthmus.orchestrator.exporters.figures import ExportedEvent, Point, Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """What is new of a run."""

    samples: tuple[Sample, ...]
    """All figures as they are now."""
    points: tuple[Point, ...] = ()
    events: tuple[ExportedEvent, ...] = ()
    state: str = ""
    """The run's, as the journal names it."""
    submitted_s: float = 0.0
    """When the run was submitted, by the wall clock; 0: not known."""
    is_last: bool = False
    """The run has ended, or these exporters end: nothing comes after it."""


class Tool(Protocol):
    """Speaks to one tool. All calls come from one thread, and any may raise.

    Importing the tool's library is part of `open`.
    """

    def open(self) -> str:
        """Get ready; return where to look, for people. Called again later if it raises."""

    def send(self, update: Update) -> bool:
        """Hand over what is new; return when that is done, and whether the tool has taken any."""

    def close(self) -> None:
        """Hand over what is left. Only after `open`, and once."""
