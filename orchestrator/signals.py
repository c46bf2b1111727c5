"""How a process that serves is told to end: SIGTERM or Ctrl-C once, and twice when it takes too long."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def first_signal() -> Iterator[asyncio.Future[int]]:
    """Give what the first SIGTERM or SIGINT resolves; a second one ends the process at once."""
    loop = asyncio.get_running_loop()
    first: asyncio.Future[int] = loop.create_future()

    def on_signal(signum: int) -> None:
        if first.done():
            os._exit(128 + signum)
        first.set_result(signum)

    signals = (signal.SIGTERM, signal.SIGINT)
    for each in signals:
        loop.add_signal_handler(each, on_signal, int(each))
    try:
        yield first
    finally:
        for each in signals:
            loop.remove_signal_handler(each)
