"""Where DistributedDataParallel hands gradients over: its communication hook."""

import torch
from torch._C._distributed_c10d import GradBucket  # what DDP compares the annotation with
from torch.nn.parallel import DistributedDataParallel

from sites.worker.exactness import Exactness
from sites.worker.exchange import Exchange
from sites.worker.layout import layout_of
from sites.worker.rounds import Round
from sites.worker.tokens import TokenCount


class GradientHook:
    """Sends each bucket through the exchange while backward goes on."""

    def __init__(
        self,
        exchange: Exchange,
        tokens: TokenCount,
        model: DistributedDataParallel,
        *,
        exactness: Exactness,
    ) -> None:
        """Do nothing yet.

        Args:
            exchange: takes the buckets.
            tokens: this rank's weight.
            model: whose gradients they are.
            exactness: says what crosses exactly though the codec rounds.

        Raises:
            ConfigError: it names parameters that there are not.
        """
        self._exchange = exchange
        self._exactness = exactness
        self._tokens = tokens
        self._names = {each: name for name, each in model.module.named_parameters()}
        exactness.check([*self._names.values()])
        self._layouts: dict[tuple[int, ...], int] = {}
        self._rounds: list[Round] = []

    def reduce(self, _: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Start a bucket's average over all sites; what DDP calls for each, in order."""
        if bucket.index() == 0:
            # Runs at the end of backward, before DDP looks at the futures: DDP would turn an
            # exception in a future into an unreadable one.
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
            self._exchange.begin(self._tokens.take())
        layout, buffer = self._layout(bucket), bucket.buffer()
        if not self._exactness.is_lossy:
            return self._exchange.submit([buffer], layout)
        names = [self._names[each] for each in bucket.parameters()]
        named = zip(names, bucket.gradients(), strict=True)
        futures = []
        for group, is_exact in self._exactness.split(named, exact=False):
            pieces = [_memory_of(each, buffer) for _, each in group]
            futures.append(self._exchange.submit(pieces, layout, exact=is_exact))

        def whole(last: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
            last.value()  # raises what went wrong
            return buffer

        # Buckets are completed in the order in which they were submitted.
        return futures[-1].then(whole)

    def take_rounds(self) -> list[Round]:
        """Return the rounds since the last call: one for each backward pass that synchronised."""
        rounds, self._rounds = self._rounds, []
        return rounds

    def _end_backward(self) -> None:
        self._rounds.append(self._exchange.wait())

    def _layout(self, bucket: GradBucket) -> int:
        parameters = bucket.parameters()
        key = tuple(id(each) for each in parameters)
        if key not in self._layouts:
            self._layouts[key] = layout_of((self._names[each], each) for each in parameters)
        return self._layouts[key]


def _memory_of(grad: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
    """Return where in the bucket a gradient lies, flat, whatever its strides are."""
    start = grad.storage_offset() - buffer.storage_offset()
    return buffer[start : start + grad.numel()]
