"""An emulator's conversation with its owner, without ever blocking.

The first line of stdin configures the emulator, whose first message says that it is up. Further
lines request changes, or make a relay forward to other gateways, and are answered. Counters are
sent after each answer, once a second, and at the end.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import stat
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from isthmus.orchestrator.emulator.emulator_config import (
    Applied,
    Apply,
    Counted,
    Refused,
    RelayEndpoint,
    Up,
)
from isthmus.topology.faults.script import Change
from isthmus.topology.spec.errors import ConfigError
from isthmus.topology.spec.json_fields import Message
from isthmus.topology.spec.json_lines import Kinds, line_of

CONFIGURED_WITHIN_S = 30.0
COUNTERS_EVERY_S = 1.0
MAX_LINE_BYTES = 4 << 20
"""Longest line: configuration or change of all links of the largest full mesh with the longest
names."""
MAX_UNREAD_BYTES = 8 << 20
"""Limit on unread output: two messages about all those links."""
END_WITHIN_S = 0.5
"""Time for the owner to read the last message."""
FLUSH_EVERY_S = 0.01
"""Interval of retries while the reader is behind: a pipe takes 64 KiB at a time."""
_READ_BYTES = 64 << 10

Config = TypeVar("Config", bound=Message)

REQUESTS: Kinds[Apply] = Kinds("owner to emulator", Apply)


class MessageWriter:
    """Writes JSON lines to a descriptor that may be full."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._rest = b""
        _never_wait(descriptor)

    @property
    def is_behind(self) -> bool:
        """Whether output waits for the reader and needs a `flush`."""
        return bool(self._rest)

    def offer(self, message: Message) -> None:
        """Write `message`, or drop it while an earlier one is not fully written.

        Raises:
            BrokenPipeError: the reader has gone.
        """
        self.flush()
        if not self._rest:
            self.answer(message)

    def answer(self, message: Message) -> None:
        """Write `message` now; the next `flush` writes the rest.

        Raises:
            BrokenPipeError: the reader has gone, or sends requests without reading answers.
        """
        self._rest += line_of(message)
        self.flush()
        if len(self._rest) > MAX_UNREAD_BYTES:
            raise BrokenPipeError

    def flush(self) -> None:
        """Write as much of the waiting output as the reader takes.

        Raises:
            BrokenPipeError: the reader has gone.
        """
        while self._rest:
            try:
                num_written = os.write(self._descriptor, self._rest)
            except BlockingIOError:
                return
            self._rest = self._rest[num_written:]

    def finish(self, within_s: float) -> None:
        """Wait until all output is written, for at most `within_s`; errors as in `flush`."""
        deadline_s = time.monotonic() + within_s
        while self.is_behind and (left_s := deadline_s - time.monotonic()) > 0:
            select.select([], [self._descriptor], [], left_s)
            self.flush()


class LineReader:
    """Reads lines from a pipe."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.has_ended = False
        self._rest = b""
        _never_wait(descriptor)

    def wait_line(self, within_s: float) -> bytes:
        """Return the next line, possibly incomplete at the end of the pipe.

        Raises:
            ConfigError: no line came in time, or it is too long.
        """
        deadline_s = time.monotonic() + within_s
        while b"\n" not in self._rest and not self.has_ended:
            left_s = max(0.0, deadline_s - time.monotonic())
            if not select.select([self.descriptor], [], [], left_s)[0]:
                raise ConfigError(f"no line on stdin within {within_s:g} s")
            self.read()
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    def lines(self) -> Iterator[bytes]:
        """Yield the complete lines read so far."""
        *lines, self._rest = self._rest.split(b"\n")
        yield from lines

    def read(self) -> None:
        """Read once, if data is available.

        Raises:
            ConfigError: a line is too long.
        """
        try:
            data = os.read(self.descriptor, _READ_BYTES)
        except BlockingIOError:
            return
        self.has_ended = not data
        self._rest += data
        if len(self._rest) > MAX_LINE_BYTES:
            raise ConfigError(f"the line on stdin is longer than {MAX_LINE_BYTES} bytes")


class Conversation:
    """Executes requests and reports counters, a turn at a time.

    Args:
        stdin: Lines after the configuration; call `turn` after reading.
        stdout: Descriptor to which messages are written.
        obey: Makes changes, all or none; raises ConfigError to refuse.
        counters: Returns the current `counters` message.
        lead: Forwards to other gateways, all or none, and returns the addresses to dial; raises
            ConfigError to refuse.

    All methods raise BrokenPipeError if the owner has gone.
    """

    def __init__(
        self,
        stdin: LineReader,
        stdout: int,
        obey: Callable[[Sequence[Change]], None],
        counters: Callable[[], Counted],
        lead: Callable[[Sequence[RelayEndpoint]], Sequence[RelayEndpoint]] | None = None,
    ) -> None:
        self._stdin = stdin
        self._messages = MessageWriter(stdout)
        self._obey = obey
        self._counters = counters
        self._lead = lead or _lead_nowhere
        self._report_s = 0.0

    def begin(self, up: Up, now_s: float) -> None:
        """Report that the emulator is up, and how it is reached."""
        self._report_s = now_s + COUNTERS_EVERY_S
        self._messages.answer(up)

    def turn(self, now_s: float) -> float:
        """Execute read requests and send due reports; return the latest time of the next turn."""
        for line in self._stdin.lines():
            self._messages.answer(self._answer(line))
            self._messages.offer(self._counters())
        if now_s >= self._report_s:
            self._messages.offer(self._counters())
            self._report_s = now_s + COUNTERS_EVERY_S  # one report, however late it is
        self._messages.flush()
        if self._messages.is_behind:
            return min(self._report_s, now_s + FLUSH_EVERY_S)
        return self._report_s

    def end(self) -> None:
        """Report the counters for the last time; this call may block briefly."""
        self._messages.offer(self._counters())
        self._messages.finish(END_WITHIN_S)

    def _answer(self, line: bytes) -> Applied | Refused:
        try:
            asked = REQUESTS.read(line)
            if asked.endpoints:
                return Applied(endpoints=tuple(self._lead(asked.endpoints)))
            self._obey(asked.changes)
        except ConfigError as error:
            return Refused(why=error.problems[0].message)
        return Applied()


def _lead_nowhere(_: Sequence[RelayEndpoint]) -> Sequence[RelayEndpoint]:
    raise ConfigError("endpoints: only a relay leads to gateways")


def _never_wait(descriptor: int) -> None:
    """Make a pipe's end non-blocking, but not a terminal or file, which is shared."""
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode):
        os.set_blocking(descriptor, False)


_PR_SET_TIMERSLACK = 29  # linux/prctl.h
_REALTIME_PRIORITY = 1


def be_punctual() -> None:
    """Ask the kernel to wake this thread, and those it starts, on time and before other processes.

    With all processors busy, one piece in a hundred of the packet emulator was delivered 0.7 to 3
    ms late at nice -20, and 0.05 ms late at the lowest real-time priority. The kernel keeps a share
    of the time from real-time processes, so an emulator with too much to do cannot take the
    machine. Without the privilege, and elsewhere than on Linux, it stays one process among others.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(_REALTIME_PRIORITY))


def run_emulator(name: str, kind: type[Config], serve: Callable[[Config, LineReader], None]) -> int:
    """Configure an emulator by the first line of stdin, and run it until stdin ends.

    Returns the exit status: 2, and a line on stderr, for a wrong configuration.
    """
    try:
        stdin = LineReader(sys.stdin.fileno())
        configurations: Kinds[Config] = Kinds(f"owner to {name}", kind)
        serve(configurations.read(stdin.wait_line(CONFIGURED_WITHIN_S)), stdin)
    except ConfigError as error:
        sys.stderr.write(f"{name}: configuration: {error.problems[0].message}\n")
        return 2
    except BrokenPipeError:  # the owner has gone: end as well
        return 0
    except KeyboardInterrupt:
        return 130
    return 0
