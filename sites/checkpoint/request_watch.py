"""Looks now and then whether a checkpoint is asked for, beside training."""

from __future__ import annotations

import threading

from isthmus.protos.checkpoint.requests import look_every_s, requested_step


class RequestWatch:
    """A thread that looks into a store until `close`."""

    def __init__(self, store: str) -> None:
        """Start to look."""
        self.step: int | None = None
        """After which all ranks save."""
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
            if step is not None:  # a store that does not answer takes no request back
                self.step = step
