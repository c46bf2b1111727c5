"""A site's part of a dataset, for frameworks that divide data over the ranks they know of."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.data import DistributedSampler, IterableDataset, Subset


class PartIndices(Sequence[int]):
    """The indices of a dataset that one site reads. Pure.

    Of each block of as many samples as there are ranks, a site has one for each of its own ranks.
    What does not fill a block is left out. So where each site reads its part in order, batches of
    b samples a rank, step k of all sites together reads the k-th b * ranks samples of the dataset.
    """

    def __init__(self, num_samples: int, ranks_per_site: Sequence[int], site: int) -> None:
        """Give site `site`, by index, its part of `num_samples` samples."""
        self._block = sum(ranks_per_site)
        self._first = sum(ranks_per_site[:site])
        self._own = ranks_per_site[site]
        self._len = num_samples // self._block * self._own

    def __len__(self) -> int:
        return self._len

    def __getitem__(self, index: Any) -> Any:  # noqa: ANN401 - an int gives an int, a slice a list
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(self._len))]
        place = int(index) + (self._len if index < 0 else 0)
        if not 0 <= place < self._len:
            raise IndexError(f"index {index} of a part of {self._len} samples")
        block, own = divmod(place, self._own)
        return block * self._block + self._first + own


def part_of(dataset: Any, ranks_per_site: Sequence[int], site: int) -> Any:  # noqa: ANN401
    """Return a view of a map-style dataset that has one site's part.

    A `datasets.Dataset` of Hugging Face stays one.

    Raises:
        TypeError: the dataset is no map-style one.
        ValueError: there is not a sample for each rank.
    """
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
        raise TypeError(
            f"site.part_of: want a map-style dataset, got a {type(dataset).__name__}, which has "
            "no places: let it take each site.global_world_size-th sample from "
            "site.global_rank on"
        )
    num_samples, num_ranks = len(dataset), sum(ranks_per_site)
    if num_samples < num_ranks:
        raise ValueError(
            f"site.part_of: want a sample for each of {num_ranks} ranks at least, got {num_samples}"
        )
    indices = PartIndices(num_samples, ranks_per_site, site)
    select = getattr(dataset, "select", None)
    return Subset(dataset, indices) if select is None else select(indices)


def sampled_by_site(num_ranks: int, num_global_ranks: int) -> str:
    """Return what torch's DistributedSamplers divide over the ranks of this site; empty: nothing.

    Nothing either where one of them divides over the ranks of all sites; and those that do not
    shuffle are of evaluations.
    """
    made = [each for each in gc.get_objects() if issubclass(type(each), DistributedSampler)]
    if any(each.num_replicas == num_global_ranks for each in made):
        return ""
    found = {
        f"{len(each.dataset)} samples by seed {each.seed}"
        for each in made
        if each.num_replicas == num_ranks and each.shuffle
    }
    return ", ".join(sorted(found))


def readers_per_site(
    site: int, own: int, num_sites: int, average: Callable[[list[torch.Tensor]], None]
) -> list[int]:
    """Return how many ranks of each site read data of their own; 0 where none takes part yet.

    A collective of all ranks that take part: each tells its own site's number.

    Args:
        site: this rank's, by index.
        own: how many ranks of it read.
        num_sites: of the run.
        average: puts the mean over all ranks that take part in place of each tensor, exactly.
    """
    told = torch.zeros(2, num_sites, dtype=torch.float32, device="cpu")
    told[0, site], told[1, site] = own, 1.0
    average([told])
    readers, ranks = told.tolist()  # both divided by the ranks that take part, however many
    return [round(each / of) if of else 0 for each, of in zip(readers, ranks, strict=True)]
