"""What runs at each site and for the coordinator, with the secrets that it needs."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from isthmus.orchestrator.coordinator.local_agents import AGENT, agent_arguments
from isthmus.orchestrator.launchers.launcher import Launcher
from isthmus.orchestrator.launchers.local import LocalLauncher
from isthmus.orchestrator.launchers.slurm import SAVE_S
from isthmus.orchestrator.launchers.tethered import CREDENTIALS, Spec
from isthmus.protos.carried_secrets import carried_secrets
from isthmus.protos.identities import AGENT as AGENT_ROLE
from isthmus.protos.identities import COORDINATOR, GATEWAY
from isthmus.protos.own_processes import own_command
from isthmus.protos.save_time import SAVE_WITHIN, SAVE_WITHIN_S, save_within_s
from isthmus.topology.spec.world import Launcher as Described
from isthmus.topology.spec.world import Site, Topology

REMOTE_FOLDER = "~/.local/state/isthmus/up"
REMOTE_PYTHON = "python3"
GREET_S = 60.0
QUEUE_S = 7 * 86400.0
"""Slurm may let a site wait; `up --timeout` says for how long a person does."""


def launcher_of(described: Described, name: str, documents: Path, nodes: int) -> Launcher:
    """Return the launcher that starts processes at a site.

    Args:
        described: As the topology has it.
        name: The site's, for an allocation.
        documents: The topology's folder, which paths are relative to.
        nodes: So many machines are allocated there.
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
    """Return how long a process at the site may take until its first line comes back."""
    return QUEUE_S if described.kind == "slurm" else GREET_S


def save_s(described: Described) -> float:
    """Return how long a site's last checkpoint may take: what is told here, or its launcher gives.

    Raises:
        SaveTimeError: the environment names something else than seconds.
    """
    return save_within_s(os.environ, SAVE_S if described.kind == "slurm" else SAVE_WITHIN_S)


def agent_spec(topology: Topology, site: Site, address: str, folder: Path) -> Spec:
    """Return what runs as a site's agent. `folder` is that of what is up, on this machine.

    Raises:
        CertificateError: a certificate or key that the site needs is not here.
        SaveTimeError: as `save_s` says.
        UnsafeFileError: a secret can be read by others.
    """
    files, env = carried_secrets(
        [f"{site.name}.{AGENT_ROLE}", f"{site.name}.{GATEWAY}"], CREDENTIALS
    )
    arguments = agent_arguments(topology, site.name, address, Path("state"), site.launcher.kind)
    return Spec(
        folder=folder_at(topology, site.launcher, site.name, folder / "sites" / site.name),
        command=own_command(AGENT, *arguments, python=python_at(site.launcher)),
        files=files,
        env={**env, SAVE_WITHIN: f"{save_s(site.launcher):g}"},
        silence_s=topology.failure.coordinator_within_s,
    )


def coordinator_spec(
    topology: Topology, text: str, overrides: list[str], bind: str, folder: Path
) -> Spec:
    """Return what runs as the coordinator.

    Args:
        topology: Of the deployment.
        text: Its file.
        overrides: What was changed of it.
        bind: host:port; port 0: any.
        folder: That of what is up, on this machine.

    Raises:
        CertificateError: its certificate or key is not here.
        UnsafeFileError: a secret can be read by others.
    """
    described = coordinator_launcher(topology)
    files, env = carried_secrets([COORDINATOR], CREDENTIALS)
    return Spec(
        folder=folder_at(topology, described, COORDINATOR, folder / COORDINATOR),
        command=[
            *own_command("isthmus.orchestrator.coordinator", python=python_at(described)),
            *("--topology", f"{CREDENTIALS}/topology.yaml", "--state", "state", "--bind", bind),
            *(word for override in overrides for word in ("--set", override)),
        ],
        files={**files, "topology.yaml": text.encode()},
        env=env,
        silence_s=topology.failure.coordinator_within_s,
    )


def coordinator_launcher(topology: Topology) -> Described:
    """Return how the coordinator is started: at its site, where one is named, else here."""
    if topology.coordinator_site is None:
        return Described()
    return topology.site(topology.coordinator_site).launcher


def python_at(described: Described) -> str:
    """Return the interpreter at a site."""
    if described.python is not None:
        return described.python
    is_here = described.kind == "local" or (described.kind == "slurm" and described.host is None)
    return sys.executable if is_here else REMOTE_PYTHON


def folder_at(topology: Topology, described: Described, name: str, here: Path) -> str:
    """Return where a part keeps its files, on its own machine."""
    if described.folder is not None:
        return f"{described.folder}/{name}" if name == COORDINATOR else described.folder
    if described.kind == "local":
        return os.path.abspath(here)  # noqa: PTH100
    return f"{REMOTE_FOLDER}/{topology.name}/{name}"
