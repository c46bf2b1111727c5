"""Starts the coordinator of a run on this machine, detached.

It outlives the command that started it.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from orchestrator.cli.command_errors import CommandError
from orchestrator.interruption import INTERRUPTION
from orchestrator.run_folder.home import LOG, RunFolder
from orchestrator.run_folder.log_files import last_line

START_S = 60.0
"""Imports take a second; on a machine that is busy with training, some more."""
POLL_S = 0.02
STOP_S = 10.0


@contextmanager
def started_coordinator(
    folder: RunFolder,
    topology_path: Path,
    overrides: Sequence[str],
    start_s: float = START_S,
    faults: Sequence[str] = (),
    sites: Sequence[str] = (),
) -> Iterator[str]:
    """Start a coordinator with an agent for each of `sites`; give its address once it listens.

    None: of all sites.

    Leaving the block in peace leaves the coordinator running; an error in the block, Ctrl-C too,
    stops it again: nothing that nobody submitted to is left behind.

    Raises:
        CommandError: it ended, or was not listening after `start_s`; with its log's last line.
    """
    command = [
        *(sys.executable, "-m", "orchestrator.coordinator", "--embedded"),
        *("--topology", str(topology_path)),
        *(word for override in overrides for word in ("--set", override)),
        *("--state", str(folder.path), "--runs", str(folder.path.parent)),
        *("--bind", "127.0.0.1:0"),
        *faults,
        *(word for site in sites for word in ("--site", site)),
    ]
    with INTERRUPTION.holding():
        process = _started(command, folder.path / LOG)
        try:
            yield _wait_until_listening(process, folder, time.monotonic() + start_s)
        except BaseException:
            _stop(process)
            raise


def _started(command: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("ab") as lines:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=lines,
            stderr=lines,
            start_new_session=True,  # a terminal's Ctrl-C and hang-up are not for it
        )


def _wait_until_listening(
    process: subprocess.Popen[bytes], folder: RunFolder, deadline_s: float
) -> str:
    while True:
        ended = process.poll() is not None
        address = folder.living_coordinator()
        if address is not None and not ended:
            return address
        if ended or time.monotonic() > deadline_s:
            how = f"ended with status {process.returncode}" if ended else "does not listen"
            log = folder.path / LOG
            raise CommandError(
                "COORDINATOR_LOST",
                f"the coordinator {how}: {last_line(log)}",
                {"run_id": folder.run_id, "log_path": str(log)},
            )
        INTERRUPTION.check()
        time.sleep(POLL_S)


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(STOP_S)
