"""A rank's view of its site and of the run: what a training script holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Sized
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal, NoReturn, SupportsFloat

import torch
from torch import nn
from torch.optim import Optimizer

from isthmus.sites.worker.api.parts import Parts
from isthmus.sites.worker.api.records import plain_numbers
from isthmus.sites.worker.api.wrappers import unwrapped_models, unwrapped_optimizers
from isthmus.sites.worker.data.sampler import Sampler
from isthmus.sites.worker.exchange.gateway_link import Link
from isthmus.sites.worker.exchange.inference import outside_inference
from isthmus.sites.worker.exchange.rank_context import RankContext

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from isthmus.sites.checkpoint.run_objects import Stateful


class Site:
    """This rank's site, joined to the others. Not thread-safe: for the training thread.

    Attributes:
        name: of the site.
        index: its position among the `num_sites` sites.
        rank: inside the site, which has `world_size` ranks.
        global_rank: among the `global_world_size` ranks of all sites, in site order.
        device: this rank's.
        job: what the job's file says.
        topology: what the topology's file says.
        run_folder: the run's files at this site.
    """

    def __init__(self, context: RankContext, link: Link, *, owns_group: bool) -> None:
        """Made by `isthmus.join`."""
        self.name, self.index, self.num_sites = context.site, context.index, context.num_sites
        self.rank, self.world_size = context.rank, context.world_size
        self.global_rank, self.global_world_size = context.global_rank, context.global_world_size
        self.device, self.run_folder = context.device, context.run_folder
        self.job, self.topology = context.spec.job, context.spec.topology
        self._parts = Parts.of(context, link, owns_group=owns_group)

    def __repr__(self) -> str:
        """Return who this is: `<isthmus.Site east, 1 of 3: rank 0 of 8, on cuda:0; sync>`."""
        return (
            f"<isthmus.Site {self.name}, {self.index + 1} of {self.num_sites}: rank {self.rank} of "
            f"{self.world_size}, on {self.device}; {self.job.regime.kind}>"
        )

    def __reduce__(self) -> NoReturn:
        """Refuse to be pickled or copied, as a dataset is that holds it under spawn."""
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
        return self._parts.life.is_main

    @property
    def learning_rate_scale(self) -> float:
        """1, or less where a run goes on with fewer ranks and `on_fewer_sites: shrink`, by `rate`.

        Optimizer and scheduler that `checkpoint` was given are scaled by it already.
        """
        return self._parts.rates.scale

    @property
    @outside_inference
    def grad_norm(self) -> float:
        """2-norm of the gradient that the latest synchronised backward pass left, all of it.

        The same bits on every rank of every site, whatever their layouts and devices; no collective
        and nothing to wait for but the gradient itself. Gradients are as `p.grad` has them after
        backward, before that is rounded to a dtype below float32: averages over tokens, and times
        the scale of a GradScaler. NaN where one is not finite.

        Raises:
            RuntimeError: no model is attached, or no backward pass has been.
        """
        return self._parts.attachment.grad_norm()

    @outside_inference
    def attach(
        self,
        model: nn.Module | Sequence[nn.Module],
        optimizer: Optimizer | Sequence[Optimizer],
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

        Once, with all that is to be attached; and again wherever other parameters are to be
        trained: a layer was thawed or added, or it is another model. That is between two steps, the
        same two at all sites, with a wrapper made anew. What it was given before is not
        attached any more, steps count on, and `checkpoint`, if it was called, is called again
        next.

        Args:
            model: a DistributedDataParallel, or what `fully_shard` was called on: each site may lay
                it out in its own way. Where the ranks of the site share one batch (one rank, tensor
                parallelism, pipeline stages), nothing need wrap it. Several where this rank has
                several parts of a pipeline, or several models train each other. torch.compile,
                Accelerate or Fabric may have wrapped it.
            optimizer: of its parameters, wrapped or not. Of several, the first one's steps are the
                run's.
            data_mesh: the ranks of the site with data of their own, for which `count_tokens`
                counts: this rank among them, of ranks that share its data none. Left out, it is the
                largest mesh over which fully_shard reduces a gradient of this rank.
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
        self._parts.attachment.attach(
            unwrapped_models(model),
            unwrapped_optimizers(optimizer),
            data_mesh=data_mesh,
            loss=loss,
            beside_shards=beside_shards,
        )

    @outside_inference
    def average_gradients(self, optimizer: Optimizer) -> None:
        """Train the parameters of `optimizer` together with all other sites. From every rank.

        For a loop without DistributedDataParallel. From now on each `optimizer.step()` is one step
        of the run. It first averages `p.grad` over all ranks of all sites, weighted by their
        tokens, so gradients that were accumulated cross once. All sites get the first site's values
        of these parameters; `broadcast(model)` does that for buffers, too, and for what the
        optimizer gets later, before the first forward pass with it. Called again as `attach`.

        Raises:
            TypeError: not an optimizer, or a parameter cannot be averaged.
            ConfigError: parameters are to cross exactly that it does not have, or has no names of.
            RuntimeError: `attach` or this was called before, and no step has been taken since.
            IsthmusError: the sites' parameters differ in more than values, or the exchange failed.
        """
        self._parts.attachment.average_gradients(optimizer)

    @outside_inference
    def all_reduce(
        self, tensors: Sequence[torch.Tensor], *, tokens: float = 1.0, exact: bool = False
    ) -> None:
        """Average tensors over all ranks of all sites, weighted by tokens, in place.

        A collective: every rank of every site calls it with the same sequence of shapes and dtypes,
        before, after or without `attach`, but not during a backward pass. They cross as
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
        self._parts.attachment.all_reduce(tensors, tokens, exact=exact)

    @outside_inference
    def broadcast(self, state: nn.Module | Sequence[torch.Tensor]) -> None:
        """Give every rank of every site the values of the first site's first rank, bit for bit.

        A collective of all ranks of all sites. Where all are equal already, only a hash crosses.

        Args:
            state: a module, whose parameters and buffers are meant, or tensors of any dtype.

        Raises:
            TypeError: something else.
            IsthmusError: names, shapes or dtypes differ, or the exchange failed.
        """
        self._parts.averaging.broadcast(state)

    @outside_inference
    def average_buffers(self, model: nn.Module, *, every: int = 1) -> None:
        """Average a model's buffers over all ranks of all sites after each `every`-th step.

        Floating-point ones, as a BatchNorm's running mean and variance: each rank counts alike.
        Where sites take steps of their own, after the next round of all sites.
        Without it they are each rank's own. After `attach` or `average_gradients`, from every
        rank.

        Raises:
            ValueError: `every` is below 1.
            TypeError: ranks of the site have unlike buffers, those of a pipeline's stages.
        """
        self._parts.attachment.average_buffers(model, every)

    @outside_inference
    def global_parameters(self) -> AbstractContextManager[None]:
        """Return a context in which the model's parameters hold what all sites have.

        Evaluate and export in it. Where the job's regime has sites take steps of their own, the
        parameters are put back at its end; no step may be taken in it. In other regimes they hold
        that anyway.

        A collective of the site then. Bytes sent per rank: 4 a parameter that it hands over.
        """
        return self._parts.regimes.global_parameters()

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context in which backward passes add to gradients here, and nothing crosses.

        For all micro-batches of a step but the last, whatever wraps the models.

        Raises:
            RuntimeError: neither `attach` nor `average_gradients` was called.
        """
        return self._parts.attachment.no_sync()

    @outside_inference
    def clip_grad_norm_(self, max_norm: float, *, loss_scale: float = 1.0) -> float:
        """Scale the gradients of the attached model so that their 2-norm is at most `max_norm`.

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
        return self._parts.attachment.clip_grad_norm_(max_norm, loss_scale)

    def steps(self, until: int) -> Iterator[int]:
        """Return the numbers of the steps to take, from 0 up to `until`: what a script loops over.

        After `attach` and `checkpoint`: begins with the run's first step, or where it goes on. With
        `regime.min_steps` a round may end before this site has taken all of its steps; numbers go
        on after that round then. So have learning rates and evaluations go by these numbers.

        Raises:
            ScriptError: the loop's body has taken no step of the optimizer.
        """
        return self._parts.rank.numbers.until(until)

    @property
    def num_steps(self) -> int:
        """How many steps of the run have ended, at this site."""
        return self._parts.rank.steps.num_steps

    def count_tokens(self, tokens: int) -> None:
        """Add to the tokens behind this rank's gradient: its weight in the average.

        Call it before the backward pass that synchronises; several calls add up (one a micro-batch
        under `no_sync`). A script that never calls it weighs each rank by what `sampler` gives it
        for a step; without that, every rank alike.
        """
        self._parts.attachment.tokens.add(tokens)

    @outside_inference
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
        return self._parts.averaging.empty(sizes)

    @outside_inference
    def checkpoint(
        self,
        model: nn.Module | Sequence[nn.Module],
        optimizer: Optimizer | Sequence[Optimizer],
        *,
        scheduler: Stateful | None = None,
        extra: Mapping[str, Stateful] | None = None,
    ) -> int:
        """Go on from the run's checkpoint, if it has one, and save from now on as the job says.

        Once, from every rank, after `attach` or `average_gradients`, and after `sampler` if
        there is one; and again after each further one of these two calls: then it loads nothing.
        Saves model, optimizer, scheduler, extras, the place in the data and the global random
        number generators: after optimizer steps at the job's `checkpoint.every`, and at the end.
        Without a `checkpoint` section nothing is saved; a site that was lost comes back by this
        call in any case. Outside a run it does nothing.

        What is saved of a step is what the next one begins with: all is copied when its gradients
        begin to cross. So change weights, scheduler and extras right after a step, or put back
        before the next one what was changed. At the end it is what there is in `leave`.

        Args:
            model: that was attached, or all of them, or all parts of a pipeline that this rank
                has.
            optimizer: of its parameters, or all that `attach` was given; their settings are
                the checkpoint's afterwards.
            scheduler: of the learning rate.
            extra: by name, anything else with a `state_dict`, equal at all ranks. Tensors, numbers,
                texts, lists and mappings of them can be saved.

        Returns:
            The optimizer steps that have been taken: the number of the first one to take, from 0.

        Raises:
            TypeError: an optimizer has a parameter that the model has not, one that `attach`
                was given is not saved, or those of a pipeline's ranks have unlike groups.
            RuntimeError: called before, or too early.
            IsthmusError: the checkpoint is damaged, or of another model.
        """
        named = {**({} if scheduler is None else {"scheduler": scheduler}), **(extra or {})}
        models, optimizers = unwrapped_models(model), unwrapped_optimizers(optimizer)
        return self._parts.checkpointing.checkpoint(models, optimizers, named)

    @outside_inference
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
            global_batch: samples of a step, over all sites, which all ranks share as evenly as they
                can; None: the job's, which its placement may divide otherwise.
            seed: names the orders; the same everywhere.
            data_mesh: the ranks of the site with data of their own, as `attach` has it: ranks
                of tensor parallelism, or of a pipeline, have the same. Left out, each has its own.

        Raises:
            ValueError: the dataset is empty, or there is not a sample for each rank.
            RuntimeError: called before.
        """
        return self._parts.data.make_sampler(
            len(dataset), global_batch=global_batch, seed=seed, data_mesh=data_mesh
        )

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
        return self._parts.data.part_of(dataset)

    def log(self, **values: SupportsFloat) -> None:
        """Add values to the last completed step's record and send it.

        Of the first rank; others' go nowhere. Names that isthmus shows: `loss`, `grad_norm`,
        `learning_rate`; any other is kept as well.
        """
        self._parts.rank.steps.add(plain_numbers(values))

    def record(
        self,
        kind: str,
        step: int,
        values: Mapping[str, SupportsFloat],
        labels: Mapping[str, str] | None = None,
    ) -> None:
        """Send a metric of any kind (protos/metrics.py has ours), from whichever rank calls."""
        self._parts.rank.records.record(kind, step, values, labels)

    @outside_inference
    def leave(self) -> None:
        """Report that this rank is done, and release everything.

        Idempotent; an orderly exit calls it.
        """
        self._parts.life.leave()
