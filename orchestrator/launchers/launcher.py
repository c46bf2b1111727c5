"""What a launcher answers: start this at the site, give me its stream, end it.

What is started is always `python -m isthmus.sites.tether`, which lives as long as its stdin. So a
launcher knows nothing of agents, secrets or topologies, and ending a stream ends what runs there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from isthmus.protos.errors import IsthmusError


class LaunchError(IsthmusError):
    """A site's process could not be started, or did not become what it should."""

    code = "SITE_NOT_STARTED"

    def __init__(self, reason: str, message: str, cure: str) -> None:
        """Describe it.

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
            OSError: nobody reads any more.
        """

    async def readline(self) -> bytes:
        """Return the next line, at most 64 KiB of it; empty: the stream has ended."""

    async def close(self) -> None:
        """End its stdin. What runs there ends by that."""

    async def wait(self) -> int | None:
        """Return its exit status once it has ended; None: the way to it was lost."""

    async def abandon(self) -> None:
        """Let go of the process at once, whether it has ended or not."""


class Launcher(Protocol):
    """Starts processes at one site."""

    python: str
    """Python there, as the site's topology says."""

    async def start(self, command: Sequence[str]) -> Stream:
        """Start a command.

        Raises:
            LaunchError: it cannot be started.
        """
