"""Figures over steps in a bounded number of points, each with minimum, maximum and mean.

Pure. A point covers `width` steps; once there are more points than allowed, each two become one. So
adding takes the same time however long a run is, and so does reading.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

MAX_POINTS = 600
"""More than a page 1400 pixels wide can show apart."""


class _Sum:
    """One figure of one point."""

    __slots__ = ("high", "low", "num", "total")

    def __init__(self, value: float) -> None:
        self.num, self.total, self.low, self.high = 1, value, value, value

    def add(self, value: float) -> None:
        self.num += 1
        self.total += value
        if value < self.low:
            self.low = value
        if value > self.high:
            self.high = value

    def add_all(self, other: _Sum) -> None:
        self.num += other.num
        self.total += other.total
        self.low, self.high = min(self.low, other.low), max(self.high, other.high)


class _Point:
    """Consecutive steps."""

    __slots__ = ("first", "last", "num", "sums", "wall_s")

    def __init__(self, step: int, wall_s: float) -> None:
        self.first, self.last, self.wall_s, self.num = step, step, wall_s, 0
        self.sums: dict[str, _Sum] = {}

    def add(self, step: int, wall_s: float, values: Mapping[str, float]) -> None:
        self.first, self.last = min(self.first, step), max(self.last, step)
        self.wall_s = max(self.wall_s, wall_s)
        self.num += 1
        for name, value in values.items():
            if name in self.sums:
                self.sums[name].add(value)
            else:
                self.sums[name] = _Sum(value)

    def add_all(self, other: _Point) -> None:
        self.first, self.last = min(self.first, other.first), max(self.last, other.last)
        self.wall_s = max(self.wall_s, other.wall_s)
        self.num += other.num
        for name, found in other.sums.items():
            if name in self.sums:
                self.sums[name].add_all(found)
            else:
                self.sums[name] = found


class StepSeries:
    """Figures over all steps of a run, or over its newest ones."""

    def __init__(self, max_points: int = MAX_POINTS, *, newest_only: bool = False) -> None:
        """Begin without points.

        Args:
            max_points: The most that there are.
            newest_only: Drop the oldest point instead of widening all.
        """
        self._max_points, self._newest_only = max_points, newest_only
        self.width = 1
        """Steps of a point."""
        self._points: dict[int, _Point] = {}

    def add(self, step: int, wall_s: float, values: Mapping[str, float]) -> None:
        """Take one record of a step; what is not finite is left out."""
        finite = {name: value for name, value in values.items() if math.isfinite(value)}
        place = step // self.width
        point = self._points.get(place)
        if point is None:
            point = self._points[place] = _Point(step, wall_s)
        point.add(step, wall_s, finite)
        if len(self._points) > self._max_points:
            self._shrink()

    def _shrink(self) -> None:
        if self._newest_only:
            del self._points[min(self._points)]
            return
        self.width *= 2
        points, self._points = self._points, {}
        for point in sorted(points.values(), key=lambda each: each.first):
            place = point.first // self.width
            if place in self._points:
                self._points[place].add_all(point)
            else:
                self._points[place] = point

    def to_json(self, names: tuple[str, ...]) -> dict[str, Any]:
        """Return columns: `step` and `wall_s` of each point's end, and of each name its figures.

        `records` is how many records a point is made of, `steps` how many steps it covers.
        """
        points = [self._points[place] for place in sorted(self._points)]
        figures: dict[str, Any] = {
            "width": self.width,
            "step": [point.last for point in points],
            "wall_s": [point.wall_s for point in points],
            "steps": [point.last - point.first + 1 for point in points],
            "records": [point.num for point in points],
        }
        for name in names:
            sums = [point.sums.get(name) for point in points]
            if any(sums):
                figures[name] = {
                    "mean": [None if each is None else each.total / each.num for each in sums],
                    "min": [None if each is None else each.low for each in sums],
                    "max": [None if each is None else each.high for each in sums],
                }
        return figures
