"""Sends gradients of a model of which a site has one replica: nothing reduces them inside the site.

So a site is laid out whose ranks share one batch: by `parallelize_module` alone (tensor and
sequence parallelism), by pipeline stages that nothing wraps, or as one rank with a plain module.
What a rank has in `p.grad` is its part of the site's gradient.

A pipeline's schedule goes through several backward passes in a step, and tells nobody but its
stages that it is through. So a stage is found in the forward pass, and watched.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from isthmus.protos.errors import ScriptError
from isthmus.sites.worker.checks.arguments import only_sync
from isthmus.sites.worker.checks.module_hooks import ModuleHook
from isthmus.sites.worker.checks.parameter_kinds import KindCheck
from isthmus.sites.worker.checks.torch_calls import call_of
from isthmus.sites.worker.exchange.sharding import is_sharded, local_of
from isthmus.sites.worker.layouts.fully_sharded import ShardGroup, lone_groups_of
from isthmus.sites.worker.layouts.gradient_hook import is_nested
from isthmus.sites.worker.layouts.shard_hook import ShardHook, check_undivided, untold_error


class LoneHook(ShardHook):
    """The hook of one rank. A backward pass is a round, and so is a step of a schedule."""

    is_lone = True

    def _find_groups(self, models: Sequence[nn.Module]) -> Mapping[int, ShardGroup]:
        return lone_groups_of(models, dist.get_rank())

    def _hook_in(self, models: Sequence[nn.Module]) -> None:
        super()._hook_in(models)
        self._syncs = True
        self._has_nested = False
        """A nested backward pass has ended in the open round; the outer one has yet to go on."""
        self._stages: set[int] = set()
        """Stages of a pipeline that are watched, by id."""
        check = ModuleHook(KindCheck(self._trained.items()))
        find_stage = ModuleHook(self._find_stage)
        for each in models:
            self._undo.append(each.register_forward_pre_hook(check).remove)
            self._undo.append(each.register_forward_pre_hook(find_stage).remove)

    def finish(self, *_: object) -> None:
        """Refuse a round that is still open: what an optimizer calls before each step.

        Raises:
            ScriptError: a nested backward pass began it, and the outer one had no gradient; or as
                `check_unbroken`.
        """
        self.check_unbroken()
        if self._is_open:
            raise ScriptError(
                "the last gradient came from a backward pass inside another one, as of reentrant "
                "activation checkpointing, and some parameters have none: give "
                "torch.utils.checkpoint use_reentrant=False"
            )

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Have backward passes accumulate gradients at this rank, and nothing cross."""
        before, self._syncs = self._syncs, False
        try:
            yield
        finally:
            self._syncs = before

    def _check_layout(self, where: str, parameter: torch.Tensor) -> None:
        if not local_of(parameter).is_contiguous():
            raise TypeError(
                f"{where} is not contiguous, as it has to be where nothing wraps the model: call "
                f"contiguous(), or {only_sync(self._regime)}let DistributedDataParallel wrap it"
            )

    # ---------------------------------------------------------------- a round

    def _crosses(self) -> bool:
        return self._syncs and not self._stages

    def _begin(self, first: str | None = None) -> None:
        if self._is_open and self._has_nested:
            self._has_nested = False
            torch.autograd.Variable._execution_engine.queue_callback(self._end_after_others)
        super()._begin(first)

    def _arrive(self, name: str) -> None:
        parameter = self._trained[name]
        parameter.grad = as_laid_out(parameter.grad, parameter)
        super()._arrive(name)

    def _end_after_others(self) -> None:
        if self._is_open and is_nested() and len(self._queue.arrived) < len(self._trained):
            self._has_nested = True  # The outer pass goes on, and ends the round.
            return
        self._end_if_reduced()

    # ---------------------------------------------------------------- a pipeline's schedule

    def _find_stage(self, module: nn.Module, _: object) -> None:
        """Have a stage tell when it is through with a step; a forward pre-hook of its module."""
        stage = call_of("forward_one_chunk").get("self")
        if stage is None or id(stage) in self._stages:
            return
        if not hasattr(stage, "perform_reduce_grad"):
            raise untold_error()
        self._stages.add(id(stage))
        own = stage.perform_reduce_grad
        self._undo.append(partial(setattr, stage, "perform_reduce_grad", own))
        stage.perform_reduce_grad = self._reducer(stage, module, own)

    def _reducer(
        self,
        stage: Any,  # noqa: ANN401 - torch's own
        module: nn.Module,
        reduce: Callable[[int], None],
    ) -> Callable[[int], None]:
        parameters = {id(each) for each in module.parameters()}

        def perform_reduce_grad(grad_scale_factor: int) -> None:
            check_undivided(grad_scale_factor)
            reduce(grad_scale_factor)
            if stage.has_backward and self._syncs:
                self._note_part(parameters)

        return perform_reduce_grad


def as_laid_out(grad: torch.Tensor | None, parameter: torch.Tensor) -> torch.Tensor:
    """Return a gradient as its parameter is laid out; a collective where it is placed otherwise.

    That of a parameter whose copies have each seen a part of a sequence is still to be added up
    over them: DTensor calls it Partial. fully_shard does the same.
    """
    assert grad is not None
    if is_sharded(grad) and is_sharded(parameter) and grad.placements != parameter.placements:
        grad = grad.redistribute(placements=parameter.placements)
    return (
        grad
        if local_of(grad).is_contiguous()
        else grad.clone(memory_format=torch.contiguous_format)
    )
