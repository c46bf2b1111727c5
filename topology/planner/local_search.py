"""Local search: applies small changes, one kind after another, while they improve."""

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
    """Return the best item reachable from `begin` by improving changes.

    Args:
        begin: Start of the search.
        kinds: Kinds of changes. A kind returns the results of single changes, the most promising
            first; the first better one is taken.
        is_better: Whether the first argument is better than the second.
        most_tries: Limit on comparisons.
    """
    best, num_tries = begin, 0
    waiting, num_idle = deque(kinds), 0
    while num_idle < len(waiting) and num_tries < most_tries:
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
