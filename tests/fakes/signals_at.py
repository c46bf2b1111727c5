"""Signals at chosen moments of the main thread, without luck.

At its n-th line, wherever that is.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TypeAlias

TraceFunction: TypeAlias = "Callable[[FrameType, str, object], TraceFunction | None]"

_ONLY_COMPUTES = ("/yaml/", "/topology/", "/re/", "/dataclasses.py")
"""Nine tenths of the lines of a launch.

Nothing is held or waited for there, and counting takes a second.
"""


class SignalAt:
    """Counts the main thread's lines while it has a handler; sends it one signal at one of them."""

    def __init__(self, line: int | None, signum: int) -> None:
        self.num_lines = 0
        self._line = line
        self._signum = signum
        self._before = signal.getsignal(signum)
        self._is_sent = threading.Lock()

    def send(self) -> None:
        """Send the signal to the main thread, unless it was sent; for any thread."""
        if self._is_sent.acquire(blocking=False):
            main = threading.main_thread().ident
            assert main is not None
            signal.pthread_kill(main, self._signum)

    def trace(self, frame: FrameType, event: str, _: object) -> TraceFunction | None:
        """Be told of a line, as `sys.settrace` tells it."""
        if event == "call" and any(part in frame.f_code.co_filename for part in _ONLY_COMPUTES):
            return None
        if event == "line" and signal.getsignal(self._signum) is not self._before:
            self.num_lines += 1
            if self.num_lines == self._line and self._is_sent.acquire(blocking=False):
                signal.raise_signal(self._signum)  # its handler runs before this returns
        return self.trace


@contextmanager
def signal_at(line: int | None, signum: int) -> Iterator[SignalAt]:
    """Send `signum` at the block's line of that number; None: only count.

    No other trace is lost.
    """
    sender = SignalAt(line, signum)
    before = sys.gettrace()
    sys.settrace(sender.trace)
    try:
        yield sender
    finally:
        sys.settrace(before)
