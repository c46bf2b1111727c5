"""The event loop on which all streams of a gateway run, as tasks on one thread.

With a thread per stream, each frame woke seven of them in turn, and each had to get the
interpreter's lock from the previous one. On a machine with few cores that cost more than carrying
the frame. One loop serves all links of all gateways of a process.

On a busy link something happens every few dozen microseconds, and each time the loop is woken costs
about as much. So it rests between two turns, for a small part of the shortest round trip: what
happens meanwhile is done in one turn.
"""

from __future__ import annotations

import asyncio
import contextlib
import selectors
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, ClassVar, TypeVar

_JOIN_S = 5.0
_END_S = 2.0

_REST_SHARE = 0.1
_REST_MIN_S = 0.0002
_REST_MAX_S = 0.002
"""Rest between two turns: this part of the shortest round trip, and at most this long. At 1 Gbit/s,
250 KB come in the longest; the kernel keeps as much that is still to be sent. Below the minimum a
rest costs more than it saves."""

Result = TypeVar("Result")


class _Selector(selectors.EpollSelector):
    """Waits for events no more often than each `rest_s`, unless nothing has happened for longer."""

    def __init__(self) -> None:
        super().__init__()
        self.rest_s = 0.0
        self._woke_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Return the sockets that are ready."""
        if self.rest_s and (timeout is None or timeout > 0):
            time.sleep(max(0.0, self._woke_s + self.rest_s - time.monotonic()))
            ready = super().select(timeout)
            self._woke_s = time.monotonic()
            return ready
        return super().select(timeout)


class WireLoop:
    """An event loop on a thread of its own.

    `acquire` the loop, and `release` it once no work of the caller runs there.
    """

    _shared: ClassVar[WireLoop | None] = None
    _num_users: ClassVar[int] = 0
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self) -> None:
        self._selector = _Selector()
        self.loop = asyncio.SelectorEventLoop(self._selector)
        self._rtts_s: dict[object, float] = {}
        self._thread = threading.Thread(target=self._run, name="wire", daemon=True)

    @classmethod
    def acquire(cls) -> WireLoop:
        """Return the process's loop; the first call starts it."""
        with cls._lock:
            if cls._shared is None:
                cls._shared = cls()
                cls._shared._thread.start()
            cls._num_users += 1
            return cls._shared

    @classmethod
    def release(cls) -> None:
        """Release the loop; the last release ends it. Not on the loop's own thread."""
        with cls._lock:
            cls._num_users -= 1
            if cls._num_users or cls._shared is None:
                return
            ended, cls._shared = cls._shared, None
            ended.loop.call_soon_threadsafe(ended.loop.stop)
            ended._thread.join(_JOIN_S)

    def carry(self, user: object, rtt_s: float | None) -> None:
        """Note the round trip of a link that is carried here; None: it is no longer."""
        with self._lock:
            self._rtts_s.pop(user, None)
            if rtt_s is not None:
                self._rtts_s[user] = rtt_s
            rest_s = min(_REST_MAX_S, _REST_SHARE * min(self._rtts_s.values(), default=0.0))
            self._selector.rest_s = rest_s if rest_s >= _REST_MIN_S else 0.0

    @property
    def rest_s(self) -> float:
        """How long the loop rests between two turns."""
        return self._selector.rest_s

    def call(self, function: Callable[[], None]) -> None:
        """Call `function` on the loop soon; may be called from any thread.

        Does nothing once the loop has ended.
        """
        with contextlib.suppress(RuntimeError):
            if threading.get_ident() == self._thread.ident:
                self.loop.call_soon(function)
            else:
                self.loop.call_soon_threadsafe(function)

    def run(self, work: Coroutine[Any, Any, Result]) -> Future[Result]:
        """Run a coroutine on the loop; may be called from any thread."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
            self.loop.run_until_complete(_end_tasks())
        finally:
            self.loop.close()


async def _end_tasks() -> None:
    """Cancel remaining tasks and wait; otherwise asyncio warns of them at exit."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=_END_S)
