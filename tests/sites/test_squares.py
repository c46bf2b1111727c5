"""Exact sums of squares: no order and no grouping changes them."""

from __future__ import annotations

import math
import random
from fractions import Fraction

import numpy as np
import pytest

from isthmus.sites.local.squares import (
    MOST_UNITS,
    norm_of,
    total_of,
    units_in,
    units_of,
    units_of_words,
    words_of,
)

LEAST, LARGEST = float(np.float32(1e-45)), float(np.finfo(np.float32).max)


@pytest.mark.parametrize("seed", range(8))
def test_any_order_and_any_groups_have_one_sum(seed: int) -> None:
    chance = random.Random(seed)
    parts = [chance.random() * 4.0 ** chance.randint(-130, 120) for _ in range(100)]
    parts = [float(np.float64(each) // LEAST**2 * LEAST**2) for each in parts]  # whole units
    total = total_of(map(units_of, parts))
    assert total is not None
    assert Fraction(total, 1 << 298) == sum(map(Fraction, parts))
    chance.shuffle(parts)
    ranks = [total_of(map(units_of, parts[place::3])) for place in range(3)]
    words = [sum(each) for each in zip(*map(words_of, ranks), strict=True)]
    assert units_of_words(words) == total
    assert norm_of(total) == pytest.approx(math.sqrt(math.fsum(parts)), rel=1e-15)


def test_the_least_and_the_largest_float32_have_units() -> None:
    assert units_of(LEAST * LEAST) == 1
    assert norm_of(units_of(LEAST * LEAST)) == LEAST
    largest = units_of(LARGEST * LARGEST)
    assert largest is not None
    assert norm_of(largest) == LARGEST
    assert largest << 80 <= MOST_UNITS
    assert units_of_words([2 * each for each in words_of(largest)]) == 2 * largest


@pytest.mark.parametrize("odd", [math.nan, math.inf])
def test_what_is_not_finite_is_in_every_sum(odd: float) -> None:
    assert units_of(odd) is None
    words = [sum(each) for each in zip(words_of(None), words_of(5), strict=True)]
    assert units_of_words(words) is None
    assert math.isnan(norm_of(total_of([3, None, 4])))


def test_squares_of_an_array() -> None:
    values = np.arange(300_001, dtype=np.float32)
    assert units_in(values) == sum(each * each for each in range(300_001)) << 298
    assert units_in(values[:0]) == 0
