"""Owns the streams to coordinator and agents, and restarts those that end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from isthmus.orchestrator.launchers.launcher import Launcher, LaunchError, Stream
from isthmus.orchestrator.launchers.restarts import Restarts
from isthmus.orchestrator.launchers.standing import (
    ENDED,
    FAILED,
    RESTARTING,
    STARTING,
    STATE,
    UNKNOWN,
    UP,
    Part,
    Standing,
)
from isthmus.orchestrator.launchers.tethered import BEAT_S, start
from isthmus.orchestrator.run_folder.rotated_lines import Limits, PartWriter
from isthmus.orchestrator.run_folder.run_files import Failing
from isthmus.protos.errors import IsthmusError
from isthmus.protos.failure import text_of
from isthmus.protos.save_time import LEAVE_S, SAVE_WITHIN_S
from isthmus.topology.spec.tether_messages import Spec

LOG_LIMITS = Limits(part_bytes=16 << 20, num_parts=4)
KEPT_LINES = 20
WRITE_AGAIN_S = 5.0
"""Interval of retries after a write to disk has failed."""
TETHER_S = 5.0
"""Time for a tether to end, beyond that of its command."""
END_S = SAVE_WITHIN_S + LEAVE_S + TETHER_S

log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Kept:
    """A part that is kept up: its name, spec, and sign of readiness."""

    name: str
    launcher: Launcher
    make_spec: Callable[[], Spec]
    """Called at each start, because secrets change."""
    ready: re.Pattern[str]
    """A line that it prints once it is up."""
    greet_s: float
    log_path: Path
    end_s: float = END_S
    """Time for the part to end: an agent first has a last checkpoint written."""
    on_ready: Callable[[re.Match[str]], None] = lambda _: None
    part: Part = field(default_factory=Part)
    stream: Stream | None = None


class Keeper:
    """Starts the parts of a topology, and keeps them up until `stop`."""

    def __init__(self, standing: Standing, folder: Path) -> None:
        """Start nothing yet. The state is written into `folder` at each change."""
        self._standing = standing
        self._folder = folder
        self._kept: list[Kept] = []
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._is_stopping = False
        self._woken = asyncio.Event()
        self._writing = Failing(folder / STATE)
        self._write_again: asyncio.TimerHandle | None = None

    def keep(self, kept: Kept) -> None:
        """Start a part, and start it again whenever it ends, until `stop`."""
        self._kept.append(kept)
        self._standing.parts[kept.name] = kept.part
        self._write()
        task = asyncio.create_task(self._keep(kept), name=f"keep-{kept.name}")
        task.add_done_callback(_tell_mistake)
        self._tasks[kept.name] = task

    def wake(self) -> None:
        """Restart waiting parts at once."""
        self._woken.set()
        self._woken = asyncio.Event()

    async def stop(self) -> None:
        """End all parts, agents before the coordinator that they speak to."""
        self._is_stopping = True
        agents, first = self._kept[1:], self._kept[:1]
        for several in (agents, first):
            await asyncio.gather(*(self._end(kept) for kept in several))
        self._write()

    async def _end(self, kept: Kept) -> None:
        task = self._tasks[kept.name]
        if kept.stream is None:
            task.cancel()
        else:
            await kept.stream.close()
        done, _ = await asyncio.wait([task], timeout=kept.end_s)
        if not done:
            task.cancel()
            await asyncio.wait([task])
        if kept.stream is not None:
            kept.part.state = UNKNOWN
            kept.part.message = f"it has not ended within {kept.end_s:g} s"
            await kept.stream.abandon()
        elif kept.part.state not in {UNKNOWN, FAILED}:
            kept.part.state = ENDED

    async def _keep(self, kept: Kept) -> None:
        """Restart a part whenever it ends; if it was never up, only after `wake`."""
        restarts = Restarts()
        part = kept.part
        while True:
            problem = await self._once(kept)
            if self._is_stopping:
                return
            log.warning("%s: %s", kept.name, problem)
            was_up = part.state == UP or part.restarts > 0
            part.reason, part.message, part.cure = problem.reason, str(problem), problem.cure
            part.state = RESTARTING if was_up else FAILED
            self._write()
            await self._pause(restarts.next_wait_s(time.monotonic()) if was_up else None)
            part.state = RESTARTING
            part.restarts += 1
            self._write()

    async def _pause(self, wait_s: float | None) -> None:
        """Wait for `wait_s`, or until `wake`; None: only until `wake`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._woken.wait()

    async def _once(self, kept: Kept) -> LaunchError:
        """Run a part to its end; return the reason of the end."""
        if kept.part.state != RESTARTING:
            kept.part.state = STARTING
        try:
            kept.stream = stream = await start(kept.launcher, kept.make_spec(), kept.greet_s)
        except LaunchError as error:
            return error
        except IsthmusError as error:
            return LaunchError(
                "bad_secret", str(error), "isthmus certs init, or see the file named"
            )
        except OSError as error:  # for example, a secret cannot be read
            return LaunchError("start_failed", text_of(error), "see the file named")
        if self._is_stopping:  # `stop` was called meanwhile
            await stream.close()
        beating = asyncio.create_task(_beat(stream), name=f"beat-{kept.name}")
        lines: deque[str] = deque(maxlen=KEPT_LINES)
        try:
            await self._read(kept, stream, lines)
            status = await stream.wait()
        finally:
            beating.cancel()
            await asyncio.wait([beating])
        kept.stream = None
        if status is None:
            if self._is_stopping:
                kept.part.state = UNKNOWN
                kept.part.message = "the connection was lost before it had ended"
            return LaunchError(
                "connection_lost", "the connection was lost", "see the network, and sshd there"
            )
        return _ended(status, lines, kept.log_path)

    async def _read(self, kept: Kept, stream: Stream, lines: deque[str]) -> None:
        """Log a part's output, and notice when it is up."""
        writer = PartWriter(kept.log_path, LOG_LIMITS)
        writing = Failing(kept.log_path)
        while line := await stream.readline():
            text = line.decode(errors="replace").rstrip()
            lines.append(text)
            with writing.reported():
                writer.append([f"{text}\n"])
            if (found := kept.ready.search(text)) and not self._is_stopping:
                kept.on_ready(found)
                kept.part.state = UP
                kept.part.reason = kept.part.message = kept.part.cure = ""
                self._write()

    def _write(self) -> None:
        """Write the state of all parts to disk; retry a moment later if that fails."""
        if self._write_again is not None:
            self._write_again.cancel()
            self._write_again = None
        with self._writing.reported():
            self._standing.write(self._folder)
        if self._writing.is_failing:
            again = asyncio.get_running_loop().call_later(WRITE_AGAIN_S, self._write)
            self._write_again = again


def _tell_mistake(task: asyncio.Task[None]) -> None:
    """Log an unexpected error of a part's task."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("%s ended because of a bug", task.get_name(), exc_info=error)


async def _beat(stream: Stream) -> None:
    """Send heartbeats to the other end."""
    try:
        while True:
            await asyncio.sleep(BEAT_S)
            await stream.write(b"\n")
    except OSError:
        return  # the reader notices the end


def _ended(status: int, lines: deque[str], log_path: Path) -> LaunchError:
    """Return an error with a part's last words."""
    said = [each for each in lines if each.strip()]
    told = next((each for each in reversed(said) if each.startswith("error: ")), "")
    hint = next((each for each in reversed(said) if each.startswith("hint: ")), "")
    message = told.removeprefix("error: ") or (said[-1] if said else "it said nothing")
    return LaunchError(
        "ended",
        f"it ended with status {status}: {message}",
        hint.removeprefix("hint: ") or f"see {log_path}",
    )
