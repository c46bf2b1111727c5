"""Chance that is the same on every machine and in every version of Python: numbers from a seed.

Pure.

SplitMix64 (Steele et al., "Fast splittable pseudorandom number generators", OOPSLA 2014).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

_MASK = (1 << 64) - 1
_NORMAL = NormalDist()

DISTRIBUTIONS = ("exponential", "lognormal", "uniform")


class Chance:
    """A stream of numbers."""

    def __init__(self, seed: int) -> None:
        self._state = seed & _MASK

    def uniform(self) -> float:
        """Return the next number of (0, 1)."""
        self._state = (self._state + 0x9E3779B97F4A7C15) & _MASK
        z = self._state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
        return (((z ^ (z >> 31)) >> 11) + 0.5) / (1 << 53)

    def exponential(self, mean: float) -> float:
        """Return a number that is exponentially distributed."""
        return -mean * math.log(self.uniform())


@dataclass(frozen=True, slots=True)
class Stragglers:
    """How much longer a rank computes in a step than it should, step by step and rank by rank."""

    distribution: str
    """One of DISTRIBUTIONS: of the factor by which compute is longer.

    `exponential`: 1 + x, x of mean `spread`. `uniform`: 1 to 1 + `spread`. `lognormal`: of median
    1, `spread` is the deviation of its logarithm; a rank may be faster too.
    """
    spread: float

    def factor(self, chance: Chance, num_ranks: int) -> float:
        """Return the largest factor of so many ranks, which are alike and wait for each other.

        One number of `chance` is enough: the largest of n has the distribution function F^n.
        """
        if self.spread == 0:
            return 1.0
        # u^(1/n) rounds to 1 for many ranks: its distance from 1 is computed instead.
        above = -math.expm1(math.log(chance.uniform()) / num_ranks)
        match self.distribution:
            case "exponential":
                return 1 - self.spread * math.log(above)
            case "uniform":
                return 1 + self.spread * (1 - above)
            case "lognormal":
                return math.exp(-self.spread * _NORMAL.inv_cdf(above))
            case other:
                raise ValueError(f"distribution: want one of {DISTRIBUTIONS}, got {other!r}")
