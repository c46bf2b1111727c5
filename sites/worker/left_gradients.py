"""Refuses gradients that an earlier backward pass has left, where losses are sums.

They are means by then. What comes next is a sum: both in one would be divided by tokens again.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from protos.errors import LocalProtocolError
from sites.worker.sharding import local_of


def check_zeroed(parameters: Iterable[torch.Tensor]) -> None:
    """Refuse what an earlier backward pass has left, where a loss that is a sum begins another.

    It is a mean by now: divided again, it would count for next to nothing. On CUDA this waits, but
    not where gradients are None.

    Raises:
        LocalProtocolError: a gradient is not zero.
    """
    grads = [each.grad for each in parameters if each.grad is not None]
    left = [local_of(each).count_nonzero() for each in grads]
    if left and bool(torch.stack(left).any()):
        raise LocalProtocolError(
            'site.synchronize(loss="sum"): gradients of an earlier backward pass are still there, '
            "which have been divided by tokens: call zero_grad, of every optimizer, before each "
            "backward pass that synchronises"
        )


class ZeroedCheck:
    """Calls `check_zeroed` at the beginning of the first backward pass after each round."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        """Hook into parameters of DistributedDataParallel, whose gradients it leaves in place."""
        self._parameters = [each for each in parameters if each.requires_grad]
        self.is_due = False
        """A round has ended, and no backward pass has begun."""
        for each in self._parameters:
            each.register_hook(self._check)  # type: ignore[no-untyped-call] # before it is added

    def _check(self, _: torch.Tensor) -> None:
        if self.is_due:
            self.is_due = False
            check_zeroed(self._parameters)
