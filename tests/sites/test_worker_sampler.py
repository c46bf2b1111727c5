"""Every sample exactly once, whatever the numbers of sites and ranks, and whatever was lost."""

import itertools
import random

import numpy as np
import pytest

from sites.worker.data_positions import DataPositions
from sites.worker.sampler import Sampler
from sites.worker.shuffling import key_of, shuffled
from topology.cost.compute import share


@pytest.mark.parametrize("num_samples", [1, 2, 3, 16, 17, 1000])
def test_each_order_has_every_sample_once(num_samples: int) -> None:
    orders = [shuffled(np.arange(num_samples), num_samples, key_of(seed)) for seed in (0, 1)]
    assert all(sorted(order) == list(range(num_samples)) for order in orders)
    if num_samples >= 16:
        assert (orders[0] != orders[1]).any()
        assert (np.diff(orders[0]) != 1).any()


def test_a_round_takes_holes_first() -> None:
    positions = DataPositions(next=20).with_holes([3, 4, 9])
    assert positions.holes == (range(3, 5), range(9, 10))
    taken, after = positions.taken(2)
    assert taken.tolist() == [3, 4]
    assert after == DataPositions(20, (range(9, 10),))
    taken, after = after.taken(3)
    assert taken.tolist() == [9, 20, 21]
    assert after == DataPositions(22)


@pytest.mark.parametrize("again", [[20], [-1], [3]])
def test_what_was_not_handed_out_cannot_be_given_back(again: list[int]) -> None:
    with pytest.raises(ValueError, match="given back"):
        DataPositions(20, (range(3, 4),)).with_holes(again)


@pytest.mark.parametrize("seed", range(20))
def test_losses_and_other_counts_leave_every_position_used_once(seed: int) -> None:
    chance = random.Random(seed)
    ledger, used = DataPositions(), list[int]()
    for _ in range(40):
        batch, ranks = chance.randint(1, 30), chance.randint(1, 6)
        taken, ledger = ledger.taken(batch)
        parts = [
            taken[share(batch, ranks, rank).start : share(batch, ranks, rank).stop]
            for rank in range(ranks)
        ]
        lost = chance.randrange(ranks) if chance.random() < 0.3 else None
        for rank, part in enumerate(parts):
            if rank == lost:
                ledger = ledger.with_holes(part)
            else:
                used += part.tolist()
        assert DataPositions.from_json(ledger.to_json()) == ledger
    unused = [each for hole in ledger.holes for each in hole]
    assert sorted(used + unused) == list(range(ledger.next)), f"{seed=}"


def samplers(ranks: int, used: DataPositions) -> list[Sampler]:
    made = [
        Sampler(num_samples=23, global_batch=6, part=share(6, ranks, rank), seed=5)
        for rank in range(ranks)
    ]
    for each in made:
        each.resume(used, lambda: None)
    return made


def test_a_resumed_sampler_goes_on_after_what_was_used_not_after_what_was_drawn() -> None:
    seen: list[int] = []
    used, data_epoch = DataPositions(), 0
    for ranks in (4, 2, 3):
        made = samplers(ranks, used)
        batches = [iter(each) for each in made]
        for _ in range(4):
            for sampler, own in zip(made, batches, strict=True):
                seen += next(own)
                sampler.step()
        for own in batches:
            list(itertools.islice(own, 3))  # fetched ahead, never used
        assert len({each.used for each in made}) == 1
        used, data_epoch = made[0].used, made[0].data_epoch
    # 12 steps of 6: three whole passes and three samples of the fourth.
    counts = np.bincount(seen, minlength=23)
    assert counts.sum() == 72
    assert set(counts.tolist()) == {3, 4}
    assert data_epoch == 3


def test_a_sampler_that_has_begun_cannot_be_resumed() -> None:
    (sampler,) = samplers(1, DataPositions())
    sampler.draw()
    with pytest.raises(RuntimeError, match="before the sampler"):
        sampler.resume(DataPositions(6), lambda: None)
