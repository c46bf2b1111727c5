"""Messages that outlive the connection that carried them: numbered, kept, acknowledged.

Each side of a session has one `Numbered`. A connection delivers messages in order; if it breaks,
those in flight are lost. On the next one each side states the last number that it has received, and
the other resends what follows. Pure: no I/O.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

from isthmus.protos.errors import RemoteProtocolError

Message = TypeVar("Message")


class Numbered(Generic[Message]):
    """One side's unacknowledged messages, and the last number that it received."""

    def __init__(self) -> None:
        self.received = 0
        """Last number received from the other side, sent as its acknowledgement."""
        self._kept: deque[Message] = deque()
        self._acknowledged = 0

    def __len__(self) -> int:
        """Return the number of unacknowledged messages."""
        return len(self._kept)

    @property
    def acknowledged(self) -> int:
        """The last number known to have been received by the other side."""
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
        """Return the message after `number`; None if there is none yet.

        `number` must not be below the acknowledged one.
        """
        index = number - self._acknowledged
        assert index >= 0, "what is acknowledged is not sent again"
        return self._kept[index] if index < len(self._kept) else None

    def acknowledge(self, received: int) -> list[Message]:
        """Drop and return the messages that the other side has received; none if outdated.

        Raises:
            RemoteProtocolError: the number was never sent.
        """
        if received > self.last:
            raise RemoteProtocolError(f"{received} acknowledged, and {self.last} sent")
        gone = []
        while self._acknowledged < received:
            gone.append(self._kept.popleft())
            self._acknowledged += 1
        return gone

    def takes(self, sequence: int) -> bool:
        """Return whether a received message is new, and count it as received. 0 is always new.

        Raises:
            RemoteProtocolError: the message before it is missing.
        """
        if sequence == 0:
            return True
        if sequence > self.received + 1:
            raise RemoteProtocolError(f"number {sequence} followed {self.received}")
        is_new = sequence == self.received + 1
        self.received = max(self.received, sequence)
        return is_new

    def begin_anew(self) -> None:
        """Start a new session: renumber the kept messages from 1 on."""
        self.received = 0
        self._acknowledged = 0
