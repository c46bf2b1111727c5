"""Checks each step of what is attached: that its gradients crossed, and that all compute alike."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from weakref import WeakSet

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from isthmus.protos import metrics
from isthmus.sites.worker.api.averaging import Averaging
from isthmus.sites.worker.api.own_machine import arithmetic_of, place_of
from isthmus.sites.worker.api.rank import Rank
from isthmus.sites.worker.checks.crossing_check import CrossingCheck
from isthmus.sites.worker.checks.forward_watch import ForwardWatch
from isthmus.sites.worker.checks.gradient_check import GradientCheck, OwnArithmetic, Seats
from isthmus.sites.worker.checks.step_watch import StepWatch
from isthmus.sites.worker.exchange.sharding import is_sharded
from isthmus.sites.worker.exchange.tensor_hashes import ParameterHashes
from isthmus.sites.worker.layouts.ddp_hook import DdpHook
from isthmus.sites.worker.layouts.gradient_hook import GradientHook

Undo = list[Callable[[], None]]
"""Takes off what was hooked in."""


class StepChecks:
    """One rank's checks of what is attached, and of all optimizers. For the training thread."""

    def __init__(self, rank: Rank, averaging: Averaging) -> None:
        """Watch all optimizers of this process."""
        self._context, self._members = rank.context, rank.members
        self._steps, self._records = rank.steps, rank.records
        self._averaging = averaging
        self._step_watch: StepWatch | None = None
        self._crossing: CrossingCheck | None = None
        self._gradient_check: GradientCheck | None = None
        """Compares gradients of one micro-batch; None: the job does not ask for it."""
        self._former: WeakSet[Optimizer] = WeakSet()
        """Optimizers that were attached before."""
        self._has_stepped = False
        self._watched = register_optimizer_step_post_hook(self._after_any_step)

    def end(self, optimizers: Iterable[Optimizer]) -> None:
        """Check no more what was attached, with its optimizers."""
        self._step_watch = self._crossing = self._gradient_check = None
        for optimizer in optimizers:
            self._former.add(optimizer)

    def close(self) -> None:
        """Watch optimizers no more."""
        self._watched.remove()

    # ---------------------------------------------------------------- what is attached

    def watch_steps(
        self,
        hook: GradientHook,
        named: Iterable[tuple[str, torch.Tensor]],
        optimizers: Sequence[Optimizer],
    ) -> Undo:
        """Refuse steps without rounds, and rounds without steps, unless nothing has to cross."""
        undo: Undo = [each.register_step_pre_hook(hook.finish).remove for each in optimizers]
        self._step_watch = watch = StepWatch(named, optimizers, is_due=self._is_due)
        hook.after_round = watch.note_round
        self._crossing = crossing = CrossingCheck(
            hook.parameters_now,
            hook.crossed,
            optimizers,
            is_due=self._is_due,
            former=self._former,
        )
        return [*undo, hook.close, watch.close, crossing.close]

    def watch_forward(
        self, models: Sequence[nn.Module], averaged: Callable[[], Sequence[torch.Tensor]]
    ) -> Undo:
        """Have what models are called with, and buffers, compared with other sites'.

        `averaged` returns the buffers that are averaged over sites.
        """
        if self._context.rank != 0 or not self._context.must_average:
            return []

        def send(step: int, hashes: ParameterHashes) -> None:
            shown = hashes.bounded()
            values = dict(zip(shown.names, (each >> 12 for each in shown.tensors), strict=True))
            self._records.record(metrics.BUFFERS, step, values)

        watch = ForwardWatch(
            models,
            lambda: self._steps.num_steps,
            averaged=averaged,
            verify_every=self._context.welcome.verify_every,
            send_buffers=send,
        )
        self._steps.take_inputs = watch.take_inputs
        return watch.undo

    def compare_gradients(
        self,
        hook: GradientHook | None,
        models: Sequence[nn.Module],
        global_parameters: Callable[[], AbstractContextManager[None]],
    ) -> Undo:
        """Have all ranks compute one micro-batch now and then, if the job wants it.

        `global_parameters` returns a context in which all ranks have the same ones.
        """
        context, job = self._context, self._context.spec.job
        own = slice(context.index, context.index + 1) if context.is_apart else slice(None)
        seats = Seats(
            sites=context.welcome.sites[own],
            ranks_per_site=context.welcome.ranks_per_site[own],
            own=context.rank if context.is_apart else context.global_rank,
        )
        if not job.gradients_every or seats.count < 2:
            return []

        def note(reason: str) -> None:
            self._records.record_problem(metrics.TROUBLE, self._steps.num_steps, reason)

        def record(step: int, num_ranks: int, length_s: float) -> None:
            values = {metrics.COMPARED_RANKS: num_ranks, metrics.COMPARED_S: length_s}
            if context.rank == 0:
                self._records.record(metrics.GRADIENTS, step, values)

        is_whole = context.world_size == 1 or isinstance(hook, DdpHook)
        names = {} if hook is None else {each: name for name, each in hook.parameters_now()}
        if hook is None or not is_whole or any(map(is_sharded, names)):
            models = []
            if context.rank == 0:
                note(
                    "gradients are not compared here (verify.gradients_every): that needs site.attach, "
                    "and DistributedDataParallel or a plain model on the site's only rank"
                )
        device = context.device
        is_exact = device.type == "cpu" or torch.are_deterministic_algorithms_enabled()
        self._gradient_check = GradientCheck(
            self._averaging.pipeline,
            models,
            names,
            device,
            seats=seats,
            own=OwnArithmetic(kind=arithmetic_of(device), place=place_of(device), repeats=is_exact),
            every=job.gradients_every * context.spec.longest_regime.sync_every,
            num_steps=lambda: self._steps.num_steps,
            gone=self._averaging.missing_sites.gone,
            global_parameters=global_parameters,
            note=note,
            record=record,
        )
        return self._gradient_check.undo

    # ---------------------------------------------------------------- a step

    def note_average(self, tensors: Sequence[torch.Tensor], *, exact: bool) -> None:
        """Note that the script averages tensors; `exact`: they are no gradients of a round."""
        if self._step_watch is not None:
            self._step_watch.note_average(exact=exact)
        if self._crossing is not None:
            self._crossing.note_average(tensors)

    def after_step(self, step: int) -> None:
        """Compare gradients, if that is due after this step.

        Raises:
            GradientsDifferError: this rank computes wrongly.
        """
        if self._gradient_check is not None:
            self._gradient_check.after_step(step)

    def _is_due(self) -> bool:
        """Whether gradients are to cross now."""
        return self._context.must_average and not self._members.is_catching_up

    def _after_any_step(self, optimizer: Optimizer, *_: object) -> None:
        """Check any optimizer's step; record the first one that other sites know nothing of."""
        if self._crossing is not None:
            self._crossing.after_any_step(optimizer)
        # The hook stays until the end: torch goes through all hooks while this one runs.
        is_first, self._has_stepped = not self._has_stepped, True
        is_unknown = self._context.must_average and not self._averaging.has_begun
        if is_first and is_unknown and self._context.rank == 0:
            self._records.record(metrics.STEPPED_ALONE, 0, {})
