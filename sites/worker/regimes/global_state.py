"""What all sites have beside the model where each takes steps of its own.

That is the global parameters and the outer momentum. Ranks have them in shards (outer_shard.py). A
checkpoint has them as the parameters are laid out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from isthmus.sites.worker.exchange.sharding import laid_out_as, local_of
from isthmus.sites.worker.regimes.outer_buckets import OuterBuckets, flat_of
from isthmus.sites.worker.regimes.outer_shard import OuterShard, Rounded

if TYPE_CHECKING:
    from isthmus.sites.checkpoint.training_state import Forms, Tensors

_GLOBAL, _MOMENTUM = "global/", "momentum/"


class GlobalState:
    """One rank's part of the global parameters and momentum. For the training thread."""

    def __init__(
        self, buckets: OuterBuckets, trained: Mapping[str, nn.Parameter], *, has_momentum: bool
    ) -> None:
        """Have nothing yet. `has_momentum`: the outer optimizer has one."""
        self._buckets = buckets
        self._trained = trained
        self._has_momentum = has_momentum
        self.shards: Sequence[OuterShard] = ()
        """The outer optimizer's part of each bucket; none before the first step."""
        self._restored: Tensors = {}
        """What training is to go on from, until the first step."""
        self._written: Tensors = {}
        """What is to be written of the latest step; empty: nothing is."""

    # ---------------------------------------------------------------- while training

    def begin(self) -> None:
        """Take the parameters for the global ones, or what there is to go on from."""
        restored, self._restored = self._restored, {}
        own = {name: local_of(each) for name, each in self._trained.items()}
        values = {name: local_of(restored.get(_GLOBAL + name, each)) for name, each in own.items()}
        parameters = self._buckets.take_shards(flat_of(values))
        momenta: Sequence[torch.Tensor | None] = [None] * len(parameters)
        if self._has_momentum:
            momenta = [*map(torch.zeros_like, parameters)]
            if any(each.startswith(_MOMENTUM) for each in restored):
                zeros = {name: torch.zeros_like(each) for name, each in own.items()}
                found = {
                    name: local_of(restored.get(_MOMENTUM + name, each))
                    for name, each in zeros.items()
                }
                momenta = self._buckets.take_shards(flat_of(found))
        self.shards = [
            OuterShard(
                of, momentum, [Rounded(*part) for part in each.dtypes() if _is_short(part[2])]
            )
            for each, of, momentum in zip(self._buckets.buckets, parameters, momenta, strict=True)
        ]

    def give(self, flats: Mapping[str, torch.Tensor]) -> None:
        """Write the global parameters into `flats`. A collective of the site."""
        self._buckets.give_shards([each.parameters for each in self.shards], flats)

    # ---------------------------------------------------------------- a checkpoint

    @property
    def is_noted(self) -> bool:
        """Whether there is something to be written of the latest step."""
        return bool(self._written)

    def forget(self) -> None:
        """Forget what was to be written: another step has ended."""
        self._written = {}

    def note(self) -> None:
        """Have the global parameters and the momentum be what is written."""
        self._written = self._gathered(_GLOBAL, [each.parameters for each in self.shards])
        momenta = [each.momentum for each in self.shards if each.momentum is not None]
        if momenta:
            self._written |= self._gathered(_MOMENTUM, momenta)

    def tensors(self) -> Tensors:
        """Return what is to be written: references."""
        return self._written

    def to_load(self, stored: Forms) -> Tensors:
        """Return tensors to load what was stored into, of what this rank has a part of."""
        found: Tensors = {}
        for path in stored:
            prefix, _, name = path.partition("/")
            if f"{prefix}/" in (_GLOBAL, _MOMENTUM) and name in self._trained:
                parameter = self._trained[name]
                found[path] = laid_out_as(parameter, _blank(parameter))
        return found

    def take(self, tensors: Tensors) -> None:
        """Go on from what was loaded; nothing: from the parameters."""
        self._restored, self.shards = tensors, ()

    def _gathered(self, prefix: str, shards: Sequence[torch.Tensor]) -> Tensors:
        """Return all of what ranks of this site have in shards, laid out as the parameters are."""
        flats = {name: _blank(each) for name, each in self._trained.items()}
        self._buckets.give_shards(shards, flats)
        return {
            prefix + name: laid_out_as(self._trained[name], flat) for name, flat in flats.items()
        }


def _is_short(dtype: torch.dtype) -> bool:
    """Whether a dtype cannot hold a float32."""
    return dtype in (torch.bfloat16, torch.float16)


def _blank(parameter: torch.Tensor) -> torch.Tensor:
    """Return a flat float32 tensor for this rank's elements of a parameter, on the host."""
    return torch.zeros(local_of(parameter).numel(), dtype=torch.float32, device="cpu")
