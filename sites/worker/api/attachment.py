"""What a site trains together with all others: models, optimizers, their hooks and checks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING
from weakref import WeakSet

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from isthmus.protos import metrics
from isthmus.protos.failure import text_of
from isthmus.sites.worker.api.averaging import Averaging
from isthmus.sites.worker.api.own_machine import arithmetic_of, place_of
from isthmus.sites.worker.api.records import Records
from isthmus.sites.worker.checks.arguments import check_optimizer, check_tensors, check_training
from isthmus.sites.worker.checks.crossing_check import CrossingCheck, places_of
from isthmus.sites.worker.checks.forward_watch import ForwardWatch
from isthmus.sites.worker.checks.gradient_check import GradientCheck, OwnArithmetic, Seats
from isthmus.sites.worker.checks.module_hooks import ModuleHook
from isthmus.sites.worker.checks.refusals import (
    SCALER_ON_AVERAGES,
    count_left_out,
    refuse_scaler,
    scaler_refusal,
    watch_scaler,
)
from isthmus.sites.worker.checks.step_watch import StepWatch
from isthmus.sites.worker.exchange.bucket_order import Cut, agree_on_cut
from isthmus.sites.worker.exchange.collectives import Collectives, device_name
from isthmus.sites.worker.exchange.member_history import MemberHistory
from isthmus.sites.worker.exchange.rank_context import RankContext
from isthmus.sites.worker.exchange.rounds import Round
from isthmus.sites.worker.exchange.run_regime import RunRegime
from isthmus.sites.worker.exchange.sharding import is_sharded
from isthmus.sites.worker.exchange.site_averages import BucketAverages
from isthmus.sites.worker.exchange.step_records import (
    Hashes,
    StepLog,
    StepNumbers,
    TokenCount,
)
from isthmus.sites.worker.exchange.tensor_hashes import ParameterHashes, hashes_of
from isthmus.sites.worker.layouts.ddp_hook import DdpHook
from isthmus.sites.worker.layouts.gradient_hook import GradientHook
from isthmus.sites.worker.layouts.optimizer_hook import OptimizerHook
from isthmus.sites.worker.layouts.replica_hook import ReplicaHook

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from isthmus.sites.worker.layouts.agreed_hook import AgreedHook, AgreedTensors
    from isthmus.sites.worker.layouts.canonical import Agreed, GradientPlan
    from isthmus.sites.worker.layouts.layout_agreement import LayoutAgreement
    from isthmus.sites.worker.regimes.ladder import Ladder
    from isthmus.sites.worker.regimes.loop import RegimeLoop
    from isthmus.sites.worker.regimes.outer_buckets import OuterBuckets
    from isthmus.topology.spec.regime import Regime, Rung


@dataclass(slots=True)
class _Current:
    """What is attached now. Another one takes its place when the script calls again."""

    optimizers: Sequence[Optimizer] = ()
    """The first one's steps count."""
    hook: GradientHook | None = None
    """None: `average_gradients` averages."""
    agreement: LayoutAgreement | None = None
    """With the other sites, where tensors are sharded."""
    loop: RegimeLoop | None = None
    """What has averages cross between sites; None: gradients do, in the backward pass."""
    ladder: Ladder | None = None
    """The loop, where it may be another one in the end; None: the regime stays as it is."""
    step_watch: StepWatch | None = None
    crossing: CrossingCheck | None = None
    undo: list[Callable[[], None]] = field(default_factory=list)
    """Take off what was hooked in."""
    gradient_check: GradientCheck | None = None
    """What compares gradients of one micro-batch; None: the job does not ask for it."""
    is_reported: bool = False
    """Whether the coordinator knows of it."""


class Attachment:
    """One rank's part in training together. For the training thread."""

    def __init__(
        self,
        context: RankContext,
        averaging: Averaging,
        members: MemberHistory,
        steps: StepLog,
        records: Records,
        regime: RunRegime,
    ) -> None:
        """Attach nothing yet; watch all optimizers of this process."""
        self._context = context
        self._averaging = averaging
        self._members = members
        self._steps = steps
        self._records = records
        self.tokens = TokenCount()
        self.numbers = StepNumbers(steps)
        self._regime = regime
        self._now = _Current()
        self._former: WeakSet[Optimizer] = WeakSet()
        """Optimizers that earlier calls were given."""
        self.before_change: Callable[[], None] = lambda: None
        """Called before what is attached is replaced."""
        self._averaged_buffers: Sequence[torch.Tensor] = ()
        self._average_buffers: Callable[[], None] = lambda: None
        self._has_stepped = False
        self._watched = register_optimizer_step_post_hook(self._after_any_step)

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

    @property
    def loop(self) -> RegimeLoop | None:
        """What has averages cross between sites; None: gradients do, in the backward pass."""
        return self._now.loop

    @property
    def gradient_averages(self) -> BucketAverages:
        """What averages gradients as they come: over all sites, or inside this one."""
        averaging = self._averaging
        return averaging.pipeline if self._regime.now.is_sync else averaging.site_averages

    def values(self) -> dict[str, float]:
        """Return what a step's record has of the regime in which it was taken."""
        rung = None if self._now.ladder is None else self._now.ladder.rung
        return {} if rung is None else {metrics.RUNG: float(rung)}

    def lists(self) -> Sequence[bytes]:
        """Return what each site has told all others of its tensors, where any site may shard."""
        return () if self._now.agreement is None else self._now.agreement.lists

    def finish(self) -> None:
        """Wait for what still crosses, at the end of a run."""
        if self._now.loop is not None:
            self._now.loop.finish()

    def close(self) -> None:
        """Watch optimizers no more."""
        self._watched.remove()

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
        may_change = self._may_change(replicas)
        if replicas and (beside_shards or may_change or not self._regime.now.is_sync):
            self._attach_beside_shards(replicas, is_summed=is_summed, may_change=may_change)
        elif replicas:
            self._attach_replicas(replicas, is_summed=is_summed)
        else:
            self._attach_shards(models, data_mesh, is_summed=is_summed, may_change=may_change)
        if (pace := self._steps.pace) is not None:
            note = ModuleHook(pace.note_forward)
            self._now.undo += [each.register_forward_pre_hook(note).remove for each in models]
        if self._context.rank == 0 and self._context.must_average:
            self._watch_forward(models)
        self._check_gradients(models)

    def average_gradients(self, optimizer: Optimizer) -> None:
        """Average the gradients of an optimizer at each step: `Site.average_gradients`."""
        check_optimizer("site.average_gradients", optimizer)
        if not self._regime.now.is_sync:
            raise RuntimeError(
                f"site.average_gradients: the job's regime is {self._regime.now.kind}, which needs "
                "site.attach(model, optimizer): call that, or say `regime: sync`"
            )
        averaging = self._averaging
        hook = OptimizerHook(averaging.lists, self.tokens, optimizer, averaging.equalise)
        averaging.exactness.check([name for name, _ in hook.parameters()])
        self._steps.begin("average_gradients")
        self._begin([optimizer])
        if self._regime.may_change:
            self._warn(
                "the regime stays sync: another one needs site.attach(model, optimizer) in place "
                "of site.average_gradients"
            )
        if not self._members.awaits_state:
            hook.equalise()
        now = self._now
        now.undo.append(optimizer.register_step_pre_hook(hook.before_step).remove)
        now.undo.append(refuse_scaler([optimizer], SCALER_ON_AVERAGES))
        self._steps.count(optimizer, lambda: hashes_of(hook.parameters()), hook.take_rounds)
        self._check_gradients([])

    def all_reduce(self, tensors: Sequence[torch.Tensor], tokens: float, *, exact: bool) -> None:
        """Average tensors, which may be gradients of what is attached: `Site.all_reduce`."""
        check_tensors("site.all_reduce", tensors)
        if not (math.isfinite(tokens) and tokens >= 0):
            raise ValueError(f"site.all_reduce: tokens: want a number of 0 or more, got {tokens}")
        now = self._now
        if not (exact or self._regime.now.is_sync or now.hook):
            raise RuntimeError(
                f"site.all_reduce: the job's regime is {self._regime.now.kind}, which needs "
                "site.attach(model, optimizer), and what is averaged by hand may be gradients: "
                "call that first, give all_reduce exact=True, or say `regime: sync`"
            )
        if self._regime.now.is_open and now.hook:
            raise RuntimeError(
                "site.all_reduce: with regime.min_steps sites are not in the same step, so nothing "
                "is averaged by hand: leave it out, or leave out min_steps"
            )
        shard = None if now.agreement is None else now.agreement.hook.shard_in(tensors)
        if shard is not None:
            raise TypeError(
                f"site.all_reduce: a tensor is this rank's shard of {shard}, of which other ranks "
                "hold other elements: average what full_tensor() returns; gradients of a model "
                "that is attached are averaged by its backward pass"
            )
        if now.step_watch is not None:
            # Where sites take steps of their own, gradients that all share are no part of a round.
            now.step_watch.note_average(exact=exact or self._regime.now.is_local)
        if now.crossing is not None:
            now.crossing.note_average(tensors)
        self._averaging.average_for_script(tensors, tokens, exact=exact)

    def grad_norm(self) -> float:
        """Return the norm of the latest round's gradient: `Site.grad_norm`."""
        if self._now.hook is None:
            raise RuntimeError(
                "site.grad_norm: call site.attach first; where site.average_gradients "
                "averages, torch.nn.utils.clip_grad_norm_ finds the norm in a hook that runs "
                "after ours"
            )
        loop = self._now.loop
        return self._now.hook.norm() if loop is None else loop.norm()

    def clip_grad_norm_(self, max_norm: float, loss_scale: float) -> float:
        """Scale the gradients down to a norm: `Site.clip_grad_norm_`."""
        norm = self.grad_norm() / loss_scale
        if self._now.loop is not None:
            self._now.loop.max_norm = max_norm
        scale = max_norm / (norm + 1e-6)
        if not scale >= 1.0:  # not a number: then no gradient is one, as with torch's own
            for each in [] if self._now.hook is None else self._now.hook.gradients():
                each.mul_(scale)
        return norm

    def global_parameters(self) -> AbstractContextManager[None]:
        """Return a context in which parameters are all sites': `Site.global_parameters`."""
        return nullcontext() if self._now.loop is None else self._now.loop.global_parameters()

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
            step, since = self._steps.num_steps, self._steps.num_steps - self._regime.now.sync_every
            if self._regime.now.meets_at(step) and step // every > since // every:
                self._averaging.average(buffers)

        self._average_buffers, self._averaged_buffers = average, buffers

    def end_step(self, step: int) -> None:
        """Do what is due after this step: average buffers, compare gradients, say what is attached.

        Raises:
            GradientsDifferError: this rank computes wrongly.
        """
        self._average_buffers()
        if self._now.gradient_check is not None:
            self._now.gradient_check.after_step(step)
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
        for optimizer in self._now.optimizers:
            self._former.add(optimizer)
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
        self._watch_steps(hook, hook.parameters())
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
        # Imported only by scripts that shard: it takes torch half a second.
        from isthmus.sites.worker.layouts.fully_sharded import is_lone
        from isthmus.sites.worker.layouts.lone_hook import LoneHook
        from isthmus.sites.worker.layouts.shard_hook import ShardHook

        kind = LoneHook if is_lone(models) else ShardHook
        if kind is LoneHook and data is not None and data.size() > 1:
            raise TypeError(
                "site.attach: data_mesh: nothing wraps the model, so all its ranks have one "
                "batch: leave it out, or let fully_shard wrap the model over that mesh"
            )
        hook = kind(
            self.gradient_averages,
            self.tokens,
            models,
            data_ranks=None if data is None else tuple(data.mesh.flatten().tolist()),
            is_summed=is_summed,
            regime=self._regime.now.kind,
        )
        self._attach_agreed(hook, models, may_change=may_change)

    def _attach_beside_shards(
        self, models: Sequence[DistributedDataParallel], *, is_summed: bool, may_change: bool
    ) -> None:
        from isthmus.sites.worker.layouts.replicas_beside_shards import ReplicaBesideShardsHook

        hook = ReplicaBesideShardsHook(
            self.gradient_averages,
            self.tokens,
            models,
            is_summed=is_summed,
            regime=self._regime.now.kind,
        )
        self._attach_agreed(hook, models, may_change=may_change)
        hook.watch_reduced(self._now.optimizers)

    def _attach_agreed(
        self, hook: AgreedHook, models: Sequence[nn.Module], *, may_change: bool
    ) -> None:
        """Exchange in buckets that all sites agree on, whatever their layouts."""
        context, averaging, now = self._context, self._averaging, self._now
        now.hook = hook
        tensors: AgreedTensors = hook
        buckets: OuterBuckets | None = None
        if may_change:
            now.loop = now.ladder = tensors = self._ladder(hook, models)
        elif not self._regime.now.is_sync:
            tensors, _ = buckets, _ = self._outer_buckets(hook)
        now.agreement = agreement = self._agreement(
            tensors, averaging.collectives, is_own=context.exchange_is_off
        )
        averaging.exactness.check([each.name for each in agreement.tensors.entries])
        if not self._members.awaits_state:
            agreement.agree(averaging.pipeline, context.device)
            agreement.state.equalise(averaging.initial_state())
        self._watch_steps(hook, hook.own.items())
        optimizers = now.optimizers

        def hashes() -> ParameterHashes | None:
            # A pipeline's ranks have unlike optimizers.
            others = [] if agreement.tensors.is_split else _others(hook, optimizers)
            with self.global_parameters():
                return agreement.state.digest(dict([*hook.parameters_now(), *others]))

        def take_rounds() -> list[Round]:
            landed = [] if now.loop is None else now.loop.take_rounds()
            own, landing = hook.take_rounds(), self._steps.landing
            if now.ladder is not None and len(own) > 1:
                now.ladder.stay("two backward passes have synchronised in one step")
            is_lost = landing is not None and landing.is_passed_over
            return landed if is_lost else [*own, *landed]

        # In sync all has crossed before the first one steps; else a step ends with the last one.
        counted = optimizers[0 if self._regime.now.is_sync else -1]
        self._count(counted, hashes, take_rounds)
        if now.ladder is not None:
            now.undo.append(watch_scaler(optimizers, now.ladder.meet_scaler))
            now.ladder.begin()
        elif buckets is not None:
            now.undo.append(refuse_scaler(optimizers, scaler_refusal(self._regime.now.kind)))
            now.loop = self._begin_loop(hook, buckets, models, self._regime.now)
            self._note_regime(self._regime.now)
        if now.loop is not None:
            self._steps.before_end, self._steps.after_end = now.loop.before_end, now.loop.after_end
            now.undo.append(now.loop.close)

    def _agreement(
        self, hook: AgreedTensors, collectives: Collectives, *, is_own: bool
    ) -> LayoutAgreement:
        """Return what agrees with the other sites; `is_own`: with this one alone."""
        from isthmus.sites.worker.layouts.layout_agreement import LayoutAgreement

        context, welcome = self._context, self._context.welcome
        return LayoutAgreement(
            hook,
            collectives,
            bucket_bytes=context.spec.job.exchange.bucket_bytes,
            exactness=self._averaging.exactness,
            site=context.site,
            sites=(context.site,) if is_own else welcome.sites,
            ranks_per_site=(context.world_size,) if is_own else welcome.ranks_per_site,
            ranks_per_gateway=welcome.ranks_per_gateway or context.world_size,
        )

    # ---------------------------------------------------------------- regimes

    def _outer_buckets(self, hook: AgreedHook) -> tuple[OuterBuckets, tuple[Agreed, GradientPlan]]:
        """Have `hook` average inside the site; return what crosses after that, and how it does."""
        from isthmus.sites.worker.regimes.outer_buckets import OuterBuckets

        averaging = self._averaging
        inside = self._agreement(hook, averaging.site_collectives, is_own=True)
        inside.adopt([inside.tensors.to_bytes()])
        assert inside.plan is not None, "it was adopted"
        context = self._context
        buckets = OuterBuckets(
            averaging.pipeline,
            hook,
            averaging.site_collectives,
            context.device,
            site=context.index,
            num_sites=context.num_sites,
        )
        return buckets, inside.plan

    def _may_change(self, replicas: Sequence[DistributedDataParallel]) -> bool:
        """Whether the run may go over to other regimes while it goes on; if not, say why once."""
        if not self._regime.may_change:
            return False
        why = self._why_only_sync(replicas)
        is_any = not self._members.awaits_state and self._is_any(bool(why))
        if why or is_any:
            self._warn(f"the regime stays sync: {why or 'another site can have no other'}")
            self._regime.stay()
            self._note_regime(self._regime.now)
        return not (why or is_any)

    def _why_only_sync(self, replicas: Sequence[DistributedDataParallel]) -> str:
        """Return what is attached that no other regime trains; nothing: any does."""
        from isthmus.sites.worker.layouts.replicas_beside_shards import check_agreed
        from isthmus.sites.worker.regimes.look_ahead import check_known

        if len(self._now.optimizers) > 1:
            return "several optimizers are attached"
        try:
            check_known(self._now.optimizers[0])
            if replicas:
                check_agreed(replicas, "delayed")
        except TypeError as error:
            return text_of(error)
        return ""

    def _ladder(self, hook: AgreedHook, models: Sequence[nn.Module]) -> Ladder:
        """Have averages cross as the run's regime says, which may change."""
        from isthmus.sites.worker.regimes.ladder import Ladder

        averaging = self._averaging
        buckets, plan_inside = self._outer_buckets(hook)
        return Ladder(
            hook,
            buckets,
            self._regime,
            across=averaging.pipeline,
            inside=averaging.site_averages,
            plan_inside=plan_inside,
            make_loop=partial(self._begin_loop, hook, buckets, models),
            is_any=self._is_any,
            begun=self._note_regime,
            warn=self._warn,
        )

    def change_regime(self, rung: Rung) -> None:
        """Go over to another regime once this step has ended: from all ranks of all sites."""
        if self._now.ladder is not None:
            self._now.ladder.hear(rung)

    def begin_at(self, rung: Rung) -> None:
        """Begin in the regime that the other sites have."""
        if self._now.ladder is not None:
            self._now.ladder.begin_at(rung)

    def _note_regime(self, regime: Regime) -> None:
        """Tell whoever counts by the regime that another one begins."""
        is_delayed = regime.kind == "delayed"
        self._averaging.missing_sites.delay_steps = 1 if is_delayed else regime.delay
        self._steps.verify_every = self._context.welcome.verify_every * regime.sync_every

    def _is_any(self, is_here: bool) -> bool:
        """Return whether `is_here` holds at any rank of any site: a collective of all."""
        return bool(self._averaging.largest(int(is_here), limit=1))

    def _begin_loop(
        self,
        hook: AgreedHook,
        buckets: OuterBuckets,
        models: Sequence[nn.Module],
        regime: Regime,
    ) -> RegimeLoop:
        """Have averages cross as the regime says."""
        loop: RegimeLoop
        optimizers = self._now.optimizers
        if regime.is_local:
            from isthmus.sites.worker.regimes.local_steps import LocalSteps
            from isthmus.sites.worker.regimes.open_steps import OpenSteps
            from isthmus.sites.worker.regimes.streaming import Streaming

            make: Callable[..., LocalSteps] = LocalSteps
            if regime.kind == "streaming":
                make = Streaming
            elif regime.is_open:
                self._check_open()
                make = partial(
                    OpenSteps,
                    link=self._averaging.link,
                    missing_sites=self._averaging.missing_sites,
                    gives_numbers=lambda: self.numbers.are_used,
                    deadline_s=self._averaging.deadline_s,
                    tell=self._tell,
                )
            loop = make(
                hook,
                buckets,
                models,
                optimizers,
                regime,
                num_sites=self._num_sites,
                counts=self._counts,
                warn=self._warn,
            )
        else:
            from isthmus.sites.worker.regimes.delayed import Delayed

            loop = Delayed(
                hook,
                buckets,
                models,
                optimizers,
                looks=regime.look,
                counts=self._counts,
                copy_state=self._copy_state,
                note_last=self._averaging.missing_sites.end_delay,
            )
        return loop

    def _check_open(self) -> None:
        """Refuse rounds that wait for nobody where one rank cannot decide for the site.

        Raises:
            RuntimeError: the site has several gateways.
        """
        context = self._context
        if 0 < context.welcome.ranks_per_gateway < context.world_size:
            raise RuntimeError(
                f"regime.min_steps: site {context.site} has several gateways, which do not hear of "
                "each other's ranks: leave min_steps out, or let the site have one gateway"
            )

    def _tell(self, reason: str) -> None:
        """Tell people something of this site, from its first rank."""
        if self._context.rank == 0:
            self._records.record_problem(metrics.TROUBLE, self._steps.num_steps, reason)

    def _warn(self, reason: str) -> None:
        """Tell people something, which all sites would say alike."""
        if self._context.rank == self._context.index == 0:
            self._records.record_problem(metrics.TROUBLE, self._steps.num_steps, reason)

    def _counts(self) -> bool:
        """Whether what this site makes of its data counts."""
        return not self._members.is_catching_up

    def _num_sites(self, ahead: int) -> int:
        """Return how many sites take part so many steps after the next one, alike at all ranks."""
        return self._context.num_sites - len(self._averaging.missing_sites.gone(ahead=ahead))

    def _copy_state(self) -> None:
        """Copy what is to be saved of the step that has ended."""
        self._averaging.site_averages.before_gradients()

    # ---------------------------------------------------------------- what watches steps

    def _watch_steps(self, hook: GradientHook, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Refuse steps without rounds, and rounds without steps, unless nothing has to cross."""
        now, optimizers = self._now, self._now.optimizers
        now.undo += [each.register_step_pre_hook(hook.finish).remove for each in optimizers]
        now.step_watch = watch = StepWatch(named, optimizers, is_due=self._is_due)
        hook.after_round = watch.note_round
        now.crossing = crossing = CrossingCheck(
            hook.parameters_now,
            hook.crossed,
            optimizers,
            is_due=self._is_due,
            former=self._former,
        )
        now.undo += [hook.close, watch.close, crossing.close]

    def _watch_forward(self, models: Sequence[nn.Module]) -> None:
        """Have what models are called with, and buffers, compared with other sites'."""

        def send(step: int, hashes: ParameterHashes) -> None:
            shown = hashes.bounded()
            values = dict(zip(shown.names, (each >> 12 for each in shown.tensors), strict=True))
            self._records.record(metrics.BUFFERS, step, values)

        watch = ForwardWatch(
            models,
            lambda: self._steps.num_steps,
            averaged=lambda: self._averaged_buffers,
            verify_every=self._context.welcome.verify_every,
            send_buffers=send,
        )
        self._steps.take_inputs = watch.take_inputs
        self._now.undo += watch.undo

    def _check_gradients(self, models: Sequence[nn.Module]) -> None:
        """Have all ranks compute one micro-batch now and then, if the job wants it."""
        context, hook, job = self._context, self._now.hook, self._context.spec.job
        own = slice(context.index, context.index + 1) if context.is_apart else slice(None)
        seats = Seats(
            sites=context.welcome.sites[own],
            ranks_per_site=context.welcome.ranks_per_site[own],
            own=context.rank if context.is_apart else context.global_rank,
        )
        if not job.gradients_every or seats.count < 2:
            return

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
        self._now.gradient_check = check = GradientCheck(
            self._averaging.pipeline,
            models,
            names,
            device,
            seats=seats,
            own=OwnArithmetic(kind=arithmetic_of(device), place=place_of(device), repeats=is_exact),
            every=job.gradients_every * self._regime.longest.sync_every,
            num_steps=lambda: self._steps.num_steps,
            gone=self._averaging.missing_sites.gone,
            global_parameters=self.global_parameters,
            note=note,
            record=record,
        )
        self._now.undo += check.undo

    def _is_due(self) -> bool:
        """Whether gradients are to cross now."""
        return self._context.must_average and not self._members.is_catching_up

    def _after_any_step(self, optimizer: Optimizer, *_: object) -> None:
        """Check any optimizer's step; record the first one that other sites know nothing of."""
        if self._now.crossing is not None:
            self._now.crossing.after_any_step(optimizer)
        # The hook stays until the end: torch goes through all hooks while this one runs.
        is_first, self._has_stepped = not self._has_stepped, True
        is_unknown = self._context.must_average and not self._averaging.has_begun
        if is_first and is_unknown and self._context.rank == 0:
            self._records.record(metrics.STEPPED_ALONE, 0, {})


def _others(hook: GradientHook, optimizers: Sequence[Optimizer]) -> list[tuple[str, torch.Tensor]]:
    """Return what optimizers hold beside the models' parameters, by place."""
    known = {id(each) for _, each in hook.parameters_now()}
    return [
        (f"optimizer {index}: {place}", each)
        for index, optimizer in enumerate(optimizers)
        for place, each in places_of(optimizer)
        if id(each) not in known
    ]
