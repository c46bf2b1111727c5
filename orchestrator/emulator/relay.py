"""The relay as a child process: `python -m orchestrator.emulator.relay`.

It reads one line of JSON (config.py) from stdin, says on stdout where it listens, then once a
second what has passed, one JSON line each. Further lines of stdin change links, at once; each is
answered, and followed by the counters of that moment. It ends when stdin does, so with its parent
too.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import sys
from collections.abc import Iterator

from orchestrator.emulator.config import RelayConfig, listening_line, parse_apply
from orchestrator.emulator.pipes import CONFIGURED_WITHIN_S, Conversation, LineReader
from orchestrator.emulator.punctual import be_punctual
from orchestrator.emulator.server import MAX_CONNECTIONS, Relay
from topology.errors import ConfigError

_MAX_DESCRIPTORS = 4 * MAX_CONNECTIONS
"""Two a connection, and as many again for listeners."""


def main() -> int:
    """Run the relay until stdin ends; return the exit status."""
    try:
        stdin = LineReader(sys.stdin.fileno())
        config = RelayConfig.from_line(stdin.wait_line(CONFIGURED_WITHIN_S))
        _allow_descriptors()
        be_punctual()
        asyncio.run(_serve(config, stdin))
    except ConfigError as error:
        sys.stderr.write(f"relay: configuration: {error.problems[0].message}\n")
        return 2
    except BrokenPipeError:  # whoever read our messages has gone, and so do we
        return 0
    except KeyboardInterrupt:
        return 130
    return 0


async def _serve(config: RelayConfig, stdin: LineReader) -> None:
    loop = asyncio.get_running_loop()
    async with Relay(config) as relay:
        with _noticed(stdin.descriptor) as readable:

            def obey(line: bytes) -> int:
                return relay.apply(parse_apply(line))

            owner = Conversation(stdin, sys.stdout.fileno(), obey, relay.counters)
            owner.begin(listening_line(relay.endpoints), loop.time())
            while not stdin.has_ended:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout_at(owner.turn(loop.time())):
                        await readable.wait()
                if readable.is_set():
                    readable.clear()
                    stdin.read()
            owner.end()


@contextlib.contextmanager
def _noticed(descriptor: int) -> Iterator[asyncio.Event]:
    """Give what is set while `descriptor` can be read."""
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    try:
        loop.add_reader(descriptor, readable.set)
    except PermissionError as error:
        raise ConfigError("stdin must be a pipe; the relay ends when it is closed") from error
    try:
        yield readable
    finally:
        loop.remove_reader(descriptor)


def _allow_descriptors() -> None:
    """Raise the number of open files, where it is the usual 1024, to what the relay may need."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(_MAX_DESCRIPTORS, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


if __name__ == "__main__":
    sys.exit(main())
