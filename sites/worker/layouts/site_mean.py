"""How fully_shard makes the mean of gradients over a site's ranks, and how tokens weigh it.

fully_shard weighs ranks alike. Where losses are means of unlike numbers of tokens, that is too late
to make good: in its place, a reduce-scatter of ours weighs them. Losses that are sums need none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist

from isthmus.sites.worker.exchange.collectives import Ranks, reduce_scatter_flat
from isthmus.sites.worker.exchange.sharding import local_of
from isthmus.sites.worker.layouts.fully_sharded import ShardGroup

Weigh = Callable[[torch.Tensor, int], None]
"""Scales a rank's gradients by its tokens, before their mean is made over so many replicas."""


class SiteMean:
    """Over which ranks the gradient of each parameter is reduced, and by what it is divided."""

    def __init__(self, groups: Mapping[int, ShardGroup], data_ranks: Ranks | None) -> None:
        """Weigh nothing yet.

        Args:
            groups: of each parameter, by its id.
            data_ranks: those of the site with data of their own; None: the most over which a
                gradient of this rank is reduced.
        """
        self._groups = groups
        most = max((each.ranks for each in groups.values()), key=len, default=())
        self.data_ranks: Ranks = data_ranks or most or (dist.get_rank(),)
        self.is_counted_alike = False
        """Each rank has to count equally many tokens, for some gradients cannot be weighed."""
        self._scales: dict[str, float] = {}
        """What makes a gradient the mean over all ranks with data, where fully_shard's is not."""

    def manages(self, parameter: torch.Tensor) -> bool:
        """Whether it is known over which ranks a parameter's gradient is reduced."""
        return id(parameter) in self._groups

    def divisor_of(self, parameter: torch.Tensor) -> float:
        """Return by what the sum of a parameter's gradients over ranks is divided, as it is now."""
        return self._groups[id(parameter)].divisor

    def check(self, name: str, parameter: torch.Tensor, copies: Ranks) -> None:
        """Refuse a parameter of which ranks with data of their own have copies, and no mean.

        Raises:
            TypeError: and what to do.
        """
        averaged = self._groups[id(parameter)].ranks
        if not set(copies) & set(self.data_ranks) <= set(averaged):
            raise TypeError(
                f"site.attach: fully_shard makes the mean of {name} over ranks "
                f"{list(averaged)}, but ranks {list(self.data_ranks)} have data of their own, and "
                f"{list(copies)} hold the same of it: call fully_shard with a mesh of all of them"
            )

    def weigh(self, trained: Mapping[str, torch.Tensor], weigh: Weigh) -> list[Callable[[], None]]:
        """Have fully_shard weigh ranks by their tokens; return what ends that.

        What cannot be weighed, each rank has to count equally many tokens for.
        """
        undo: list[Callable[[], None]] = []
        for each in {id(each.module): each for each in self._groups.values()}.values():
            if each.module is not None and each.is_weighed:
                comm = WeightedReduceScatter(weigh, each.num_replicas)
                own = each.record._reduce_scatter_comm
                undo.append(partial(each.module.set_custom_reduce_scatter, own))
                each.module.set_custom_reduce_scatter(comm)  # type: ignore[arg-type] # by its methods
        for name, parameter in trained.items():
            group = self._groups[id(parameter)]
            is_whole = set(group.ranks) == set(self.data_ranks)
            if not (group.is_weighed and is_whole):
                self.is_counted_alike = len(self.data_ranks) > 1
            if not (group.is_weighed or is_whole):
                self._scales[name] = len(group.ranks) / len(self.data_ranks)
        return undo

    def scale(self, name: str, grad: torch.Tensor) -> None:
        """Make what fully_shard left of a gradient the mean over all ranks with data, in place."""
        if name in self._scales:
            local_of(grad).mul_(self._scales[name])


class WeightedReduceScatter:
    """Reduce-scatter of a module's gradients, weighted by tokens, as FSDP calls its own."""

    def __init__(self, weigh: Weigh, num_replicas: int) -> None:
        self._weigh = weigh
        self._num_replicas = num_replicas

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return a buffer, as FSDP itself would."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: object,
        async_op: bool = False,
    ) -> dist.Work | None:
        """Sum what each rank has weighed.

        Raises:
            TypeError: FSDP was told to divide in a way of its own.
        """
        if op != dist.ReduceOp.AVG:
            raise TypeError(
                "site.attach: fully_shard would reduce gradients in another way than by their "
                "mean: use reduce_dtype=torch.float32 and no divide factor, or losses that are sums: "
                'attach(…, loss="sum")'
            )
        self._weigh(input_tensor, self._num_replicas)
        work: dist.Work | None = reduce_scatter_flat(
            output_tensor, input_tensor, group=group, async_op=async_op
        )
        return work
