"""The relay as a child process: `python -m orchestrator.emulator.relay`.

It reads one line of JSON (config.py) from stdin, says on stdout where it listens, then once a
second what has passed, one JSON line each. Further lines of stdin change links, at once; each is
answered, and followed by the counters of that moment. It ends when stdin does, so with its parent too.
"""

from __future__ import annotations

import asyncio
import sys

from orchestrator.emulator.config import (
    MAX_LINE_BYTES,
    RelayConfig,
    listening_line,
    parse_apply,
)
from orchestrator.emulator.pipes import MessageWriter
from orchestrator.emulator.server import Relay
from topology.errors import ConfigError

CONFIGURED_WITHIN_S = 30.0
COUNTERS_EVERY_S = 1.0


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


async def _serve() -> None:
    stdin = await _open_stdin()
    async with Relay(await _read_config(stdin)) as relay:
        messages = MessageWriter(sys.stdout.fileno())
        messages.answer(listening_line(relay.endpoints))
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
            messages.answer({"op": "refused", "message": error.problems[0].message})
        else:
            messages.answer({"op": "applied", "count": num_changes})
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
