"""Times of calls, sizes of processes, and lists of numbers as options have them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import psutil


def times_s(work: Callable[[], object], num_calls: int) -> list[float]:
    """Return how long each of some calls takes."""
    taken_s = []
    for _ in range(num_calls):
        began_s = time.perf_counter()
        work()
        taken_s.append(time.perf_counter() - began_s)
    return taken_s


def best_s(work: Callable[[], object], seconds: float) -> float:
    """Return the shortest of as many calls as fit into `seconds`."""
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        best = min(best, *times_s(work, 2))
    return best


def rss_bytes(pids: Iterable[int]) -> int:
    """Return the memory of the largest of some processes."""
    return max(psutil.Process(pid).memory_info().rss for pid in pids)


def numbers(text: str) -> list[float]:
    """Return what an option lists, as `20,80`."""
    return [float(number) for number in text.split(",")]
