"""Ships a run's log lines to the coordinator, without ever delaying the run.

The files on disk are the buffer (`sites/node/log_files.py`): lines are read only once the previous
ones have been shipped.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Protocol

from isthmus.protos.control.v1.control_pb2 import LogLine, ShipLogsRequest
from isthmus.protos.errors import IsthmusError
from isthmus.protos.limits import LOG_BATCH_BYTES
from isthmus.sites.node.log_files import KEEP_BYTES, Lines

RATE_BYTES_PER_S = 1 << 20
"""Limit on the log bytes shipped per site, over all sources."""
TICK_S = 0.2
_OWN_LINES = 1000
"""Lines of the agent's own log that are kept between two ticks, at most."""

log = logging.getLogger(__name__)


class OwnLines(logging.Handler):
    """Keeps the agent's own log records to be shipped.

    The oldest go first when there are too many.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lines: deque[str] = deque(maxlen=_OWN_LINES)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep one record."""
        self._lines.append(self.format(record))

    def take(self) -> list[str]:
        """Return the records since the last call, one line per record."""
        taken, self._lines = self._lines, deque(maxlen=_OWN_LINES)
        return [line for text in taken for line in text.splitlines()]


class Reader(Protocol):
    """Reads the log files of a node (`isthmus.sites.node.node.Node`)."""

    async def read_logs(self, budget_bytes: int) -> tuple[Lines, int]:
        """Return new lines and their size in bytes, at most the budget."""

    async def read_log_ends(self, first: Sequence[str]) -> Lines:
        """Return the last lines of every source, sources in `first` before others."""


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
        readers: Callable[[], Sequence[Reader]],
    ) -> None:
        """`ship` sends one request, and raises IsthmusError if it did not arrive.

        `readers` returns the site's nodes that exist so far; it is called every tick. The agent's
        `own` lines are another source.
        """
        self._ship = ship
        self._run_id = run_id
        self._generation = generation
        self._site = site
        self._own = own
        self._readers = readers
        self._sequences: dict[str, int] = {}
        self._pending: deque[LogLine] = deque()
        self._allowance_bytes = float(RATE_BYTES_PER_S)
        self._collecting: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Ship until cancelled."""
        while True:
            await asyncio.sleep(TICK_S)
            refill = self._allowance_bytes + TICK_S * RATE_BYTES_PER_S
            self._allowance_bytes = min(refill, RATE_BYTES_PER_S)
            if not self._pending:
                # Lines are read only once, so keep the collecting task even if this one is
                # cancelled.
                self._collecting = asyncio.create_task(self._collect(), name="collect-logs")
                await asyncio.shield(self._collecting)
            await self._send()

    async def finish(self, deadline_s: float, first: Iterable[str] = ()) -> None:
        """Ship the last lines of every source, those of `first` before others, after `run`.

        Lines that do not arrive by `deadline_s` (monotonic) stay in the site's files.
        """
        if self._collecting is not None:
            await self._collecting
        await self._collect_ends(set(first))
        while self._pending and time.monotonic() < deadline_s:
            try:
                async with asyncio.timeout(deadline_s - time.monotonic()):
                    await self._send()
            except TimeoutError:
                break
            if self._pending:
                await asyncio.sleep(min(TICK_S, max(0.0, deadline_s - time.monotonic())))

    async def _collect(self) -> None:
        """Read lines within the byte budget, a fair share of each node."""
        self._add("agent", self._own.take())
        readers = self._readers()
        for place, reader in enumerate(readers):
            share = int(self._allowance_bytes / (len(readers) - place))
            found, read_bytes = await reader.read_logs(share)
            self._allowance_bytes -= read_bytes
            for source, lines in found:
                self._add(source, lines)

    async def _collect_ends(self, first: set[str]) -> None:
        of_nodes = await asyncio.gather(
            *(reader.read_log_ends(sorted(first)) for reader in self._readers())
        )
        waiting, self._pending = self._pending, deque()
        ends = [end for of_node in of_nodes for end in of_node]
        for source, lines in sorted(ends, key=lambda each: each[0] not in first):
            earlier = [line for line in waiting if line.source == source]
            waiting = deque(line for line in waiting if line.source != source)
            self._pending.extend(_latest(earlier))
            self._add(source, lines)
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
        """Ship pending lines; a batch that did not arrive stays first in line."""
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
    """Return the last KEEP_BYTES of waiting lines, so that the end of a source arrives in time."""
    room = KEEP_BYTES
    for place in range(len(lines) - 1, -1, -1):
        room -= lines[place].ByteSize()
        if room < 0:
            gap = LogLine()
            gap.CopyFrom(lines[place])
            gap.text = f"… {place + 1} lines dropped"
            return [gap, *lines[place + 1 :]]
    return lines
