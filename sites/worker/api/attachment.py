"""What a site trains together with all others: models, optimizers, and the hooks in them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from isthmus.protos import metrics
from isthmus.sites.worker.api.averaging import Averaging
from isthmus.sites.worker.api.rank import Rank
from isthmus.sites.worker.api.regimes import Regimes
from isthmus.sites.worker.api.step_checks import StepChecks
from isthmus.sites.worker.checks.arguments import check_optimizer, check_tensors, check_training
from isthmus.sites.worker.checks.crossing_check import places_of
from isthmus.sites.worker.checks.module_hooks import ModuleHook
from isthmus.sites.worker.checks.refusals import (
    SCALER_ON_AVERAGES,
    count_left_out,
    refuse_scaler,
)
from isthmus.sites.worker.exchange.bucket_order import Cut, agree_on_cut
from isthmus.sites.worker.exchange.collectives import device_name
from isthmus.sites.worker.exchange.rounds import Round
from isthmus.sites.worker.exchange.step_records import Hashes, TokenCount
from isthmus.sites.worker.exchange.tensor_hashes import ParameterHashes, hashes_of
from isthmus.sites.worker.layouts.agreed_hook import AgreedHook
from isthmus.sites.worker.layouts.fully_sharded import is_lone
from isthmus.sites.worker.layouts.gradient_hook import GradientHook
from isthmus.sites.worker.layouts.layout_agreement import LayoutAgreement
from isthmus.sites.worker.layouts.lone_hook import LoneHook
from isthmus.sites.worker.layouts.optimizer_hook import OptimizerHook
from isthmus.sites.worker.layouts.replica_hook import ReplicaHook
from isthmus.sites.worker.layouts.replicas_beside_shards import ReplicaBesideShardsHook
from isthmus.sites.worker.layouts.shard_hook import ShardHook
from isthmus.sites.worker.regimes.permitted import check_all_reduce, check_average_gradients

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(slots=True)
class _Current:
    """What is attached now. Another one takes its place when the script calls again."""

    optimizers: Sequence[Optimizer] = ()
    """The first one's steps count."""
    hook: GradientHook | None = None
    """None: `average_gradients` averages."""
    agreement: LayoutAgreement | None = None
    """With the other sites, where tensors are sharded."""
    undo: list[Callable[[], None]] = field(default_factory=list)
    """Take off what was hooked in."""
    is_reported: bool = False
    """Whether the coordinator knows of it."""


class Attachment:
    """One rank's part in training together. For the training thread."""

    def __init__(self, rank: Rank, averaging: Averaging, regimes: Regimes) -> None:
        """Attach nothing yet; watch all optimizers of this process."""
        self._context, self._members = rank.context, rank.members
        self._steps, self._records = rank.steps, rank.records
        self._averaging, self._regimes = averaging, regimes
        self._checks = StepChecks(rank, averaging)
        self.tokens = TokenCount()
        self._now = _Current()
        self.before_change: Callable[[], None] = lambda: None
        """Called before what is attached is replaced."""
        self._averaged_buffers: Sequence[torch.Tensor] = ()
        self._average_buffers: Callable[[], None] = lambda: None

    # ---------------------------------------------------------------- what others ask

    @property
    def optimizers(self) -> Sequence[Optimizer]:
        """Those that are attached."""
        return self._now.optimizers

    @property
    def hook(self) -> GradientHook | None:
        """What hands the model's gradients over; None: no model is attached."""
        return self._now.hook

    @property
    def replica_hook(self) -> ReplicaHook | None:
        """That of DistributedDataParallel, where no site shards."""
        hook = self._now.hook
        return hook if isinstance(hook, ReplicaHook) else None

    @property
    def agreement(self) -> LayoutAgreement | None:
        """How all sites' tensors cross, where any site may shard."""
        return self._now.agreement

    @property
    def is_split(self) -> bool:
        """Whether ranks of the site have unlike tensors: a pipeline's stages."""
        return self._now.agreement is not None and self._now.agreement.tensors.is_split

    def lists(self) -> Sequence[bytes]:
        """Return what each site has told all others of its tensors, where any site may shard."""
        return () if self._now.agreement is None else self._now.agreement.lists

    def close(self) -> None:
        """Watch optimizers no more."""
        self._checks.close()

    # ---------------------------------------------------------------- what a script calls

    def attach(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[Optimizer],
        *,
        data_mesh: DeviceMesh | None,
        loss: str,
        beside_shards: bool,
    ) -> None:
        """Attach models, which nothing wraps but torch: `Site.attach`."""
        check_training(models, optimizers)
        if loss not in ("mean", "sum"):
            raise ValueError(f"site.attach: loss: want mean or sum, got {loss!r}")
        is_summed = loss == "sum"
        self._steps.begin("attach")
        self._begin(optimizers)
        replicas = [each for each in models if isinstance(each, DistributedDataParallel)]
        may_change = self._regimes.may_change(optimizers, replicas)
        if replicas and (beside_shards or may_change or not self._regimes.now.is_sync):
            self._attach_beside_shards(replicas, is_summed=is_summed, may_change=may_change)
        elif replicas:
            self._attach_replicas(replicas, is_summed=is_summed)
        else:
            self._attach_shards(models, data_mesh, is_summed=is_summed, may_change=may_change)
        if (pace := self._steps.pace) is not None:
            note = ModuleHook(pace.note_forward)
            self._now.undo += [each.register_forward_pre_hook(note).remove for each in models]
        self._now.undo += self._checks.watch_forward(models, lambda: self._averaged_buffers)
        self._compare_gradients(models)

    def average_gradients(self, optimizer: Optimizer) -> None:
        """Average the gradients of an optimizer at each step: `Site.average_gradients`."""
        check_optimizer("site.average_gradients", optimizer)
        regimes = self._regimes
        check_average_gradients(regimes.now)
        averaging = self._averaging
        hook = OptimizerHook(averaging.lists, self.tokens, optimizer, averaging.equalise)
        averaging.exactness.check([name for name, _ in hook.parameters()])
        self._steps.begin("average_gradients")
        self._begin([optimizer])
        regimes.warn_without_attach()
        if not self._members.awaits_state:
            hook.equalise()
        now = self._now
        now.undo.append(optimizer.register_step_pre_hook(hook.before_step).remove)
        now.undo.append(refuse_scaler([optimizer], SCALER_ON_AVERAGES))
        self._steps.count(optimizer, lambda: hashes_of(hook.parameters()), hook.take_rounds)
        self._compare_gradients([])

    def all_reduce(self, tensors: Sequence[torch.Tensor], tokens: float, *, exact: bool) -> None:
        """Average tensors, which may be gradients of what is attached: `Site.all_reduce`."""
        check_tensors("site.all_reduce", tensors)
        if not (math.isfinite(tokens) and tokens >= 0):
            raise ValueError(f"site.all_reduce: tokens: want a number of 0 or more, got {tokens}")
        now = self._now
        regime = self._regimes.now
        check_all_reduce(regime, exact=exact, is_attached=now.hook is not None)
        shard = None if now.agreement is None else now.agreement.hook.shard_in(tensors)
        if shard is not None:
            raise TypeError(
                f"site.all_reduce: a tensor is this rank's shard of {shard}, of which other ranks "
                "hold other elements: average what full_tensor() returns; gradients of a model "
                "that is attached are averaged by its backward pass"
            )
        # Where sites take steps of their own, gradients that all share are no part of a round.
        self._checks.note_average(tensors, exact=exact or regime.is_local)
        self._averaging.average_for_script(tensors, tokens, exact=exact)

    def grad_norm(self) -> float:
        """Return the norm of the latest round's gradient: `Site.grad_norm`."""
        if self._now.hook is None:
            raise RuntimeError(
                "site.grad_norm: call site.attach first; where site.average_gradients "
                "averages, torch.nn.utils.clip_grad_norm_ finds the norm in a hook that runs "
                "after ours"
            )
        return self._regimes.loop.norm(self._now.hook)

    def clip_grad_norm_(self, max_norm: float, loss_scale: float) -> float:
        """Scale the gradients down to a norm: `Site.clip_grad_norm_`."""
        norm = self.grad_norm() / loss_scale
        self._regimes.loop.note_clipping(max_norm)
        scale = max_norm / (norm + 1e-6)
        if not scale >= 1.0:  # not a number: then no gradient is one, as with torch's own
            for each in [] if self._now.hook is None else self._now.hook.gradients():
                each.mul_(scale)
        return norm

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context in which no gradient crosses: `Site.no_sync`.

        For models of DistributedDataParallel it is their `no_sync`, for those of `fully_shard`
        `set_requires_gradient_sync`. With `average_gradients` no backward pass sends gradients.
        """
        if self._now.hook is not None:
            return self._now.hook.no_sync()
        if not self._now.optimizers:
            raise RuntimeError("site.no_sync: call site.attach first")
        return nullcontext()

    def average_buffers(self, model: nn.Module, every: int) -> None:
        """Average buffers after each `every`-th step from now on: `Site.average_buffers`."""
        if every < 1:
            raise ValueError(f"site.average_buffers: every: want 1 or more, got {every}")
        if self.is_split:
            raise TypeError(
                "site.average_buffers: ranks of this site have unlike buffers (a pipeline's "
                "stages): leave it out"
            )
        buffers = [each for each in model.buffers() if each.is_floating_point()]
        check_tensors("site.average_buffers", buffers)

        def average() -> None:
            step, regime = self._steps.num_steps, self._regimes.now
            if regime.meets_at(step) and step // every > (step - regime.sync_every) // every:
                self._averaging.average(buffers)

        self._average_buffers, self._averaged_buffers = average, buffers

    def end_step(self, step: int) -> None:
        """Do what is due after this step: average buffers, compare gradients, say what is attached.

        Raises:
            GradientsDifferError: this rank computes wrongly.
        """
        self._average_buffers()
        self._checks.after_step(step)
        if not self._now.is_reported:
            self._now.is_reported = True
            self._report_model()

    def _report_model(self) -> None:
        """Tell the coordinator, from the first rank, how large the model is: for the MFU."""
        if self._context.rank != 0:
            return
        agreement = self._now.agreement
        if agreement is None:
            groups = [group for each in self._now.optimizers for group in each.param_groups]
            every = {id(each): each for group in groups for each in group["params"]}
            numels = [each.numel() for each in every.values() if each.requires_grad]
        else:  # ranks may have unlike parts
            entries = agreement.tensors.entries
            numels = [each.numel for each in entries if each.kind == "trained"]
        values = {
            metrics.PARAMETERS: sum(numels),
            metrics.COUNTS_TOKENS: self.tokens.is_counted,
        }
        labels = {metrics.DEVICE: device_name(self._context.device)}
        self._records.record(metrics.MODEL, self._steps.num_steps, values, labels)

    # ---------------------------------------------------------------- layouts

    def _begin(self, optimizers: Sequence[Optimizer]) -> None:
        """End what was attached until now, between two steps, and begin anew."""
        self.before_change()
        for each in self._now.undo:
            each()
        self._checks.end(self._now.optimizers)
        self._regimes.end()
        self._now = _Current(optimizers)

    def _attach_replicas(
        self, models: Sequence[DistributedDataParallel], *, is_summed: bool
    ) -> None:
        hook = ReplicaHook(
            self._averaging.pipeline,
            self.tokens,
            models,
            exactness=self._averaging.exactness,
            agree=self._agree_on_cut,
            is_summed=is_summed,
        )
        now, optimizers = self._now, self._now.optimizers
        now.hook = hook
        for model in models:
            self._averaging.broadcast(model.module)
        hook.hook_in()
        if not self._members.awaits_state and (others := _others(hook, optimizers)):
            self._averaging.equalise(others)
        now.undo += self._checks.watch_steps(hook, hook.parameters(), optimizers)
        hook.watch_reduced(optimizers)
        self._count(
            optimizers[0],
            lambda: hashes_of([*hook.parameters_now(), *_others(hook, optimizers)]),
            hook.take_rounds,
        )

    def _count(
        self, optimizer: Optimizer, hashes: Hashes, take_rounds: Callable[[], list[Round]]
    ) -> None:
        """Count an optimizer's steps, also those that a GradScaler leaves out at all sites.

        Their rounds have crossed, and their batches are used as in a script without us.
        """
        end_step = self._steps.count(optimizer, hashes, take_rounds)
        self._now.undo.append(count_left_out(optimizer, lambda: self._steps.num_steps, end_step))

    def _agree_on_cut(self, own: Cut) -> Cut:
        context = self._context
        if context.is_apart:
            return own
        return agree_on_cut(
            self._averaging.pipeline,
            context.welcome.sites,
            context.rank,
            context.device,
            site=context.index,
            own=own,
        )

    def _attach_shards(
        self,
        models: Sequence[nn.Module],
        data: DeviceMesh | None,
        *,
        is_summed: bool,
        may_change: bool,
    ) -> None:
        kind = LoneHook if is_lone(models) else ShardHook
        if kind is LoneHook and data is not None and data.size() > 1:
            raise TypeError(
                "site.attach: data_mesh: nothing wraps the model, so all its ranks have one "
                "batch: leave it out, or let fully_shard wrap the model over that mesh"
            )
        hook = kind(
            self._regimes.gradient_averages,
            self.tokens,
            models,
            data_ranks=None if data is None else tuple(data.mesh.flatten().tolist()),
            is_summed=is_summed,
            regime=self._regimes.now.kind,
        )
        self._attach_agreed(hook, models, may_change=may_change)

    def _attach_beside_shards(
        self, models: Sequence[DistributedDataParallel], *, is_summed: bool, may_change: bool
    ) -> None:
        hook = ReplicaBesideShardsHook(
            self._regimes.gradient_averages,
            self.tokens,
            models,
            is_summed=is_summed,
            regime=self._regimes.now.kind,
        )
        self._attach_agreed(hook, models, may_change=may_change)
        hook.watch_reduced(self._now.optimizers)

    def _attach_agreed(
        self, hook: AgreedHook, models: Sequence[nn.Module], *, may_change: bool
    ) -> None:
        """Exchange in buckets that all sites agree on, whatever their layouts."""
        averaging, regimes, now = self._averaging, self._regimes, self._now
        now.hook, optimizers = hook, now.optimizers
        now.agreement = agreement = LayoutAgreement(
            regimes.prepare(hook, models, optimizers, may_change=may_change),
            averaging.collectives,
            self._context,
            averaging.exactness,
            is_own=self._context.exchange_is_off,
        )
        averaging.exactness.check([each.name for each in agreement.tensors.entries])
        if not self._members.awaits_state:
            agreement.agree(averaging.pipeline)
            agreement.state.equalise(averaging.initial_state())
        now.undo += self._checks.watch_steps(hook, hook.own.items(), optimizers)

        def hashes() -> ParameterHashes | None:
            # A pipeline's ranks have unlike optimizers.
            others = [] if agreement.tensors.is_split else _others(hook, optimizers)
            with regimes.global_parameters():
                return agreement.state.digest(dict([*hook.parameters_now(), *others]))

        # In sync all has crossed before the first one steps; else a step ends with the last one.
        counted = optimizers[0 if regimes.now.is_sync else -1]
        self._count(counted, hashes, lambda: regimes.take_rounds(hook.take_rounds()))
        now.undo += regimes.begin(optimizers)

    def _compare_gradients(self, models: Sequence[nn.Module]) -> None:
        self._now.undo += self._checks.compare_gradients(
            self._now.hook, models, self._regimes.global_parameters
        )


def _others(hook: GradientHook, optimizers: Sequence[Optimizer]) -> list[tuple[str, torch.Tensor]]:
    """Return what optimizers hold beside the models' parameters, by place."""
    known = {id(each) for _, each in hook.parameters_now()}
    return [
        (f"optimizer {index}: {place}", each)
        for index, optimizer in enumerate(optimizers)
        for place, each in places_of(optimizer)
        if id(each) not in known
    ]
