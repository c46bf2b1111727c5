"""Sends gradients of DistributedDataParallel to sites that have it, too, while backward goes on.

Annotations are evaluated here, not postponed: DDP compares its hook's with its own classes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch._C._distributed_c10d import GradBucket  # what DDP compares the annotation with
from torch.nn.parallel import DistributedDataParallel

from isthmus.sites.worker.exchange.bucket_order import Agree, Cut, own_cut
from isthmus.sites.worker.exchange.bucket_pipeline import BucketPipeline
from isthmus.sites.worker.exchange.exactness import Exactness
from isthmus.sites.worker.exchange.step_records import TokenCount
from isthmus.sites.worker.exchange.tensor_average import first_bucket_of
from isthmus.sites.worker.exchange.tensor_hashes import layout_of
from isthmus.sites.worker.exchange.used_flags import MaybeUsed
from isthmus.sites.worker.layouts.bucket_gradients import gradients_in, piece_of
from isthmus.sites.worker.layouts.ddp_hook import DdpHook, HeldBuckets
from isthmus.sites.worker.layouts.gradient_hook import check_is_outermost

Named = Sequence[tuple[str, torch.Tensor]]


@dataclass(slots=True)
class _ModelBuckets:
    """How one model's gradients cross: in DDP's buckets, or in those that all sites agreed on."""

    number: int
    """The model's number among those that are attached."""
    model: DistributedDataParallel
    agreed: Cut | None = None
    """The cut that all sites have agreed on; None: the model has had no round."""
    crossed: Cut = field(default_factory=list)
    """How its latest round has crossed."""
    is_under_way: bool = False
    """A pass has brought a bucket of it, and not the last one."""
    holds: bool = False
    """The buckets of this round are not DDP's, from one on."""
    held: HeldBuckets = field(default_factory=HeldBuckets)
    """DDP's buckets that wait for those agreed on."""
    arrived: dict[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    """By name, parameters, and their gradients in DDP's buckets, that have yet to cross."""

    def begin(self) -> None:
        """Expect the first bucket of a round."""
        self.crossed, self.holds, self.is_under_way = [], False, True

    def is_next(self, names: list[str]) -> bool:
        """Whether a bucket of DDP crosses as it is, for it is the next one of those agreed on."""
        place = len(self.crossed)
        if self.agreed is not None and self.agreed[place : place + 1] != [names]:
            self.holds = True
        return not self.holds

    def complete(self) -> Iterator[list[tuple[str, torch.Tensor, torch.Tensor]]]:
        """Yield the agreed buckets whose turn it is: names, parameters and gradients of each."""
        for names in (self.agreed or [])[len(self.crossed) :]:
            if any(name not in self.arrived for name in names):
                return
            self.crossed.append(names)
            yield [(name, *self.arrived.pop(name)) for name in names]


class ReplicaHook(DdpHook):
    """Averages each bucket of DDP over all sites.

    Several models may train each other. A backward pass is a round of all that it goes through.
    """

    def __init__(
        self,
        pipeline: BucketPipeline,
        tokens: TokenCount,
        models: Sequence[DistributedDataParallel],
        *,
        exactness: Exactness,
        agree: Agree,
        is_summed: bool = False,
    ) -> None:
        """Take no bucket yet. Of several models, names begin with the model's number, as `1.`.

        `agree` has all sites take one cut.

        Raises:
            ConfigError: `exactness` names parameters that there are not.
        """
        names = {each: name for name, each in _named_parameters(models)}
        super().__init__(pipeline, tokens, models, names, is_summed=is_summed)
        self._exactness = exactness
        self._agree = agree
        if any(each.find_unused_parameters for each in models):
            self._used = MaybeUsed(names, models)
        exactness.check([*names.values()])
        self._buckets = [_ModelBuckets(number, model) for number, model in enumerate(models)]
        self._crossed: set[str] = set()
        """Names of what crossed in the latest round."""
        self._layouts: dict[tuple[int, ...], int] = {}

    def hook_in(self) -> None:
        """Have the models hand over their buckets."""
        for each in self._buckets:
            self._take_buckets(each.model, partial(self._reduce, each))

    def parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Return all parameters that were there at first, with their names."""
        return ((name, each) for each, name in self._names.items())

    def parameters_now(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Return the parameters that the models have now, new ones too, with their names."""
        return _named_parameters(self._models)

    def gradients(self) -> list[torch.Tensor]:
        """Return each gradient of the latest round."""
        parameters = [each for name, each in self.parameters() if name in self._crossed]
        return [each.grad for each in parameters if each.grad is not None]

    # ---------------------------------------------------------------- cuts

    @property
    def buckets(self) -> Cut:
        """The agreed buckets, of all models that have agreed on theirs."""
        return [names for each in self._buckets for names in each.agreed or ()]

    def resume(self, buckets: Cut) -> None:
        """Cut gradients as the run did when it was saved, or when this site rejoins it.

        A bucket's residual, and the order of sums, depend on the cut. Of a model whose parameters
        they are not, all sites agree anew.
        """
        for each in self._buckets:
            trained = (one for one in each.model.module.parameters() if one.requires_grad)
            names = {self._names[one] for one in trained}
            cut = [bucket for bucket in buckets if bucket[0] in names]
            if sorted(name for bucket in cut for name in bucket) == sorted(names):
                each.agreed = cut

    def _agree_on_cuts(self) -> None:
        """Have all sites take one cut of each model that has had its first round."""
        for each in self._buckets:
            if each.agreed is None and each.crossed:
                each.agreed = self._agree(own_cut(each.model, self._names))

    # ---------------------------------------------------------------- a round

    def _reduce(
        self, buckets: _ModelBuckets, bucket: GradBucket
    ) -> torch.futures.Future[torch.Tensor]:
        """Start the average of a model's next bucket over all sites, in the order of DDP's."""
        if self._begin(first_bucket=first_bucket_of(buckets.number)):
            self._crossed.clear()
        if bucket.index() == 0:
            buckets.begin()
        if bucket.is_last():
            buckets.is_under_way = False
            check_is_outermost(len(self._buckets))
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
        parameters, grads = bucket.parameters(), gradients_in(bucket)
        if self._used is not None:
            self._used.note(parameters, grads)
        names = [self._names[each] for each in parameters]
        self._crossed.update(names)
        self.crossed.update(map(id, parameters))
        self._reduced.note_crossed(names)
        if not buckets.is_next(names):
            buckets.arrived |= zip(names, zip(parameters, grads, strict=True), strict=True)
            return self._hold(buckets, bucket)
        buckets.crossed.append(names)
        layout, buffer = self._layout(parameters), bucket.buffer()
        named = [*zip(names, grads, strict=True)]
        if not self._exactness.is_lossy and all(each.is_contiguous() for each in grads):
            return self._pipeline.submit([buffer], layout, named=named)

        def whole(last: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
            last.value()  # raises what went wrong
            return buffer

        return self._submit(named, layout).then(whole)

    def _hold(
        self, buckets: _ModelBuckets, bucket: GradBucket
    ) -> torch.futures.Future[torch.Tensor]:
        """Keep a bucket of DDP; submit those agreed on that it completes."""
        latest, future = None, buckets.held.hold(bucket.buffer())
        for complete in buckets.complete():
            layout = layout_of((name, parameter) for name, parameter, _ in complete)
            latest = self._submit([(name, grad) for name, _, grad in complete], layout)
        if bucket.is_last():
            assert latest is not None, "the last gradient completes the last bucket"
            buckets.held.complete_after(latest)
        return future

    def _submit(self, named: Named, layout: int) -> torch.futures.Future[torch.Tensor]:
        """Submit gradients, those that cross exactly apart; return what is completed last.

        That is the last one: buckets are completed in the order in which they were submitted.
        """
        futures = []
        for group, is_exact in self._exactness.split(named, exact=False):
            pieces = [piece_of(each) for _, each in group]
            futures.append(self._pipeline.submit(pieces, layout, exact=is_exact, named=[*group]))
        return futures[-1]

    def _end_backward(self) -> None:
        if not self._is_backward or any(each.is_under_way for each in self._buckets):
            return  # Another model of the same pass calls this, too.
        self._finish()
        if any(each.agreed is None and each.crossed for each in self._buckets):
            # Runs once DDP is through with the pass.
            torch.autograd.Variable._execution_engine.queue_callback(self._agree_on_cuts)

    def _layout(self, parameters: Sequence[torch.Tensor]) -> int:
        key = tuple(id(each) for each in parameters)
        if key not in self._layouts:
            self._layouts[key] = layout_of((self._names[each], each) for each in parameters)
        return self._layouts[key]


def _named_parameters(
    models: Sequence[DistributedDataParallel],
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters of models; of several, names begin with the model's number."""
    for index, model in enumerate(models):
        prefix = f"{index}." if len(models) > 1 else ""
        for name, each in model.module.named_parameters():
            yield prefix + name, each
