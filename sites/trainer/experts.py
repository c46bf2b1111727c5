"""A layer's experts: MLPs of which each token passes through the few that a router chooses.

Under expert parallelism each rank of `mesh` has some of them: tokens travel to the ranks that have
their experts, and back. Every token gets there, however many choose the same expert; so outputs do
not depend on the mesh, but for the order of sums.

Shape suffixes: N tokens, W width, E experts, K experts of a token, S = N K tokens sent, R tokens
received, F hidden width.
"""
# ruff: noqa: N803, N806 - the shape suffixes

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from isthmus.sites.worker.exchange.sharding import is_sharded
from isthmus.topology.spec.job import Model

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class Experts(nn.Module):
    """The router and the MLPs of one layer."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.active = model.active_experts
        self.router = nn.Linear(model.width, model.experts, bias=False)
        self.mlps = Mlps(model)

    def forward(self, x_BTW: Tensor) -> Tensor:
        """Return each token's experts' outputs, weighed by the router; same shape."""
        x_NW = x_BTW.flatten(0, 1)
        weights_NK, chosen_NK = self.router(x_NW).softmax(-1).topk(self.active, dim=-1)
        order_S = chosen_NK.flatten().argsort(stable=True)
        counts_E = torch.bincount(chosen_NK.flatten(), minlength=self.router.out_features)
        sent_SW = x_NW.repeat_interleave(self.active, dim=0)[order_S]
        back_SW: Tensor = self.mlps(sent_SW, counts_E)
        out_SW = torch.empty_like(back_SW).index_copy(0, order_S, back_SW)
        out_NKW = out_SW.view(*weights_NK.shape, -1)
        out_NW: Tensor = (out_NKW * weights_NK[..., None]).sum(1)
        return out_NW.view(x_BTW.shape)


class Mlps(nn.Module):
    """The MLPs of one layer, those of this rank where ranks share them."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.empty(model.experts, model.width, 4 * model.width))
        self.down = nn.Parameter(torch.empty(model.experts, 4 * model.width, model.width))
        self.mesh: DeviceMesh | None = None
        """The ranks that share them; None: this one has all."""

    def forward(self, x_SW: Tensor, counts_E: Tensor) -> Tensor:
        """Return what experts make of tokens that are sorted by expert; same shape.

        Args:
            x_SW: float.
            counts_E: int64, how many of them each expert has.
        """
        if self.mesh is None:
            return _through(x_SW, counts_E.tolist(), self.up, self.down)
        assert is_sharded(self.up)
        assert is_sharded(self.down)
        up, down = self.up.to_local(), self.down.to_local()
        group = self.mesh.get_group()
        size = self.mesh.size()
        theirs_E = torch.empty_like(counts_E)  # by rank of the sender, then by expert of this rank
        dist.all_to_all_single(theirs_E, counts_E, group=group)
        sent, received = (each.view(size, -1).sum(1).tolist() for each in (counts_E, theirs_E))
        x_RW = _exchanged(x_SW, received, sent, group)
        # Sorted by sender; experts want them sorted by expert.
        expert_R = (
            torch.arange(len(up), device=x_SW.device).repeat(size).repeat_interleave(theirs_E)
        )
        order_R = expert_R.argsort(stable=True)
        counts = theirs_E.view(size, -1).sum(0).tolist()
        out_RW = _through(x_RW[order_R], counts, up, down)
        back_RW = torch.empty_like(out_RW).index_copy(0, order_R, out_RW)
        return _exchanged(back_RW, sent, received, group)


def _through(x_RW: Tensor, counts: list[int], up_EWF: Tensor, down_EFW: Tensor) -> Tensor:
    """Return what each expert makes of its tokens."""
    parts = [
        functional.gelu(part @ up, approximate="tanh") @ down
        for part, up, down in zip(torch.split(x_RW, counts), up_EWF, down_EFW, strict=True)
    ]
    return torch.cat(parts)


def _exchanged(x: Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup) -> Tensor:
    """Send rows to each rank and return what they sent; backward sends gradients back."""
    from torch.distributed._functional_collectives import all_to_all_single_autograd

    rows: Tensor = all_to_all_single_autograd(x, received, sent, group)
    return rows
