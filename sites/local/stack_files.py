"""The file to which a rank writes its threads' stacks when its agent sends a signal.

The rank creates the file when it joins, with its pid as first line. The signal must not be sent to
a process without the file: it would end the process.
"""

from __future__ import annotations

import signal
from pathlib import Path

SIGNAL = signal.SIGRTMIN + 7
"""A signal that scripts and schedulers do not use; SIGUSR1 and SIGUSR2 are theirs."""


def stack_file(run_folder: Path, rank: int) -> Path:
    """Return a rank's file; `run_folder` is its site's."""
    return run_folder / f"stacks-rank{rank}.txt"
