"""A few threads that work on chunks, the earliest chunk first.

The codecs' loops, zstd and checksums release the interpreter's lock, so a few threads keep as many
cores busy.
"""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Callable

Priority = tuple[int, int, int]
"""Round, bucket, chunk."""
_JOIN_S = 5.0


class Pool:
    """Runs short work that never blocks. Its queue is bounded by what its callers admit."""

    def __init__(self, num_threads: int) -> None:
        self._condition = threading.Condition()
        self._heap: list[tuple[Priority, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._closed = False
        self._threads = [
            threading.Thread(target=self._work, name=f"pool-{index}", daemon=True)
            for index in range(num_threads)
        ]

    def start(self) -> None:
        """Start the threads."""
        for thread in self._threads:
            thread.start()

    def submit(self, priority: Priority, work: Callable[[], None]) -> None:
        """Run `work` soon, or never after `close`. Equal priorities run in order of submission.

        `work` reports its own errors.
        """
        with self._condition:
            heapq.heappush(self._heap, (priority, next(self._order), work))
            self._condition.notify()

    def close(self) -> None:
        """Drop what has not begun and wait for what has. May be called from a pool thread."""
        with self._condition:
            self._closed = True
            self._heap.clear()
            self._condition.notify_all()
        for thread in self._threads:
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join(_JOIN_S)

    def _work(self) -> None:
        while True:
            with self._condition:
                while not self._heap and not self._closed:
                    self._condition.wait()
                if self._closed:
                    return
                _, _, work = heapq.heappop(self._heap)
            work()
            del work  # holds a chunk's memory
