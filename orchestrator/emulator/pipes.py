"""The two ends of an emulator's conversation with its owner: neither ever makes it wait."""

from __future__ import annotations

import json
import os
import select
import stat
import time
from collections.abc import Iterator
from typing import Any

from topology.errors import ConfigError

MAX_LINE_BYTES = 1 << 20
MAX_UNREAD_BYTES = 1 << 20
_READ_BYTES = 64 << 10


class MessageWriter:
    """Writes JSON lines to a descriptor that may be full."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._rest = b""
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode):
            os.set_blocking(descriptor, False)

    def offer(self, message: dict[str, Any]) -> None:
        """Write `message`, or drop it while an earlier one has not been taken completely.

        Raises:
            BrokenPipeError: nobody will ever read it.
        """
        self._flush()
        if not self._rest:
            self.answer(message)

    def answer(self, message: dict[str, Any]) -> None:
        """Write `message` now, or with the next one.

        Raises:
            BrokenPipeError: nobody will ever read it, or asks on and on and reads no answers.
        """
        self._rest += json.dumps(message).encode() + b"\n"
        self._flush()
        if len(self._rest) > MAX_UNREAD_BYTES:
            raise BrokenPipeError

    def _flush(self) -> None:
        while self._rest:
            try:
                num_written = os.write(self._descriptor, self._rest)
            except BlockingIOError:
                return
            self._rest = self._rest[num_written:]


class LineReader:
    """Reads lines from a pipe."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.has_ended = False
        self._rest = b""

    def wait_line(self, within_s: float) -> bytes:
        """Return the next line, or what there is of it at the end of the pipe.

        Raises:
            ConfigError: there is none in time, or it is too long.
        """
        deadline_s = time.monotonic() + within_s
        while b"\n" not in self._rest and not self.has_ended:
            left_s = max(0.0, deadline_s - time.monotonic())
            if not select.select([self.descriptor], [], [], left_s)[0]:
                raise ConfigError(f"no line on stdin within {within_s:g} s")
            self._read()
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    def lines(self) -> Iterator[bytes]:
        """Read once, which waits unless there is something, and yield the complete lines.

        Raises:
            ConfigError: one is too long.
        """
        self._read()
        *lines, self._rest = self._rest.split(b"\n")
        yield from lines

    def _read(self) -> None:
        data = os.read(self.descriptor, _READ_BYTES)
        self.has_ended = not data
        self._rest += data
        if len(self._rest) > MAX_LINE_BYTES:
            raise ConfigError(f"the line on stdin is longer than {MAX_LINE_BYTES} bytes")
