"""The launcher of a site under Slurm: one allocation, whose first node runs the agent by srun.

srun forwards stdin and output, so its stream is the tether's, and the allocation ends with it. In
an allocation of several nodes the agent starts the other nodes' supervisors with further sruns.
Slurm sends the tether a SIGTERM before the time limit, early enough for a checkpoint; the keeper
then asks for another allocation.
"""

from __future__ import annotations

import itertools

from isthmus.orchestrator.launchers.launcher import Launcher
from isthmus.orchestrator.launchers.local import LocalLauncher
from isthmus.topology.spec.world import Launcher as Described

SIGNAL_S = 60
"""Time of the SIGTERM before the time limit. Slurm may be up to a minute early."""
SAVE_S = 40.0
"""Time for a site's last checkpoint: SIGNAL_S less LEAVE_S for the end, and 5 s in reserve."""


def components(described: Described) -> list[list[str]]:
    """Return the options of each component of a site's job.

    A ":" among the options separates the components of a heterogeneous job, as in Slurm's commands.
    Each of them says how many nodes it has.
    """
    parts = itertools.groupby(described.options, ":".__eq__)
    return [list(options) for is_colon, options in parts if not is_colon] or [[]]


def allocation(described: Described, site: str, nodes: int) -> list[str]:
    """Return the command prefix that allocates nodes and runs a command on the first one."""
    srun = ["srun", "--nodes=1", "--ntasks=1", "--unbuffered", "--kill-on-bad-exit=1"]
    job = [f"--signal=TERM@{SIGNAL_S}", f"--job-name=isthmus-{site}"]
    if nodes == 1:
        return [*srun, *job, *described.options]
    parts = components(described)
    job += ["--ntasks-per-node=1", *([f"--nodes={nodes}"] if len(parts) == 1 else [])]
    salloc = [word for options in parts for word in (":", *job, *options)]
    return ["salloc", *salloc[1:], *srun]


def slurm_launcher(described: Described, site: str, python: str, nodes: int) -> Launcher:
    """Return a launcher that runs Slurm's commands on this machine, or on the named host."""
    command = allocation(described, site, nodes)
    if described.host is None:
        return LocalLauncher(python, command)
    from isthmus.orchestrator.launchers.ssh import SshLauncher

    return SshLauncher(described, python, command)
