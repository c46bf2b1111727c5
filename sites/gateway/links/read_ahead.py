"""Limits the memory of unread messages over all calls of a process.

A call stops reading once some messages wait (`frame_calls.py`). But there may be hundreds of calls,
and a message has megabytes. So a call asks for room before it reads a message.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

_MOST_BYTES: Final = 1 << 30
"""Default limit. Peers' windows bound the bytes in flight to one gateway: two BDP, 600 MB at 10
Gbit/s and 250 ms."""


class ReadAhead:
    """A shared budget of bytes for unread messages. Use it on one thread only."""

    def __init__(self, most_bytes: int = _MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self.num_bytes = 0
        """Bytes that are taken."""
        self._waiting: dict[Callable[[], None], int] = {}

    def take(self, num_bytes: int) -> bool:
        """Take `num_bytes` if there is room; return whether there was.

        A single message always has room, however long.
        """
        if self._waiting or not self._has_room(num_bytes):
            return False
        self.num_bytes += num_bytes
        return True

    def count(self, num_bytes: int) -> None:
        """Take room for bytes already read: messages of a few KiB, such as acknowledgements."""
        self.num_bytes += num_bytes

    def wait(self, num_bytes: int, go_on: Callable[[], None]) -> None:
        """Call `go_on` once `num_bytes` are free and taken; first come, first served."""
        self._waiting[go_on] = num_bytes

    def give_back(self, num_bytes: int) -> None:
        """Return taken bytes to the budget."""
        self.num_bytes -= num_bytes
        self._serve()

    def give_up(self, go_on: Callable[[], None]) -> None:
        """Cancel a wait."""
        if self._waiting.pop(go_on, None) is not None:
            self._serve()

    def _serve(self) -> None:
        while self._waiting:
            go_on, num_bytes = next(iter(self._waiting.items()))
            if not self._has_room(num_bytes):
                return
            del self._waiting[go_on]
            self.num_bytes += num_bytes
            go_on()

    def _has_room(self, num_bytes: int) -> bool:
        return not self.num_bytes or self.num_bytes + num_bytes <= self._most_bytes
