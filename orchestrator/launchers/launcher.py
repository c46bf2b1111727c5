"""The interface of launchers, which start a process at a site and return its stream.

The process is always `python -m isthmus.sites.tether`, which lives as long as its stdin. So a
launcher knows nothing of agents, secrets or topologies, and closing a stream ends the process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from isthmus.protos.errors import IsthmusError


class LaunchError(IsthmusError):
    """A site's process could not be started, or did not become ready."""

    code = "SITE_NOT_STARTED"

    def __init__(self, reason: str, message: str, cure: str) -> None:
        """Describe the error.

        Args:
            reason: A word for programs: `host_unreachable`, `python_missing`, ...
            message: One line.
            cure: What to do, as a command where there is one.
        """
        super().__init__(message)
        self.reason = reason
        self.cure = cure


class Stream(Protocol):
    """A process at a site: its stdin, and its stdout and stderr as one."""

    async def write(self, data: bytes) -> None:
        """Write to its stdin.

        Raises:
            OSError: the process has ended, or the connection is lost.
        """

    async def readline(self) -> bytes:
        """Return the next line, at most 64 KiB; empty at the end of the stream."""

    async def close(self) -> None:
        """Close the stdin of the process, which ends it."""

    async def wait(self) -> int | None:
        """Wait for the process and return its exit status; None: the connection was lost."""

    async def abandon(self) -> None:
        """Release the process at once, whether it has ended or not."""


class Launcher(Protocol):
    """Starts processes at one site."""

    python: str
    """Python interpreter at the site."""

    async def start(self, command: Sequence[str]) -> Stream:
        """Start a command.

        Raises:
            LaunchError: the command cannot be started.
        """
