"""Where a rank writes what its threads are doing, when its agent asks by a signal.

The rank makes the file when it joins. Its first line is its process's number. Nobody may send the
signal to a process that has made none: it would end it.
"""

from __future__ import annotations

import signal
from pathlib import Path

SIGNAL = signal.SIGRTMIN + 7
"""One that scripts and schedulers leave alone; SIGUSR1 and SIGUSR2 are theirs."""


def stack_file(run_folder: Path, rank: int) -> Path:
    """Return a rank's file; `run_folder` is its site's."""
    return run_folder / f"stacks-rank{rank}.txt"
