"""A real Slurm on this machine, with a folder of its own, by tests/tools/slurm_here.py."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.tools import slurm_here
from tests.tools.daemons import held


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
    if missing := slurm_here.missing_programs():
        pytest.skip(missing)
    with held("tests.tools.slurm_here", str(folder), *partitions):
        yield Slurm(folder)
