"""Sends gradients of DistributedDataParallel to sites that shard the model, as these send theirs.

Sites that shard have agreed on buckets of their own (canonical.py), whatever DDP makes. So DDP's
buckets are held until all gradients of the next agreed bucket are there. To the others, every rank
of this site holds all of each tensor.

Annotations are evaluated here, not postponed: DDP compares its hook's with its own classes.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket  # what DDP compares the annotation with
from torch.nn.parallel import DistributedDataParallel

from isthmus.protos.errors import ScriptError
from isthmus.sites.local.regions import FLOAT_BYTES
from isthmus.sites.worker.checks.arguments import check_not_complex
from isthmus.sites.worker.checks.left_gradients import ZeroedCheck
from isthmus.sites.worker.checks.parameter_kinds import KindCheck
from isthmus.sites.worker.checks.refusals import check_in_backward
from isthmus.sites.worker.exchange.bucket_pipeline import EVERYBODY, BucketPipeline, SharedBy
from isthmus.sites.worker.exchange.collectives import Ranks
from isthmus.sites.worker.exchange.exactness import Exactness, bare_name
from isthmus.sites.worker.exchange.step_records import TokenCount
from isthmus.sites.worker.exchange.used_flags import MaybeUsed
from isthmus.sites.worker.layouts.canonical import Agreed, BucketCut, Held, cut_flags
from isthmus.sites.worker.layouts.gradient_hooks import (
    CommHook,
    GradientHook,
    HeldBuckets,
    no_sync_of,
)
from isthmus.sites.worker.layouts.sharded_state import held_tensors


class ReplicaBesideShardsHook(GradientHook):
    """The hook of one rank: a backward pass is a round."""

    def __init__(
        self,
        pipeline: BucketPipeline,
        tokens: TokenCount,
        models: Sequence[DistributedDataParallel],
        *,
        bucket_bytes: int,
        exactness: Exactness,
        is_summed: bool = False,
    ) -> None:
        """Hook into the model; `agree` comes next. `bucket_bytes` is float32 of a bucket.

        Raises:
            TypeError: there are several models, or a parameter is complex, or not in row-major
                order.
        """
        super().__init__(tokens, is_summed=is_summed)
        self._pipeline = pipeline
        self._exactness = exactness
        self._bucket_numel = max(1, bucket_bytes // FLOAT_BYTES)
        if len(models) != 1:
            raise TypeError("site.synchronize: beside shards, want one DistributedDataParallel")
        (model,) = models
        self._model = model
        parameters = [*model.module.named_parameters()]
        self._names = {each: bare_name(name) for name, each in parameters}
        if is_summed:
            self._zeroed = ZeroedCheck(self._names)
            self._undo.append(self._zeroed.close)
        for each, name in self._names.items():
            if not each.is_contiguous():
                raise TypeError(
                    f"site.synchronize: parameter {name} is not contiguous, as it has to be beside "
                    "shards"
                )
            check_not_complex(name, each)
        # Backward comes to them from the last to the first.
        named = [*reversed(parameters), *model.module.named_buffers()]
        self.own: dict[str, torch.Tensor] = {bare_name(name): each for name, each in named}
        """Parameters and buffers, by name."""
        self.twins: list[tuple[str, torch.Tensor]] = []
        """Buffers that a pipeline's parts share: here there are none."""
        self.data_ranks: Ranks = tuple(range(dist.get_world_size()))
        self.groups: set[Ranks] = {self.data_ranks}
        self.cut = 0
        """What tells apart how all are cut into buckets, and which ranks share each."""
        self._cuts: list[tuple[BucketCut, SharedBy]] = []
        self._sharing_flags = EVERYBODY
        self._used: MaybeUsed | None = None
        self._num_submitted = 0
        self._is_backward = False
        """A backward pass goes on, and has brought a bucket."""
        self._held = HeldBuckets()
        self._arrived: dict[str, torch.Tensor] = {}
        """Where in DDP's buckets a gradient lies, flat."""
        named = [(name, each) for each, name in self._names.items()]
        self._undo.append(model.register_forward_pre_hook(KindCheck(named)).remove)
        comm_hook = CommHook.of(model)
        comm_hook.take = self.reduce
        self._undo.append(comm_hook.close)

    def held(self) -> list[Held]:
        """Return what this rank tells the others of its site."""
        return held_tensors(self.own, self._exactness)

    def agree(self, agreed: Agreed) -> None:
        """Cut the agreed list into buckets."""
        cuts = agreed.cut_gradients(self._bucket_numel)
        self.cut = agreed.identity(cuts)
        flags = cut_flags(agreed.law, len(cuts))
        *sharing, self._sharing_flags = agreed.shared_by([*cuts, flags], dist.get_rank())
        self._cuts = [*zip(cuts, sharing, strict=True)]
        parameters = {name: each for each, name in self._names.items()}
        self._used = MaybeUsed({parameters[name]: name for name in flags.names}, [self._model])
        self.crossed |= {id(parameters[name]) for cut in cuts for name in cut.names}

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context in which backward passes accumulate gradients, and nothing crosses."""
        return no_sync_of([self._model])

    def gradients(self) -> list[torch.Tensor]:
        """Return each gradient that there is."""
        return [each.grad for each in self._names if each.grad is not None]

    def parameters_now(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Return the parameters that the model has now, new ones too, with their names."""
        for name, each in reversed([*self._model.module.named_parameters()]):
            yield bare_name(name), each

    def shard_in(self, _: Sequence[torch.Tensor]) -> None:
        """Nothing is a shard here."""

    def reduce(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Hold one of DDP's buckets; submit the agreed ones that it completes.

        Raises:
            ScriptError: DDP has no gradient of a parameter that other sites train.
        """
        if not self._is_backward:
            check_in_backward()
            self._is_backward = True
            self._pipeline.begin(self._tokens.take(), is_gradient=True, is_summed=self._is_summed)
            self._num_submitted = 0
        future = self._held.hold(bucket.buffer())
        assert self._used is not None, "agree comes first"
        self._used.note(bucket.parameters(), bucket.gradients())
        for parameter, grad in zip(bucket.parameters(), bucket.gradients(), strict=True):
            self._arrived[self._names[parameter]] = grad.view(-1)
        latest = self._submit()
        if bucket.is_last():
            # Runs at the end of the pass that brings it, before DDP looks at the futures: DDP would
            # turn an exception in a future into an unreadable one.
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
            if self._num_submitted < len(self._cuts):
                names = self._cuts[self._num_submitted][0].names
                raise ScriptError(
                    "DistributedDataParallel does not reduce the gradient of "
                    f"{next(each for each in names if each not in self._arrived)}, which other "
                    "sites train"
                )
            assert latest is not None, "the last gradient completes the last bucket"
            self._arrived = {}
            self._held.complete_after(latest)  # buckets come back in order
        return future

    def _submit(self) -> torch.futures.Future[torch.Tensor] | None:
        """Submit the agreed buckets whose turn it is; return the last of them."""
        latest = None
        for cut, sharing in self._cuts[self._num_submitted :]:
            if any(name not in self._arrived for name in cut.names):
                break
            latest = self._pipeline.submit(
                [self._arrived[each.entry.name][each.start : each.stop] for each in cut.slices],
                cut.layout,
                exact=cut.exact,
                number=cut.number,
                sharing=sharing,
                named=[(name, self._arrived[name]) for name in cut.names],
            )
            self._num_submitted += 1
        return latest

    def _end_backward(self) -> None:
        assert self._used is not None, "agree comes first"
        self._is_backward = False
        self._used.submit(self._pipeline, number=len(self._cuts), sharing=self._sharing_flags)
        finished = self._pipeline.wait(has_norm=True)
        self._end_round(finished)
        self._used.give_averaged_after_ddp(is_catching_up=finished.is_catching_up)
