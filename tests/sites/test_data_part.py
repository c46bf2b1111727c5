from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DistributedSampler, IterableDataset

from isthmus.sites.worker.data.data_part import (
    PartIndices,
    part_of,
    readers_per_site,
    sampled_by_site,
)


@pytest.mark.parametrize("ranks_per_site", [(1,), (2, 1), (3, 1, 4)])
@pytest.mark.parametrize("num_samples", [0, 1, 7, 100])
def test_sites_have_disjoint_parts_in_proportion_to_their_ranks(
    ranks_per_site: tuple[int, ...], num_samples: int
) -> None:
    parts = [PartIndices(num_samples, ranks_per_site, each) for each in range(len(ranks_per_site))]
    blocks = num_samples // sum(ranks_per_site)
    assert [len(each) for each in parts] == [blocks * ranks for ranks in ranks_per_site]
    assert sorted(index for part in parts for index in part) == list(
        range(blocks * sum(ranks_per_site))
    )


def test_steps_in_order_are_those_of_the_whole() -> None:
    ranks_per_site, batch = (2, 1), 4
    parts = [PartIndices(60, ranks_per_site, site) for site in (0, 1)]
    for step in range(5):
        taken = [
            index
            for part, ranks in zip(parts, ranks_per_site, strict=True)
            for index in part[step * ranks * batch : (step + 1) * ranks * batch]
        ]
        assert sorted(taken) == list(range(step * 12, (step + 1) * 12))


def test_an_index_beyond_the_part_is_an_error() -> None:
    part = PartIndices(7, (2, 1), 0)
    assert part[-1] == part[len(part) - 1]
    with pytest.raises(IndexError, match="a part of 4 samples"):
        part[4]


@pytest.mark.parametrize("index", [-5, 4, 5])
def test_an_index_below_or_beyond_the_part_is_none(index: int) -> None:
    with pytest.raises(IndexError, match="a part of 4 samples"):
        PartIndices(7, (2, 1), 0)[index]


@pytest.mark.parametrize("num_samples", [0, 1, 2])
@pytest.mark.parametrize("site", [0, 1])
def test_a_part_without_a_sample_for_each_rank_is_refused(num_samples: int, site: int) -> None:
    """Else a script would end well after no step."""
    with pytest.raises(ValueError, match=f"each of 3 ranks at least, got {num_samples}"):
        part_of([*range(num_samples)], (2, 1), site)
    assert len(part_of([*range(3)], (2, 1), site)) == 2 - site


def test_what_has_no_places_has_no_parts() -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(len(self)))

        def __len__(self) -> int:
            return 100

    for dataset in (Stream(), iter([1, 2, 3])):
        with pytest.raises(TypeError, match="want a map-style dataset"):
            part_of(dataset, (2, 1), 0)


@pytest.mark.parametrize("present", [(0, 1, 2), (0, 2), (1,)])
def test_the_readers_are_those_of_the_sites_that_take_part(present: tuple[int, ...]) -> None:
    """A pipeline's ranks share their data, so fewer read than there are."""
    ranks, reading = (3, 4, 8), (3, 2, 1)

    def average(tensors: list[torch.Tensor]) -> None:
        for each in tensors:
            each.zero_()
            for site in present:
                each[0, site], each[1, site] = reading[site] * ranks[site], ranks[site]
            each /= sum(ranks[site] for site in present)

    found = [readers_per_site(site, reading[site], 3, average) for site in present]
    assert found == [[reading[at] if at in present else 0 for at in range(3)]] * len(present)


def test_a_sampler_over_the_ranks_of_a_site_is_found() -> None:
    make: Any = DistributedSampler
    assert sampled_by_site(2, 4) == ""
    evaluated = make(range(9), 2, 0, shuffle=False)
    assert sampled_by_site(2, 4) == "", "each site may evaluate all"
    trained = make(range(64), 2, 1, seed=3)
    assert sampled_by_site(2, 4) == "64 samples by seed 3"
    assert sampled_by_site(3, 6) == ""
    divided = make(range(64), 4, 1)
    assert sampled_by_site(2, 4) == "", "the script knows of the other sites"
    del evaluated, trained, divided
