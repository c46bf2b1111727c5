"""Which packets are lost: as many as configured in any window, at places that the seed decides."""

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.emulator.link_shape import LOSSES_PER_DECK, LossDeck

FIXED = settings(deadline=None, derandomize=True, max_examples=100)


def losses(probability: float, seed: int, sizes: list[int]) -> list[int]:
    """The positions of all losses among packets that come in groups of these sizes."""
    deck = LossDeck(probability, random.Random(seed))
    found: list[int] = []
    taken = 0
    for size in sizes:
        lost = deck.take(size)
        assert all(0 <= index < size for index in lost)
        found += [taken + index for index in lost]
        taken += size
    return found


@pytest.mark.parametrize("probability", [0.001, 0.01])
@pytest.mark.parametrize("seed", range(5))
def test_any_100_000_packets_lose_what_is_configured_within_a_tenth(
    probability: float, seed: int
) -> None:
    found = losses(probability, seed, [45] * 6667)
    for start in range(0, 200_001, 7919):
        count = sum(start <= position < start + 100_000 for position in found)
        assert abs(count - probability * 100_000) <= 0.1 * probability * 100_000, (seed, start)


@FIXED
@given(
    probability=st.floats(1e-4, 1.0),
    seed=st.integers(0, 1 << 32),
    sizes=st.lists(st.integers(0, 64), max_size=200),
)
def test_losses_are_never_more_than_a_deck_off_and_grouping_changes_nothing(
    probability: float, seed: int, sizes: list[int]
) -> None:
    found = losses(probability, seed, sizes)
    assert found == sorted(set(found))
    assert abs(len(found) - probability * sum(sizes)) <= LOSSES_PER_DECK + 1
    assert found == losses(probability, seed, [1] * sum(sizes))


def test_seeds_differ_and_places_are_irregular() -> None:
    found = losses(0.01, 1, [100_000])
    assert found != losses(0.01, 2, [100_000])
    gaps = {after - before for before, after in itertools.pairwise(found)}
    assert min(gaps) <= 5
    assert max(gaps) >= 300


def test_the_extremes() -> None:
    assert losses(0.0, 1, [1000]) == []
    assert losses(5e-324, 1, [1000]) == []
    assert losses(1.0, 1, [7, 1000]) == list(range(1007))
