"""Local search: small changes of one kind after another, each for as long as it helps."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import TypeVar

Item = TypeVar("Item")


def improved(
    begin: Item,
    kinds: Iterable[Callable[[Item], Iterable[Item]]],
    is_better: Callable[[Item, Item], bool],
    most_tries: int,
) -> Item:
    """Return the best that small changes make of `begin`; `begin` itself if none is better.

    Args:
        begin: To change.
        kinds: Of changes: each returns what one change makes of its argument, the most promising
            first. The first that is better is taken.
        is_better: Whether the first of two is better.
        most_tries: The most comparisons.
    """
    best, num_tries = begin, 0
    waiting, num_idle = deque(kinds), 0
    while num_idle < len(waiting):
        for other in waiting[0](best):
            if num_tries >= most_tries:
                return best
            num_tries += 1
            if is_better(other, best):
                best, num_idle = other, 0
                break
        else:
            waiting.rotate(-1)
            num_idle += 1
    return best
