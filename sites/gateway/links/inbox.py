"""The messages of a call that have come and were not read yet.

They take room in a budget which all calls of the process share (`read_ahead.py`). Without room the
call is read no further until there is some.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

from isthmus.sites.gateway.links.read_ahead import ReadAhead

Taker = Callable[[memoryview], bytes | None]
"""Takes a message, and returns the answer to it, if there is one."""

_MESSAGES_MAX: Final = 4
"""A call with this many unread messages is read no further."""
_AHEAD_BYTES_MAX: Final = 64 << 20
"""Limit on bytes read ahead from a peer that makes no room for ours: its window update lies behind
the messages that it sent before."""
_READ_AHEAD: Final = ReadAhead()
"""Room for unread messages, shared by all calls; they run on one thread (`wire_loop.py`)."""
_MESSAGE_COST_BYTES: Final = 512
"""Memory of a message beside its bytes, a high estimate."""


class Inbox:
    """The unread messages of one call."""

    def __init__(self) -> None:
        self.taker: Taker | None = None
        """Takes messages as they come."""
        self.untaken: Exception | None = None
        """The taker's exception; no message is taken after it."""
        self.is_blocked = False
        """The peer makes no room for our messages: all of its own are read, until it does."""
        self.is_closed = False
        """Nobody takes messages yet, or any more."""
        self._messages: deque[memoryview] = deque()
        self._num_bytes = 0
        """Bytes of the unread messages."""
        self._held_bytes = 0
        """Bytes taken of the shared room."""
        self._awaited_bytes = 0
        """Bytes that are waited for in the shared room; 0: none."""
        self._on_room: Callable[[], None] | None = None
        """Called when awaited room is granted; None: none is awaited."""
        self._room = _READ_AHEAD

    def __len__(self) -> int:
        return len(self._messages)

    @property
    def wants_more(self) -> bool:
        """Whether the call may be read on."""
        if self._awaited_bytes or self.is_closed:
            return False
        return self.is_blocked or len(self._messages) < _MESSAGES_MAX

    def take(self, message: memoryview, *, is_busy: bool) -> bytes | None:
        """Give a message to its taker, and return the answer; or keep the message.

        `is_busy`: no answer can be sent now.
        """
        if self.taker is None or self._messages or is_busy or self.untaken is not None:
            self._messages.append(message)
            self._num_bytes += len(message) + _MESSAGE_COST_BYTES
            return None
        try:
            return self.taker(message)
        except Exception as error:  # noqa: BLE001 - raised by whoever reads
            self.untaken = error
            return None

    def next(self) -> memoryview:
        """Return the oldest message, which must exist. Then `hold`."""
        message = self._messages.popleft()
        self._num_bytes -= len(message) + _MESSAGE_COST_BYTES
        return message

    def hold(self, under_way_bytes: int, on_room: Callable[[], None]) -> bool:
        """Take room for the messages, and the one of which some has come.

        If there is none now, `on_room` is called once there is, and the call is not to be read on
        before. Return False if a peer that makes no room for our messages has sent too much: its
        window update would never be read.
        """
        wanted_bytes = self._num_bytes + under_way_bytes - self._awaited_bytes
        more_bytes = wanted_bytes - self._held_bytes
        if more_bytes <= 0:
            self._held_bytes = wanted_bytes
            if more_bytes:
                self._room.give_back(-more_bytes)
        elif self._awaited_bytes:
            pass
        elif self.is_blocked and self._num_bytes > _AHEAD_BYTES_MAX:
            return False
        elif not under_way_bytes:
            self._held_bytes = wanted_bytes
            self._room.count(more_bytes)
        elif self._room.take(more_bytes):
            self._held_bytes = wanted_bytes
        elif self.is_blocked:
            return False
        else:
            self._awaited_bytes, self._on_room = more_bytes, on_room
            self._room.wait(more_bytes, self._granted)
        return True

    def give_up(self) -> None:
        """Wait for no more room."""
        self._room.give_up(self._granted)
        self._awaited_bytes, self._on_room = 0, None

    def clear(self) -> None:
        """Free messages that nobody will read."""
        self._messages.clear()
        self.give_up()
        self._num_bytes = 0
        held_bytes, self._held_bytes = self._held_bytes, 0
        self._room.give_back(held_bytes)

    def _granted(self) -> None:
        self._held_bytes += self._awaited_bytes
        self._awaited_bytes = 0
        on_room, self._on_room = self._on_room, None
        assert on_room is not None
        on_room()
