"""One number that differs where two sites' tensors differ in name, order, shape or dtype."""

from collections.abc import Iterable

import google_crc32c
import torch


def layout_of(tensors: Iterable[tuple[str, torch.Tensor]]) -> int:
    """Return the crc32c of names, shapes and dtypes, in order."""
    return layout_of_labels(f"{name} {tuple(each.shape)} {each.dtype}" for name, each in tensors)


def layout_of_labels(labels: Iterable[str]) -> int:
    """Return the crc32c of what tells tensors from others, in order."""
    return int(google_crc32c.value("\n".join(labels).encode()))
