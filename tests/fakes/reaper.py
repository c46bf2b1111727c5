"""Ends what tests started, once pytest is gone that could not clean up itself, as after SIGKILL.

Usage: python reaper.py MARK, with a pipe from pytest as its standard input.

What it ends has MARK in its environment: children inherit that wherever they go, agents and
coordinators that outlive whoever started them, too.
"""

import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

MARK = "ISTHMUS_TESTS"
ROUNDS = 20
"""While one is ended, it may start another: at most so many times."""


def begin() -> subprocess.Popen[bytes] | None:
    """Mark what is started from here on, and start its reaper; None where that is done already.

    Who ends well writes a byte to its standard input: then nothing is to be ended.
    """
    if MARK in os.environ:
        return None
    mark = uuid.uuid4().hex
    reaper = subprocess.Popen(
        [sys.executable, __file__, f"{MARK}={mark}"],
        stdin=subprocess.PIPE,
        start_new_session=True,
    )
    os.environ[MARK] = mark
    return reaper


def reap(mark: str) -> None:
    """Kill all processes that have it in their environment, and what they start meanwhile."""
    marked = mark.encode()
    for _ in range(ROUNDS):
        pids = [
            int(each.name)
            for each in Path("/proc").iterdir()
            if each.name.isdigit() and marked in _environment(each)
        ]
        if not pids:
            return
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue


def _environment(process: Path) -> list[bytes]:
    try:
        return (process / "environ").read_bytes().split(b"\0")
    except OSError:
        return []  # it has ended, or is another user's


if __name__ == "__main__":
    if not sys.stdin.buffer.read(1):
        reap(sys.argv[1])
