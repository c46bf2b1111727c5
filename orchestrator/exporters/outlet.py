"""Keeps a tool that is slow, broken or gone away from everything else."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

from isthmus.orchestrator.exporters.tool import Tool, Update
from isthmus.protos.failure import reason_of

MAX_WAITING = 256
"""Updates that wait for a tool, at two a second; later ones are dropped."""
MAX_TOLD = 5
"""Times that a tool which fails now and then is told of; what it misses is counted all the same."""
REOPEN_S = 10.0
"""Between two attempts to get a tool ready."""

Say = Callable[[str, bool], None]
"""Tells people a line; True: it is a warning. For any thread."""


class Outlet:
    """Hands updates to one tool, in a thread of its own. `put` never waits and never raises."""

    def __init__(
        self,
        name: str,
        tool: Tool,
        say: Say,
        *,
        max_waiting: int = MAX_WAITING,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start nothing."""
        self._name, self._tool, self._say, self._now_s = name, tool, say, now_s
        self._max_waiting = max_waiting
        self._waiting: queue.Queue[Update | None] = queue.Queue(max_waiting + 1)
        """With room for None, the end."""
        self._thread = threading.Thread(target=self._run, name=f"exporter {name}", daemon=True)
        self._is_open, self._open_at_s = False, 0.0
        self._trouble, self._num_told = "", 0
        self._lock = threading.Lock()
        self._num_missed = 0
        self._is_behind = False

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def put(self, update: Update) -> None:
        """Hand an update over, or drop it if the tool is too slow."""
        if self._waiting.qsize() < self._max_waiting:  # nobody else puts any
            self._waiting.put_nowait(update)
            return
        with self._lock:
            self._num_missed += 1
            is_new, self._is_behind = not self._is_behind, True
        if is_new:
            self._say(f"{self._name} does not keep up; what it cannot take is dropped", True)

    def end(self) -> None:
        """Have it end once all is handed over; nothing is put afterwards."""
        self._waiting.put_nowait(None)

    def wait(self, deadline_s: float) -> None:
        """Wait for the end, until a time of the monotonic clock; tell what was lost."""
        self._thread.join(max(0.0, deadline_s - self._now_s()))
        is_late = self._thread.is_alive()
        left = ", and was not done at the end" if is_late else ""
        if self._num_missed or is_late:
            self._say(f"{self._name} has missed {self._num_missed} updates{left}", True)

    def _fail(self, why: str) -> None:
        """Count what is lost; why is told only until it works again."""
        with self._lock:
            self._num_missed += 1
        if not self._trouble:
            self._num_told += 1
            if self._num_told <= MAX_TOLD:
                last = "; not told again" if self._num_told == MAX_TOLD else ""
                self._say(
                    f"{self._name} gets no data: {why}; the run continues without it{last}", True
                )
        self._trouble = why

    def _run(self) -> None:
        while (update := self._waiting.get()) is not None:
            try:
                self._hand_over(update)
            except Exception as error:  # noqa: BLE001 - a tool's library may raise anything
                self._fail(reason_of(error))
        if self._is_open:
            try:
                self._tool.close()
            except Exception as error:  # noqa: BLE001
                self._say(f"{self._name} may lack the end: {reason_of(error)}", True)

    def _hand_over(self, update: Update) -> None:
        if not self._is_open:
            if self._now_s() < self._open_at_s and not update.is_last:
                self._fail(self._trouble)
                return
            self._open_at_s = self._now_s() + REOPEN_S
            place = self._tool.open()
            self._is_open = True
            self._say(f"{self._name}: {place}", False)
        if self._tool.send(update) and self._trouble:
            self._trouble = ""
            if self._num_told < MAX_TOLD:
                self._say(f"{self._name} gets data again", False)
