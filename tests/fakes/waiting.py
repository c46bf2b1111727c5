"""Waiting for what nobody tells of, with a deadline."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator

DEADLINE_S = 60.0
LOOK_S = 0.001
PROCESSES_S = 0.02
"""Between two looks at all processes of the machine: one costs milliseconds."""


def wait_for(
    fact: Callable[[], bool],
    what: str | Callable[[], str] = "it",
    within_s: float = DEADLINE_S,
    look_s: float = LOOK_S,
) -> None:
    """Return once something is so; fail with what is missing at the deadline.

    Args:
        fact: whether it is.
        what: is waited for, or who says more about it then.
        within_s: the deadline.
        look_s: from one look to the next.
    """
    never = threading.Event()
    for _ in _looks(fact, what, within_s):
        never.wait(look_s)


async def until(
    fact: Callable[[], bool],
    what: str | Callable[[], str] = "it",
    within_s: float = DEADLINE_S,
    look_s: float = LOOK_S,
) -> None:
    """Do as `wait_for`, and let others go on meanwhile."""
    for _ in _looks(fact, what, within_s):
        await asyncio.sleep(look_s)


def _looks(
    fact: Callable[[], bool], what: str | Callable[[], str], within_s: float
) -> Iterator[None]:
    deadline_s = time.monotonic() + within_s
    while not fact():
        if time.monotonic() >= deadline_s:
            said = what if isinstance(what, str) else what()
            raise AssertionError(f"not within {within_s} s: {said}")
        yield
