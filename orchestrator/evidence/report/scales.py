"""Scales from data to 0..1, with ticks where a person would put them. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Scale:
    """A monotone map from `low`..`high` to 0..1."""

    low: float
    high: float
    ticks: tuple[float, ...]
    """Inside the range, ascending."""
    forward: Callable[[float], float] = float
    """The identity, or math.log10."""

    def __call__(self, value: float) -> float:
        """Return where `value` lies: 0 at the low end."""
        low, high = self.forward(self.low), self.forward(self.high)
        return (self.forward(value) - low) / (high - low)


def linear(low: float, high: float, num_ticks: int = 5) -> Scale:
    """Return a linear scale from `low` to `high`; equal ends are moved apart."""
    if high <= low:
        low, high = low - 0.5 * (abs(low) or 1.0), high + 0.5 * (abs(high) or 1.0)
    return Scale(low, high, tuple(ticks(low, high, num_ticks)))


def rounded(low: float, high: float, num_ticks: int = 5) -> Scale:
    """Return a linear scale that is widened to ticks at both ends."""
    scale = linear(low, high, num_ticks)
    step = _step(scale.high - scale.low, num_ticks)
    low = math.floor(scale.low / step + 1e-9) * step
    high = math.ceil(scale.high / step - 1e-9) * step
    return Scale(low, high, tuple(ticks(low, high, num_ticks)))


def logarithmic(values: Iterable[float]) -> Scale:
    """Return a scale of positive values, with a tick at each of them: sweeps measure few."""
    found = sorted(set(values))
    if len(found) == 1:
        return Scale(found[0] / 2, found[0] * 2, tuple(found), math.log10)
    return Scale(found[0], found[-1], tuple(found), math.log10)


def ticks(low: float, high: float, wanted: int) -> list[float]:
    """Return about `wanted` multiples of 1, 2 or 5 times a power of ten in low..high."""
    step = _step(high - low, wanted)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [float(f"{index * step:.10g}") for index in range(first, last + 1)]


def _step(span: float, wanted: int) -> float:
    rough = span / max(1, wanted)
    power: float = 10.0 ** math.floor(math.log10(rough))
    return next(power * step for step in (1, 2, 5, 10) if power * step >= rough * (1 - 1e-9))
