"""Polls the store for requested checkpoints, beside training."""

from __future__ import annotations

import threading

from isthmus.protos.checkpoint.requests import look_every_s, requested_step


class RequestWatch:
    """A thread that polls a store for requests until `close`."""

    def __init__(self, store: str) -> None:
        """Start the thread."""
        self.step: int | None = None
        """Step after which all ranks save; None: no request."""
        self._store = store
        self._closed = threading.Event()
        self._thread = threading.Thread(
            target=self._look, name="isthmus-checkpoint-requests", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._closed.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._closed.wait(look_every_s(self._store)):
            step = requested_step(self._store)
            if step is not None:  # an unreachable store withdraws no request
                self.step = step
