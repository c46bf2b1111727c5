"""A rank's view of its site and of the run: what a training script holds."""

from __future__ import annotations

import atexit
import dataclasses
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, SupportsFloat

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from protos.errors import ConfigMismatchError
from sites.worker.alone_link import AloneLink
from sites.worker.collectives import Collectives
from sites.worker.cuda_transfer import CudaTransfer
from sites.worker.digest import digest_of
from sites.worker.environment import Environment, NotLaunchedError, lone_topology
from sites.worker.exchange import Exchange
from sites.worker.gateway_link import GatewayLink
from sites.worker.gradient_hook import GradientHook
from sites.worker.host_transfer import HostTransfer
from sites.worker.initial_state import InitialState
from sites.worker.link import Link, Welcome
from sites.worker.process_group import choose_device, ensure_process_group, local_rank
from sites.worker.site_only_link import SiteOnlyLink
from sites.worker.step_log import StepLog
from sites.worker.tokens import TokenCount
from topology.job import Job
from topology.timeouts import Timeouts
from topology.world import Topology


def join(*, alone: bool = False) -> Site:
    """Enter the run that isthmus started this process for. Once a process, from every rank.

    Initialises torch.distributed inside the site (NCCL where there is CUDA, else Gloo) unless the script
    has done so, and makes the rank's CUDA device the current one.

    Args:
        alone: outside a run, return a site without others instead of an error, so that the same
            script also runs under torchrun or python; inside a run it changes nothing.

    Raises:
        NotLaunchedError: outside a run.
        ConfigError: the launcher's variables or files are wrong.
        IsthmusError: the gateway refuses this rank or does not answer.
    """
    try:
        environment = Environment.read(os.environ)
    except NotLaunchedError:
        if not alone:
            raise
        return _join_alone()
    timeouts = Timeouts.derive(environment.topology.failure)
    device = choose_device()
    owns_group = ensure_process_group(device, timeouts.process_group_s)
    gateway = GatewayLink(environment.gateway, send_timeout_s=timeouts.process_group_s)
    link: Link = gateway
    try:
        welcome = gateway.join(
            rank=dist.get_rank(),
            local_rank=local_rank(),
            generation=environment.generation,
            timeout_s=timeouts.start_s,
        )
        _check_size(welcome)
    except BaseException:
        gateway.close()
        raise
    is_off = environment.job.exchange.schedule == "off"
    if is_off or len(welcome.sites) == 1:
        link = SiteOnlyLink(gateway)
    if is_off:
        welcome = dataclasses.replace(welcome, verify_every=0)  # Sites are not to be equal.
    return Site(
        link=link,
        welcome=welcome,
        job=environment.job,
        topology=environment.topology,
        run_folder=environment.run_folder,
        device=device,
        owns_group=owns_group,
    )


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
        """Made by `join`."""
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
        self._verify_every = welcome.verify_every
        self._owns_group = owns_group
        self._timeouts = Timeouts.derive(topology.failure)
        self._tokens = TokenCount()
        self._steps = StepLog(link, sends=self.rank == 0, timeline_every=job.timeline_every)
        self._exchange: Exchange | None = None
        self._has_left = False
        self._pid = os.getpid()
        atexit.register(self._leave_at_exit)

    def synchronize(self, model: DistributedDataParallel, optimizer: torch.optim.Optimizer) -> None:
        """Train `model` together with all other sites from now on. Once, from every rank.

        Gives all sites the first site's parameters and buffers, bit for bit. Afterwards `p.grad` is,
        after each synchronised backward pass, the average over all ranks of all sites, weighted by
        their tokens, and each `optimizer.step()` is one step of the run. With `exchange.schedule: off`
        all of this holds for the ranks of this site alone.

        Raises:
            TypeError: not a DistributedDataParallel, or not an optimizer.
            RuntimeError: called before.
            IsthmusError: the sites' models differ in more than values, or the exchange failed.
        """
        _check_types(model, optimizer)
        if self._exchange is not None:
            raise RuntimeError("site.synchronize: a model is synchronised already")
        # A peer that is gone is noticed by the gateway; this bounds what is slow, as compilation is.
        deadline_s = max(self._timeouts.process_group_s, self._timeouts.start_s)
        collectives = Collectives(self._timeouts.process_group_s)
        on_cuda = self.device.type == "cuda"
        self._exchange = Exchange(
            self._link,
            CudaTransfer(collectives, self.device) if on_cuda else HostTransfer(collectives),
            rank=self.rank,
            world_size=self.world_size,
            deadline_s=deadline_s,
            overlaps=self.job.exchange.schedule != "serial",
        )
        self._exchange.start()
        is_off = self.job.exchange.schedule == "off"
        InitialState(
            self._exchange,
            site_index=0 if is_off else self.index,
            num_sites=1 if is_off else self.num_sites,
            rank=self.rank,
            device=self.device,
        ).equalise(model.module)
        hook = GradientHook(self._exchange, self._tokens, model)
        model.register_comm_hook(None, hook.reduce)
        self._send_digest(model, 0)
        self._steps.restart_clock()

        def end_step(*_: Any) -> None:  # noqa: ANN401 - torch's own arguments
            self._steps.end_step(hook.take_rounds())
            self._send_digest(model, self._steps.num_steps)

        optimizer.register_step_post_hook(end_step)

    def count_tokens(self, tokens: int) -> None:
        """Say how many tokens are behind this rank's gradient: its weight in the average.

        Call it before the backward pass that synchronises; several calls add up (one a micro-batch
        under `model.no_sync()`). A script that never calls it weighs every rank alike.
        """
        self._tokens.add(tokens)

    def log(self, **values: SupportsFloat) -> None:
        """Add values to the last completed step's record and send it. Of the first rank; others' go nowhere.

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
        """Say that this rank is done, and release everything. Idempotent; an orderly exit calls it."""
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
        if self._exchange is not None:
            self._exchange.close()
        if self._owns_group and dist.is_initialized():
            dist.destroy_process_group()

    def _send_digest(self, model: DistributedDataParallel, step: int) -> None:
        """Send hashes of all parameters, in the steps that are verified.

        Not of buffers: a running mean is each rank's own, as in DistributedDataParallel.
        """
        if self._verify_every == 0 or step % self._verify_every != 0:
            return
        digest = digest_of(model.module.named_parameters())
        shown = digest.bounded()
        self._link.send_digest(step, digest.combined, shown.tensors, shown.names)


def _join_alone() -> Site:
    topology_timeouts = Timeouts.derive(lone_topology(1).failure)
    device = choose_device()
    owns_group = ensure_process_group(device, topology_timeouts.process_group_s)
    num_ranks = dist.get_world_size()
    welcome = Welcome(
        site="alone",
        site_index=0,
        sites=("alone",),
        ranks_per_site=(num_ranks,),
        verify_every=0,
        config_hash="",
    )
    return Site(
        link=AloneLink(),
        welcome=welcome,
        job=Job(name="alone", topology=""),
        topology=lone_topology(num_ranks),
        run_folder=Path.cwd(),
        device=device,
        owns_group=owns_group,
    )


def _floats(values: Mapping[str, SupportsFloat]) -> dict[str, float]:
    """Return plain numbers; a loss may still hold its graph."""
    return {
        name: float(value.detach() if isinstance(value, torch.Tensor) else value)
        for name, value in values.items()
    }


def _check_size(welcome: Welcome) -> None:
    expected, actual = welcome.ranks_per_site[welcome.site_index], dist.get_world_size()
    if expected != actual:
        raise ConfigMismatchError(
            f"site {welcome.site} has {expected} ranks by the topology, but torch.distributed has "
            f"{actual}: its default process group must be the whole site"
        )


def _check_types(model: object, optimizer: object) -> None:
    if not isinstance(model, DistributedDataParallel):
        raise TypeError(
            f"site.synchronize: want a torch.nn.parallel.DistributedDataParallel, got "
            f"{type(model).__name__}: wrap the model first"
        )
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"site.synchronize: want a torch.optim.Optimizer, got {type(optimizer).__name__}"
        )
