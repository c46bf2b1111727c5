"""The launcher of a site under Slurm: one allocation of one task, by srun.

srun carries stdin and the output, so its stream is the tether's, and the allocation ends with it.
Slurm sends the tether a SIGTERM before the time limit, early enough for a checkpoint; the keeper
then asks for another allocation.
"""

from __future__ import annotations

from orchestrator.launchers.launcher import Launcher
from orchestrator.launchers.local import LocalLauncher
from topology.world import Launcher as Described

SIGNAL_S = 60
"""Before the time limit. Slurm may be up to a minute early."""


def srun(described: Described, site: str) -> list[str]:
    """Return what starts a command in an allocation of its own."""
    return [
        "srun",
        *("--nodes=1", "--ntasks=1", "--unbuffered", "--kill-on-bad-exit=1"),
        *(f"--signal=TERM@{SIGNAL_S}", f"--job-name=isthmus-{site}"),
        *described.options,
    ]


def slurm_launcher(described: Described, site: str, python: str) -> Launcher:
    """Return the launcher: srun on this machine, or on the host that is named."""
    if described.host is None:
        return LocalLauncher(python, srun(described, site))
    from orchestrator.launchers.ssh import SshLauncher

    return SshLauncher(described, python, srun(described, site))
