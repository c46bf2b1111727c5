"""Notices sites that train on the same data, by hashes of their own gradients and inputs."""

from __future__ import annotations

from dataclasses import dataclass

WINDOW_STEPS = 64
"""Steps that are remembered: a site that is further behind is not compared."""

SAME_INPUTS = 3
"""In so many steps two sites have had the same inputs, of unlike gradients, when that is noted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SameData:
    """Two sites whose own gradients, or inputs, of a step were equal, bit for bit."""

    step: int
    sites: tuple[str, str]
    times: int
    """In how many steps that has been seen of any sites, this one included."""

    def __str__(self) -> str:
        first, second = self.sites
        return (
            f"sites {first} and {second} had the same gradient in step {self.step}, before it was "
            "averaged: they read the same data"
        )


class SameDataWatch:
    """Finds equal hashes in a step. Pure. Gradients of different data are never equal."""

    def __init__(self) -> None:
        self._steps: dict[int, dict[int, str]] = {}
        """Which site had a hash first, by step and hash."""
        self._found: set[int] = set()
        """Steps. A run that goes on in spite of it keeps a number for each."""
        self._newest = 0

    @property
    def has_found(self) -> bool:
        """Whether two sites have had an equal hash in any step."""
        return bool(self._found)

    def report(self, site: str, step: int, gradient_hash: int) -> SameData | None:
        """Compare the hash of a site's own gradient with others'; 0: there is none to compare.

        Returns:
            What was found; once a step, however many sites are alike.
        """
        if gradient_hash == 0 or step in self._found or step <= self._newest - WINDOW_STEPS:
            return None
        self._newest = max(self._newest, step)
        for each in [each for each in self._steps if each <= self._newest - WINDOW_STEPS]:
            del self._steps[each]
        first = self._steps.setdefault(step, {}).setdefault(gradient_hash, site)
        if first == site:
            return None
        self._found.add(step)
        one, other = sorted((first, site))  # whichever was heard first
        return SameData(step=step, sites=(one, other), times=len(self._found))
