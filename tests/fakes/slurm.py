"""A real Slurm on this machine, with a folder of its own, by scripts/slurm_here."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "slurm_here"
ADMIN_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
"""Where Debian has the daemons."""
WITHIN_S = 100.0


@dataclass
class Slurm:
    """Its configuration's folder, which is gone once it has been stopped."""

    folder: Path

    def jobs(self, what: str = "%j") -> list[str]:
        """Return what squeue says of each job that waits, runs or ends."""
        return self.said("squeue", "-h", "-o", what).split()

    def said(self, *command: str, more: Mapping[str, str] | None = None) -> str:
        """Return what a command of Slurm prints; it finds `more` in its environment."""
        env = {**self.env, **(more or {}), "SLURM_CONF": str(self.folder / "slurm.conf")}
        return subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout

    @property
    def env(self) -> Mapping[str, str]:
        """The environment in which commands find it."""
        return {**os.environ, "SLURM_CONF": str(self.folder / "slurm.conf")}


@contextmanager
def slurm(folder: Path, *partitions: str) -> Iterator[Slurm]:
    """Run one for as long as the block lasts; skip the test where it is not installed.

    It ends with this process, too, however that ends.

    Args:
        folder: Made for it, and removed.
        partitions: `NAME=NODES` each.
    """
    programs = ("slurmctld", "slurmd", "munged", "srun", "sbatch")
    if missing := [name for name in programs if shutil.which(name, path=ADMIN_PATH) is None]:
        pytest.skip(f"no Slurm here: {', '.join(missing)}; apt-get install slurm-wlm munge")
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), "hold", str(folder), *partitions],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        assert process.stdout.readline().startswith("export SLURM_CONF="), "see what it says above"
        yield Slurm(folder)
    finally:
        process.stdin.close()
        process.stdout.close()
        assert process.wait(WITHIN_S) == 0
