"""Keeps a tool that is slow, broken or gone away from everything else."""

from __future__ import annotations

import contextlib
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
        self._waiting: queue.Queue[Update | None] = queue.Queue(max_waiting)
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
        try:
            self._waiting.put_nowait(update)
        except queue.Full:
            with self._lock:
                self._num_missed += 1
                is_new, self._is_behind = not self._is_behind, True
            if is_new:
                self._say(f"{self._name} does not keep up; what it cannot take is dropped", True)

    def finish(self, deadline_s: float) -> None:
        """End once all is handed over, or at a time of the monotonic clock; tell what was lost."""
        with contextlib.suppress(queue.Full):
            self._waiting.put(None, timeout=max(0.0, deadline_s - self._now_s()))
        self._thread.join(max(0.0, deadline_s - self._now_s()))
        with self._lock:
            is_late = self._thread.is_alive()
            left = f", and {self._waiting.qsize()} were left at the end" if is_late else ""
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
                    f"{self._name} takes nothing: {why}; the run goes on without it{last}", True
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
        self._tool.send(update)
        if self._trouble:
            self._trouble = ""
            if self._num_told < MAX_TOLD:
                self._say(f"{self._name} takes what comes again", False)
