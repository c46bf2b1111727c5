"""Hashes that tell tensors apart: of their values, and of their names, shapes and dtypes.

Hashes of parameters are equal on all ranks of all sites, bit for bit, or the run ends. A layout is
one number that differs where two sites' tensors differ in name, order, shape or dtype.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass

import google_crc32c
import torch
import xxhash

from isthmus.protos.limits import CONTROL_MESSAGE_BYTES
from isthmus.sites.worker.exchange.sharding import whole_of

_MESSAGE_BYTES = CONTROL_MESSAGE_BYTES // 2
"""The most that names and hashes may take as JSON, so that every message on the way has room."""


@dataclass(frozen=True, slots=True)
class ParameterHashes:
    """xxh3-64 of each tensor, in order, and of all of them."""

    names: tuple[str, ...]
    tensors: tuple[int, ...]

    @property
    def combined(self) -> int:
        """One hash for all: equal where every tensor's is."""
        return _combine(self.tensors)

    def bounded(self) -> ParameterHashes:
        """Return one that fits in a message: of a large model, neighbours share a hash.

        A shared hash is named `first .. last`.
        """
        grouped = self
        per_group = 1
        while len(json.dumps([grouped.names, grouped.tensors])) > _MESSAGE_BYTES:
            per_group *= 2
            starts = range(0, len(self.names), per_group)
            groups = [slice(start, start + per_group) for start in starts]
            grouped = ParameterHashes(
                tuple(_name_of(self.names[each]) for each in groups),
                tuple(_combine(self.tensors[each]) for each in groups),
            )
            if len(groups) == 1:
                break
        return grouped


def hashes_of(tensors: Iterable[tuple[str, torch.Tensor]]) -> ParameterHashes:
    """Hash tensors of any dtype and device; one on a device is copied to the host first.

    Sharded ones are gathered one after another, by collectives of their ranks, so that a hash does
    not depend on how many those are.
    """
    named = [(name, hash_of(each)) for name, each in tensors]
    return ParameterHashes(tuple(name for name, _ in named), tuple(number for _, number in named))


def hash_of(tensor: torch.Tensor) -> int:
    """Return the xxh3-64 of a tensor's elements, as bytes in row-major order."""
    return xxhash.xxh3_64_intdigest(as_bytes(whole_of(tensor).cpu()).numpy().data)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return uint8[n]: a view where `tensor` is contiguous, else a copy."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def _combine(hashes: tuple[int, ...]) -> int:
    return xxhash.xxh3_64_intdigest(b"".join(each.to_bytes(8, "little") for each in hashes))


def _name_of(names: tuple[str, ...]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]}"


def layout_of(tensors: Iterable[tuple[str, torch.Tensor]]) -> int:
    """Return the crc32c of names, shapes and dtypes, in order."""
    return layout_of_labels(labels_of(tensors))


def labels_of(tensors: Iterable[tuple[str, torch.Tensor]]) -> list[str]:
    """Return names, shapes and dtypes, in order."""
    return [f"{name} {tuple(each.shape)} {each.dtype}" for name, each in tensors]


def layout_of_labels(labels: Iterable[str]) -> int:
    """Return the crc32c of what tells tensors from others, in order."""
    return int(google_crc32c.value("\n".join(labels).encode()))
