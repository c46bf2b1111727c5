"""What calls may hold of messages that nobody has taken yet: all calls of a process together.

Each call is read no further once some messages wait (`frame_calls.py`). But there may be hundreds
of calls, and a message has megabytes. So a call asks for a message's room before it reads it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

_MOST_BYTES: Final = 1 << 30
"""What peers have on their way to one gateway is bounded by their windows: twice the product of
rate and round trip, 600 MB at 10 Gbit/s and 250 ms."""


class ReadAhead:
    """Room for messages. Of one thread alone."""

    def __init__(self, most_bytes: int = _MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self.num_bytes = 0
        """What was given."""
        self._waiting: dict[Callable[[], None], int] = {}

    def take(self, num_bytes: int) -> bool:
        """Return whether there is room, and count it as taken then.

        One message always has it, however long.
        """
        if self._waiting or not self._has_room(num_bytes):
            return False
        self.num_bytes += num_bytes
        return True

    def count(self, num_bytes: int) -> None:
        """Count what has come already: messages of a few KiB, acknowledgements among them."""
        self.num_bytes += num_bytes

    def wait(self, num_bytes: int, go_on: Callable[[], None]) -> None:
        """Call `go_on` once there is room, which is taken then; the first who wait come first."""
        self._waiting[go_on] = num_bytes

    def give_back(self, num_bytes: int) -> None:
        """Let others have what was taken."""
        self.num_bytes -= num_bytes
        self._serve()

    def give_up(self, go_on: Callable[[], None]) -> None:
        """Wait no longer."""
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
