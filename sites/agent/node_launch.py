"""Lists a site's nodes, with the commands that start supervisors on the agent's other nodes.

A command's stdin and stdout become those of the supervisor.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from isthmus.protos.failure import text_of
from isthmus.protos.own_processes import own_command
from isthmus.sites.node.failures import SiteError
from isthmus.topology.spec.world import Site

MODULE = "isthmus.sites.node"
"""The module that runs as a supervisor."""
_NUM_COMPONENTS = "SLURM_HET_SIZE"
"""Slurm's variable in a heterogeneous job: how many components it has."""
SCONTROL_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePlace:
    """One node of a site."""

    host: str | None
    """Host by which the site's other nodes reach the node; None: all are on this machine."""
    dialled: str | None
    """Host by which other sites reach the node; None: the site's in the topology."""
    command: tuple[str, ...]
    """The command that starts the node's supervisor."""
    shares_files: bool
    """Whether the node can read this machine's secret files by their paths."""


def node_places(site: Site, launcher: str, dialled: Sequence[str] = ()) -> list[NodePlace]:
    """Return all nodes of a site; the first one is the agent's own. May block for a while.

    Args:
        site: The site, as the topology describes it.
        launcher: How other nodes are started: one of isthmus.topology.spec.world.LAUNCHERS.
        dialled: host:port of each node where the agent dials them instead, its own first.

    Raises:
        SiteError: Slurm's allocation has another number of nodes, or cannot be read.
    """
    supervisor = own_command(MODULE)
    if dialled:
        return _dialled(site, dialled)
    if launcher == "slurm" and site.nodes > 1:
        return [
            NodePlace(
                host=address,
                dialled=None,
                command=(*_srun(name, component), *supervisor),
                shares_files=True,
            )
            for name, address, component in _slurm_nodes(site, os.environ)
        ]
    hosts: Sequence[str | None] = site.hosts or [None] * site.nodes
    if launcher == "ssh" and site.hosts:
        python = site.launcher.python or sys.executable
        return [
            NodePlace(
                host=host,
                dialled=host,
                command=over_ssh(host, site.launcher.options, own_command(MODULE, python=python)),
                shares_files=False,
            )
            for host in site.hosts
        ]
    return [
        NodePlace(host=host, dialled=host, command=tuple(supervisor), shares_files=True)
        for host in hosts
    ]


def _dialled(site: Site, nodes: Sequence[str]) -> list[NodePlace]:
    """Return nodes that run `python -m isthmus.sites.node.serve`.

    Their certificates have the same paths as here.

    Raises:
        SiteError: `nodes` has another length than the site has nodes.
    """
    if len(nodes) != site.nodes:
        raise SiteError(
            "LAUNCH_FAILED", f"site {site.name} has {site.nodes} nodes, and --node {len(nodes)}"
        )
    dial = own_command("isthmus.sites.node.dial", "--site", site.name)
    return [
        NodePlace(
            host=each.rpartition(":")[0], dialled=host, command=(*dial, each), shares_files=True
        )
        for each, host in zip(nodes, site.hosts or [None] * site.nodes, strict=True)
    ]


def over_ssh(host: str, options: Sequence[str], command: Sequence[str]) -> tuple[str, ...]:
    """Return the ssh command that runs `command` on a host, with the user's ssh settings.

    OpenSSH's client refuses a host with an unknown key, without a prompt.
    """
    alive = ("-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=4")
    ssh = ("ssh", "-T", "-o", "BatchMode=yes", *alive, *options, host)
    return (*ssh, shlex.join(command))


def _srun(name: str, component: int) -> list[str]:
    """Return the srun command that starts a step on one node of the agent's allocation."""
    return [
        *("srun", "--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={name}"),
        *([f"--het-group={component}"] if _NUM_COMPONENTS in os.environ else []),
        *("--unbuffered", "--kill-on-bad-exit=1"),
    ]


def _slurm_nodes(site: Site, environ: Mapping[str, str]) -> list[tuple[str, str, int]]:
    """Return (name, address, component) of the allocation's nodes, the agent's own first.

    A job has one component, number 0, unless it is heterogeneous.
    """
    suffixes = [""]
    if _NUM_COMPONENTS in environ:
        suffixes = [f"_HET_GROUP_{number}" for number in range(int(environ[_NUM_COMPONENTS]))]
    allocated = [environ.get(f"SLURM_JOB_NODELIST{suffix}") for suffix in suffixes]
    if None in allocated:
        raise SiteError(
            "LAUNCH_FAILED",
            f"site {site.name} has {site.nodes} nodes by Slurm, and its agent is in no allocation",
        )
    names = [
        (name, component)
        for component, given in enumerate(filter(None, allocated))
        for name in _scontrol("show", "hostnames", given).split()
    ]
    if len(names) != site.nodes:
        raise SiteError(
            "LAUNCH_FAILED",
            f"site {site.name} has {site.nodes} nodes, and Slurm has given {len(names)}: "
            + ", ".join(filter(None, allocated)),
        )
    own = environ.get("SLURMD_NODENAME", names[0][0])
    names.sort(key=lambda node: node[0] != own)
    return [(name, _address(name), component) for name, component in names]


def _address(name: str) -> str:
    """Return the address by which Slurm itself reaches a node."""
    found = re.search(r"NodeAddr=(\S+)", _scontrol("--oneliner", "show", "node", name))
    return found[1] if found else name


def _scontrol(*arguments: str) -> str:
    try:
        return subprocess.run(
            ["scontrol", *arguments],
            capture_output=True,
            text=True,
            check=True,
            timeout=SCONTROL_S,
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", "") or text_of(error)
        raise SiteError("LAUNCH_FAILED", f"scontrol: {said.strip()}") from error
