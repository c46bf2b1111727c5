"""What a hook offers whose gradients cross in buckets that all sites agree on."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence, Set
from typing import Protocol

import torch
from torch import nn

from isthmus.sites.worker.exchange.collectives import Ranks
from isthmus.sites.worker.exchange.site_averages import BucketAverages
from isthmus.sites.worker.layouts.canonical import Agreed, GradientPlan
from isthmus.sites.worker.layouts.gradient_hook import GradientHook


class AgreedTensors(Protocol):
    """Tensors that cross in buckets on which all sites agree."""

    own: Mapping[str, torch.Tensor]
    twins: Sequence[tuple[str, torch.Tensor]]
    is_lone: bool
    data_ranks: Ranks

    def agree(self, agreed: Agreed, plan: GradientPlan) -> Set[Ranks]:
        """Prepare for the buckets: as `AgreedHook.agree`."""

    def shard_in(self, tensors: Sequence[torch.Tensor]) -> str | None:
        """Return the parameter of which one of these is a shard, or of whose gradient."""


class AgreedHook(GradientHook):
    """A hook that has to be told what all sites have agreed on before its first round."""

    own: Mapping[str, torch.Tensor]
    """Parameters and buffers that this rank holds any of, by name, in the order of gradients."""
    twins: Sequence[tuple[str, torch.Tensor]]
    """Buffers that another part of a pipeline has on this rank, too."""
    is_lone = False
    """Nothing makes the mean of gradients over the site's ranks."""
    data_ranks: Ranks
    """Those of the site with data of their own, this one among them."""

    _pipeline: BucketAverages

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        """Those of `own` that have gradients."""
        return {
            name: each
            for name, each in self.own.items()
            if isinstance(each, nn.Parameter) and each.requires_grad
        }

    def average_by(self, averages: BucketAverages) -> None:
        """Have gradients averaged by this one from the next round on; `agree` comes next."""
        self._pipeline = averages

    @abstractmethod
    def agree(self, agreed: Agreed, plan: GradientPlan) -> Set[Ranks]:
        """Prepare for the buckets that all sites have agreed on.

        Returns:
            The ranks that share a bucket whose elements move among them, of all buckets.

        Raises:
            TypeError: this rank's layout does not allow for them.
        """

    @abstractmethod
    def shard_in(self, tensors: Sequence[torch.Tensor]) -> str | None:
        """Return the parameter of which one of these is a shard, or of whose gradient."""

    def forget_gathered(self) -> None:
        """Have the next forward pass read parameters anew: copies of them are old."""

    def gather_after_changes(self) -> None:
        """Have a backward pass read parameters once they have been changed on this stream."""
