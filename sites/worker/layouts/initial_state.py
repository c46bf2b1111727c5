"""Gives all sites the first site's tensors, bit for bit: a model's initial state, say.

The pipeline averages float32 numbers, so bytes travel as numbers: each pair of bytes is a whole
number below 65536, exact in float32. Only the first site's first rank has a weight. So the mean is
what it has, whoever else takes part: were another site lost meanwhile, nothing would change. Hence
any dtype, -0.0 and NaN payloads survive. First only a hash is compared: equal models send nothing
more.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch
import torch.distributed as dist

from isthmus.protos.errors import LayoutMismatchError
from isthmus.sites.worker.exchange.bucket_pipeline import BucketPipeline
from isthmus.sites.worker.exchange.sharding import whole_of, write_whole
from isthmus.sites.worker.exchange.tensor_average import packed
from isthmus.sites.worker.exchange.tensor_hashes import (
    as_bytes,
    hashes_of,
    labels_of,
    layout_of_labels,
)

BLOCK_NUMEL = 2 << 20
"""float32 numbers a bucket: 8 MiB of shared memory, 4 MiB of the model."""
BLOCKS_IN_FLIGHT = 8
_ANY_LAYOUT = layout_of_labels(["what models are compared by"])
_GROUP_BYTES = 2 * BLOCK_NUMEL * BLOCKS_IN_FLIGHT


@dataclass(frozen=True, slots=True)
class InitialState:
    """Compares, and where needed copies, the tensors of one rank."""

    pipeline: BucketPipeline
    is_first: bool
    """This is the rank whose tensors are everybody's: the first one of the first site."""
    device: torch.device

    def equalise(self, named: Sequence[tuple[str, torch.Tensor]]) -> bool:
        """Give every site the first site's state; return whether any ranks differed.

        A collective of all ranks. Those of a site may differ, too: the first one's state counts.
        Tensors are of any dtype, and overwritten.

        Raises:
            LayoutMismatchError: ranks' tensors differ in names, order, shapes or dtypes.
            IsthmusError: the exchange failed.
        """
        labels = labels_of(named)
        layout = layout_of_labels(labels)
        values = hashes_of(named).combined.to_bytes(8, "little")
        are_alike = self._compare([layout.to_bytes(8, "little"), values], _ANY_LAYOUT)
        if not are_alike[0]:
            self._refuse(labels)
        if all(are_alike):
            return False
        self._copy_from_first([tensor for _, tensor in named], layout)
        return True

    def all_sites_have(self, combined: bytes, layout: int) -> bool:
        """Compare 8 bytes that all ranks of all sites have to have alike; say whether they do."""
        return all(self._compare([combined], layout))

    def _compare(self, parts: Sequence[bytes], layout: int) -> list[bool]:
        """Return, for each of these parts of 8 bytes, whether all ranks of all sites have it alike.

        First all hear the first site's, then whether anybody has others. A site whose ranks differ
        says so: were each rank to decide by its own state alone, some would go on to the next
        collective and others not.
        """
        data = [torch.frombuffer(bytearray(each), dtype=torch.uint8) for each in parts]
        own = torch.stack([*map(numbers_of, data)])
        first = own.clone().to(self.device)
        self._hear_first([first], layout)
        are_equal = [*map(torch.equal, first.cpu(), own)]
        agree = [*map(self._ranks_agree, data)]
        differs = torch.tensor(
            [float(not (one and other)) for one, other in zip(are_equal, agree, strict=True)],
            dtype=torch.float32,
            device=self.device,
        )
        self._average([differs], layout, 1.0)
        return (differs.cpu() == 0).tolist()

    def _refuse(self, labels: Sequence[str]) -> NoReturn:
        """Name the first tensor whose name, shape or dtype differs from the first site's.

        Raises:
            LayoutMismatchError: at all ranks.
        """
        own = "\n".join(labels).encode()
        length = torch.tensor([len(own)], dtype=torch.int64, device="cpu")
        size = numbers_of(length.view(torch.uint8)).to(self.device)
        self._hear_first([size], _ANY_LAYOUT)
        block = torch.zeros(8, dtype=torch.uint8, device="cpu")
        _write_back(size.cpu(), [block])
        told = torch.zeros(int(block.view(torch.int64)), dtype=torch.uint8, device="cpu")
        if self.is_first:
            told.copy_(torch.frombuffer(bytearray(own), dtype=torch.uint8))
        numbers = numbers_of(told).to(self.device)
        self._hear_first([numbers], _ANY_LAYOUT)
        _write_back(numbers.cpu(), [told])
        first = bytes(told.tolist()).decode().split("\n")
        pairs = [*itertools.zip_longest(labels, first, fillvalue="not there")]
        differs = torch.zeros(len(first) + 1, dtype=torch.float32, device=self.device)
        for place in [at for at, (here, there) in enumerate(pairs) if here != there][:1]:
            differs[place] = 1.0
        self._average([differs], _ANY_LAYOUT, 1.0)
        place = int(differs.nonzero().min())
        here, there = pairs[place] if place < len(pairs) else ("not there", "not there")
        raise LayoutMismatchError(
            f"tensor {place} is {here} at this rank, and "
            + (f"{there} at the first site's first rank" if here != there else "not at another")
            + ": a model has to have the same parameters and buffers, registered in the same "
            "order, at all ranks of all sites"
        )

    def _ranks_agree(self, data: torch.Tensor) -> bool:
        """Whether all ranks of the site have the same bytes. A collective of the site."""
        if dist.get_world_size() == 1:
            return True
        own = data.to(self.device)
        found = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(found, own)
        return all(torch.equal(each, own) for each in found)

    def _copy_from_first(self, tensors: Sequence[torch.Tensor], layout: int) -> None:
        """Send all bytes; of sharded tensors, only so many are gathered at a time."""
        group: list[torch.Tensor] = []
        for each in tensors:
            group.append(each)
            if sum(member.nbytes for member in group) >= _GROUP_BYTES:
                self._copy_group(group, layout)
                group = []
        self._copy_group(group, layout)

    def _copy_group(self, tensors: Sequence[torch.Tensor], layout: int) -> None:
        """Send the bytes of some tensors, block after block, some of them at a time."""
        wholes = (whole_of(tensor).resolve_conj().resolve_neg() for tensor in tensors)
        contiguous = [each.contiguous() for each in wholes]
        flats = [as_bytes(each).to(self.device) for each in contiguous]
        blocks = list(packed(flats, 2 * BLOCK_NUMEL))
        for start in range(0, len(blocks), BLOCKS_IN_FLIGHT):
            group = blocks[start : start + BLOCKS_IN_FLIGHT]
            numbers = [numbers_of(torch.cat(block)) for block in group]
            self._hear_first(numbers, layout)
            for block, received in zip(group, numbers, strict=True):
                _write_back(received, block)
        for tensor, copy in zip(tensors, contiguous, strict=True):
            write_whole(tensor, copy)

    def _hear_first(self, buckets: Sequence[torch.Tensor], layout: int) -> None:
        """Write the numbers of the first site's first rank over everybody's."""
        self._average(buckets, layout, 1.0 if self.is_first else 0.0)

    def _average(self, buckets: Sequence[torch.Tensor], layout: int, weight: float) -> None:
        """Average numbers over all ranks of all sites, in place: a round of its own."""
        self.pipeline.begin(weight)
        futures = [self.pipeline.submit([each], layout, exact=True) for each in buckets]
        self.pipeline.wait()
        for future in futures:
            future.wait()  # on CUDA, results are only enqueued: this stream must wait for them


def numbers_of(data: torch.Tensor) -> torch.Tensor:
    """Return uint8[n] as float32[ceil(n / 2)]: each pair of bytes, little-endian."""
    if data.numel() % 2:
        data = torch.cat([data, data.new_zeros(1)])
    pairs = data.view(-1, 2).to(torch.float32)
    return pairs[:, 0] + 256.0 * pairs[:, 1]


def _write_back(numbers: torch.Tensor, block: Sequence[torch.Tensor]) -> None:
    """Write what `numbers_of` made of a block into the block's views."""
    whole = numbers.to(torch.int32)
    data = torch.stack([whole % 256, whole // 256], dim=1).to(torch.uint8).view(-1)
    start = 0
    for part in block:
        part.copy_(data[start : start + part.numel()])
        start += part.numel()
