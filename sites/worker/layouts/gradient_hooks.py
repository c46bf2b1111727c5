"""Where training loops hand gradients over: DistributedDataParallel, and any optimizer.

shard_hook.py has the hook of fully_shard.

Annotations are evaluated here, not postponed: DDP compares its hook's with its own classes.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any, ClassVar, NoReturn
from weakref import WeakKeyDictionary

import torch
from torch._C._distributed_c10d import GradBucket  # what DDP compares the annotation with
from torch.nn.parallel import DistributedDataParallel

from isthmus.protos.errors import NotSynchronisedError, ScriptError
from isthmus.sites.worker.checks.arguments import why_not_averaged
from isthmus.sites.worker.checks.left_gradients import ZeroedCheck
from isthmus.sites.worker.checks.parameter_kinds import KindCheck
from isthmus.sites.worker.checks.refusals import check_in_backward, check_no_scaler
from isthmus.sites.worker.checks.torch_calls import calls, has_closure
from isthmus.sites.worker.checks.unreduced import ReducedCheck
from isthmus.sites.worker.exchange.bucket_order import Agree, Cut, own_cut
from isthmus.sites.worker.exchange.bucket_pipeline import BucketPipeline, Round
from isthmus.sites.worker.exchange.exactness import Exactness
from isthmus.sites.worker.exchange.step_records import TokenCount
from isthmus.sites.worker.exchange.tensor_average import TensorAverage, first_bucket_of
from isthmus.sites.worker.exchange.tensor_hashes import layout_of
from isthmus.sites.worker.exchange.used_flags import MaybeUsed
from isthmus.sites.worker.layouts.bucket_gradients import gradients_in, piece_of

MAX_ROUNDS = 1024
"""The record of a step tells of so many rounds, the last ones: gradients may pile up for ever."""


class GradientHook:
    """What all hooks have in common: the rounds in which they averaged gradients."""

    def __init__(self, tokens: TokenCount, *, is_summed: bool) -> None:
        """Take what counts this rank's weight. `is_summed`: losses are sums over tokens."""
        self._tokens = tokens
        self._is_summed = is_summed
        self._zeroed: ZeroedCheck | None = None
        if is_summed:
            tokens.require()
        self._rounds: deque[Round] = deque(maxlen=MAX_ROUNDS)
        self._latest: Round | None = None
        self.crossed: set[int] = set()
        """Ids of the parameters whose gradients cross, as far as rounds have brought them."""
        self.after_round: Callable[[], None] = lambda: None
        """Called at the end of each backward pass that has synchronised."""
        self._undo: list[Callable[[], None]] = []
        """Take what was hooked in off again."""

    def close(self) -> None:
        """Take all hooks off, between two backward passes."""
        for each in self._undo:
            each()
        self._undo.clear()

    def finish(self, *_: object) -> None:
        """End a round that is still open: what an optimizer calls before each step."""

    def gradients(self) -> list[torch.Tensor]:
        """Return what this rank holds of each gradient of the latest round: views."""
        raise NotImplementedError

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context in which backward passes accumulate gradients, and nothing crosses."""
        raise NotImplementedError

    def parameters_now(self) -> Iterable[tuple[str, torch.Tensor]]:
        """Return the parameters that the models have now, new ones too, with their names."""
        raise NotImplementedError

    def norm(self) -> float:
        """Return the 2-norm of the whole gradient of the latest round: `Round.norm`.

        Raises:
            RuntimeError: there was no round.
        """
        self.finish()
        if self._latest is None:
            raise RuntimeError("site.grad_norm: no backward pass has synchronised gradients yet")
        return self._latest.norm

    def _end_round(self, finished: Round) -> None:
        self._rounds.append(finished)
        self._latest = finished
        if self._zeroed is not None:
            self._zeroed.is_due = True
        self.after_round()

    def take_rounds(self) -> list[Round]:
        """Return the rounds since the last call: one for each time that gradients were averaged."""
        rounds = [*self._rounds]
        self._rounds.clear()
        return rounds


class CommHook:
    """Stands in a DistributedDataParallel, which takes a hook once, for what takes its buckets."""

    _all: ClassVar["WeakKeyDictionary[DistributedDataParallel, CommHook]"] = WeakKeyDictionary()

    def __init__(self) -> None:
        """Take no bucket yet."""
        self.take: Callable[[GradBucket], torch.futures.Future[torch.Tensor]] = _refuse_bucket

    @classmethod
    def of(cls, model: DistributedDataParallel) -> "CommHook":
        """Return the one that stands in a model; put it there if there is none."""
        hook = cls._all.get(model)
        if hook is None:
            hook = cls()
            model.register_comm_hook(None, hook.reduce)
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
        "a backward pass goes through a DistributedDataParallel that site.synchronize was given "
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


class ReplicaHook(GradientHook):
    """Sends each bucket of DistributedDataParallel to the other sites while backward goes on.

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
        """Register nothing yet. Of several models, names begin with the model's number, as `1.`.

        `agree` has all sites take one cut.

        Raises:
            ConfigError: it names parameters that there are not.
        """
        super().__init__(tokens, is_summed=is_summed)
        self._pipeline = pipeline
        self._exactness = exactness
        self._models = models
        self._names = {each: name for name, each in self.parameters_now()}
        for model in models:
            named = ((self._names[each], each) for each in model.module.parameters())
            self._undo.append(model.register_forward_pre_hook(KindCheck(named)).remove)
        self._reduced = ReducedCheck(models, self._names)
        self._undo.append(self._reduced.close)
        self._used: MaybeUsed | None = None
        if any(each.find_unused_parameters for each in models):
            self._used = MaybeUsed(self._names, models)
        self._is_backward = False
        """A backward pass goes on, and has brought a bucket."""
        self._under_way: set[int] = set()
        """Numbers of the models of which it has brought a bucket, and not the last one."""
        exactness.check([*self._names.values()])
        if is_summed:
            self._zeroed = ZeroedCheck(self._names)
            self._undo.append(self._zeroed.close)
        self._layouts: dict[tuple[int, ...], int] = {}
        self._agree = agree
        self._cuts: list[Cut | None] = [None for _ in models]
        """By model, the cut that all sites have agreed on; None: it has had no round."""
        self._buckets: list[Cut] = [[] for _ in models]
        """By model, how its latest round has crossed."""
        self._crossed: set[str] = set()
        """Names of what crossed in the latest round."""
        self._held = [HeldBuckets() for _ in models]
        self._held_grads: list[dict[str, tuple[torch.Tensor, torch.Tensor]]] = [{} for _ in models]
        """By model, parameters by name, and their gradients in DDP's buckets, that wait."""
        self._holds = [False for _ in models]
        """By model, whether this round's buckets are not DDP's, from one on."""

    def hook_in(self) -> None:
        """Have the models hand over their buckets."""
        for index, model in enumerate(self._models):
            comm_hook = CommHook.of(model)
            comm_hook.take = partial(self.reduce, index)
            self._undo.append(comm_hook.close)

    def parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Return all parameters that were there at first, with their names."""
        return ((name, each) for each, name in self._names.items())

    def parameters_now(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Return the parameters that the models have now, new ones too, with their names."""
        for index, model in enumerate(self._models):
            prefix = f"{index}." if len(self._models) > 1 else ""
            for name, each in model.module.named_parameters():
                yield prefix + name, each

    @property
    def buckets(self) -> Cut:
        """The agreed buckets, of all models that have agreed on theirs."""
        return [names for each in self._cuts for names in each or ()]

    def resume(self, buckets: Cut) -> None:
        """Cut gradients as the run did when it was saved, or when this site comes back to it.

        A codec's residual of a bucket, and the order of sums, depend on them. Of a model whose
        parameters they are not, all sites agree anew.
        """
        for model, names in enumerate(self._names_of_models()):
            cut = [each for each in buckets if each[0] in names]
            if sorted(name for each in cut for name in each) == sorted(names):
                self._cuts[model] = cut

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context in which backward passes accumulate gradients, and nothing crosses."""
        return no_sync_of(self._models)

    def gradients(self) -> list[torch.Tensor]:
        """Return each gradient of the latest round."""
        parameters = [each for name, each in self.parameters() if name in self._crossed]
        return [each.grad for each in parameters if each.grad is not None]

    def _names_of_models(self) -> list[set[str]]:
        """Return the names of the parameters that each model trains."""
        return [
            {self._names[each] for each in model.module.parameters() if each.requires_grad}
            for model in self._models
        ]

    def watch_reduced(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Refuse their steps with gradients of which a part has not crossed."""
        for each in optimizers:
            self._reduced.watch(each)

    def reduce(self, model: int, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Start a bucket's average over all sites, in the order of DDP's.

        `model` is the number of the model that it is of.
        """
        if not self._is_backward:
            check_in_backward()
            self._is_backward = True
            self._pipeline.begin(
                self._tokens.take(),
                first_bucket=first_bucket_of(model),
                is_gradient=True,
                is_summed=self._is_summed,
            )
            self._crossed.clear()
        if bucket.index() == 0:
            self._buckets[model], self._holds[model] = [], False
            self._under_way.add(model)
        if bucket.is_last():
            self._under_way.discard(model)
            check_is_outermost(len(self._held))
            # Runs at the end of the pass that brings the last bucket, be it nested in another one:
            # there DDP looks at the futures, afterwards. It would turn an exception in a future
            # into an unreadable one.
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
        parameters, grads = bucket.parameters(), gradients_in(bucket)
        if self._used is not None:
            self._used.note(parameters, grads)
        names = [self._names[each] for each in parameters]
        self._crossed.update(names)
        self.crossed.update(map(id, parameters))
        self._reduced.note_crossed(names)
        order, place = self._cuts[model], len(self._buckets[model])
        if order is not None and (self._holds[model] or order[place : place + 1] != [names]):
            self._holds[model] = True
            return self._hold(model, bucket, grads, order)
        self._buckets[model].append(names)
        layout, buffer = self._layout(parameters), bucket.buffer()
        named = [*zip(names, grads, strict=True)]
        if not self._exactness.is_lossy and all(each.is_contiguous() for each in grads):
            return self._pipeline.submit([buffer], layout, named=named)
        futures = []
        for group, is_exact in self._exactness.split(named, exact=False):
            pieces = [piece_of(each) for _, each in group]
            futures.append(self._pipeline.submit(pieces, layout, exact=is_exact, named=[*group]))

        def whole(last: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
            last.value()  # raises what went wrong
            return buffer

        # Buckets are completed in the order in which they were submitted.
        return futures[-1].then(whole)

    def _agree_on_cuts(self) -> None:
        """Have all sites take one cut of each model that has had its first round."""
        for model, cut in enumerate(self._cuts):
            if cut is None and self._buckets[model]:
                self._cuts[model] = self._agree(own_cut(self._models[model], self._names))

    def _hold(
        self, model: int, bucket: GradBucket, grads: Sequence[torch.Tensor], order: Cut
    ) -> torch.futures.Future[torch.Tensor]:
        """Keep a bucket; submit those that are wanted once all their gradients are there."""
        held, latest = self._held_grads[model], None
        future = self._held[model].hold(bucket.buffer())
        for parameter, grad in zip(bucket.parameters(), grads, strict=True):
            held[self._names[parameter]] = parameter, grad
        for names in order[len(self._buckets[model]) :]:
            if any(name not in held for name in names):
                break
            self._buckets[model].append(names)
            layout = layout_of((name, held[name][0]) for name in names)
            named = [(name, held.pop(name)[1]) for name in names]
            for group, is_exact in self._exactness.split(named, exact=False):
                pieces = [piece_of(each) for _, each in group]
                latest = self._pipeline.submit(pieces, layout, exact=is_exact, named=[*group])
        if bucket.is_last():
            assert latest is not None, "the last gradient completes the last bucket"
            # Buckets are completed in the order in which they were submitted.
            self._held[model].complete_after(latest)
        return future

    def _end_backward(self) -> None:
        if self._under_way or not self._is_backward:
            return  # Another model of the same pass calls this, too.
        self._is_backward = False
        if self._used is not None:
            self._used.submit(self._pipeline)
        finished = self._pipeline.wait(has_norm=True)
        self._end_round(finished)
        if self._used is not None:
            self._used.give_averaged_after_ddp(is_catching_up=finished.is_catching_up)
        if any(cut is None and had for cut, had in zip(self._cuts, self._buckets, strict=True)):
            # Runs once DDP is through with the pass.
            torch.autograd.Variable._execution_engine.queue_callback(self._agree_on_cuts)

    def _layout(self, parameters: Sequence[torch.Tensor]) -> int:
        key = tuple(id(each) for each in parameters)
        if key not in self._layouts:
            self._layouts[key] = layout_of((self._names[each], each) for each in parameters)
        return self._layouts[key]


@contextmanager
def no_sync_of(models: Sequence[DistributedDataParallel]) -> Iterator[None]:
    """Have backward passes of these accumulate gradients at this rank."""
    with ExitStack() as stack:
        for each in models:
            stack.enter_context(each.no_sync())
        yield


def check_is_outermost(num_models: int) -> None:
    """Refuse to end a round of several models in a backward pass that another one began.

    Reentrant checkpointing computes parts of a model's gradients in nested passes. Of one model
    the last part ends the round. Of several, nobody knows whether the outer pass brings more.

    Raises:
        ScriptError: there are several, and this pass is nested.
    """
    if num_models > 1 and is_nested():
        raise ScriptError(
            "several models are synchronised, and gradients come from a backward pass inside "
            "another one, as of reentrant activation checkpointing: give "
            "torch.utils.checkpoint use_reentrant=False"
        )


def is_nested() -> bool:
    """Whether a backward pass is at its end that another one began."""
    return any(each.f_code.co_name == "backward" and "ctx" in each.f_locals for each in calls())


class OptimizerHook(GradientHook):
    """Averages all gradients of an optimizer's parameters, once a step, before the step."""

    def __init__(
        self,
        average: TensorAverage,
        tokens: TokenCount,
        optimizer: torch.optim.Optimizer,
        equalise: Callable[[Sequence[tuple[str, torch.Tensor]]], bool],
    ) -> None:
        """Check the parameters.

        `equalise` gives all sites the first one's values of such, and says whether any differed.

        Raises:
            TypeError: one of them cannot be averaged.
        """
        super().__init__(tokens, is_summed=False)
        self._average = average
        self._optimizer = optimizer
        self._equalise = equalise
        self._known: dict[int, torch.Tensor] = {}
        """Parameters that all sites have alike, by id."""
        self._note(self.parameters())

    def _note(self, named: Sequence[tuple[str, torch.Tensor]]) -> None:
        for name, parameter in named:
            problem = why_not_averaged(parameter)
            if problem is not None:
                raise TypeError(f"site.average_gradients: parameter {name} is {problem}")
            self._known[id(parameter)] = parameter

    def equalise(self) -> None:
        """Give all sites the first one's parameters."""
        self._equalise(self.parameters())

    def _check_new(self) -> None:
        """Refuse parameters that have come since, and that ranks have computed with unlike.

        Raises:
            NotSynchronisedError: and what to do.
        """
        new = [(name, each) for name, each in self.parameters() if id(each) not in self._known]
        if not new:
            return
        self._note(new)
        if self._equalise(new):
            name, parameter = new[0]
            more = f" and {len(new) - 1} more" if len(new) > 1 else ""
            raise NotSynchronisedError(
                f"the optimizer has got {name} {[*parameter.shape]}{more} after "
                "site.average_gradients, with other values at other ranks: call "
                "site.broadcast(model), or site.average_gradients again, before the first forward "
                "pass with what is new"
            )

    def parameters(self) -> list[tuple[str, torch.Tensor]]:
        """Return all parameters with the names that the optimizer knows, else their places."""
        named: list[tuple[str, torch.Tensor]] = []
        for group_index, group in enumerate(self._optimizer.param_groups):
            places = [f"{group_index}.{index}" for index in range(len(group["params"]))]
            named += zip(group.get("param_names", places), group["params"], strict=True)
        return named

    def before_step(self, _: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Average the gradients in place; what the optimizer calls before each step.

        A parameter without a gradient here counts as zeros. If no rank of any site has one (whose
        tokens count, and whose site takes part), none has: so the optimizer leaves the parameter
        alone everywhere.
        """
        if has_closure(args, kwargs):
            raise RuntimeError(
                "site.average_gradients: optimizer.step was called with a closure, which computes "
                "gradients that would not be averaged: compute them before optimizer.step()"
            )
        check_no_scaler()
        self._check_new()
        trained = [(name, each) for name, each in self.parameters() if each.requires_grad]
        grads = [_gradient(name, each) for name, each in trained]
        is_used = torch.tensor([float(each.grad is not None) for _, each in trained])
        names = [name for name, _ in trained]
        named = [*zip(names, grads, strict=True), ("is_used", is_used)]
        finished = self._average.average(named, self._tokens.take(), is_gradient=True)
        if finished is not None:
            self._rounds.append(finished)
        for (_, parameter), grad, used in zip(trained, grads, is_used.tolist(), strict=True):
            parameter.grad = grad if used > 0.0 else None


def _gradient(name: str, parameter: torch.Tensor) -> torch.Tensor:
    """Return a parameter's gradient, or zeros.

    Raises:
        TypeError: it cannot be averaged.
    """
    if parameter.grad is None:
        return torch.zeros_like(parameter, requires_grad=False)
    problem = why_not_averaged(parameter.grad)
    if problem is not None:
        raise TypeError(f"site.average_gradients: the gradient of {name} is {problem}")
    return parameter.grad
