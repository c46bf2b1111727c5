"""Accelerate, together with all other sites."""

from __future__ import annotations

from contextlib import AbstractContextManager

from accelerate import Accelerator
from torch.nn.parallel import DistributedDataParallel


def accumulate_before_crossing(accelerator: Accelerator) -> None:
    """Have accumulated gradients cross sites once a step, where the site has one rank, too.

    Accelerate leaves `no_sync` of DistributedDataParallel out where it knows of one process only:
    then every micro-batch would cross.
    """

    def no_sync(model: DistributedDataParallel) -> AbstractContextManager[None]:
        return model.no_sync()

    accelerator.no_sync = no_sync
