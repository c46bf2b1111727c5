"""Messages that outlive the connection that carried them: numbered, kept, acknowledged.

Each side of a session has one `Numbered`. On a connection messages come in order and none is
lost; a connection that breaks loses those that were on the way. On the next one each side says
the last number that it has received, and the other sends again what follows. Pure: no I/O.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

from isthmus.protos.errors import RemoteProtocolError

Message = TypeVar("Message")


class Numbered(Generic[Message]):
    """What one side has sent and not seen acknowledged, and how far it has received."""

    def __init__(self) -> None:
        self.received = 0
        """The last number taken from the other side: what acknowledges it."""
        self._kept: deque[Message] = deque()
        self._acknowledged = 0

    def __len__(self) -> int:
        """Return how many messages are kept."""
        return len(self._kept)

    @property
    def acknowledged(self) -> int:
        """The last number that the other side has received, as far as is known here."""
        return self._acknowledged

    @property
    def last(self) -> int:
        """The number of the newest message; 0 before the first."""
        return self._acknowledged + len(self._kept)

    def add(self, message: Message) -> int:
        """Keep a message until it is acknowledged, and return its number."""
        self._kept.append(message)
        return self.last

    def after(self, number: int) -> Message | None:
        """Return the message that follows that number; None if there is none yet.

        Numbers that are acknowledged are not asked for.
        """
        index = number - self._acknowledged
        assert index >= 0, "what is acknowledged is not sent again"
        return self._kept[index] if index < len(self._kept) else None

    def acknowledge(self, received: int) -> list[Message]:
        """Let go of what the other side has received; return it. A late acknowledgement is none.

        Raises:
            RemoteProtocolError: that number was never sent.
        """
        if received > self.last:
            raise RemoteProtocolError(f"{received} acknowledged, and {self.last} sent")
        gone = []
        while self._acknowledged < received:
            gone.append(self._kept.popleft())
            self._acknowledged += 1
        return gone

    def takes(self, sequence: int) -> bool:
        """Return whether a received message is new; then it counts as received. 0 is always new.

        Raises:
            RemoteProtocolError: the one before it is missing.
        """
        if sequence == 0:
            return True
        if sequence > self.received + 1:
            raise RemoteProtocolError(f"number {sequence} followed {self.received}")
        is_new = sequence == self.received + 1
        self.received = max(self.received, sequence)
        return is_new

    def begin_anew(self) -> None:
        """Talk to somebody who knows nothing: what is kept is sent from 1 on."""
        self.received = 0
        self._acknowledged = 0
