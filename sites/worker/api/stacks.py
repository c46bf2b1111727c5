"""Lets a rank's agent see what its threads are doing, whatever they do."""

from __future__ import annotations

import faulthandler
import logging
import os
from pathlib import Path

from isthmus.sites.local.stack_files import SIGNAL, stack_file

log = logging.getLogger(__name__)


def write_stacks_on_signal(run_folder: Path, rank: int) -> None:
    """Write the stacks of all threads into a file at each SIGNAL, from now to the process's end."""
    path = stack_file(run_folder, rank)
    try:
        file = path.open("w", encoding="utf-8")  # open as long as the process
        file.write(f"{os.getpid()}\n")
        file.flush()
        # Written by the signal's own handler: it needs neither the interpreter nor its lock.
        faulthandler.register(SIGNAL, file=file, all_threads=True, chain=False)
    except OSError as error:  # a full disk: a hang would be named without its stack
        log.warning("%s: %s", path, error.strerror)
