"""Refuses gradients that an earlier backward pass has left, where they would count wrong.

They are means over all ranks by then. Where losses are sums, what comes next is a sum: both in one
would be divided by tokens again. Of a parameter that parts of a pipeline share, each part has the
whole mean: it would be added up.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from isthmus.protos.errors import ScriptError
from isthmus.sites.worker.exchange.sharding import local_of


def check_zeroed(parameters: Iterable[torch.Tensor], *, is_summed: bool = True) -> None:
    """Refuse what an earlier backward pass has left, where another begins.

    On CUDA this waits, but not where gradients are None.

    Args:
        parameters: that are to have no gradient, or zeros.
        is_summed: losses are sums; else parts of a pipeline share these parameters.

    Raises:
        ScriptError: a gradient is not zero.
    """
    grads = [each.grad for each in parameters if each.grad is not None]
    left = [local_of(each).count_nonzero() for each in grads]
    if left and bool(torch.stack(left).any()):
        where, why = (
            ('site.attach(loss="sum")', "which have been divided by tokens")
            if is_summed
            else ("site.attach", "which parts of a pipeline share: each would add them again")
        )
        raise ScriptError(
            f"{where}: gradients of an earlier backward pass are still there, {why}: call "
            "zero_grad, of every optimizer, before each backward pass that synchronises"
        )


class ZeroedCheck:
    """Calls `check_zeroed` at the beginning of the first backward pass after each round."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        """Hook into parameters of DistributedDataParallel, whose gradients it leaves in place."""
        self._parameters = [each for each in parameters if each.requires_grad]
        self.is_due = False
        """A round has ended, and no backward pass has begun."""
        self._handles = [
            each.register_hook(self._check)  # type: ignore[no-untyped-call] # before it is added
            for each in self._parameters
        ]

    def close(self) -> None:
        """Take the hooks off."""
        for each in self._handles:
            each.remove()

    def _check(self, _: torch.Tensor) -> None:
        if self.is_due:
            self.is_due = False
            check_zeroed(self._parameters)
