"""A probe in a process of its own: started, told and heard by the check."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator
from typing import Any

from orchestrator.emulator.backend import EmulatorError

ANSWER_S = 120.0


class ProbeProcess:
    """One end of what is measured."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.host = ""
        self.port = 0
        self.datagram_port = 0

    async def serve(self, host: str) -> None:
        """Listen at an address of the place where it runs."""
        answer = await self.ask(op="serve", host=host)
        self.host, self.port, self.datagram_port = host, answer["port"], answer["datagram_port"]

    async def ask(self, **message: Any) -> dict[str, Any]:  # noqa: ANN401 - JSON values
        """Tell it something and return its answer.

        Raises:
            EmulatorError: it has ended, or could not.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(ANSWER_S):
                self._process.stdin.write(json.dumps(message).encode() + b"\n")
                await self._process.stdin.drain()
                line = await self._process.stdout.readline()
        except (TimeoutError, ConnectionError):
            line = b""
        answer = json.loads(line) if line else {"error": "it does not answer"}
        if "error" in answer:
            raise EmulatorError(f"a probe could not {message['op']}: {answer['error']}")
        assert isinstance(answer, dict)
        return answer


@contextlib.asynccontextmanager
async def running_probe(enter: tuple[str, ...]) -> AsyncIterator[ProbeProcess]:
    """Run a probe while the block does.

    Args:
        enter: Words for sites.leash that lead it into a site; empty: it stays here.
    """
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "sites.leash", str(os.getpid()), *enter, "--"),
        *(sys.executable, "-m", "orchestrator.emulator.probe"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        yield ProbeProcess(process)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
