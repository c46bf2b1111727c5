"""A rank's view of its site and of the run: what a training script holds."""

from __future__ import annotations

import atexit
import math
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import SupportsFloat

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from sites.worker.arguments import check_list, check_optimizer, check_tensors, check_training
from sites.worker.counted_steps import CountedSteps
from sites.worker.exactness import Exactness
from sites.worker.gradient_hook import GradientHook
from sites.worker.link import Link, Welcome
from sites.worker.optimizer_hook import OptimizerHook
from sites.worker.rank_exchange import RankExchange
from sites.worker.step_log import StepLog
from sites.worker.tokens import TokenCount
from topology.job import Job
from topology.timeouts import Timeouts
from topology.world import Topology


class Site:
    """This rank's site, joined to the others. Not thread-safe: for the training thread."""

    name: str
    index: int
    """Position among the sites; 0's initial parameters are everybody's."""
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

    def __init__(
        self,
        *,
        link: Link,
        welcome: Welcome,
        job: Job,
        topology: Topology,
        run_folder: Path,
        device: torch.device,
        owns_group: bool,
    ) -> None:
        """Made by `sites.join`."""
        self.name = welcome.site
        self.index = welcome.site_index
        self.num_sites = len(welcome.sites)
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.global_rank = sum(welcome.ranks_per_site[: self.index]) + self.rank
        self.global_world_size = sum(welcome.ranks_per_site)
        self.device = device
        self.job = job
        self.topology = topology
        self.run_folder = run_folder
        self._link = link
        self._owns_group = owns_group
        self._tokens = TokenCount()
        self._steps = StepLog(link, sends=self.rank == 0, timeline_every=job.timeline_every)
        self._counted = CountedSteps(link, self._steps, welcome.verify_every)
        self._exactness = Exactness(job.exchange)
        self._exchange = RankExchange(
            link, welcome, job, Timeouts.derive(topology.failure), self._exactness, device
        )
        self._has_left = False
        self._pid = os.getpid()
        atexit.register(self._leave_at_exit)

    def synchronize(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Train `model` together with all other sites from now on. Once, from every rank.

        Gives all sites the first site's parameters and buffers, bit for bit. Afterwards `p.grad`
        is, after each synchronised backward pass, the average over all ranks of all sites, weighted
        by their tokens, and each `optimizer.step()` is one step of the run. With
        `exchange.schedule: off` all of this holds for the ranks of this site alone.

        Args:
            model: a DistributedDataParallel, or what `fully_shard` was called on: then every
                parameter is sharded by rows over all ranks of the site. Sites may have different
                numbers of ranks.
            optimizer: of its parameters.

        Raises:
            TypeError: another model, or not an optimizer.
            ConfigError: parameters are to cross exactly that the model does not have.
            RuntimeError: called before.
            IsthmusError: the sites' models differ in more than values, or the exchange failed.
        """
        check_training(model, optimizer)
        self._counted.begin("synchronize")
        if isinstance(model, DistributedDataParallel):
            self._synchronize_replicas(model, optimizer)
        else:
            self._synchronize_shards(model, optimizer)

    def average_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Train the parameters of `optimizer` together with all other sites. Once, from every rank.

        For a loop without DistributedDataParallel: from now on each `optimizer.step()` averages
        `p.grad` over all ranks of all sites first, weighted by their tokens, so that gradients
        which were accumulated cross once, and is one step of the run. Gives all sites the first
        site's values of these parameters; `broadcast(model)` does that for buffers, too.

        Raises:
            TypeError: not an optimizer, or a parameter cannot be averaged.
            ConfigError: parameters are to cross exactly that it does not have, or has no names of.
            RuntimeError: `synchronize` or this was called before.
            IsthmusError: the sites' parameters differ in more than values, or the exchange failed.
        """
        check_optimizer("site.average_gradients", optimizer)
        hook = OptimizerHook(self._exchange.open_average(), self._tokens, optimizer)
        self._exactness.check([name for name, _ in hook.parameters()])
        self._counted.begin("average_gradients")
        self._exchange.equalise(hook.parameters())
        optimizer.register_step_pre_hook(hook.before_step)
        self._counted.follow(optimizer, hook.parameters, hook.take_rounds)

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
            tensors: floating point, of any shapes, dtypes and strides, none of them twice. Empty
                ones and an empty list are fine.
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
        named = [(str(index), each) for index, each in enumerate(tensors)]
        self._exchange.open_average().average(named, tokens, exact=exact)

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
        return self._exchange.empty(sizes)

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
            named = [*state.named_parameters(), *state.named_buffers()]
        else:
            check_list("site.broadcast", state)
            named = [(str(index), each) for index, each in enumerate(state)]
        self._exchange.equalise(named)

    def count_tokens(self, tokens: int) -> None:
        """Say how many tokens are behind this rank's gradient: its weight in the average.

        Call it before the backward pass that synchronises; several calls add up (one a micro-batch
        under `model.no_sync()`). A script that never calls it weighs every rank alike.
        """
        self._tokens.add(tokens)

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
        self._link.send_metric(kind, step, _floats(values), labels or {})

    def leave(self) -> None:
        """Say that this rank is done, and release everything.

        Idempotent; an orderly exit calls it.
        """
        if self._has_left:
            return
        self._has_left = True
        atexit.unregister(self._leave_at_exit)
        self._steps.flush()
        self._link.leave()
        self._end()

    def _leave_at_exit(self) -> None:
        """Leave, unless an exception ends the process: to the others that is a crash."""
        if os.getpid() != self._pid:
            return  # A fork, a data loader's worker say, ends; the rank goes on.
        if getattr(sys, "last_value", None) is None:
            self.leave()
        else:
            self._link.close()

    def _end(self) -> None:
        self._exchange.close()
        if self._owns_group and dist.is_initialized():
            dist.destroy_process_group()

    def _synchronize_replicas(
        self, model: DistributedDataParallel, optimizer: torch.optim.Optimizer
    ) -> None:
        hook = GradientHook(self._exchange.open(), self._tokens, model, exactness=self._exactness)
        self.broadcast(model.module)
        model.register_comm_hook(None, hook.reduce)
        self._counted.follow(optimizer, model.module.named_parameters, hook.take_rounds)

    def _synchronize_shards(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        from sites.worker.sharded_hook import ShardedHook  # imports what only such scripts need

        bucket_bytes = self.job.exchange.bucket_bytes
        hook = ShardedHook(
            self._exchange.open(),
            self._tokens,
            bucket_bytes=bucket_bytes,
            exactness=self._exactness,
        )
        hook.register(model)
        self.broadcast(model)
        self._counted.follow(optimizer, model.named_parameters, hook.take_rounds)


def _floats(values: Mapping[str, SupportsFloat]) -> dict[str, float]:
    """Return plain numbers; a loss may still hold its graph."""
    return {
        name: float(value.detach() if isinstance(value, torch.Tensor) else value)
        for name, value in values.items()
    }
