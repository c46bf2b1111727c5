"""A rank's view of its site and of the run: what a training script holds."""

from __future__ import annotations

import atexit
import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, SupportsFloat
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from isthmus.protos import metrics
from isthmus.protos.checkpoint.manifest import Manifest
from isthmus.protos.checkpoint.store import joined
from isthmus.protos.failure import one_line
from isthmus.sites.local.rank_messages import Metric, Saving, StateProgress, Welcome
from isthmus.sites.worker.api.wrappers import unwrapped_model, unwrapped_optimizer
from isthmus.sites.worker.checks.arguments import (
    check_list,
    check_optimizer,
    check_tensors,
    check_training,
)
from isthmus.sites.worker.checks.crossing_check import CrossingCheck, places_of
from isthmus.sites.worker.checks.step_watch import StepWatch
from isthmus.sites.worker.data.batch_shares import BatchShares
from isthmus.sites.worker.data.data_part import part_of
from isthmus.sites.worker.data.data_positions import DataPositions
from isthmus.sites.worker.data.sampler import Sampler
from isthmus.sites.worker.exchange.bucket_copy import CudaTransfer, Transfer
from isthmus.sites.worker.exchange.bucket_order import Cut, agree_on_cut
from isthmus.sites.worker.exchange.bucket_pipeline import BucketPipeline
from isthmus.sites.worker.exchange.collectives import Collectives, local_rank
from isthmus.sites.worker.exchange.exactness import Exactness
from isthmus.sites.worker.exchange.finite_watch import FiniteWatch
from isthmus.sites.worker.exchange.gateway_link import Link
from isthmus.sites.worker.exchange.member_history import (
    Announced,
    Entering,
    Following,
    GivenUp,
    MemberHistory,
)
from isthmus.sites.worker.exchange.missing_sites import NOTICE_STEPS
from isthmus.sites.worker.exchange.shard_encoder import ShardEncoder
from isthmus.sites.worker.exchange.slots import SharedTensors
from isthmus.sites.worker.exchange.step_records import StepLog, TokenCount
from isthmus.sites.worker.exchange.tensor_average import TensorAverage
from isthmus.sites.worker.exchange.tensor_hashes import ParameterHashes, hashes_of
from isthmus.sites.worker.layouts.gradient_hooks import GradientHook, OptimizerHook, ReplicaHook
from isthmus.sites.worker.layouts.initial_state import InitialState
from isthmus.topology.spec.batch_rule import FullBatch
from isthmus.topology.spec.job import Checkpoint, Job
from isthmus.topology.spec.run_spec import RunSpec
from isthmus.topology.spec.world import Topology

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from isthmus.sites.checkpoint.checkpoints import Checkpoints
    from isthmus.sites.checkpoint.entry_state import Entered, EntryState
    from isthmus.sites.checkpoint.exchange_state import ExchangeState
    from isthmus.sites.checkpoint.run_objects import RunObjects, Stateful
    from isthmus.sites.checkpoint.training_state import TrainingState
    from isthmus.sites.worker.layouts.replicas_beside_shards import ReplicaBesideShardsHook
    from isthmus.sites.worker.layouts.settlement import Settlement
    from isthmus.sites.worker.layouts.shard_hook import ShardHook

_LOOK_S = 1.0
_RATES = frozenset({"lr", "initial_lr", "max_lr", "min_lr"})
"""What an optimizer's groups have of learning rates; OneCycleLR keeps its ends there."""
_SCHEDULER_RATES = frozenset({"base_lrs", "max_lrs", "eta_min"})
"""What schedulers have of them."""


class Site:
    """This rank's site, joined to the others. Not thread-safe: for the training thread."""

    name: str
    index: int
    """Position among the sites; the first one's initial parameters are everybody's."""
    num_sites: int
    rank: int
    """Inside the site."""
    world_size: int
    """Ranks of the site."""
    global_rank: int
    """Among the ranks of all sites, in site order."""
    global_world_size: int
    device: torch.device
    job: Job
    topology: Topology
    run_folder: Path
    learning_rate_scale: float
    """1, or less where a run goes on with fewer ranks and `on_fewer_sites: shrink`. Optimizer and
    scheduler that `checkpoint` was given are scaled by it already."""

    def __init__(
        self,
        *,
        link: Link,
        welcome: Welcome,
        spec: RunSpec,
        run_folder: Path,
        device: torch.device,
        owns_group: bool,
        run: str = "alone",
        generation: int = 0,
        returns: bool = False,
        averages: bool = True,
    ) -> None:
        """Made by `isthmus.join`."""
        self.name = welcome.site
        self.index = welcome.site_index
        self.num_sites = len(welcome.sites)
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.global_rank = sum(welcome.ranks_per_site[: self.index]) + self.rank
        self.global_world_size = sum(welcome.ranks_per_site)
        self.device = device
        self.job = spec.job
        self.topology = spec.topology
        self.run_folder = run_folder
        self.learning_rate_scale = 1.0
        self._link = link
        self._welcome = welcome
        self._run = run
        self._generation = generation
        self._timeouts = spec.timeouts
        self._owns_group = owns_group
        self._tokens = TokenCount()
        self._steps = StepLog(
            link,
            sends=self.rank == 0,
            timeline_every=spec.job.timeline_every,
            verify_every=welcome.verify_every,
            returns=returns,
        )
        self._exactness = Exactness(spec.job.exchange)
        self._shared: SharedTensors | None = None
        if device.type == "cpu" and self.world_size == 1:
            self._shared = SharedTensors(link)
        self._pipeline: BucketPipeline | None = None
        self._collectives: Collectives | None = None
        self._hook: GradientHook | None = None
        self._shard_hook: ShardHook | ReplicaBesideShardsHook | None = None
        self._step_watch: StepWatch | None = None
        self._crossing: CrossingCheck | None = None
        self._settlement: Settlement | None = None
        """With the other sites, where tensors are sharded."""
        self._average: TensorAverage | None = None
        self._sampler: Sampler | None = None
        self._optimizers: Sequence[torch.optim.Optimizer] = ()
        """What `synchronize` or `average_gradients` was given; the first one's steps count."""
        self._former: WeakSet[torch.optim.Optimizer] = WeakSet()
        """What they were given before they were called again."""
        self._rates: tuple[Sequence[torch.optim.Optimizer], Sequence[object]] = (), ()
        self._entry: EntryState | None = None
        self._checkpoints: Checkpoints | None = None
        self._before_step_end: Callable[[], None] = lambda: None
        """Averages buffers, before sites that enter are given the state."""
        self._steps.listen(self._end_step)
        self._encoder: ShardEncoder | None = None
        self._replica_hook: ReplicaHook | None = None
        self._members = MemberHistory(self.name, returns=returns)
        self._marks = 0
        """The epoch that the next gradients begin, for a site follows or enters; 0: none."""
        self._returns = returns
        self._awaits_state = returns
        """It comes back, and `checkpoint` has not brought the others' state yet."""
        self._undo: list[Callable[[], None]] = []
        """Take off what `synchronize` or `average_gradients` has hooked in."""
        self._unsaved = False
        """The model was synchronised anew, and `checkpoint` not called again."""
        self._saving: list[RemovableHandle] = []
        """Hooks in the optimizers that are saved."""
        later = {*spec.site_names} - {*spec.first_sites}
        self._later = tuple(at for at, name in enumerate(welcome.sites) if name in later)
        """Sites that the run does not begin with, by index."""
        if not returns:
            link.missing_sites.begin_without(self._later)
        self._returned_at = 0
        """Steps that the others had taken when this site began to follow."""
        self._has_averaged = False
        """The script has averaged tensors, and synchronised nothing before that."""
        self._has_left = False
        is_apart = self.num_sites == 1 or self.job.exchange.schedule == "off"
        self._must_average = averages and not is_apart
        """Ending without having averaged anything is a mistake of the script."""
        self._has_stepped = False
        self._watched = register_optimizer_step_post_hook(self._stepped)
        self._pid = os.getpid()
        atexit.register(self._leave_at_exit)

    def __reduce__(self) -> NoReturn:
        """Refuse to be pickled or copied, as a dataset is that holds it under spawn or forkserver.

        Raises:
            TypeError: and what to do.
        """
        raise TypeError(
            "site cannot be pickled or copied, for it is this process's connection to the run: "
            "give a dataset, collate_fn or worker the plain numbers that it needs instead, such as "
            "site.global_rank and site.global_world_size"
        )

    @property
    def is_main(self) -> bool:
        """Whether this rank does what is done once a run: log to a tracker, write a file.

        At each step that is so for exactly one rank: rank 0 of the first site, in the topology's
        order, that takes part. When that site is lost, the next one takes over, 64 steps later:
        then all ranks know. It is the first one's again once it takes part again.
        """
        gone = self._link.missing_sites.gone()
        first = next((at for at in range(self.num_sites) if at not in gone), self.index)
        return self.rank == 0 and self.index == first and not self._members.follows

    def synchronize(
        self,
        model: nn.Module | Sequence[nn.Module],
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        *,
        data_mesh: DeviceMesh | None = None,
        loss: Literal["mean", "sum"] = "mean",
        beside_shards: bool = False,
    ) -> None:
        """Train `model` together with all other sites from now on. From every rank.

        Gives all sites the first site's parameters and buffers, bit for bit. Afterwards `p.grad`
        is, after each synchronised backward pass, the average over all ranks of all sites, weighted
        by their tokens, and each `optimizer.step()` is one step of the run. With
        `exchange.schedule: off` all of this holds for the ranks of this site alone.

        Once, with all that is to be synchronised; and again wherever other parameters are to be
        trained: a layer was thawed or added, adapters were put in, or it is another model. That is
        between two steps, the same two at all sites, with a wrapper made anew. What it was given
        before is not synchronised any more, steps count on, and `checkpoint`, if it was called, is
        called again next.

        Args:
            model: a DistributedDataParallel, or what `fully_shard` was called on, whatever else
                shards it: each site may lay it out in its own way. Where the ranks of the site
                share one batch (one rank, tensor parallelism, pipeline stages), nothing need wrap
                it. Several where this rank has
                several parts of a pipeline, or several models train each other, as in a GAN.
                torch.compile, Accelerate or Fabric may have wrapped it.
            optimizer: of its parameters, wrapped or not. Of several, the first one's steps are the
                run's.
            data_mesh: the ranks of the site with data of their own, for which `count_tokens`
                counts: this rank among them, of other ranks that share its data none. Left out,
                it is the largest mesh over which fully_shard reduces a gradient of this rank.
            loss: of what a rank counts as its tokens, its loss is the mean, or the sum: then
                gradients are added up, and divided once, by the tokens of all sites. Sums need
                `count_tokens`; with them, ranks that share experts may count unlike numbers, and
                `fully_shard` may have any divide factor.
            beside_shards: where this site has a DistributedDataParallel, others may call
                `fully_shard`. To these it makes no difference, so all may say it.

        Raises:
            TypeError: another model, or not an optimizer.
            ValueError: another `loss`.
            ConfigError: parameters are to cross exactly that the model does not have.
            RuntimeError: called before, and no step has been taken since.
            IsthmusError: the sites' models differ in more than values, or the exchange failed.
        """
        models = [*model] if isinstance(model, Sequence) else [model]
        models = [unwrapped_model(each) for each in models]
        optimizers = [*optimizer] if isinstance(optimizer, Sequence) else [optimizer]
        optimizers = [unwrapped_optimizer(each) for each in optimizers]
        check_training(models, optimizers)
        if loss not in ("mean", "sum"):
            raise ValueError(f"site.synchronize: loss: want mean or sum, got {loss!r}")
        is_summed = loss == "sum"
        self._steps.begin("synchronize")
        self._end_synchronised()
        self._optimizers = optimizers
        replicas = [each for each in models if isinstance(each, DistributedDataParallel)]
        if replicas:
            way = self._synchronize_beside_shards if beside_shards else self._synchronize_replicas
            way(replicas, optimizers, is_summed=is_summed)
        else:
            self._synchronize_shards(models, optimizers, data_mesh, is_summed=is_summed)

    def average_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Train the parameters of `optimizer` together with all other sites. From every rank.

        Once; and again between two steps where another optimizer takes its place, as `synchronize`.
        This is for a loop without DistributedDataParallel. From now on each `optimizer.step()` is
        one step of the run. It first averages `p.grad` over all ranks of all sites, weighted by
        their tokens, so gradients that were accumulated cross once. All sites get the first site's
        values of these parameters; `broadcast(model)` does that for buffers, too, and for what the
        optimizer gets later, before the first forward pass with it.

        Raises:
            TypeError: not an optimizer, or a parameter cannot be averaged.
            ConfigError: parameters are to cross exactly that it does not have, or has no names of.
            RuntimeError: `synchronize` or this was called before, and no step has been taken since.
            IsthmusError: the sites' parameters differ in more than values, or the exchange failed.
        """
        check_optimizer("site.average_gradients", optimizer)
        hook = OptimizerHook(self._open_average(), self._tokens, optimizer, self._equalise)
        self._exactness.check([name for name, _ in hook.parameters()])
        self._steps.begin("average_gradients")
        self._end_synchronised()
        self._optimizers = [optimizer]
        if not self._awaits_state:
            hook.equalise()
        self._undo.append(optimizer.register_step_pre_hook(hook.before_step).remove)
        self._steps.follow(optimizer, lambda: hashes_of(hook.parameters()), hook.take_rounds)

    def all_reduce(
        self, tensors: Sequence[torch.Tensor], *, tokens: float = 1.0, exact: bool = False
    ) -> None:
        """Average tensors over all ranks of all sites, weighted by tokens, in place.

        A collective: every rank of every site calls it with the same sequence of shapes and dtypes,
        before, after or without `synchronize`, but not during a backward pass. They cross as
        float32, which float64 exceeds, under the job's codec; of a lossy one, tensors of one
        dimension or none are spared. With `exchange.schedule: off` the average is over this site's
        ranks.

        Args:
            tensors: floating point or complex, of any shapes, dtypes and strides, none of them
                twice. Empty ones and an empty list are fine.
            tokens: this rank's weight; 0: it contributes nothing, whatever the tensors hold.
            exact: let nothing but fp32 cross the WAN: for what is no gradient.

        Raises:
            TypeError, ValueError: something else than this.
            IsthmusError: the sites' lists differ in more than values, no rank has tokens, or the
                exchange failed. Then the tensors hold anything.
        """
        check_tensors("site.all_reduce", tensors)
        if not (math.isfinite(tokens) and tokens >= 0):
            raise ValueError(f"site.all_reduce: tokens: want a number of 0 or more, got {tokens}")
        shard = None if self._shard_hook is None else self._shard_hook.shard_in(tensors)
        if shard is not None:
            raise TypeError(
                f"site.all_reduce: a tensor is this rank's shard of {shard}, of which other ranks "
                "hold other elements: average what full_tensor() returns; gradients of a model "
                "that is synchronised are averaged by its backward pass"
            )
        if self._step_watch is not None:
            self._step_watch.note_average(exact=exact)
        if self._crossing is not None:
            self._crossing.note_average(tensors)
        self._average_all(tensors, tokens, exact=exact)
        if not (self._has_averaged or self._steps.has_begun):
            self._has_averaged = True
            if self.rank == 0:
                self.record(metrics.FIRST_AVERAGE, 0, {})

    def _average_all(
        self, tensors: Sequence[torch.Tensor], tokens: float = 1.0, *, exact: bool = True
    ) -> None:
        named = [(str(index), each) for index, each in enumerate(tensors)]
        self._open_average().average(named, tokens, exact=exact)

    @property
    def grad_norm(self) -> float:
        """2-norm of the gradient that the latest synchronised backward pass left, all of it.

        The same bits on every rank of every site, whatever their layouts and devices; no collective
        and nothing to wait for but the gradient itself. Gradients are as `p.grad` has them after
        backward, before that is rounded to a dtype below float32: averages over tokens, and times
        the scale of a GradScaler. NaN where one is not finite.

        Raises:
            RuntimeError: no model is synchronised, or no backward pass has been.
        """
        if self._hook is None:
            raise RuntimeError(
                "site.grad_norm: call site.synchronize first; where site.average_gradients "
                "averages, torch.nn.utils.clip_grad_norm_ finds the norm in a hook that runs "
                "after ours"
            )
        return self._hook.norm()

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context in which backward passes add to gradients here, and nothing crosses.

        For all micro-batches of a step but the last, whatever wraps the models: for those of
        DistributedDataParallel it is their `no_sync`, for `fully_shard`
        `set_requires_gradient_sync`. With `average_gradients` nothing crosses in a backward pass
        anyway.

        Raises:
            RuntimeError: neither `synchronize` nor `average_gradients` was called.
        """
        if self._hook is not None:
            return self._hook.no_sync()
        if not self._optimizers:
            raise RuntimeError("site.no_sync: call site.synchronize first")
        return nullcontext()

    def clip_grad_norm_(self, max_norm: float, *, loss_scale: float = 1.0) -> float:
        """Scale the gradients of the synchronised model so that their 2-norm is at most `max_norm`.

        Once after each synchronised backward pass, before anything else changes gradients; no
        collective. All ranks get the same bits, whatever their sites' layouts.

        Args:
            max_norm: of all gradients together.
            loss_scale: by what gradients were divided since backward: after
                `scaler.unscale_(optimizer)`, `scaler.get_scale()`.

        Returns:
            The norm before, `grad_norm / loss_scale`.

        Raises:
            RuntimeError: as `grad_norm`.
        """
        norm = self.grad_norm / loss_scale
        scale = max_norm / (norm + 1e-6)
        if not scale >= 1.0:  # not a number: then no gradient is one, as with torch's own
            for each in [] if self._hook is None else self._hook.gradients():
                each.mul_(scale)
        return norm

    def empty(self, *sizes: int) -> torch.Tensor:
        """Return a float32 tensor of these sizes, on this rank's device, that holds anything.

        On the host, where it is the site's only rank, `all_reduce` and `average_gradients` average
        it, or its parts, where they lie: other tensors are copied to memory that the gateway
        shares, and back. A forked process shares this memory, too: what it writes, this one reads.

        Raises:
            ValueError: a size below 0.
            OSError: there is no such memory.
            IsthmusError: the gateway has gone.
        """
        if any(each < 0 for each in sizes):
            raise ValueError(f"site.empty: want sizes of 0 or more, got {sizes}")
        numel = math.prod(sizes)
        if self._shared is None or numel == 0:
            return torch.empty(sizes, dtype=torch.float32, device=self.device)
        return self._shared.empty(numel).view(sizes)

    def broadcast(self, state: nn.Module | Sequence[torch.Tensor]) -> None:
        """Give every rank of every site the values of the first site's first rank, bit for bit.

        A collective of all ranks of all sites. Where all are equal already, only a hash crosses.

        Args:
            state: a module, whose parameters and buffers are meant, or tensors of any dtype.

        Raises:
            TypeError: something else.
            IsthmusError: names, shapes or dtypes differ, or the exchange failed.
        """
        if isinstance(state, nn.Module):
            if self._awaits_state:
                return  # `checkpoint` brings the others' state
            named = [*state.named_parameters(), *state.named_buffers()]
        else:
            check_list("site.broadcast", state)
            named = [(str(index), each) for index, each in enumerate(state)]
        self._equalise(named)

    def average_buffers(self, model: nn.Module, *, every: int = 1) -> None:
        """Average a model's buffers over all ranks of all sites after each `every`-th step.

        Floating-point ones, as a BatchNorm's running mean and variance: each rank counts alike.
        Without it they are each rank's own. After `synchronize` or `average_gradients`, from every
        rank.

        Raises:
            ValueError: `every` is below 1.
            TypeError: ranks of the site have unlike buffers, those of a pipeline's stages.
        """
        if every < 1:
            raise ValueError(f"site.average_buffers: every: want 1 or more, got {every}")
        if self._is_split:
            raise TypeError(
                "site.average_buffers: ranks of this site have unlike buffers (a pipeline's "
                "stages): leave it out"
            )
        buffers = [each for each in model.buffers() if each.is_floating_point()]
        check_tensors("site.average_buffers", buffers)

        def average() -> None:
            if self._steps.num_steps % every == 0:
                self._average_all(buffers)

        self._before_step_end = average

    def count_tokens(self, tokens: int) -> None:
        """Add to the tokens behind this rank's gradient: its weight in the average.

        Call it before the backward pass that synchronises; several calls add up (one a micro-batch
        under `model.no_sync()`). A script that never calls it weighs every rank alike.
        """
        self._tokens.add(tokens)

    def checkpoint(
        self,
        model: nn.Module | Sequence[nn.Module],
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        *,
        scheduler: Stateful | None = None,
        extra: Mapping[str, Stateful] | None = None,
    ) -> int:
        """Go on from the run's checkpoint, if it has one, and save from now on as the job says.

        Once, from every rank, after `synchronize` or `average_gradients`, and after `sampler` if
        there is one; and again after each further one of these two calls: then it loads nothing.
        Saves model, optimizer, scheduler, extras, the place in the data and the
        global random number generators: after optimizer steps at the job's `checkpoint.every`, and
        at the end. Without a `checkpoint` section nothing is saved; a site that was lost comes back
        by this call in any case. Outside a run it does nothing.

        What is saved of a step is what the next one begins with: all is copied when its gradients
        begin to cross. So change weights, scheduler and extras right after a step, or put back
        before the next one what was changed. At the end it is what there is in `leave`.

        Args:
            model: that was synchronised, or all of them, or all parts of a pipeline that this rank
                has.
            optimizer: of its parameters, or all that `synchronize` was given; their settings are
                the checkpoint's afterwards.
            scheduler: of the learning rate.
            extra: by name, anything else with a `state_dict`, equal at all ranks. Tensors, numbers,
                texts, lists and mappings of them can be saved.

        Returns:
            The optimizer steps that have been taken: the number of the first one to take, from 0.

        Raises:
            TypeError: an optimizer has a parameter that the model has not, one that `synchronize`
                was given is not saved, or those of a pipeline's ranks have unlike groups.
            RuntimeError: called before, or too early.
            IsthmusError: the checkpoint is damaged, or of another model.
        """
        models = [model] if isinstance(model, nn.Module) else [*model]
        models = [unwrapped_model(each) for each in models]
        optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else [*optimizer]
        optimizers = [unwrapped_optimizer(each) for each in optimizers]
        for each in optimizers:
            check_optimizer("site.checkpoint", each)
        named = {**({} if scheduler is None else {"scheduler": scheduler}), **(extra or {})}
        more = [each for each in named.values() if isinstance(each, torch.optim.Optimizer)]
        watched = list(dict.fromkeys([*self._optimizers, *optimizers, *more]))
        self._check_all_saved(optimizers, [*named.values()])
        if self._unsaved:
            before, objects_before = self._rates
            scale_learning_rates(
                [each for each in watched if all(each is not one for one in before)],
                [each for each in named.values() if all(each is not one for one in objects_before)],
                self.learning_rate_scale,
            )
        self._rates = watched, [*named.values()]
        is_alone = self.num_sites == 1 and self.job.checkpoint is None
        if is_alone or self.job.exchange.schedule == "off":
            return 0
        if self._pipeline is None or (self._entry is not None and not self._unsaved):
            raise RuntimeError(
                "site.checkpoint: call it once, after site.synchronize or site.average_gradients, "
                "and again only where one of these was called again"
            )
        from isthmus.sites.checkpoint.entry_state import EntryState
        from isthmus.sites.checkpoint.exchange_state import ExchangeState
        from isthmus.sites.checkpoint.run_objects import RunObjects
        from isthmus.sites.checkpoint.training_state import TrainingState

        exchange = ExchangeState(
            self._link if self.num_sites > 1 and self.job.exchange.error_feedback else None,
            self._encoder,
            self._replica_hook,
            self._shard_hook,
        )
        state = TrainingState(models, optimizers, is_split=self._is_split)
        objects = RunObjects(state, named, exchange)
        if self._entry is not None:
            self._entry.replace(state, objects)
            if self._checkpoints is not None:
                self._checkpoints.replace(state, objects, exchange)
            self._watch_saved(watched)
            self._unsaved = False
            return self._steps.num_steps
        reports = _EntryReports(self._link, self.record)
        self._entry = EntryState(state, objects, self._entry_data_state, self._lists, reports)
        if self.rank == 0:
            self.record(metrics.STATE, self._steps.num_steps, {})
        if self.job.checkpoint is not None:
            self._checkpoints = self._make_checkpoints(
                self.job.checkpoint, state, objects, exchange
            )
        self._watch_saved(watched)
        self._go_on(self._entry, self._checkpoints)
        self._awaits_state = False
        self._pipeline.before_gradients = self._mark
        if self._checkpoints is not None:
            self._checkpoints.start(self._agreed, self._steps.num_steps)
            self._steps.listen(self._checkpoints.after_step)
        return self._steps.num_steps

    def _watch_saved(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Have what is to be saved copied before one of these optimizers steps, and no other."""
        assert self._entry is not None
        publish = self._entry.publish
        for handle in self._saving:
            handle.remove()
        self._saving = []
        if self._checkpoints is not None:
            self._saving += self._checkpoints.watch(optimizers)
        self._saving += [each.register_step_pre_hook(lambda *_: publish()) for each in optimizers]

    def _check_all_saved(
        self, optimizers: Sequence[torch.optim.Optimizer], others: Sequence[object]
    ) -> None:
        """Refuse to save a run of which a part would be lost.

        Raises:
            TypeError: an optimizer that steps in it would begin anew.
        """
        saved = {id(each) for each in (*optimizers, *others)}
        for index, each in enumerate(self._optimizers):
            if id(each) not in saved:
                raise TypeError(
                    f"site.checkpoint: optimizer {index} of site.synchronize would not be saved: "
                    "name all of them, as site.checkpoint([a, b], [optimizer_a, optimizer_b])"
                )

    @property
    def _is_split(self) -> bool:
        """Whether ranks of the site have unlike tensors: a pipeline's stages."""
        return self._settlement is not None and self._settlement.tensors.is_split

    def _lists(self) -> Sequence[bytes]:
        """Return what each site has told all others of its tensors, where they are sharded."""
        return () if self._settlement is None else self._settlement.lists

    def _make_checkpoints(
        self,
        settings: Checkpoint,
        state: TrainingState,
        objects: RunObjects,
        exchange: ExchangeState,
    ) -> Checkpoints:
        from isthmus.sites.checkpoint.checkpoints import Checkpoints  # brings much of torch
        from isthmus.sites.checkpoint.place import Place

        return Checkpoints(
            settings=settings,
            place=Place(
                store=joined(settings.to, self._run),
                local=self.run_folder / "checkpoints",
                run=self._run,
                job=self.job.name,
                generation=self._generation,
                site=self.name,
                rank=self.rank,
                local_rank=local_rank(),
                ranks=dict(zip(self._welcome.sites, self._welcome.ranks_per_site, strict=True)),
                keep=settings.keep,
            ),
            device=self.device,
            state=state,
            objects=objects,
            data=self._data_state,
            missing_sites=self._link.missing_sites,
            exchange=exchange,
            on_written=self._record_checkpoint,
            on_failed=partial(self._record_problem, metrics.CHECKPOINT_FAILED),
            on_stays=partial(self._record_problem, metrics.CHECKPOINT_STAYS),
            on_waiting=lambda: self._link.send(Saving()),
        )

    def _go_on(self, entry: EntryState, checkpoints: Checkpoints | None) -> None:
        """Load what there is to go on from: the others' state, or the job's checkpoint."""
        found: Entered | Manifest | None = None
        if self._returns:
            found = self._take_state(entry)
        elif checkpoints is not None:
            found = checkpoints.resume()
        if found is None:
            return
        self._steps.resume(found.step)
        self._returned_at = found.step
        if self._sampler is not None and found.data:
            before_first = checkpoints.restore_generators if checkpoints else lambda: None
            self._resume_data(found.data, before_first)

    def _take_state(self, entry: EntryState) -> Entered:
        """Come back to a run that goes on: wait to be let in, and take the others' state.

        Raises:
            IsthmusError: the gateway has ended, or it is the state of another model.
        """
        assert self._pipeline is not None
        while (told := self._members.own_entry(_LOOK_S)) is None:
            self._pipeline.check()
        entered = entry.take(Path(told.state))
        if self._settlement is not None:
            self._settlement.settle(entered.lists)
        present = set(told.sites) - set(told.follows)
        gone = [each for each, name in enumerate(self._welcome.sites) if name not in present]
        self._link.missing_sites.begin_without(gone)
        self._pipeline.num_rounds = told.from_round
        self._members.has_state()
        return entered

    def _let_in(self) -> None:
        """Do what is due after this step for sites that come back."""
        entry = self._entry
        if entry is None or self._pipeline is None:
            return
        for change in self._members.end_step(self._pipeline.num_rounds, self._notice_steps):
            for site in map(self._welcome.sites.index, change.sites):
                match change:
                    case Announced() if self._sampler is not None:
                        self._sampler.regain(site, change.step)
                    case GivenUp() if self._sampler is not None:
                        self._sampler.give_up(site, change.step)
                    case Entering():
                        self._link.missing_sites.enter(site)
            match change:
                case Following():
                    entry.write(change, self._steps.num_steps)
                    self._marks = change.epoch
                    if self._checkpoints is not None:
                        self._checkpoints.let_enter()
                case Entering():
                    entry.discard()
                    self._marks = change.epoch
                    self._steps.counts |= self.name in change.sites
                    if self.name in change.sites and self.rank == 0:
                        step = self._steps.num_steps
                        values = {metrics.FOLLOWED_STEPS: step - self._returned_at}
                        self.record(metrics.ENTERED, step, values)

    def _mark(self) -> int:
        """Return the epoch that the gradients begin which are about to be averaged; 0: none."""
        if self._entry is not None:
            self._entry.publish()
        if self._checkpoints is not None:
            self._checkpoints.before_gradients()
        marks, self._marks = self._marks, 0
        return marks

    def _notice_steps(self, entering: Sequence[str]) -> int:
        """Return after how many steps at least sites may enter: the same at all ranks."""
        if self._sampler is None:
            return 0
        own = self._sampler.notice_steps(map(self._welcome.sites.index, entering))
        most = self._most(own)
        if own > most:  # this site follows: what it says counts for nothing
            raise RuntimeError(
                f"site.sampler: batches were fetched {own} steps ahead, and {most} at most at the "
                "sites that this one comes back to"
            )
        return most

    def _most(self, steps: int) -> int:
        """Return the largest of a number of steps over all ranks of all sites."""
        taken = torch.zeros(NOTICE_STEPS + 1, device=self.device)
        taken[min(steps, NOTICE_STEPS)] = 1.0
        self._average_all([taken])
        return int(taken.nonzero().max())

    def _end_step(self, _: int) -> None:
        """Follow an optimizer step: who took part in it, and what that means for the data.

        Raises:
            RuntimeError: what is saved is not what is trained.
        """
        if self._unsaved:
            raise RuntimeError(
                "site.checkpoint: call it again where site.synchronize or site.average_gradients is "
                "called again, right after it: it would save the model of before"
            )
        self._before_step_end()
        self._link.missing_sites.end_step()
        if self._sampler is not None:
            self._sampler.lose(self._link.missing_sites.absent())
            self._sampler.step()
        self._let_in()
        if self._sampler is not None:
            gone = self._link.missing_sites.gone()
            self._scale_learning_rates(self._sampler.shares.batch(gone).learning_rate_scale)

    def _data_state(self) -> dict[str, Any]:
        """Return what a checkpoint's manifest has of the data."""
        if self._sampler is None:
            return {}
        self._sampler.lose(self._link.missing_sites.absent())
        return {
            **self._sampler.used.to_json(),
            "full_ranks": self._sampler.shares.full.ranks,
            "learning_rate_scale": self.learning_rate_scale,
        }

    def _entry_data_state(self) -> dict[str, Any]:
        """Return the place in the data for a site that follows: what all ranks have yet to do."""
        found = self._data_state()
        if self._sampler is not None:
            absent = self._link.missing_sites.absent_before()
            found |= {**self._sampler.handed_out(), "absent": absent}
        return found

    def _resume_data(self, data: Mapping[str, Any], before_first: Callable[[], None]) -> None:
        """Go on after the positions that were used, with the batch for as many ranks as now."""
        assert self._sampler is not None
        absences = data.get("absences", ())
        self._sampler.resume(DataPositions.from_json(data), before_first, absences)
        self._link.missing_sites.begin_amid(data.get("absent", ()))
        shares = self._sampler.shares
        if not shares.sequences:  # a placement has each site's part of the batch
            full = FullBatch(shares.full.samples, data["full_ranks"])
            self._sampler.shares = replace(shares, full=full)
        self.learning_rate_scale = data["learning_rate_scale"]
        gone = self._link.missing_sites.gone()
        self._scale_learning_rates(self._sampler.shares.batch(gone).learning_rate_scale)

    def _scale_learning_rates(self, scale: float) -> None:
        """Have all learning rates be those of the full batch times `scale`."""
        if scale != self.learning_rate_scale:
            scale_learning_rates(*self._rates, scale / self.learning_rate_scale)
        self.learning_rate_scale = scale

    def _agreed(self, value: float) -> float:
        """Return the mean of a number over all ranks of all sites, the same at each."""
        mean = torch.tensor([value], dtype=torch.float32, device=self.device)
        self._average_all([mean])
        return float(mean)

    def _record_checkpoint(self, step: int, write_s: float, num_bytes: int, stall_s: float) -> None:
        values = {
            metrics.WRITE_S: write_s,
            metrics.STALL_S: stall_s,
            metrics.CHECKPOINT_BYTES: num_bytes,
        }
        self.record(metrics.CHECKPOINT, step, values)

    def _record_problem(self, kind: str, step: int, reason: str) -> None:
        self.record(kind, step, {}, {metrics.REASON: one_line(reason)})

    def sampler(
        self,
        dataset: Sized,
        *,
        global_batch: int | None = None,
        seed: int = 0,
        data_mesh: DeviceMesh | None = None,
    ) -> Sampler:
        """Return this rank's batches of a map-style dataset: a DataLoader's `batch_sampler`.

        Once. One batch is this rank's part of one optimizer step; all ranks of all sites together
        take each sample once a pass, in an order that only `seed` and the pass decide.

        Args:
            dataset: the same at every site, of which only the length is read.
            global_batch: samples of a step, over all sites, which all ranks share evenly; None: the
                job's, which its placement may divide otherwise.
            seed: names the orders; the same everywhere.
            data_mesh: the ranks of the site with data of their own, this one among them, as
                `synchronize` has it: ranks of tensor parallelism, or of a pipeline, have the same.
                Left out, each rank has its own.

        Raises:
            ValueError: the dataset is empty, or there is not a sample for each rank.
            RuntimeError: called before.
        """
        if self._sampler is not None:
            raise RuntimeError("site.sampler: there is one already")
        size = self.job.global_batch if global_batch is None else global_batch
        if data_mesh is None and size < self.global_world_size:
            raise ValueError(
                f"site.sampler: a global batch of {size} for {self.global_world_size} ranks: want "
                "at least a sample for each"
            )
        sequences = {each.site: each.sequences for each in self.job.placement}
        names = self._welcome.sites if global_batch is None else ()
        sharing = None if data_mesh is None else data_mesh.mesh.flatten().tolist()
        ranks = self._welcome.ranks_per_site
        first_ranks = sum(each for at, each in enumerate(ranks) if at not in self._later)
        sampler = Sampler(
            num_samples=len(dataset),
            shares=BatchShares(
                full=FullBatch(size, first_ranks),
                rule=self.job.on_fewer_sites,
                ranks=ranks,
                sequences=tuple(sequences[each] for each in names) if sequences else (),
                later=frozenset(self._later),
            ),
            site=self.index,
            rank=self.rank if sharing is None else sharing.index(self.rank),
            replicas=None if sharing is None else len(sharing),
            seed=seed,
        )
        if not self._returns:
            sampler.begin_without(self._later)
        self._sampler = sampler
        return sampler

    def part_of(self, dataset: Any) -> Any:  # noqa: ANN401 - any map-style dataset
        """Return a view of a map-style dataset that has this site's part of the samples.

        For frameworks that divide a dataset over the ranks they know of: give them this in place of
        the dataset. The parts of all sites are disjoint and in proportion to their ranks; fewer
        samples than there are ranks are left out. For a loop of your own, `sampler` does more.

        Args:
            dataset: the same at every site. A `datasets.Dataset` stays one.

        Raises:
            TypeError: it is not map-style.
            ValueError: there is not a sample for each rank.
        """
        return part_of(dataset, self._welcome.ranks_per_site, self.index)

    def log(self, **values: SupportsFloat) -> None:
        """Add values to the last completed step's record and send it.

        Of the first rank; others' go nowhere.

        Names that isthmus shows: `loss`, `grad_norm`, `learning_rate`; any other is kept as well.
        """
        self._steps.add(_floats(values))

    def record(
        self,
        kind: str,
        step: int,
        values: Mapping[str, SupportsFloat],
        labels: Mapping[str, str] | None = None,
    ) -> None:
        """Send a metric of any kind (protos/metrics.py has ours), from whichever rank calls."""
        self._link.send(
            Metric(kind=kind, step=step, values=_floats(values), labels=dict(labels or {}))
        )

    def leave(self) -> None:
        """Report that this rank is done, and release everything.

        Idempotent; an orderly exit calls it.
        """
        if self._has_left:
            return
        self._has_left = True
        atexit.unregister(self._leave_at_exit)
        if self._checkpoints is not None:
            self._checkpoints.finish(self._steps.num_steps)
        if self._entry is not None:
            self._entry.close()
        self._steps.flush()
        has_averaged = self._pipeline is not None or not self._must_average
        self._link.leave(has_averaged=has_averaged)
        self._end()

    def _stepped(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Tell, once, of an optimizer that takes steps of which other sites know nothing."""
        if self._crossing is not None:
            self._crossing.after_any_step(optimizer)
        # The hook stays until the end: torch goes through all hooks while this one runs.
        is_first, self._has_stepped = not self._has_stepped, True
        if is_first and self._must_average and self.rank == 0 and self._pipeline is None:
            self.record(metrics.STEPPED_ALONE, 0, {})

    def _leave_at_exit(self) -> None:
        """Leave, unless an exception ends the process: to the others that is a crash."""
        if os.getpid() != self._pid:
            return  # A fork, a data loader's worker say, ends; the rank goes on.
        if getattr(sys, "last_value", None) is None:
            self.leave()
        else:
            self._link.close()

    def _end(self) -> None:
        self._watched.remove()
        if self._pipeline is not None:
            self._pipeline.close()
        if self._owns_group and dist.is_initialized():
            dist.destroy_process_group()

    def _end_synchronised(self) -> None:
        """End what was synchronised until now, between two steps: something else is."""
        if self._checkpoints is not None:
            self._checkpoints.flush()
        if self._entry is not None:
            self._entry.publish()
        for each in self._undo:
            each()
        self._undo.clear()
        for optimizer in self._optimizers:
            self._former.add(optimizer)
        self._hook = self._replica_hook = self._shard_hook = None
        self._settlement = self._step_watch = self._crossing = None
        self._unsaved = self._entry is not None

    def _synchronize_replicas(
        self,
        models: Sequence[DistributedDataParallel],
        optimizers: Sequence[torch.optim.Optimizer],
        *,
        is_summed: bool,
    ) -> None:
        pipeline = self._open()

        def agree(own: Cut) -> Cut:
            if self.num_sites == 1 or self.job.exchange.schedule == "off":
                return own
            sites = self._welcome.sites
            return agree_on_cut(pipeline, sites, self.rank, self.device, site=self.index, own=own)

        hook = ReplicaHook(
            pipeline,
            self._tokens,
            models,
            exactness=self._exactness,
            agree=agree,
            is_summed=is_summed,
        )
        self._hook = self._replica_hook = hook
        for model in models:
            self.broadcast(model.module)
        hook.hook_in()
        if not self._awaits_state and (others := _others(hook, optimizers)):
            self._equalise(others)
        self._watch_steps(hook, hook.parameters(), optimizers)
        hook.watch_reduced(optimizers)
        self._steps.follow(
            optimizers[0],
            lambda: hashes_of([*hook.parameters_now(), *_others(hook, optimizers)]),
            hook.take_rounds,
        )

    def _synchronize_shards(
        self,
        models: Sequence[nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        data: DeviceMesh | None,
        *,
        is_summed: bool,
    ) -> None:
        # Imported only by scripts that shard: it takes torch half a second.
        from isthmus.sites.worker.layouts.fully_sharded import is_lone
        from isthmus.sites.worker.layouts.lone_hook import LoneHook
        from isthmus.sites.worker.layouts.shard_hook import ShardHook

        kind = LoneHook if is_lone(models) else ShardHook
        if kind is LoneHook and data is not None and data.size() > 1:
            raise TypeError(
                "site.synchronize: data_mesh: nothing wraps the model, so all its ranks have one "
                "batch: leave it out, or let fully_shard wrap the model over that mesh"
            )
        hook = kind(
            self._open(),
            self._tokens,
            models,
            bucket_bytes=self.job.exchange.bucket_bytes,
            exactness=self._exactness,
            data_ranks=None if data is None else tuple(data.mesh.flatten().tolist()),
            is_summed=is_summed,
        )
        self._synchronize_agreed(hook, optimizers)

    def _synchronize_beside_shards(
        self,
        models: Sequence[DistributedDataParallel],
        optimizers: Sequence[torch.optim.Optimizer],
        *,
        is_summed: bool,
    ) -> None:
        from isthmus.sites.worker.layouts.replicas_beside_shards import ReplicaBesideShardsHook

        hook = ReplicaBesideShardsHook(
            self._open(),
            self._tokens,
            models,
            bucket_bytes=self.job.exchange.bucket_bytes,
            exactness=self._exactness,
            is_summed=is_summed,
        )
        self._synchronize_agreed(hook, optimizers)

    def _synchronize_agreed(
        self,
        hook: ShardHook | ReplicaBesideShardsHook,
        optimizers: Sequence[torch.optim.Optimizer],
    ) -> None:
        """Synchronise in buckets that all sites agree on, whatever their layouts."""
        from isthmus.sites.worker.layouts.settlement import Settlement

        self._hook = self._shard_hook = hook
        is_off = self.job.exchange.schedule == "off"
        pipeline = self._open()
        assert self._collectives is not None
        self._settlement = settlement = Settlement(
            hook,
            self._collectives,
            site=self.name,
            sites=(self.name,) if is_off else self._welcome.sites,
            ranks_per_site=(self.world_size,) if is_off else self._welcome.ranks_per_site,
            ranks_per_gateway=self._welcome.ranks_per_gateway or self.world_size,
        )
        self._exactness.check([each.name for each in settlement.tensors.entries])
        if not self._awaits_state:
            settlement.tell(pipeline, self.device)
            settlement.state.equalise(self._initial_state())
        for optimizer in optimizers:
            self._undo.append(optimizer.register_step_pre_hook(hook.finish).remove)
        self._watch_steps(hook, hook.own.items(), optimizers)

        def hashes() -> ParameterHashes | None:
            # A pipeline's ranks have unlike optimizers.
            others = [] if settlement.tensors.is_split else _others(hook, optimizers)
            return settlement.state.digest(dict([*hook.parameters_now(), *others]))

        self._steps.follow(optimizers[0], hashes, hook.take_rounds)

    def _watch_steps(
        self,
        hook: GradientHook,
        named: Iterable[tuple[str, torch.Tensor]],
        optimizers: Sequence[torch.optim.Optimizer],
    ) -> None:
        """Refuse steps without rounds, and rounds without steps, unless nothing has to cross."""
        self._step_watch = watch = StepWatch(
            named,
            optimizers,
            is_due=self._is_due,
        )
        hook.after_round = watch.note_round
        self._crossing = crossing = CrossingCheck(
            hook.parameters_now,
            hook.crossed,
            optimizers,
            is_due=self._is_due,
            former=self._former,
        )
        self._undo += [hook.close, watch.close, crossing.close]

    def _is_due(self) -> bool:
        """Whether gradients are to cross now."""
        return self._must_average and not self._members.follows

    # ---------------------------------------------------------------- what averages

    def _open(self) -> BucketPipeline:
        """Return the pipeline, started by the first that needs it.

        That is at the same call at every rank of the site, for these calls are collectives.
        """
        if self._pipeline is None:
            timeouts = self._timeouts
            self._encoder = self._make_encoder()
            self._collectives = collectives = Collectives(timeouts.process_group_s)
            on_cuda = self.device.type == "cuda"
            self._pipeline = BucketPipeline(
                self._link,
                CudaTransfer(collectives, self.device) if on_cuda else Transfer(collectives),
                rank=self.rank,
                world_size=self.world_size,
                # A peer that is gone is noticed by the gateway; this bounds what is slow, as
                # compilation is.
                deadline_s=max(timeouts.process_group_s, timeouts.start_s),
                overlaps=self.job.exchange.schedule != "serial",
                encoder=self._encoder,
                shared=self._shared,
                members=self._members,
                finite=FiniteWatch(
                    self._tell_not_finite, stops=self.job.exchange.non_finite == "stop"
                ),
            )
            self._pipeline.start()
        return self._pipeline

    def _tell_not_finite(self, tensor: str, reason: str, is_averaged: bool) -> None:
        step = self._steps.num_steps + 1
        self._link.send(
            Metric(
                kind=metrics.NON_FINITE,
                step=step,
                values={metrics.AVERAGED: float(is_averaged)},
                labels={metrics.TENSOR: tensor, metrics.REASON: f"in step {step} {reason}"},
            )
        )

    def _open_average(self) -> TensorAverage:
        """Return what averages lists of tensors."""
        if self._average is None:
            self._average = TensorAverage(
                self._open(),
                bucket_bytes=self.job.exchange.bucket_bytes,
                exactness=self._exactness,
            )
        return self._average

    def _equalise(self, named: Sequence[tuple[str, torch.Tensor]]) -> bool:
        """Give every rank of every site the first site's values; return whether any differed.

        With `schedule: off`, those of this site alone, its own first rank's.

        Raises:
            IsthmusError: names, shapes or dtypes differ, or the exchange failed.
        """
        return self._initial_state().equalise(named)

    def _initial_state(self) -> InitialState:
        is_off = self.job.exchange.schedule == "off"
        first_site = self.index if is_off else self._first_site()
        return InitialState(
            self._open(),
            is_first=self.rank == 0 and self.index == first_site,
            device=self.device,
        )

    def _first_site(self) -> int:
        """Return which site's state is everybody's: the first of those that take part.

        Once sites may be lost or come back, an average tells all the same. A collective then.
        """
        if self._steps.num_steps == 0 and not self._has_averaged:
            return next(at for at in range(self.num_sites) if at not in self._later)
        takes_part = torch.zeros(self.num_sites, device=self.device)
        takes_part[self.index] = 1.0
        self._average_all([takes_part])
        return int(takes_part.nonzero().min())

    def _make_encoder(self) -> ShardEncoder | None:
        """Return what encodes on this rank's device, if that is wanted and the gateway takes it."""
        if self._welcome.encoding is None:
            return None
        return ShardEncoder(
            self._welcome.encoding,
            site_index=self.index,
            rank=self.rank,
            ranks_per_site=self._welcome.ranks_per_site,
            device=self.device,
        )


class _EntryReports:
    """Tells the gateway how writing a state for others goes, and people that it failed."""

    def __init__(
        self, link: Link, record: Callable[[str, int, dict[str, float], dict[str, str]], None]
    ) -> None:
        self._link = link
        self._record = record

    def progress(self, epoch: int, done_bytes: int, problem: str = "") -> None:
        self._link.send(StateProgress(epoch=epoch, done_bytes=done_bytes, problem=problem))

    def failed(self, step: int, reason: str) -> None:
        self._record(metrics.STATE_FAILED, step, {}, {metrics.REASON: one_line(reason)})

    def waiting(self) -> None:
        self._link.send(Saving())


def scale_learning_rates(
    optimizers: Sequence[torch.optim.Optimizer], schedulers: Sequence[object], scale: float
) -> None:
    """Multiply all learning rates by `scale`: those now, and those that schedulers begin with."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for key in _RATES & group.keys():
                group[key] = group[key] * scale
    for each in schedulers:
        _scale_scheduler(each, scale)


def _scale_scheduler(scheduler: object, scale: float) -> None:
    """Scale what torch's schedulers keep of learning rates, those of each that one consists of."""
    if not isinstance(scheduler, torch.optim.lr_scheduler.LRScheduler):
        return
    for each in getattr(scheduler, "_schedulers", ()):
        _scale_scheduler(each, scale)
    for name in _SCHEDULER_RATES & vars(scheduler).keys():
        rates = getattr(scheduler, name)
        scaled = [each * scale for each in rates] if isinstance(rates, list) else rates * scale
        setattr(scheduler, name, scaled)


def _others(
    hook: GradientHook, optimizers: Sequence[torch.optim.Optimizer]
) -> list[tuple[str, torch.Tensor]]:
    """Return what optimizers hold beside the models' parameters, by place."""
    known = {id(each) for _, each in hook.parameters_now()}
    return [
        (f"optimizer {index}: {place}", each)
        for index, optimizer in enumerate(optimizers)
        for place, each in places_of(optimizer)
        if id(each) not in known
    ]


def _floats(values: Mapping[str, SupportsFloat]) -> dict[str, float]:
    """Return plain numbers; a loss may still hold its graph."""
    return {
        name: float(value.detach() if isinstance(value, torch.Tensor) else value)
        for name, value in values.items()
    }
