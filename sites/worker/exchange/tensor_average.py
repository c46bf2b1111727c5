"""Averages lists of tensors over all ranks of all sites, with no backward pass to hide behind.

Also cuts tensors, one after another, into buckets: `Packer`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Generic, Protocol, Self, TypeVar

import torch

from isthmus.sites.local.regions import FLOAT_BYTES
from isthmus.sites.worker.exchange.bucket_pipeline import MAX_BUCKETS, BucketPipeline
from isthmus.sites.worker.exchange.exactness import Exactness
from isthmus.sites.worker.exchange.rounds import Round, RoundTerms
from isthmus.sites.worker.exchange.tensor_hashes import layout_of

IN_FLIGHT_BYTES = 256 << 20
"""float32 bytes that are on their way at once: twice what fills 10 Gbit/s over 100 ms."""
MAX_LISTS = 1024
"""Different lists whose rounding errors a lossy codec may keep for their next average, at most: of
two with the same number, neither has a residual."""

Named = Sequence[tuple[str, torch.Tensor]]


class Flat(Protocol):
    """Elements in a row: a tensor of one dimension, or one that ranks hold shards of."""

    def numel(self) -> int:
        """Return how many there are."""

    def __getitem__(self, part: slice, /) -> Self:
        """Return a view of those in `part`, whose ends are given."""


FlatT = TypeVar("FlatT", bound=Flat)


class Packer(Generic[FlatT]):
    """Fills buckets with views of what comes, in the order in which it comes."""

    def __init__(self, bucket_numel: int) -> None:
        """Start with an empty bucket of `bucket_numel` elements."""
        self._bucket_numel = bucket_numel
        self._room = bucket_numel
        self._bucket: list[FlatT] = []

    def add(self, flat: FlatT) -> Iterator[list[FlatT]]:
        """Put all of `flat` in; yield each bucket as it is full."""
        start, numel = 0, flat.numel()
        while start < numel:
            stop = min(numel, start + self._room)
            self._bucket.append(flat[start:stop])
            self._room -= stop - start
            start = stop
            if self._room == 0:
                yield self.take()

    def take(self) -> list[FlatT]:
        """Return what the bucket holds, and start another one."""
        bucket, self._bucket, self._room = self._bucket, [], self._bucket_numel
        return bucket


class TensorAverage:
    """Cuts lists of tensors into buckets and sends each list in a round of its own."""

    def __init__(
        self, pipeline: BucketPipeline, *, bucket_bytes: int, exactness: Exactness
    ) -> None:
        """`bucket_bytes` is float32 of a bucket, at most."""
        self._pipeline = pipeline
        self._bucket_numel = max(1, bucket_bytes // FLOAT_BYTES)
        self._num_slots = max(2, IN_FLIGHT_BYTES // (self._bucket_numel * FLOAT_BYTES))
        self._exactness = exactness

    def average(
        self, named: Named, tokens: float, *, exact: bool = False, is_gradient: bool = False
    ) -> Round | None:
        """Average in place, weighted by tokens; a collective of all ranks of all sites.

        Args:
            named: floating point or complex, of any shape and strides, on any device.
            tokens: this rank's weight; not negative.
            exact: let nothing but fp32 cross the WAN.
            is_gradient: an optimizer step takes them.

        Returns:
            The round; None where there is no element, for then nothing crosses.

        Raises:
            IsthmusError: sites' lists differ in names, order, shapes or dtypes, or the exchange
                failed. Then the tensors hold anything.
        """
        held = [(name, each.detach()) for name, each in named if each.numel()]
        if not held:
            return None
        layout = layout_of(named)
        terms = RoundTerms(
            first_bucket=first_bucket_of_list(layout),
            num_slots=self._num_slots,
            is_gradient=is_gradient,
        )
        self._pipeline.begin(tokens, terms)
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        futures = []
        for group, is_exact in self._exactness.split(held, exact=exact):
            tensors = [each for _, each in group]
            for pieces in packed(_flat(tensors, copies), self._bucket_numel):
                future = self._pipeline.submit(pieces, layout, exact=is_exact, named=group)
                futures.append(future)
        finished = self._pipeline.wait()
        for future in futures:
            future.wait()  # on CUDA, results are only enqueued: this stream must wait for them
        for tensor, copy in copies:
            pairs = copy.view(*tensor.shape, 2) if tensor.is_complex() else copy
            values = torch.view_as_complex(pairs) if tensor.is_complex() else pairs
            tensor.copy_(values.view(tensor.shape))
        return finished


def first_bucket_of_list(layout: int) -> int:
    """Return where a list's bucket numbers begin; 0 is the backward pass's.

    Whatever was averaged before: a site that comes back has not seen that.
    """
    return MAX_BUCKETS * (1 + layout % MAX_LISTS)


def first_bucket_of(model: int) -> int:
    """Return where the bucket numbers of backward passes begin that reach model `model` first."""
    return 0 if model == 0 else MAX_BUCKETS * (MAX_LISTS + model)


def packed(flats: Iterable[torch.Tensor], bucket_numel: int) -> Iterator[list[torch.Tensor]]:
    """Cut flat tensors into buckets, all full but the last."""
    packer: Packer[torch.Tensor] = Packer(bucket_numel)
    for each in flats:
        yield from packer.add(each)
    if rest := packer.take():
        yield rest


def _flat(
    tensors: Sequence[torch.Tensor], copies: list[tuple[torch.Tensor, torch.Tensor]]
) -> Iterator[torch.Tensor]:
    """Flatten in row-major order; what is not contiguous is copied, which `copies` notes.

    Complex numbers are pairs of real ones.
    """
    for each in tensors:
        real = torch.view_as_real(each.resolve_conj()) if each.is_complex() else each
        flat = real.reshape(-1)
        if flat.data_ptr() != each.data_ptr():
            copies.append((each, flat))
        yield flat
