"""Which positions of a run's data have been used: the ledger behind "each sample exactly once".

Positions count the samples of a run, from 0, over all sites and all passes over the data. A round
takes the next ones for its whole global batch, and each rank of each site its own part of them. So
what has been used is one number, and *holes*: ranges below it that were handed out for a round
which never took place. Holes are handed out before anything new. Pure: every rank computes the
same, and nothing of it depends on how many ranks there are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Positions = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class DataPositions:
    """What has been handed out so far."""

    next: int = 0
    """Nothing from here on has been handed out."""
    holes: tuple[range, ...] = ()
    """Ranges below `next` that are to be handed out again, lowest first, apart from each other."""

    def taken(self, num_samples: int) -> tuple[Positions, DataPositions]:
        """Return the positions of one round, in the order of its ranks, and what remains after it.

        Holes come first.
        """
        ranges: list[range] = []
        holes = list(self.holes)
        missing = num_samples
        while holes and missing:
            hole = holes.pop(0)
            ranges.append(hole[:missing])
            if rest := hole[missing:]:
                holes.insert(0, rest)
            missing -= len(ranges[-1])
        ranges.append(range(self.next, self.next + missing))
        after = DataPositions(self.next + missing, tuple(holes))
        return np.concatenate([np.arange(each.start, each.stop) for each in ranges]), after

    def with_holes(self, positions: Iterable[int]) -> DataPositions:
        """Return the ledger after positions were given back: their round never took place.

        Raises:
            ValueError: one of them has not been handed out, or was given back before.
        """
        unused = [each for hole in self.holes for each in hole]
        returned = sorted([*unused, *map(int, positions)])
        if returned and not (returned[0] >= 0 and returned[-1] < self.next):
            raise ValueError(f"positions given back: want each below {self.next}")
        if len(set(returned)) != len(returned):
            raise ValueError("positions given back: one of them is unused already")
        return DataPositions(self.next, tuple(ranges_of(returned)))

    def to_json(self) -> dict[str, object]:
        """Return the ledger as a checkpoint's manifest has it."""
        return {"next": self.next, "holes": [[hole.start, hole.stop] for hole in self.holes]}

    @classmethod
    def from_json(cls, written: Mapping[str, object]) -> DataPositions:
        """Read what `to_json` wrote.

        Raises:
            ValueError, TypeError, KeyError: it did not.
        """
        first, holes = written["next"], written["holes"]
        if not isinstance(first, int) or not isinstance(holes, list):
            raise TypeError("positions: want a number and a list")
        return cls(first, tuple(range(start, stop) for start, stop in holes))


def ranges_of(ordered: Sequence[int]) -> list[range]:
    """Return rising numbers as the fewest ranges."""
    ranges: list[range] = []
    for each in ordered:
        if ranges and ranges[-1].stop == each:
            ranges[-1] = range(ranges[-1].start, each + 1)
        else:
            ranges.append(range(each, each + 1))
    return ranges
