"""Processes that a test started, and all that those started.

Found by a mark in their environment.
"""

from __future__ import annotations

import os
import signal
import uuid
from dataclasses import dataclass, field
from pathlib import Path

from tests.fakes.waiting import DEADLINE_S, PROCESSES_S, wait_for

_MARK = "ISTHMUS_TEST_MARK"


@dataclass
class MarkedProcesses:
    """Those with one mark. Whoever starts the first gives it `env`; descendants inherit it."""

    mark: str = field(default_factory=lambda: uuid.uuid4().hex)

    @property
    def env(self) -> dict[str, str]:
        """This process's environment, and the mark."""
        return {**os.environ, _MARK: self.mark}

    def living(self) -> dict[int, str]:
        """Return their command lines, by pid."""
        found, mark = {}, f"{_MARK}={self.mark}".encode()
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                environ = _read(entry / "environ").split(b"\0")
                if mark in environ and (command := _read(entry / "cmdline")):
                    found[int(entry.name)] = command.replace(b"\0", b" ").decode(errors="replace")
        return found

    def pids(self, *words: str) -> list[int]:
        """Return whose command line holds all `words`, lowest first."""
        # A leash becomes its command, so the words never match it for longer than an instant.
        # So does a child that is still a copy of its parent.
        living = self.living()
        return sorted(
            pid
            for pid, command in living.items()
            if all(word in command for word in words)
            and "isthmus.sites.leash" not in command
            and living.get(_parent(pid)) != command
        )

    def wait_gone(self, within_s: float = DEADLINE_S) -> None:
        """Wait until none lives: strangers' processes, so there is nothing to wait on."""
        wait_for(lambda: not self.living(), self._left, within_s, PROCESSES_S)

    def kill(self) -> None:
        """SIGKILL all, and those that they start meanwhile, until none lives."""

        def gone() -> bool:
            left = self.living()
            for pid in left:
                kill_if_there(pid)
            return not left

        wait_for(gone, self._left, DEADLINE_S, PROCESSES_S)

    def _left(self) -> str:
        return f"the end of {self.living()}"


def kill_if_there(pid: int) -> None:
    """SIGKILL a process that may have ended."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _parent(pid: int) -> int:
    """Return a process's parent; 0 of one that has ended."""
    fields = _read(Path(f"/proc/{pid}/stat")).rpartition(b")")[2].split()
    return int(fields[1]) if fields else 0


def _read(path: Path) -> bytes:
    """Return a file of a process; of one that has ended, nothing."""
    try:
        return path.read_bytes()
    except OSError:
        return b""
