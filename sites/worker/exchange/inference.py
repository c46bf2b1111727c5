"""Lets scripts call from within `torch.inference_mode`, and hand over what was made there.

A tensor that is made there can be written to there only. So ours are not: a later backward pass, or
another thread, writes to them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

import torch

Given = ParamSpec("Given")
Returned = TypeVar("Returned")


def outside_inference(call: Callable[Given, Returned]) -> Callable[Given, Returned]:
    """Have a call run as ever where the script is in `torch.inference_mode`."""

    @functools.wraps(call)
    def run(*args: Given.args, **kwargs: Given.kwargs) -> Returned:
        if not torch.is_inference_mode_enabled():
            return call(*args, **kwargs)
        with torch.inference_mode(mode=False):
            return call(*args, **kwargs)

    return run


@contextmanager
def written_anywhere(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Have tensors be what is written, by any thread, to those that this context has.

    They are the same, but for those that were made in `torch.inference_mode`.
    """
    own = [each.clone() if each.is_inference() else each for each in tensors]
    yield own
    with torch.inference_mode():
        for tensor, copy in zip(tensors, own, strict=True):
            if copy is not tensor:
                tensor.copy_(copy)
