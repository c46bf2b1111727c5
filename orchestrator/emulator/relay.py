"""The relay as a child process: `python -m orchestrator.emulator.relay`.

It reads one line of JSON (config.py) from stdin, says on stdout where it listens, then once a
second what has passed, one JSON line each. Further lines of stdin change links, at once; each is
answered, and followed by the counters of that moment. It ends when stdin does, so with its parent too.
"""

from __future__ import annotations

import asyncio
import json
import os
import stat
import sys
from typing import Any

from orchestrator.emulator.config import (
    MAX_LINE_BYTES,
    RelayConfig,
    listening_line,
    parse_apply,
)
from orchestrator.emulator.server import Relay
from topology.errors import ConfigError

CONFIGURED_WITHIN_S = 30.0
COUNTERS_EVERY_S = 1.0
MAX_UNREAD_BYTES = 1 << 20
"""Answers that nobody takes, before the parent counts as gone."""


def main() -> int:
    """Run the relay until stdin ends; return the exit status."""
    try:
        asyncio.run(_serve())
    except ConfigError as error:
        sys.stderr.write(f"relay: configuration: {error.problems[0].message}\n")
        return 2
    except BrokenPipeError:  # whoever read our messages has gone, and so do we
        return 0
    except KeyboardInterrupt:
        return 130
    return 0


class MessageWriter:
    """Writes JSON lines to a descriptor that may be full: the relay never waits for its reader."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._rest = b""
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode):
            os.set_blocking(descriptor, False)

    def offer(self, message: dict[str, Any]) -> None:
        """Write `message`, or drop it while earlier ones have not been taken completely.

        Raises:
            BrokenPipeError: nobody will ever read it.
        """
        self._flush()
        if not self._rest:
            self.say(message)

    def say(self, message: dict[str, Any]) -> None:
        """Write `message`, or keep it for the next call; BrokenPipeError if nobody will read it."""
        if len(self._rest) > MAX_UNREAD_BYTES:
            raise BrokenPipeError(f"{MAX_UNREAD_BYTES} bytes of answers have not been read")
        self._rest += json.dumps(message).encode() + b"\n"
        self._flush()

    def _flush(self) -> None:
        while self._rest:
            try:
                num_written = os.write(self._descriptor, self._rest)
            except BlockingIOError:
                return
            self._rest = self._rest[num_written:]


async def _serve() -> None:
    stdin = await _open_stdin()
    async with Relay(await _read_config(stdin)) as relay:
        messages = MessageWriter(sys.stdout.fileno())
        messages.say(listening_line(relay.endpoints))
        obeying = asyncio.create_task(_obey(stdin, relay, messages))
        try:
            while not obeying.done():
                await asyncio.wait([obeying], timeout=COUNTERS_EVERY_S)
                messages.offer(relay.counters())
        finally:
            obeying.cancel()
        await obeying


async def _obey(stdin: asyncio.StreamReader, relay: Relay, messages: MessageWriter) -> None:
    """Make the changes that each line asks for, until stdin ends."""
    while line := await _read_line(stdin):
        try:
            num_changes = relay.apply(parse_apply(line))
        except ConfigError as error:
            messages.say({"op": "refused", "message": error.problems[0].message})
        else:
            messages.say({"op": "applied", "count": num_changes})
            messages.offer(relay.counters())


async def _open_stdin() -> asyncio.StreamReader:
    reader = asyncio.StreamReader(limit=MAX_LINE_BYTES)
    loop = asyncio.get_running_loop()
    try:
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    except ValueError as error:
        raise ConfigError("stdin must be a pipe; the relay ends when it is closed") from error
    return reader


async def _read_config(stdin: asyncio.StreamReader) -> RelayConfig:
    try:
        line = await asyncio.wait_for(_read_line(stdin), CONFIGURED_WITHIN_S)
    except TimeoutError as error:
        raise ConfigError(f"no line on stdin within {CONFIGURED_WITHIN_S:g} s") from error
    return RelayConfig.from_line(line)


async def _read_line(stdin: asyncio.StreamReader) -> bytes:
    """Return the next line; empty at the end."""
    try:
        return await stdin.readline()
    except ValueError as error:
        raise ConfigError(f"the line on stdin is longer than {MAX_LINE_BYTES} bytes") from error


if __name__ == "__main__":
    sys.exit(main())
