"""Sends gradients of fully_shard (FSDP2) to the other sites while backward goes on.

Whatever the layout: parameters may be sharded by rows, by tensor or expert parallelism, replicated,
or be of another pipeline stage. Each gradient is there when its parameter's hook is called, with
what this rank holds of the mean over the site (site_mean.py); buckets leave in the agreed order as
their parameters are there (bucket_queue.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from isthmus.protos.errors import ScriptError
from isthmus.sites.worker.checks.arguments import check_not_complex
from isthmus.sites.worker.checks.left_gradients import check_zeroed
from isthmus.sites.worker.checks.module_hooks import ModuleHook
from isthmus.sites.worker.checks.torch_calls import call_of, in_backward
from isthmus.sites.worker.exchange.collectives import Ranks
from isthmus.sites.worker.exchange.rounds import RoundTerms
from isthmus.sites.worker.exchange.sharding import is_sharded, local_of
from isthmus.sites.worker.exchange.site_averages import BucketAverages
from isthmus.sites.worker.exchange.step_records import TokenCount
from isthmus.sites.worker.layouts.agreed_hook import AgreedHook
from isthmus.sites.worker.layouts.bucket_queue import BucketQueue
from isthmus.sites.worker.layouts.canonical import Agreed, GradientPlan
from isthmus.sites.worker.layouts.fully_sharded import (
    ShardGroup,
    awaits_callback,
    groups_of,
    named_tensors,
    parameters_now,
    sharded_modules,
    states_of,
    tell_reduced,
    twin_buffers,
)
from isthmus.sites.worker.layouts.gradient_hook import check_is_outermost
from isthmus.sites.worker.layouts.site_mean import SiteMean


class ShardHook(AgreedHook):
    """The hook of one rank. Each time that gradients are synchronised is one round."""

    def __init__(
        self,
        pipeline: BucketAverages,
        tokens: TokenCount,
        models: Sequence[nn.Module],
        *,
        data_ranks: Ranks | None = None,
        is_summed: bool = False,
        regime: str = "sync",
    ) -> None:
        """Hook into the model; `agree` comes next.

        `data_ranks` are those of the site with data of their own, this one among them, whose tokens
        are counted; None: the most over which fully_shard reduces a gradient of this rank.
        `regime` is the job's.

        Raises:
            TypeError: a parameter cannot be averaged.
        """
        super().__init__(tokens, is_summed=is_summed)
        self._pipeline = pipeline
        self._regime = regime
        self._models = models
        self._states = states_of(models)
        self._mean = SiteMean(self._find_groups(models), data_ranks)
        self.data_ranks = self._mean.data_ranks
        self.own = named_tensors(models)
        self.twins = twin_buffers(models)
        self._trained: dict[str, torch.Tensor] = {}
        for name, each in self.own.items():
            if isinstance(each, nn.Parameter) and each.requires_grad:
                self._check(name, each)
                self._trained[name] = each
        self.crossed |= {id(each) for each in self._trained.values()}
        self._tied: set[str] = set()
        """Names of those that other parts of a pipeline have, too."""
        self._queue: BucketQueue
        """Made by `agree`."""
        self._is_open = False
        """A round goes on."""
        self._reduced: set[int] = set()
        """Parameters whose gradients a pipeline's schedule has reduced, by id."""
        self._taken = 0.0
        """This rank's tokens in the round."""
        self._hook_in(models)

    def _find_groups(self, models: Sequence[nn.Module]) -> Mapping[int, ShardGroup]:
        """Return over which ranks the gradient of each parameter is reduced, by its id."""
        return groups_of(models)

    def agree(self, agreed: Agreed, plan: GradientPlan) -> Set[Ranks]:
        """Prepare for the buckets that all sites have agreed on.

        Raises:
            TypeError: fully_shard does not make a mean over all ranks with data.
        """
        rank, holders = dist.get_rank(), agreed.here.holders
        for name, parameter in self._trained.items():
            held = holders[name].group_of(rank)
            assert held is not None
            self._mean.check(name, parameter, held[1])
        self._tied = {name for name in self._trained if holders[name].is_tied}
        divisor_of = self._mean.divisor_of if self._is_summed else None
        self._queue = BucketQueue(self._pipeline, self._trained, agreed.here, plan, divisor_of)
        return self._queue.groups

    def _hook_in(self, models: Sequence[nn.Module]) -> None:
        """Have this rank's parameters tell of their gradients, and weigh ranks by tokens."""
        self._undo.append(tell_reduced(models, self._note_reduced))
        self._undo += [
            each.register_forward_pre_hook(ModuleHook(self.check_unbroken), prepend=True).remove
            for each in models
        ]
        for name, parameter in self._trained.items():
            handle = parameter.register_post_accumulate_grad_hook(self._collector(name))  # type: ignore[no-untyped-call]
            self._undo.append(handle.remove)
        if not self._is_summed:
            self._undo += self._mean.weigh(self._trained, self._weigh)

    def gradients(self) -> list[torch.Tensor]:
        """Return what this rank holds of each gradient that there is: views."""
        grads = [each.grad for each in self._trained.values()]
        return [local_of(each) for each in grads if each is not None]

    def parameters_now(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Return the parameters that the models have now, new ones too, with their names."""
        return parameters_now(self._models)

    def finish(self, *_: object) -> None:
        """End a round that is still open: what an optimizer calls before each step."""
        super().finish()
        if self._is_open:
            self._end_backward()

    def _is_amid_round(self) -> bool:
        return self._is_open or awaits_callback(self._states)

    def shard_in(self, tensors: Sequence[torch.Tensor]) -> str | None:
        """Return the parameter of which one of these is a shard, or of whose gradient."""
        memory = {each.untyped_storage().data_ptr() for each in tensors if each.numel()}
        for name, each in self._trained.items():
            for of in (each, each.grad):
                if (
                    of is not None
                    and local_of(of).numel() < of.numel()
                    and local_of(of).untyped_storage().data_ptr() in memory
                ):
                    return name
        return None

    def forget_gathered(self) -> None:
        """Drop whole parameters that a forward pass has left gathered: `AgreedHook`."""
        for each in sharded_modules(self._models):
            each.reshard()

    def gather_after_changes(self) -> None:
        """Have gathers wait for what this stream has written into shards: `AgreedHook`.

        fully_shard does so in a forward pass only, for it knows of no changes before the backward
        pass.
        """
        for each in self._states:
            gathers = each._comm_ctx.all_gather_copy_in_stream
            gathers.wait_stream(each._device_handle.current_stream())

    def _check(self, name: str, parameter: torch.Tensor) -> None:
        """Refuse a parameter whose gradient would not be there when its hook is called.

        Raises:
            TypeError: and what to do.
        """
        where = f"site.attach: parameter {name}"
        check_not_complex(name, parameter, self._regime)
        self._check_layout(where, parameter)
        if getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise TypeError(
                f"{where} has a hook that runs when its gradient is there (an optimizer in "
                "backward?), before the other sites' part has come: take it off"
            )

    def _check_layout(self, where: str, parameter: torch.Tensor) -> None:
        """Refuse a parameter that fully_shard does not manage.

        Raises:
            TypeError: and what to do; it begins with `where`.
        """
        if not (is_sharded(parameter) and self._mean.manages(parameter)):
            raise TypeError(
                f"{where}: it is not sharded by fully_shard: call fully_shard on a module that has "
                "it, with a mesh of the ranks that have data of their own (of one rank, if it is "
                "the only one)"
            )

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Have backward passes accumulate gradients at this rank, and nothing cross."""
        for each in sharded_modules(self._models):
            each.set_requires_gradient_sync(False, recurse=False)
        try:
            yield
        finally:
            for each in sharded_modules(self._models):
                each.set_requires_gradient_sync(True, recurse=False)

    # ---------------------------------------------------------------- a round

    def _weigh(self, values: torch.Tensor, num_replicas: int) -> None:
        """Scale a rank's gradients so that their sum over the site's ranks is the site's mean.

        Over `num_replicas` groups of ranks, fully_shard makes the mean afterwards.
        """
        self._begin()
        if self._taken == 0.0:
            values.zero_()  # Not a product: a loss over no tokens is often NaN.
        else:
            values.mul_(num_replicas * self._taken / self._pipeline.site_tokens()[0])

    def _begin(self, first: str | None = None) -> None:
        """Open a round with the first gradients of a backward pass; `first` is there already."""
        if self._is_open:
            return
        checked = self._trained if self._is_summed else self._tied
        parameters = [self._trained[name] for name in checked if name != first]
        check_zeroed(parameters, is_summed=self._is_summed)
        if in_backward():
            torch.autograd.Variable._execution_engine.queue_callback(self._end_after_others)
        else:
            check_schedule()
        self._taken = self._tokens.take(is_alike=self._mean.is_counted_alike)
        terms = RoundTerms(
            is_gradient=True,
            is_summed=self._is_summed,
            counted_by=self.data_ranks,
            is_counted_alike=self._mean.is_counted_alike,
        )
        self._pipeline.begin(self._taken, terms)
        self._queue.begin()
        self._reduced.clear()
        self._is_open = True

    def _collector(self, name: str) -> Callable[[torch.Tensor], None]:
        def collect(parameter: torch.Tensor) -> None:
            if not self._crosses():
                return
            self._begin(name)
            if len(getattr(parameter, "_post_accumulate_grad_hooks", None) or ()) > 1:
                raise ScriptError(
                    f"parameter {name} has got another hook that runs when its gradient is there (an "
                    "optimizer in backward?), before the other sites' part has come: take it off"
                )
            if name in self._queue.arrived:
                raise ScriptError(
                    f"the gradient of {name} came twice in one backward pass: synchronise in the "
                    "last micro-batch only (set_requires_gradient_sync)"
                )
            assert parameter.grad is not None
            self._mean.scale(name, parameter.grad)
            self._arrive(name)

        return collect

    def _crosses(self) -> bool:
        """Whether gradients of this backward pass cross."""
        return True  # else fully_shard calls no hook

    def _note_reduced(self, parameters: Set[int]) -> None:
        """Note that fully_shard has reduced a model's part; end the round with the last one."""
        if in_backward():
            self._end_after_others()
            return
        if self._is_open or schedule_trains():
            self._note_part(parameters)

    def _note_part(self, parameters: Set[int]) -> None:
        """Note that a pipeline's schedule is through with a model's part; end with the last one."""
        self._begin()  # other ranks wait for this one, though its part may have no gradient
        self._reduced |= parameters
        if all(id(each) in self._reduced for each in self._trained.values()):
            self._end_backward()

    def _arrive(self, name: str) -> None:
        """Note that a gradient is there; submit what it completes."""
        self._queue.arrive(name)

    def _end_after_others(self) -> None:
        """End the round once every model has reduced what fully_shard leaves to its own callback.

        Of several models, a later one's may have been queued after ours.
        """
        torch.autograd.Variable._execution_engine.queue_callback(self._end_if_reduced)

    def _end_if_reduced(self) -> None:
        """End the round, unless this is the end of a nested backward pass: the outer one goes on.

        Reentrant checkpointing has such. fully_shard's own callback, of the outer one, is to come.
        """
        if self._is_open and not awaits_callback(self._states):
            check_is_outermost(len(self._models))
            self._end_backward()

    def _end_backward(self) -> None:
        unused = [name for name in self._trained if name not in self._queue.arrived]
        made = {name for name in unused if self._trained[name].grad is None}
        for name in made:
            self._trained[name].grad = torch.zeros_like(self._trained[name], requires_grad=False)
        for name in unused:
            self._arrive(name)
        self._queue.submit_flags(made)
        self._is_open = False
        finished = self._pipeline.wait(has_norm=True)
        self._end_round(finished)
        self._queue.wait()
        if made or finished.is_catching_up:
            # What no rank of any site has used, of those that take part, has no gradient.
            for name in self._trained.keys() - self._queue.used():
                self._trained[name].grad = None
        if self.after_gradients is not None:
            self.after_gradients()


def check_schedule() -> None:
    """Refuse a pipeline's schedule that divides gradients after they have crossed.

    Called while it reduces them. torch tells its stage alone what they will be divided by.

    Raises:
        TypeError: and what to do; also where torch tells it nobody.
    """
    if call_of("run_post_backward"):  # torch 2.9's, inside a stage's last backward pass
        raise untold_error()
    check_undivided(_in_schedule().get("grad_scale_factor", 1))


def untold_error() -> TypeError:
    """Return the refusal of a PyTorch whose schedules reduce gradients without a call of theirs."""
    return TypeError(
        f"site.attach: pipelines of PyTorch {torch.__version__} do not say when a stage's gradients "
        "are all there, nor by what they will be divided: install a newer one (2.13 was tested), "
        "or do without a pipeline"
    )


def check_undivided(divisor: float) -> None:
    """Refuse gradients that a pipeline's schedule will divide by anything but 1.

    Raises:
        TypeError: and what to do.
    """
    if divisor != 1:
        raise TypeError(
            f"site.attach: the pipeline's schedule would divide gradients by {divisor} after "
            "they have crossed: give it scale_grads=False, and let loss_fn divide by the number of "
            "micro-batches"
        )


def schedule_trains() -> bool:
    """Whether a pipeline's schedule that reduces gradients has any; else it evaluates."""
    stage = _in_schedule().get("self")
    return bool(getattr(stage, "has_backward", False))


def _in_schedule() -> Mapping[str, Any]:
    """Return what is in the call by which a schedule has a stage reduce; {}: there is none."""
    return call_of("perform_reduce_grad")
