"""One number that differs where two sites' tensors differ in name, order, shape or dtype."""

from collections.abc import Iterable

import google_crc32c
import torch


def layout_of(tensors: Iterable[tuple[str, torch.Tensor]]) -> int:
    """Return the crc32c of names, shapes and dtypes, in order."""
    text = "\n".join(f"{name} {tuple(each.shape)} {each.dtype}" for name, each in tensors)
    return int(google_crc32c.value(text.encode()))
