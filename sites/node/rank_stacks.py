"""Finds out what a late rank is doing, from its stack and the kernel."""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass
from pathlib import Path

from isthmus.sites.local.stack_files import SIGNAL, stack_file

_ANSWER_S = 1.0
_LOOK_S = 0.02
_FRAMES = 4
_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')
_STOPPED = ("T", "t")
"""The kernel's state letters for a process stopped by a signal or a debugger."""
_COLLECTIVE = re.compile(r"torch/distributed/|sites/worker/exchange/")
"""Source files in whose functions a rank waits for other ranks."""


@dataclass(frozen=True, slots=True)
class RankStack:
    """The stack and state of one rank."""

    is_stopped: bool
    """Whether the process was stopped by SIGSTOP or a debugger."""
    frames: tuple[str, ...]
    """Top of the main thread's stack, innermost first: `function (file:line)`."""
    path: str
    """File with the stacks of all threads."""

    @property
    def is_in_collective(self) -> bool:
        """Whether the rank waits for other ranks."""
        return any(_COLLECTIVE.search(frame) for frame in self.frames)

    @property
    def doing(self) -> str:
        """Return a description of the rank's activity for people."""
        if self.is_stopped:
            return "its process is stopped (SIGSTOP, or a debugger)"
        return f"it is in {' < '.join(self.frames)}" if self.frames else "it shows no stack"


def look_at(run_folder: Path, rank: int) -> RankStack:
    """Ask a rank for its stacks, and wait a moment for them. Blocks; every error is an answer."""
    path = stack_file(run_folder, rank)
    try:
        with path.open("r", encoding="utf-8", errors="replace") as file:
            pid = int(file.readline())
            file.seek(0, 2)
            if _state_of(pid) in _STOPPED:
                return RankStack(True, (), str(path))
            os.kill(pid, SIGNAL)
            text, deadline_s = "", time.monotonic() + _ANSWER_S
            while time.monotonic() < deadline_s:
                time.sleep(_LOOK_S)
                more = file.read()
                text += more
                if text and not more:
                    break
    except (OSError, ValueError):
        return RankStack(False, (), str(path))
    return RankStack(False, _top_frames(text), str(path))


def is_stopped(run_folder: Path, rank: int) -> bool:
    """Whether a rank's process is stopped, as far as can be seen."""
    try:
        with stack_file(run_folder, rank).open("r", encoding="utf-8", errors="replace") as file:
            return _state_of(int(file.readline())) in _STOPPED
    except (OSError, ValueError):
        return False


def _state_of(pid: int) -> str:
    """Return the kernel's letter for a process's state."""
    stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    return stat.rpartition(")")[2].split()[0]


def _top_frames(text: str) -> tuple[str, ...]:
    """Return the top of the main thread's stack: faulthandler writes that thread last."""
    frames = [
        f"{match[3]} ({match[1]}:{match[2]})"
        for line in text.rstrip().rpartition("hread 0x")[2].splitlines()
        if (match := _FRAME.fullmatch(line))
    ]
    return tuple(frames[:_FRAMES])
