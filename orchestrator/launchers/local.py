"""The launcher of a site on this machine: a child process."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Sequence

from isthmus.orchestrator.launchers.launcher import LaunchError

LINE_BYTES = 64 << 10
WAIT_S = 5.0


class LocalStream:
    """A child process in its own session, which a terminal's Ctrl-C does not reach."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._process = process
        self._stdin, self._stdout = process.stdin, process.stdout

    async def write(self, data: bytes) -> None:
        """Write to its stdin."""
        self._stdin.write(data)
        await self._stdin.drain()

    async def readline(self) -> bytes:
        """Return the next line."""
        return await line_of(self._stdout)

    async def close(self) -> None:
        """End its stdin."""
        self._stdin.close()

    async def wait(self) -> int | None:
        """Return its exit status."""
        return await self._process.wait()

    async def abandon(self) -> None:
        """Terminate it, if it still runs; a killed srun would leave its job in the queue."""
        for signum in (signal.SIGTERM, signal.SIGKILL):
            if self._process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    self._process.send_signal(signum)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._process.wait(), WAIT_S)


class LocalLauncher:
    """Starts processes on this machine."""

    def __init__(self, python: str, prefix: Sequence[str] = ()) -> None:
        """Start nothing yet.

        Args:
            python: The interpreter.
            prefix: Prefix of each command, such as srun.
        """
        self.python = python
        self._prefix = tuple(prefix)

    async def start(self, command: Sequence[str]) -> LocalStream:
        """Start a command.

        Raises:
            LaunchError: the program does not exist.
        """
        words = [*self._prefix, *command]
        try:
            process = await asyncio.create_subprocess_exec(
                *words,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                limit=LINE_BYTES,
                start_new_session=True,
            )
        except OSError as error:
            raise not_found(words[0], error.strerror or "cannot be started") from error
        return LocalStream(process)


def not_found(program: str, why: str) -> LaunchError:
    """Return the error for a missing program."""
    if program in {"srun", "salloc"}:
        return LaunchError(
            "slurm_missing", f"{program}: {why}", "install Slurm's client, or name a host"
        )
    return LaunchError(
        "python_missing",
        f"{program}: {why}",
        "install Python there, and name it as launcher.python in the topology",
    )


async def line_of(reader: asyncio.StreamReader) -> bytes:
    """Return the next line, cut if it is too long."""
    try:
        return await reader.readuntil()
    except asyncio.IncompleteReadError as error:
        return error.partial
    except asyncio.LimitOverrunError as error:
        return await reader.readexactly(error.consumed)
