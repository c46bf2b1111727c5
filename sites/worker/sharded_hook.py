"""Where fully_shard (FSDP2) hands over gradients, reduce-scattered in the site, by module."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from sites.worker.collectives import Collectives
from sites.worker.exactness import Exactness
from sites.worker.exchange import Exchange
from sites.worker.layout import layout_of_labels
from sites.worker.packing import Packer
from sites.worker.region import FLOAT_BYTES
from sites.worker.rounds import Round
from sites.worker.routes import route
from sites.worker.sharded import ShardedFlat, check_sharding
from sites.worker.tokens import TokenCount


class ShardedHook:
    """Sends each shard of a gradient through the exchange while backward goes on.

    FSDP weighs ranks alike; in its place, a reduce-scatter of ours weighs them by tokens, so that
    `.grad` is the site's mean for a moment. As each gradient is there, it is packed into buckets;
    their averages over sites are in place when backward returns.
    """

    def __init__(
        self, exchange: Exchange, tokens: TokenCount, *, bucket_bytes: int, exactness: Exactness
    ) -> None:
        """Do nothing yet.

        Args:
            exchange: takes the buckets.
            tokens: this rank's weight.
            bucket_bytes: of float32 a bucket, all ranks' shards of it.
            exactness: says what crosses exactly though the codec rounds.
        """
        self._exchange = exchange
        self._tokens = tokens
        self._exactness = exactness
        bucket_numel = max(1, bucket_bytes // FLOAT_BYTES)
        self._packers: dict[bool, Packer[ShardedFlat]] = {
            is_exact: Packer(bucket_numel) for is_exact in (False, True)
        }
        self._is_open = False
        self._taken = 0.0
        self._futures: list[torch.futures.Future[torch.Tensor]] = []
        self._rounds: list[Round] = []

    def register(self, model: nn.Module) -> None:
        """Hook into every parameter and every module that fully_shard was called on.

        Raises:
            TypeError: a parameter is not sharded over all ranks of the site.
            ConfigError: parameters are to cross exactly that there are not.
        """
        self._exactness.check([name for name, _ in model.named_parameters()])
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                check_sharding(name, parameter)
                parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                    self._collector(name)
                )
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_reduce_scatter(WeightedReduceScatter(self.weigh))  # type: ignore[arg-type] # by its methods

    def weigh(self, values: torch.Tensor) -> None:
        """Scale a rank's gradients so that their sum over the site's ranks is the site's mean."""
        self._begin()
        if self._taken == 0.0:
            values.zero_()  # Not a product: a loss over no tokens is often NaN.
        else:
            values.mul_(self._taken / self._exchange.site_tokens()[0])

    def take_rounds(self) -> list[Round]:
        """Return the rounds since the last call: one for each backward pass that synchronised."""
        rounds, self._rounds = self._rounds, []
        return rounds

    def _begin(self) -> None:
        """Open a round with what is first of a backward pass."""
        if not self._is_open:
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
            self._taken = self._tokens.take()
            self._exchange.begin(self._taken)
            self._is_open = True

    def _collector(self, name: str) -> Callable[[torch.Tensor], None]:
        def collect(parameter: torch.Tensor) -> None:
            self._begin()
            grad = parameter.grad
            assert isinstance(grad, DTensor)
            is_exact = self._exactness.spares(name, grad)
            for bucket in self._packers[is_exact].add(ShardedFlat.of(name, grad)):
                self._submit(bucket, is_exact=is_exact)

        return collect

    def _submit(self, bucket: Sequence[ShardedFlat], *, is_exact: bool) -> None:
        alone = dist.get_world_size() == 1
        future = self._exchange.submit(
            [each.held for each in bucket],
            layout_of_labels(each.label for each in bucket),
            exact=is_exact,
            route=None if alone else route(tuple(each.cuts for each in bucket), dist.get_rank()),
        )
        self._futures.append(future)

    def _end_backward(self) -> None:
        for is_exact, packer in self._packers.items():
            if rest := packer.take():
                self._submit(rest, is_exact=is_exact)
        self._is_open = False
        futures, self._futures = self._futures, []
        self._rounds.append(self._exchange.wait())
        for future in futures:
            future.wait()  # on CUDA, results are only enqueued: this stream must wait for them


class WeightedReduceScatter:
    """FSDP's reduce-scatter of a module's gradients, weighted by tokens. By its interface."""

    def __init__(self, weigh: Callable[[torch.Tensor], None]) -> None:
        self._weigh = weigh

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
                "site.synchronize: fully_shard would reduce gradients in another way than by their "
                "mean: use reduce_dtype=torch.float32, and set no divide factor"
            )
        self._weigh(input_tensor)
        return Collectives.reduce_scatter_over(
            group, output_tensor, input_tensor, async_op=async_op
        )
