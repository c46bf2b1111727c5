import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.sites.trainer import sampler
from isthmus.topology.spec.compute import share


@settings(max_examples=200)
@given(batch=st.integers(1, 500), ranks=st.integers(1, 64), step=st.integers(0, 10**6))
def test_ranks_share_a_step_exactly_once_and_evenly(batch: int, ranks: int, step: int) -> None:
    parts = [sampler.samples_of(step, batch, ranks, rank) for rank in range(ranks)]
    assert list(itertools.chain(*parts)) == list(range(step * batch, (step + 1) * batch))
    sizes = {len(part) for part in parts}
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("rank", [-1, 3])
def test_a_rank_that_does_not_exist_is_refused(rank: int) -> None:
    with pytest.raises(ValueError, match="rank: want 0 to 2"):
        share(8, 3, rank)


@settings(max_examples=100)
@given(count=st.integers(0, 100), micro_batch=st.integers(1, 20), first=st.integers(0, 10**9))
def test_micro_batches_cover_in_order(count: int, micro_batch: int, first: int) -> None:
    samples = np.arange(first, first + count)
    parts = sampler.micro_batches(samples, micro_batch)
    assert list(itertools.chain(*parts)) == list(samples)
    assert all(len(part) == micro_batch for part in parts[:-1])


@settings(max_examples=100)
@given(
    seed=st.integers(0, (1 << 63) - 1),
    first=st.integers(0, 1 << 50),
    cut=st.integers(0, 40),
    num_starts=st.integers(1, 1 << 31),
)
def test_a_start_depends_on_seed_and_index_only(
    seed: int, first: int, cut: int, num_starts: int
) -> None:
    whole = sampler.random_starts(seed, np.arange(first, first + 40), num_starts)
    head = sampler.random_starts(seed, np.arange(first, first + cut), num_starts)
    tail = sampler.random_starts(seed, np.arange(first + cut, first + 40), num_starts)
    assert np.array_equal(whole, np.concatenate([head, tail]))
    assert whole.dtype == np.int64
    assert ((whole >= 0) & (whole < num_starts)).all()


def test_starts_never_change() -> None:
    # Written down once: another order would be other data for the same seed.
    starts = sampler.random_starts(1337, np.arange(1 << 40, (1 << 40) + 3), 10_000_000)
    assert starts.tolist() == [3022079, 2917887, 6518808]


def test_neighbouring_seeds_give_unrelated_uniform_starts() -> None:
    bins = 64
    for seed in range(8):
        starts = sampler.random_starts(seed, np.arange(64 * 1000), bins)
        counts = np.bincount(starts, minlength=bins)
        # Chi-square with 63 degrees of freedom: 126 is exceeded once in 10^5 draws.
        assert ((counts - 1000) ** 2 / 1000).sum() < 126, f"{seed=}"
        others = sampler.random_starts(seed + 1, np.arange(64 * 1000), bins)
        for shift in range(-2, 3):
            assert np.mean(starts == np.roll(others, shift)) < 2 / bins, f"{seed=} {shift=}"


@pytest.mark.parametrize(("count", "num_starts"), [(1, 1), (1, 9), (5, 9), (64, 7), (3, 10**9)])
def test_even_starts_reach_from_end_to_end(count: int, num_starts: int) -> None:
    starts = sampler.even_starts(count, num_starts)
    assert len(starts) == count
    assert starts[0] == 0
    assert count == 1 or starts[-1] == num_starts - 1
    assert (np.diff(starts) >= 0).all()


def test_windows_are_the_text_from_each_start() -> None:
    text = np.arange(200, dtype=np.uint8)
    cut = sampler.windows(text, np.array([0, 7, 195]), 4)
    assert cut.dtype == np.int64
    assert cut.tolist() == [[0, 1, 2, 3, 4], [7, 8, 9, 10, 11], [195, 196, 197, 198, 199]]
