"""The batch script of a site under Slurm. Pure.

A batch job survives who has submitted it, and Slurm starts it again by itself: after a node's
failure, `scontrol requeue`, or preemption. Before the time limit it puts itself into the queue.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path

from isthmus.orchestrator.coordinator.local_agents import AGENT, agent_arguments
from isthmus.orchestrator.launchers.slurm import SIGNAL_S, components
from isthmus.topology.spec.world import Site, Topology

STATE = "state"


def slurm_script(
    topology: Topology,
    site: Site,
    coordinator: str,
    *,
    python: str,
    folder: str,
    environment: Mapping[str, str],
) -> str:
    """Return the script of a site, as sbatch takes it.

    Args:
        topology: The deployment's.
        site: The site whose agent it starts.
        coordinator: host:port, as the site reaches it.
        python: Path on the site's nodes of a Python that has isthmus.
        folder: Path on the site's nodes of the agent's files.
        environment: Variables of the agent: where certificates are.
    """
    job = [
        f"--job-name=isthmus-{topology.name}-{site.name}",
        *("--ntasks-per-node=1", "--requeue", "--open-mode=append"),
        f"--signal=B:USR1@{SIGNAL_S}",
    ]
    parts = components(site.launcher)
    job += [f"--nodes={site.nodes}"] if len(parts) == 1 else []
    options = [line for part in parts for line in ("hetjob", *job, shlex.join(part)) if line][1:]
    arguments = agent_arguments(topology, site.name, coordinator, Path(STATE), "slurm")
    exports = [f"export {name}={shlex.quote(value)}" for name, value in environment.items()]
    lines = [
        "#!/bin/sh",
        *(f"#SBATCH {option}" for option in options),
        f"# The agent of site {site.name}. Submit it once: sbatch {site.name}.sbatch",
        *exports,
        f"mkdir -p -- {_placed(folder)}",
        f"cd -- {_placed(folder)} || exit 1",
        f"{shlex.quote(python)} -m {AGENT} {shlex.join(arguments)} &",
        "agent=$!",
        "again=",
        "# Slurm says that the time limit is near: sites write a checkpoint, and it starts anew.",
        "trap 'again=yes; kill -TERM \"$agent\"' USR1",
        "# Cancelled, requeued or preempted: a checkpoint as well; the rest is Slurm's business.",
        "trap 'kill -TERM \"$agent\"' TERM",
        'while kill -0 "$agent" 2>/dev/null; do',
        '    wait "$agent"',
        "    status=$?",
        "done",
        '[ -z "$again" ] || scontrol requeue "$SLURM_JOB_ID"',
        'exit "$status"',
    ]
    return "\n".join(lines) + "\n"


def _placed(folder: str) -> str:
    """Return a folder as a word of the shell, which still expands `~`."""
    if folder.startswith("~/"):
        return f"~/{shlex.quote(folder.removeprefix('~/'))}"
    return shlex.quote(folder)
