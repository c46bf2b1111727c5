"""Ships a run's log lines to the coordinator, without ever holding up the run.

The files on disk are the buffer: nothing is read before what was read is shipped. A source that
writes more than the rate allows is read with gaps, and each gap says how many lines it left out.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path

from protos.control.v1.control_pb2 import LogLine, ShipLogsRequest
from protos.disk import Beginning
from protos.errors import IsthmusError
from protos.limits import LOG_BATCH_BYTES, LOG_LINE_BYTES

RATE_BYTES_PER_S = 1 << 20
"""What all sources of a site together may write."""
TICK_S = 0.2
_OWN_LINES = 1000
"""Lines of the agent's own log that are kept between two ticks, at most."""

LAG_BYTES = 1 << 20
"""A reader that is further behind leaves lines out."""
KEEP_BYTES = 128 << 10
"""How much of the end it keeps then."""
_COUNT_BYTES = 1 << 20

log = logging.getLogger(__name__)


class OwnLines(logging.Handler):
    """Keeps the agent's own log records for shipping.

    The oldest go first when there are too many.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lines: deque[str] = deque(maxlen=_OWN_LINES)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep one record."""
        self._lines.append(self.format(record))

    def take(self) -> list[str]:
        """Return what came in since the last call, a line each."""
        taken, self._lines = self._lines, deque(maxlen=_OWN_LINES)
        return [line for text in taken for line in text.splitlines()]


class LogShipper:
    """Ships the log lines of one run at one site."""

    def __init__(
        self,
        ship: Callable[[ShipLogsRequest], Awaitable[object]],
        *,
        run_id: str,
        generation: int,
        site: str,
        own: OwnLines,
        find: Callable[[], Iterable[tuple[str, Path]]],
    ) -> None:
        """`ship` sends one request, and raises IsthmusError when it did not arrive.

        `find` returns the sources' names and files as far as there are any yet; it is asked every
        tick. The agent's `own` lines are another source.
        """
        self._ship = ship
        self._run_id = run_id
        self._generation = generation
        self._site = site
        self._own = own
        self._find = find
        self._tails: dict[Path, tuple[str, Tail]] = {}
        self._sequences: dict[str, int] = {}
        self._pending: deque[LogLine] = deque()
        self._allowance_bytes = float(RATE_BYTES_PER_S)

    async def run(self) -> None:
        """Ship until cancelled."""
        while True:
            await asyncio.sleep(TICK_S)
            refill = self._allowance_bytes + TICK_S * RATE_BYTES_PER_S
            self._allowance_bytes = min(refill, RATE_BYTES_PER_S)
            if not self._pending:
                await asyncio.to_thread(self._collect)
            await self._send()

    async def finish(self, deadline_s: float, first: Iterable[str] = ()) -> None:
        """Ship the end of every source, those that matter most first, when `run` has ended.

        What does not arrive by `deadline_s`, on time.monotonic's clock, stays in the site's files.
        """
        await asyncio.to_thread(self._collect_ends, set(first))
        while self._pending and time.monotonic() < deadline_s:
            try:
                async with asyncio.timeout(deadline_s - time.monotonic()):
                    await self._send()
            except TimeoutError:
                break
            if self._pending:
                await asyncio.sleep(min(TICK_S, max(0.0, deadline_s - time.monotonic())))

    def _discover(self) -> None:
        for source, path in self._find():
            self._tails.setdefault(path, (source, Tail(path)))

    def _collect(self) -> None:
        """Read what the allowance permits, a fair share of each source."""
        self._discover()
        self._add("agent", self._own.take())
        for place, (source, tail) in enumerate(self._tails.values()):
            share = self._allowance_bytes / (len(self._tails) - place)
            if share >= 1:
                tail.free()  # nothing is pending: what was read has been shipped
                lines, read_bytes = tail.read(int(share))
                self._allowance_bytes -= read_bytes
                self._add(source, lines)

    def _collect_ends(self, first: set[str]) -> None:
        self._discover()
        waiting, self._pending = self._pending, deque()
        for source, tail in sorted(self._tails.values(), key=lambda each: each[0] not in first):
            earlier = [line for line in waiting if line.source == source]
            waiting = deque(line for line in waiting if line.source != source)
            self._pending.extend(_latest(earlier))
            self._add(source, tail.finish())
        self._pending.extend(waiting)
        self._add("agent", self._own.take())

    def _add(self, source: str, lines: Iterable[str]) -> None:
        wall_s = time.time()
        for text in lines:
            sequence = self._sequences.get(source, 0)
            self._sequences[source] = sequence + 1
            self._pending.append(
                LogLine(site=self._site, source=source, sequence=sequence, wall_s=wall_s, text=text)
            )

    async def _send(self) -> None:
        """Ship what is pending; a batch that did not arrive stays first in line."""
        while self._pending:
            request, count = self._batch()
            try:
                await self._ship(request)
            except IsthmusError as error:
                log.debug("log lines not shipped: %s", error)
                return
            for _ in range(count):
                self._pending.popleft()

    def _batch(self) -> tuple[ShipLogsRequest, int]:
        request = ShipLogsRequest(run_id=self._run_id, generation=self._generation, site=self._site)
        room = LOG_BATCH_BYTES - request.ByteSize()
        for count, line in enumerate(self._pending):
            room -= line.ByteSize() + 4  # and its tag and length
            if room < 0:
                return request, count
            request.lines.append(line)
        return request, len(self._pending)


def _latest(lines: list[LogLine]) -> list[LogLine]:
    """Return the last KEEP_BYTES of lines that wait: the end of a source is to arrive in time."""
    room = KEEP_BYTES
    for place in range(len(lines) - 1, -1, -1):
        room -= lines[place].ByteSize()
        if room < 0:
            gap = LogLine()
            gap.CopyFrom(lines[place])
            gap.text = f"… {place + 1} lines dropped"
            return [gap, *lines[place + 1 :]]
    return lines


class Tail:
    """Reads one file from its beginning. Never loads more than it was allowed to."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0
        self._rest = b""
        self._cut_bytes = 0
        self._beginning = Beginning(path)

    def free(self) -> None:
        """Give back the disk space of what was read long ago: processes write for weeks."""
        self._beginning.free(self._offset)

    def read(self, budget_bytes: int) -> tuple[list[str], int]:
        """Return the complete lines in the next `budget_bytes` bytes, and how many bytes were read.

        A file that is not there (yet) has no lines.
        """
        try:
            with self.path.open("rb") as file:
                skipped = self._catch_up(file.fileno(), LAG_BYTES)
                data = os.pread(file.fileno(), budget_bytes, self._offset)
        except OSError:
            return [], 0
        self._offset += len(data)
        return skipped + self._lines(data), len(data)

    def finish(self) -> list[str]:
        """Return what is left, at most the last KEEP_BYTES of it, with an unfinished line."""
        try:
            with self.path.open("rb") as file:
                skipped = self._catch_up(file.fileno(), KEEP_BYTES)
        except OSError:
            return []
        lines, _ = self.read(KEEP_BYTES)
        rest = [self._text(self._rest)] if self._rest else []
        self._rest = b""
        return skipped + lines + rest

    def _catch_up(self, descriptor: int, lag_bytes: int) -> list[str]:
        """Go to a line near the end when too much is unread; say how many were left out."""
        end = os.fstat(descriptor).st_size
        if end - self._offset <= lag_bytes:
            return []
        dropped = 0
        target = end - KEEP_BYTES
        while self._offset < target:
            data = os.pread(descriptor, min(_COUNT_BYTES, target - self._offset), self._offset)
            if not data:
                break
            self._offset += len(data)
            dropped += data.count(b"\n")
        # The line in which the target lies is incomplete: its rest goes too.
        data = os.pread(descriptor, KEEP_BYTES, self._offset)
        self._offset += data.find(b"\n") + 1
        self._rest, self._cut_bytes = b"", 0
        return [f"… {dropped + 1} lines dropped"]

    def _lines(self, data: bytes) -> list[str]:
        """Return the lines that `data` completes; keep the unfinished one, in bounded space."""
        *complete, rest = data.split(b"\n")
        lines = []
        for piece in complete:
            self._keep(piece)
            lines.append(self._text(self._rest))
            self._rest, self._cut_bytes = b"", 0
        self._keep(rest)
        return lines

    def _keep(self, piece: bytes) -> None:
        room = LOG_LINE_BYTES - len(self._rest)
        self._rest += piece[:room]
        self._cut_bytes += max(0, len(piece) - room)

    def _text(self, line: bytes) -> str:
        text = line.decode(errors="replace").rstrip("\r")
        return f"{text}… [{self._cut_bytes} bytes cut]" if self._cut_bytes else text
