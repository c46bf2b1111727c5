"""Waits for a saving thread, and reports meanwhile that training does not hang."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

TELL_EVERY_S = 1.0
PATIENCE_S = 600.0
"""Longest wait. A slower store or device counts as hanging, and the rank as stalled."""


def join_patiently(
    thread: threading.Thread, tell: Callable[[], None], within_s: float = PATIENCE_S
) -> None:
    """Wait for a thread to end, for at most `within_s`; call `tell` every second."""
    until_s = time.monotonic() + within_s
    while thread.is_alive() and time.monotonic() < until_s:
        tell()
        thread.join(TELL_EVERY_S)


def wait_patiently(event: threading.Event, tell: Callable[[], None]) -> None:
    """Wait for an event; call `tell` every second, for at most PATIENCE_S."""
    until_s = time.monotonic() + PATIENCE_S
    while not event.wait(TELL_EVERY_S) and time.monotonic() < until_s:
        tell()
    event.wait()
