"""Polls the stores for requested checkpoints, beside training."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from isthmus.protos.checkpoint.requests import look_every_s, requested_step


class RequestWatch:
    """Polls stores for requests until `close`, each in a thread: one that fails takes its time."""

    def __init__(self, stores: Sequence[str]) -> None:
        """Start the threads."""
        self.step: int | None = None
        """Step after which all ranks save; None: no request."""
        self._closed = threading.Event()
        self._threads = [
            threading.Thread(
                target=self._look, args=(store,), name="isthmus-checkpoint-requests", daemon=True
            )
            for store in stores
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """End the threads."""
        self._closed.set()
        for thread in self._threads:
            thread.join()

    def _look(self, store: str) -> None:
        seen: int | None = None
        while not self._closed.wait(look_every_s(store)):
            step = requested_step(store)
            if step is not None and step != seen:  # an unreachable store withdraws no request
                self.step = seen = step
