"""The event loop on which all streams of a gateway run, as tasks on one thread.

With a thread per stream, each frame woke seven of them in turn, and each had to get the
interpreter's lock from the previous one. On a machine with few cores that cost more than carrying
the frame. One loop serves all links of all gateways of a process.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, ClassVar, TypeVar

_JOIN_S = 5.0
_END_S = 2.0

Result = TypeVar("Result")


class WireLoop:
    """An event loop on a thread of its own.

    `acquire` the loop, and `release` it once no work of the caller runs there.
    """

    _shared: ClassVar[WireLoop | None] = None
    _num_users: ClassVar[int] = 0
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
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

    def call(self, function: Callable[[], None]) -> None:
        """Call `function` on the loop soon; may be called from any thread.

        Does nothing once the loop has ended.
        """
        with contextlib.suppress(RuntimeError):
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
