"""Notices parameters whose dtype or device was changed after `site.synchronize`."""

from __future__ import annotations

from collections.abc import Iterable

import torch


class KindCheck:
    """Compares, before each forward pass that trains, what parameters are with what they were.

    DDP has made its buckets by then, and torch would fail in them by an assertion. A forward hook.
    """

    def __init__(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Note what these parameters are now."""
        self._kinds = [(name, each, each.dtype, each.device) for name, each in named]

    def __call__(self, *_: object) -> None:
        """Refuse what has changed.

        Raises:
            TypeError: and what to do.
        """
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        for name, parameter, dtype, device in self._kinds:
            if parameter.dtype is not dtype or parameter.device != device:
                raise TypeError(
                    f"parameter {name} is of {parameter.dtype} on {parameter.device} now, and was "
                    f"of {dtype} on {device} when site.synchronize was called: change the dtype or "
                    "the device of a model (half, double, to) before DistributedDataParallel wraps "
                    "it"
                )
