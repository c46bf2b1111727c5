"""Training waits for a thread that saves, and says meanwhile that it does not hang."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

TELL_EVERY_S = 1.0
PATIENCE_S = 600.0
"""A store or device that takes longer hangs, and the rank that waits for it is named as stalled."""


def join_patiently(
    thread: threading.Thread, tell: Callable[[], None], within_s: float = PATIENCE_S
) -> None:
    """Return once a thread has ended, or after `within_s`; `tell` is called every second."""
    until_s = time.monotonic() + within_s
    while thread.is_alive() and time.monotonic() < until_s:
        tell()
        thread.join(TELL_EVERY_S)


def wait_patiently(event: threading.Event, tell: Callable[[], None]) -> None:
    """Return once an event is set; `tell` is called every second, for PATIENCE_S at most."""
    until_s = time.monotonic() + PATIENCE_S
    while not event.wait(TELL_EVERY_S) and time.monotonic() < until_s:
        tell()
    event.wait()
