"""Has one run exported to where its job says, by a process that follows its files.

The coordinator hands nothing over and waits for nothing: it starts the process, passes on what it
says for people, and ends it. orchestrator/exporters has the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Callable
from pathlib import Path

from isthmus.orchestrator.coordinator.journal import JournalError
from isthmus.protos.failure import one_line, reason_of
from isthmus.protos.own_processes import own_command

MODULE = "isthmus.orchestrator.exporters"
END_S = 30.0
"""Time for the process to end by itself; more than it takes for itself."""

log = logging.getLogger(__name__)


class Exporting:
    """Owns at most one process, from `begin` until the run's end or `close`."""

    def __init__(
        self, run_id: str, folder: Path, state: Path, on_trouble: Callable[[str], None]
    ) -> None:
        """Start nothing.

        Args:
            run_id: The run.
            folder: Its folder.
            state: The coordinator's, with the journal.
            on_trouble: Told what people should know, from the event loop.
        """
        self._command = own_command(
            MODULE, "--run", run_id, "--folder", str(folder), "--state", str(state)
        )
        self._on_trouble = on_trouble
        self._task: asyncio.Task[None] | None = None
        self._process: asyncio.subprocess.Process | None = None

    def begin(self) -> None:
        """Start the process. A second call changes nothing."""
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="exporters")

    async def close(self) -> None:
        """Have the process finish, and return when it has ended. Idempotent."""
        if self._task is None:
            return
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
        await asyncio.wait([self._task], timeout=END_S)
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _run(self) -> None:
        try:
            await self._follow()
        except JournalError:
            return  # whoever lets time pass raises it
        except OSError as error:
            self._on_trouble(f"exporters: no process for them: {error.strerror or error}")
        except Exception as error:
            log.exception("nothing is exported, by a mistake of ours")
            self._on_trouble(f"exporters: {reason_of(error)}")

    async def _follow(self) -> None:
        """Pass on what the process says, until it has ended."""
        process = self._process = await asyncio.create_subprocess_exec(
            *self._command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
        )
        try:
            assert process.stdout is not None
            while line := await process.stdout.readline():
                told = json.loads(line)
                text = f"exporter {one_line(told['text'])}"
                if told["is_warning"]:
                    self._on_trouble(text)
                else:
                    log.info("%s", text)
            if status := await process.wait():
                self._on_trouble(f"exporters: their process ended with status {status}")
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
