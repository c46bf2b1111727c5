"""What takes the buckets of DistributedDataParallel, whatever becomes of them.

Annotations are evaluated here, not postponed: DDP compares its hook's with its own classes.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import ClassVar, NoReturn
from weakref import WeakKeyDictionary

import torch
from torch._C._distributed_c10d import GradBucket  # what DDP compares the annotation with
from torch.nn.parallel import DistributedDataParallel

from isthmus.protos.errors import ScriptError
from isthmus.sites.worker.checks.left_gradients import ZeroedCheck
from isthmus.sites.worker.checks.module_hooks import ModuleHook
from isthmus.sites.worker.checks.parameter_kinds import KindCheck
from isthmus.sites.worker.checks.refusals import check_in_backward
from isthmus.sites.worker.checks.unreduced import ReducedCheck
from isthmus.sites.worker.exchange.rounds import RoundTerms
from isthmus.sites.worker.exchange.site_averages import BucketAverages
from isthmus.sites.worker.exchange.step_records import TokenCount
from isthmus.sites.worker.exchange.used_flags import MaybeUsed
from isthmus.sites.worker.layouts.gradient_hook import GradientHook

TakeBucket = Callable[[GradBucket], torch.futures.Future[torch.Tensor]]
"""Takes a bucket of DDP; returns what DDP waits for."""


class CommHook:
    """Stands in a DistributedDataParallel, which takes a hook once, for what takes its buckets."""

    _all: ClassVar["WeakKeyDictionary[DistributedDataParallel, CommHook]"] = WeakKeyDictionary()

    def __init__(self) -> None:
        """Take no bucket yet."""
        self.take: TakeBucket = _refuse_bucket

    @classmethod
    def of(cls, model: DistributedDataParallel) -> "CommHook":
        """Return the one that stands in a model; put it there if there is none."""
        hook = cls._all.get(model)
        if hook is None:
            hook = cls()
            model.register_comm_hook(None, hook.reduce)
            model._comm_hooks.pop()  # a copy would have it: torch notes it for its python reducer
            cls._all[model] = hook
        return hook

    def reduce(self, _: None, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Hand over a bucket; what DDP calls for each, in order."""
        return self.take(bucket)

    def close(self) -> None:
        """Refuse all further buckets."""
        self.take = _refuse_bucket


def _refuse_bucket(_: GradBucket) -> NoReturn:
    raise ScriptError(
        "a backward pass goes through a DistributedDataParallel that site.attach was given "
        "before, and not when it was called again: use the new one, or give it all of them"
    )


class HeldBuckets:
    """Buckets of DistributedDataParallel that get their averages together."""

    def __init__(self) -> None:
        """Hold none."""
        self._held: list[tuple[torch.Tensor, torch.futures.Future[torch.Tensor]]] = []

    def hold(self, buffer: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        """Take a bucket; return what DDP waits for."""
        devices: list[int | str | torch.device] = (
            [] if buffer.device.type == "cpu" else [buffer.device]
        )
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future(devices=devices)
        self._held.append((buffer, future))
        return future

    def complete_after(self, last: torch.futures.Future[torch.Tensor]) -> None:
        """Give DDP all that are held once `last` is done, or its error."""
        held, self._held = self._held, []

        def complete(last: torch.futures.Future[torch.Tensor]) -> None:
            for buffer, future in held:
                try:
                    last.value()
                except Exception as error:  # noqa: BLE001 - as DDP's own bucket would tell it
                    future.set_exception(error)  # type: ignore[arg-type] # torch's own is wrong
                else:
                    future.set_result(buffer)

        last.then(complete)


class DdpHook(GradientHook):
    """A hook whose models DistributedDataParallel wraps. A backward pass is a round."""

    def __init__(
        self,
        pipeline: BucketAverages,
        tokens: TokenCount,
        models: Sequence[DistributedDataParallel],
        names: Mapping[torch.Tensor, str],
        *,
        is_summed: bool,
    ) -> None:
        """Check forward and backward passes from now on; take no bucket yet.

        `names` are those of all the models' parameters.
        """
        super().__init__(tokens, is_summed=is_summed)
        self._pipeline = pipeline
        self._models = models
        self._names = names
        self._used: MaybeUsed | None = None
        """What says which gradients there are; None: all are there, or the pass fails."""
        self._is_backward = False
        """A backward pass goes on, and has brought a bucket."""
        self._reduced = ReducedCheck(models, names)
        self._undo.append(self._reduced.close)
        self._zeroed = ZeroedCheck(names) if is_summed else None
        if self._zeroed is not None:
            self._undo.append(self._zeroed.close)
        for model in models:
            named = [(names[each], each) for each in model.module.parameters()]
            self._undo += [
                model.register_forward_pre_hook(ModuleHook(KindCheck(named))).remove,
                model.register_forward_pre_hook(ModuleHook(self.check_unbroken)).remove,
            ]

    def watch_reduced(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Refuse their steps with gradients of which a part has not crossed."""
        for each in optimizers:
            self._reduced.watch(each)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Have backward passes accumulate gradients at this rank, and nothing cross."""
        with ExitStack() as stack:
            for each in self._models:
                stack.enter_context(each.no_sync())
            yield

    def _is_amid_round(self) -> bool:
        return self._is_backward or not all(map(_is_reduced, self._models))

    def _take_buckets(self, model: DistributedDataParallel, take: TakeBucket) -> None:
        """Have DDP hand a model's buckets to `take`."""
        comm_hook = CommHook.of(model)
        comm_hook.take = take
        self._undo.append(comm_hook.close)

    def _begin(self, *, first_bucket: int = 0) -> bool:
        """Open a round, if this is the first bucket of a backward pass; return whether it is."""
        if self._is_backward:
            return False
        check_in_backward()
        self._is_backward = True
        terms = RoundTerms(first_bucket=first_bucket, is_gradient=True, is_summed=self._is_summed)
        self._pipeline.begin(self._tokens.take(), terms)
        return True

    def _finish(self) -> None:
        """Wait for all buckets of the backward pass, and end its round.

        Runs at the end of the pass that brings the last bucket, be it nested in another one: before
        DDP looks at the futures. It would turn an exception in a future into an unreadable one.
        """
        self._is_backward = False
        if self._used is not None:
            self._used.submit(self._pipeline)
        finished = self._pipeline.wait(has_norm=True)
        if self._zeroed is not None:
            self._zeroed.is_due = True
        self._end_round(finished)
        if self._used is not None:
            self._used.give_averaged_after_ddp(is_catching_up=finished.is_catching_up)
        if self.after_gradients is not None:  # once DDP has given parameters their gradients
            torch.autograd.Variable._execution_engine.queue_callback(self.after_gradients)


def _is_reduced(model: DistributedDataParallel) -> bool:
    """Whether DDP expects no gradient any more; else it would fail in the next forward pass."""
    try:
        model.reducer._rebuild_buckets()  # as it would then
    except RuntimeError:
        return False
    return True
