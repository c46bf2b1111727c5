"""Global parameters and outer momentum of one rank's shard of a bucket, in the host's memory.

Of each element one rank of a site hands it over to its gateway. That rank also keeps what all sites
have of it: the global parameter G, and the momentum M of the outer optimizer, both float32. It
takes the outer step on them between the gateway's result and the way back to the other ranks. The
kernels round each operation (sites/codecs/kernels/loops.py), so all sites have the same bits,
whatever their layouts and devices.

What training begins from after a round is G in each parameter's dtype. From that the next
pseudo-gradient is measured: the difference to G itself would cross as a signal that nobody made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from isthmus.sites.codecs.kernels import loops


@dataclass(frozen=True, slots=True)
class Rates:
    """The outer optimizer's learning rate and momentum in one round."""

    lr: float
    momentum: float


@dataclass(frozen=True, slots=True)
class Rounded:
    """Elements [start, stop) of a shard whose parameters are of a dtype below float32."""

    start: int
    stop: int
    dtype: torch.dtype


class OuterShard:
    """What a rank keeps of one bucket; `ShardWork` of its rounds over sites."""

    def __init__(
        self, parameters: torch.Tensor, momentum: torch.Tensor | None, rounded: Sequence[Rounded]
    ) -> None:
        """Own them from now on: float32, shape (n,)."""
        self.parameters = parameters
        """G."""
        self.momentum = momentum
        """M; None: it is always 0."""
        self.rates = Rates(1.0, 0.0)
        """The rates of the round that is to land next."""
        self._rounded = rounded

    def leave(self, shard: torch.Tensor, weight: float) -> None:
        """Make the pseudo-gradient of the site's parameters, times its tokens."""
        base = self.parameters
        if self._rounded:
            base = base.clone()
            for each in self._rounded:
                part = base[each.start : each.stop]
                part.copy_(part.to(each.dtype))
        loops.write_pseudo_gradient(base.numpy(), shard.numpy(), np.float32(weight))

    def land(self, shard: torch.Tensor) -> None:
        """Take the outer step by the sites' mean, and deliver the global parameters."""
        lr = np.float32(self.rates.lr)
        if self.momentum is None:
            loops.take_plain_outer_step(self.parameters.numpy(), shard.numpy(), lr)
            return
        loops.take_outer_step(
            self.parameters.numpy(),
            self.momentum.numpy(),
            shard.numpy(),
            lr,
            np.float32(self.rates.momentum),
        )
