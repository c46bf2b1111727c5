"""The commands of agents and coordinator, with the secrets that they need."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from isthmus.orchestrator.coordinator.local_agents import AGENT, agent_arguments
from isthmus.orchestrator.launchers.launcher import Launcher
from isthmus.orchestrator.launchers.local import LocalLauncher
from isthmus.orchestrator.launchers.slurm import SAVE_S
from isthmus.protos.carried_secrets import carried_secrets
from isthmus.protos.identities import AGENT as AGENT_ROLE
from isthmus.protos.identities import COORDINATOR, GATEWAY
from isthmus.protos.own_processes import own_command
from isthmus.protos.save_time import SAVE_WITHIN, SAVE_WITHIN_S, save_within_s
from isthmus.topology.spec.tether_messages import CREDENTIALS, FOLDER, Spec
from isthmus.topology.spec.world import Launcher as Described
from isthmus.topology.spec.world import Site, Topology

REMOTE_FOLDER = "~/.local/state/isthmus/up"
REMOTE_PYTHON = "python3"
GREET_S = 60.0
QUEUE_S = 7 * 86400.0
_CREDENTIALS = f"{FOLDER}/{CREDENTIALS}"
"""Longest wait in Slurm's queue; `up --timeout` limits how long a person waits."""


def launcher_of(described: Described, name: str, documents: Path, nodes: int) -> Launcher:
    """Return the launcher that starts processes at a site.

    Args:
        described: The launcher section of the topology.
        name: Name of the site, for an allocation.
        documents: Folder of the topology, to which paths are relative.
        nodes: Number of machines to allocate.
    """
    python = python_at(described)
    if described.kind == "local":
        return LocalLauncher(python)
    # Imported here: asyncssh takes a while, and most sites are on this machine.
    from isthmus.orchestrator.launchers.slurm import slurm_launcher
    from isthmus.orchestrator.launchers.ssh import SshLauncher, absolute

    placed = absolute(described, documents)
    if described.kind == "slurm":
        return slurm_launcher(placed, name, python, nodes)
    return SshLauncher(placed, python)


def greet_s(described: Described) -> float:
    """Return the time limit for the first line of a process at the site."""
    return QUEUE_S if described.kind == "slurm" else GREET_S


def save_s(described: Described) -> float:
    """Return the time limit of a site's last checkpoint, from the environment or its launcher.

    Raises:
        SaveTimeError: the environment variable is not a number of seconds.
    """
    return save_within_s(os.environ, SAVE_S if described.kind == "slurm" else SAVE_WITHIN_S)


def agent_spec(topology: Topology, site: Site, address: str, folder: Path) -> Spec:
    """Return the spec of a site's agent. `folder` is the keeper's, on this machine.

    Raises:
        CertificateError: a certificate or key of the site is missing here.
        SaveTimeError: as for `save_s`.
        UnsafeFileError: a secret can be read by others.
    """
    files, env = carried_secrets(
        [f"{site.name}.{AGENT_ROLE}", f"{site.name}.{GATEWAY}"], _CREDENTIALS
    )
    arguments = agent_arguments(topology, site.name, address, Path("state"), site.launcher.kind)
    return Spec(
        folder=folder_at(topology, site.launcher, site.name, folder / "sites" / site.name),
        command=tuple(own_command(AGENT, *arguments, python=python_at(site.launcher))),
        files=files,
        env={**env, SAVE_WITHIN: f"{save_s(site.launcher):g}"},
        silence_s=topology.failure.coordinator_within_s,
    )


def coordinator_spec(
    topology: Topology, text: str, overrides: list[str], bind: str, folder: Path
) -> Spec:
    """Return the spec of the coordinator.

    Args:
        topology: Topology of the deployment.
        text: Text of its file.
        overrides: Overrides (`path=value`) of the text.
        bind: host:port; port 0: any.
        folder: The keeper's folder on this machine.

    Raises:
        CertificateError: its certificate or key is missing here.
        UnsafeFileError: a secret can be read by others.
    """
    described = coordinator_launcher(topology)
    files, env = carried_secrets([COORDINATOR], _CREDENTIALS)
    return Spec(
        folder=folder_at(topology, described, COORDINATOR, folder / COORDINATOR),
        command=(
            *own_command("isthmus.orchestrator.coordinator", python=python_at(described)),
            *("--topology", f"{_CREDENTIALS}/topology.yaml", "--state", "state", "--bind", bind),
            *(word for override in overrides for word in ("--set", override)),
        ),
        files={**files, "topology.yaml": text.encode()},
        env=env,
        silence_s=topology.failure.coordinator_within_s,
    )


def coordinator_launcher(topology: Topology) -> Described:
    """Return the coordinator's launcher: that of its site if one is named, else local."""
    if topology.coordinator.site is None:
        return Described()
    return topology.site(topology.coordinator.site).launcher


def python_at(described: Described) -> str:
    """Return the interpreter at a site."""
    if described.python is not None:
        return described.python
    is_here = described.kind == "local" or (described.kind == "slurm" and described.host is None)
    return sys.executable if is_here else REMOTE_PYTHON


def folder_at(topology: Topology, described: Described, name: str, here: Path) -> str:
    """Return the folder of a part's files, on its own machine."""
    if described.folder is not None:
        return f"{described.folder}/{name}" if name == COORDINATOR else described.folder
    if described.kind == "local":
        return os.path.abspath(here)  # noqa: PTH100
    return f"{REMOTE_FOLDER}/{topology.name}/{name}"
