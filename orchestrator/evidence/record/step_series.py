"""Figures over steps in a bounded number of points, each with minimum, maximum and mean.

Pure. A point covers `width` steps; once there are more points than allowed, each two become one. So
adding takes the same time however long a run is, and so does reading. Records are kept as they come
and added many at once, by numpy.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

MAX_POINTS = 600
"""More than a page 1400 pixels wide can show apart."""
BATCH = 2048
"""Records that are added at once."""


@dataclass(slots=True)
class _Points:
    """Points by their places: a point's place is its steps over how many a point has."""

    place: Array
    first: Array
    last: Array
    wall_s: Array
    records: Array
    figures: dict[str, Array]
    """By name, four rows: the number of values, their sum, the least and the most."""

    @classmethod
    def of(cls, steps: Array, wall_s: Array, values: Mapping[str, Array]) -> _Points:
        """Return a point for each record; a value that is not finite counts as none."""
        figures = {}
        for name, each in values.items():
            known = np.isfinite(each)
            figures[name] = np.stack(
                [
                    known.astype(float),
                    np.where(known, each, 0.0),
                    np.where(known, each, math.inf),
                    np.where(known, each, -math.inf),
                ]
            )
        return cls(steps, steps, steps, wall_s, np.ones_like(steps), figures)

    def __len__(self) -> int:
        return len(self.place)

    def part(self, chosen: slice | Array) -> _Points:
        """Return some of them."""
        figures = {name: rows[:, chosen] for name, rows in self.figures.items()}
        return _Points(
            self.place[chosen],
            self.first[chosen],
            self.last[chosen],
            self.wall_s[chosen],
            self.records[chosen],
            figures,
        )

    def then(self, other: _Points) -> _Points:
        """Return these, and others after them."""
        figures = {
            name: np.concatenate([self._rows(name), other._rows(name)], axis=1)
            for name in dict.fromkeys([*self.figures, *other.figures])
        }
        return _Points(
            np.concatenate([self.place, other.place]),
            np.concatenate([self.first, other.first]),
            np.concatenate([self.last, other.last]),
            np.concatenate([self.wall_s, other.wall_s]),
            np.concatenate([self.records, other.records]),
            figures,
        )

    def _rows(self, name: str) -> Array:
        if name in self.figures:
            return self.figures[name]
        nothing = np.array([[0.0], [0.0], [math.inf], [-math.inf]])
        return np.repeat(nothing, len(self), axis=1)

    def merged(self) -> _Points:
        """Return one point for each place, in order."""
        if len(self) < 2:
            return self
        ordered = self
        if (self.place[1:] < self.place[:-1]).any():
            ordered = self.part(np.argsort(self.place, kind="stable"))
        is_new = np.concatenate([[True], ordered.place[1:] != ordered.place[:-1]])
        starts = np.flatnonzero(is_new)
        figures = {}
        for name, rows in ordered.figures.items():
            figures[name] = np.concatenate(
                [
                    np.add.reduceat(rows[:2], starts, axis=1),
                    np.minimum.reduceat(rows[2:3], starts, axis=1),
                    np.maximum.reduceat(rows[3:], starts, axis=1),
                ]
            )
        return _Points(
            ordered.place[starts],
            np.minimum.reduceat(ordered.first, starts),
            np.maximum.reduceat(ordered.last, starts),
            np.maximum.reduceat(ordered.wall_s, starts),
            np.add.reduceat(ordered.records, starts),
            figures,
        )

    def with_batch(self, batch: _Points) -> _Points:
        """Return these, and with them what has come since."""
        added = batch.merged()
        kept = int(np.searchsorted(self.place, added.place[0]))
        tail = self.part(slice(kept, None)).then(added).merged()
        return self.part(slice(kept)).then(tail)

    def widened(self, factor: int) -> _Points:
        """Return points of so many times as many steps."""
        wider = self.part(slice(None))
        wider.place = self.place // factor
        return wider.merged()


class StepSeries:
    """Figures over all steps of a run, and beside them its newest steps one by one."""

    def __init__(
        self,
        max_points: int = MAX_POINTS,
        *,
        names: Sequence[str] | None = None,
        num_newest: int = MAX_POINTS,
    ) -> None:
        """Begin without points.

        Args:
            max_points: The most that there are over all steps.
            names: The figures that are kept of each record; None: all.
            num_newest: The newest steps that are kept.
        """
        self._max_points, self._num_newest = max_points, num_newest
        self._names = names
        self._width = 1
        nothing = np.empty(0, dtype=np.int64)
        self._points = self._newest = _Points.of(nothing, np.empty(0), {})
        self._steps: list[int] = []
        self._walls_s: list[float] = []
        self._values: list[Mapping[str, float]] = []

    @property
    def width(self) -> int:
        """Steps of a point."""
        self._add_batch()
        return self._width

    def add(self, step: int, wall_s: float, values: Mapping[str, float]) -> None:
        """Take one record of a step; what is not finite is left out. Nobody may change it later."""
        self._steps.append(step)
        self._walls_s.append(wall_s)
        self._values.append(values)
        if len(self._steps) >= BATCH:
            self._add_batch()

    def _add_batch(self) -> None:
        if not self._steps:
            return
        steps, walls_s, all_values = self._steps, self._walls_s, self._values
        self._steps, self._walls_s, self._values = [], [], []
        names = self._names
        if names is None:
            names = list(dict.fromkeys(itertools.chain.from_iterable(all_values)))
        columns = {
            name: np.array([values.get(name, math.nan) for values in all_values], dtype=float)
            for name in names
        }
        batch = _Points.of(np.array(steps, dtype=np.int64), np.array(walls_s), columns)
        self._newest = self._newest.with_batch(batch).part(slice(-self._num_newest, None))
        self._points = self._points.with_batch(batch.widened(self._width))
        while len(self._points) > self._max_points:
            self._width *= 2
            self._points = self._points.widened(2)

    def to_json(
        self,
        names: Sequence[str],
        first: int | None = None,
        last: int | None = None,
        *,
        newest_only: bool = False,
    ) -> dict[str, Any]:
        """Return columns: `step` and `wall_s` of each point's end, and of each name its figures.

        `records` is how many records a point is made of, `steps` how many steps it covers.

        Args:
            names: The figures that are wanted.
            first: The first step that is wanted; None: from the beginning.
            last: The last; None: to the end.
            newest_only: Only the newest steps are wanted, one by one.
        """
        self._add_batch()
        points, width = (self._newest, 1) if newest_only else (self._points, self._width)
        begin = 0 if first is None else int(np.searchsorted(points.last, first))
        end = None if last is None else int(np.searchsorted(points.first, last, "right"))
        points = points.part(slice(begin, end))
        while len(points) > MAX_POINTS:
            points, width = points.widened(2), width * 2
        figures: dict[str, Any] = {
            "width": width,
            "step": points.last.tolist(),
            "wall_s": points.wall_s.tolist(),
            "steps": (points.last - points.first + 1).tolist(),
            "records": points.records.tolist(),
        }
        for name in names:
            if name in points.figures and points.figures[name][0].any():
                figures[name] = _columns(points.figures[name])
        return figures


def _columns(rows: Array) -> dict[str, list[float | None]]:
    """Return mean, least and most of each point; None: it has no value."""
    counts, totals, low, high = rows
    is_known = counts > 0
    means = totals / np.where(is_known, counts, 1.0)
    return {
        key: [
            value if known else None
            for value, known in zip(column.tolist(), is_known.tolist(), strict=True)
        ]
        for key, column in (("mean", means), ("min", low), ("max", high))
    }
