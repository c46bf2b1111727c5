"""How a process becomes a rank of a run: what `isthmus.join` does."""

from __future__ import annotations

import dataclasses
import errno
import os
from pathlib import Path
from typing import Literal

import torch.distributed as dist

from isthmus.protos import metrics
from isthmus.protos.errors import ConfigMismatchError
from isthmus.sites.local.rank_messages import Welcome
from isthmus.sites.worker.api.environment import (
    Environment,
    NotLaunchedError,
    check_is_own_process,
    lone_spec,
    note_joined,
)
from isthmus.sites.worker.api.own_machine import report_machine
from isthmus.sites.worker.api.site import Site
from isthmus.sites.worker.api.stacks import write_stacks_on_signal
from isthmus.sites.worker.exchange.collectives import (
    choose_device,
    device_name,
    ensure_process_group,
    local_rank,
)
from isthmus.sites.worker.exchange.gateway_link import AloneLink, GatewayLink, Link, SiteOnlyLink
from isthmus.sites.worker.exchange.rank_context import RankContext
from isthmus.sites.worker.exchange.shard_encoder import encodes_here
from isthmus.topology.spec.errors import ConfigError
from isthmus.topology.spec.expected_devices import NO_DEVICE, expected_device, unlike
from isthmus.topology.spec.run_spec import RunSpec


def join(
    *,
    alone: bool = False,
    environment: Literal["site", "global"] = "site",
    averages: bool = True,
) -> Site:
    """Enter the run that isthmus started this process for. Once a process, from every rank.

    Initialises torch.distributed inside the site (NCCL where there is CUDA, else Gloo) unless the
    script has done so, and makes the rank's CUDA device the current one.

    Args:
        alone: outside a run, return a site without others instead of an error, so that the same
            script also runs under torchrun or python; inside a run it changes nothing.
        environment: `global` sets RANK and WORLD_SIZE in `os.environ` to this rank among the ranks
            of all sites, once the site's process group is there: for a script that divides its data
            by them. torch.distributed's own ranks stay the site's.
        averages: False: the script averages nothing over sites on purpose, as one that only
            evaluates. Else a run whose script ends without having done so has failed
            (NEVER_ATTACHED).

    Raises:
        ValueError: another environment.
        NotLaunchedError: outside a run.
        RuntimeError: in a DataLoader worker, or another process that a rank started.
        ConfigError: the launcher's variables or files are wrong.
        IsthmusError: the gateway refuses this rank or does not answer.
        OSError: the topology says an accelerator, and there is none.
    """
    if environment not in {"site", "global"}:
        raise ValueError(f"isthmus.join: environment: want 'site' or 'global', got {environment!r}")
    try:
        launched = Environment.read(os.environ)
    except NotLaunchedError:
        if not alone:
            raise
        return _join_alone()
    check_is_own_process(launched, os.environ)
    site = _join_launched(launched, averages=averages)
    if environment == "global":
        os.environ["RANK"] = str(site.global_rank)
        os.environ["WORLD_SIZE"] = str(site.global_world_size)
    return site


def _join_launched(launched: Environment, *, averages: bool) -> Site:
    """Join the gateway that the launcher names."""
    if os.environ.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL":
        raise ConfigError(
            "TORCH_DISTRIBUTED_DEBUG=DETAIL has torch's DistributedDataParallel crash (SIGSEGV), as "
            "it is made or in a communication hook: say TORCH_DISTRIBUTED_DEBUG=INFO"
        )
    spec, timeouts = launched.spec, launched.spec.timeouts
    device = choose_device()
    # Where sites take steps of their own, what crosses is made in the host's memory; and ranks cut
    # a bucket in another way where they average it inside the site first.
    encodes = encodes_here(os.environ, device) and not (spec.job.regime.is_local or spec.rungs)
    owns_group = ensure_process_group(device, timeouts.process_group_s)
    gateway = GatewayLink(launched.gateway, send_timeout_s=timeouts.process_group_s)
    link: Link = gateway
    try:
        welcome = gateway.join(
            rank=dist.get_rank(),
            local_rank=local_rank(),
            generation=launched.generation,
            timeout_s=timeouts.start_s,
            encodes=encodes,
        )
        _check_size(welcome)
        _check_device(welcome.site, spec, device_name(device))
    except BaseException:
        gateway.close()
        raise
    note_joined(launched, os.environ)
    write_stacks_on_signal(launched.run_folder, dist.get_rank())
    is_off = spec.job.exchange.schedule == "off"
    if is_off or len(welcome.sites) == 1:
        link = SiteOnlyLink(gateway, dist.get_world_size())
        encodes = False  # Nothing crosses.
    if not encodes:
        welcome = dataclasses.replace(welcome, encoding=None)
    if is_off:
        welcome = dataclasses.replace(welcome, verify_every=0)  # Sites are not to be equal.
    context = RankContext(
        welcome=welcome,
        spec=spec,
        run=launched.run,
        generation=launched.generation,
        run_folder=launched.run_folder,
        device=device,
        rejoins=launched.rejoins,
        averages=averages,
    )
    site = Site(context, link, owns_group=owns_group)
    _compare_device(site)
    if site.rank == 0:
        entrypoint = launched.spec.job.entrypoint
        script = None if entrypoint is None else Path(entrypoint)
        report_machine(device, script, lambda labels: site.record(metrics.MACHINE, 0, {}, labels))
    return site


def _check_device(name: str, spec: RunSpec, found: str) -> None:
    """Refuse to train on a CPU where the topology says an accelerator.

    Raises:
        OSError: the machine has lost its accelerator, or never had one: no fault of the script.
    """
    expected = expected_device(spec.topology.site(name), spec.topology, spec.job)
    if expected is not None and found == NO_DEVICE and not spec.job.allow_cpu:
        raise OSError(
            errno.ENODEV,
            f"the topology says {spec.topology.site(name).accelerator.name} at site {name}, and "
            "torch finds no accelerator: see nvidia-smi -L, CUDA_VISIBLE_DEVICES and "
            "torch.version.cuda there; say `accelerator: cpu` in the topology where that is meant; "
            "`isthmus launch --allow-cpu` trains on CPUs all the same",
        )


def _compare_device(site: Site) -> None:
    """Record, once a site, that its ranks compute on something else than the topology says."""
    place = site.topology.site(site.name)
    expected = expected_device(place, site.topology, site.job)
    found = device_name(site.device)
    if site.rank == 0 and expected is not None and unlike(expected, [found]):
        site.record(metrics.DEVICE_DIFFERS, 0, {}, {metrics.FOUND: found})


def _join_alone() -> Site:
    device = choose_device()
    owns_group = ensure_process_group(device, lone_spec(1).timeouts.process_group_s)
    num_ranks = dist.get_world_size()
    welcome = Welcome(
        site="alone",
        site_index=0,
        sites=("alone",),
        ranks_per_site=(num_ranks,),
        verify_every=0,
        config_hash="",
    )
    context = RankContext(
        welcome=welcome, spec=lone_spec(num_ranks), run_folder=Path.cwd(), device=device
    )
    return Site(context, AloneLink(num_ranks), owns_group=owns_group)


def _check_size(welcome: Welcome) -> None:
    expected, actual = welcome.ranks_per_site[welcome.site_index], dist.get_world_size()
    if expected != actual:
        raise ConfigMismatchError(
            f"site {welcome.site} has {expected} ranks by the topology, but torch.distributed has "
            f"{actual}: its default process group must be the whole site"
        )
