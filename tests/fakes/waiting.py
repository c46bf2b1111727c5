"""Waiting for what nobody tells of, with a deadline."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from tests.fakes.gateway_rank import DEADLINE_S


def wait_for(fact: Callable[[], bool]) -> None:
    """Return once something is so, looking every millisecond."""
    deadline_s, never = time.monotonic() + DEADLINE_S, threading.Event()
    while not fact():
        assert time.monotonic() < deadline_s
        never.wait(0.001)
