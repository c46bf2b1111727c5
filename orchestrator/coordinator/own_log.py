"""What a coordinator itself logs: kept among its run's logs, and bounded where it goes to a file.

An embedded coordinator, its agents and its emulator write to one file, coordinator.log, which
errors quote. Of that the end stays on the disk. What the coordinator says while a run goes on is
also one of the run's logs, in parts like all of them, so that whoever reads these reads it, too,
from wherever.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from pathlib import Path

from isthmus.orchestrator.coordinator.active_run import ActiveRun
from isthmus.protos.disk import Beginning

LOOK_S = 10.0
"""Between two looks at a file's size."""


class OwnLines(logging.Handler):
    """Appends log records to the logs of the run that is going on."""

    def __init__(self, run: Callable[[], ActiveRun | None]) -> None:
        """Keep nothing yet."""
        super().__init__(logging.INFO)
        self._run = run

    def emit(self, record: logging.LogRecord) -> None:
        """Keep one record; a disk that refuses is told of elsewhere."""
        run = self._run()
        if run is not None and not run.has_ended:
            with contextlib.suppress(OSError):
                run.logs.append_own(self.format(record).splitlines())


async def bound(path: Path) -> None:
    """Keep the end of a growing file on the disk, and give back the rest. Never returns."""
    beginning = Beginning(path)
    while True:
        beginning.free_written()
        await asyncio.sleep(LOOK_S)
