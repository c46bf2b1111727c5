"""Asks a machine what it is like, by `python -m isthmus.sites.facts --serve` on that machine."""

from __future__ import annotations

import contextlib
import math
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self, TypeVar

from isthmus.protos.own_processes import own_command
from isthmus.topology.spec import machine_facts
from isthmus.topology.spec.errors import ConfigError
from isthmus.topology.spec.json_fields import read_json
from isthmus.topology.spec.json_lines import Kinds, line_of
from isthmus.topology.spec.machine_facts import Answer, Burned, Facts, Question, Wanted
from isthmus.topology.spec.world import PortRange

FACTS = own_command("isthmus.sites.facts", "--serve")[1:]
"""The arguments with which Python answers for its machine."""
HERE = (sys.executable, *FACTS)
"""The command that answers for this machine. Any other has the same streams."""
_LINE_BYTES = 8 << 20


class NoAnswerError(Exception):
    """A machine cannot be examined: its process does not start, ended, or says nothing."""


class CannotError(NoAnswerError):
    """The machine says why it cannot do what it was asked for."""


T = TypeVar("T")
_ANSWERS: Kinds[Answer] = Kinds(
    "machine to doctor", Answer, NoAnswerError, on_unknown=lambda _: None
)


class Examiner:
    """One process that answers for its machine, from `with` to the end of the block."""

    def __init__(self, command: Sequence[str] = HERE) -> None:
        self._command = command
        self._answers: queue.Queue[bytes] = queue.Queue()

    def __enter__(self) -> Self:
        """Start the process.

        Raises:
            NoAnswerError: it cannot be started.
        """
        try:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # a terminal's Ctrl-C is for who asks
            )
        except OSError as error:
            raise NoAnswerError(f"{self._command[0]}: {error.strerror}") from error
        threading.Thread(target=self._read, name="examiner", daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the process; it does nothing that must be waited for."""
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # what was asked last has nowhere to go
            self._process.stdin.close()

    def facts(self, wanted: Wanted, within_s: float) -> Facts:
        """Return what the machine is like.

        Raises:
            NoAnswerError: it does not answer within that time, or not in these terms.
        """
        return self._ask(machine_facts.AskFacts(wanted=wanted), Facts, within_s)

    def clock_ahead_s(self, within_s: float) -> tuple[float, float]:
        """Return by how much its clock is ahead of this one, and by how much that may be wrong.

        Raises:
            NoAnswerError: as of `facts`.
        """
        before_s, begun_s = time.time(), time.monotonic()
        clock_s = self._ask(machine_facts.AskClock(), float, within_s)
        round_trip_s = time.monotonic() - begun_s
        if not math.isfinite(clock_s):
            raise NoAnswerError(f"its clock says {clock_s}")
        return clock_s - before_s - round_trip_s / 2, round_trip_s / 2

    def listen(self, host: str, ports: PortRange | None, within_s: float) -> int | str:
        """Have the machine listen; return the port, or why it cannot.

        `ports` are those that may be listened on; None: any.

        Raises:
            NoAnswerError: as of `facts`.
        """
        asked = machine_facts.AskListen(host=host, ports=ports)
        try:
            return self._ask(asked, int, within_s)
        except CannotError as error:
            return str(error)

    def reach(self, source: str, host: str, port: int, within_s: float) -> str | None:
        """Return why the machine's `source` cannot exchange data with `host`; None: it can.

        Raises:
            NoAnswerError: as of `facts`.
        """
        asked = machine_facts.AskReach(source=source, host=host, port=port, within_s=within_s)
        return self._ask(asked, str, 4 * within_s + 5.0) or None

    def burn_in(self, for_s: float, within_s: float) -> Sequence[Burned]:
        """Load the machine's devices for a while; return what became of each.

        Raises:
            NoAnswerError: as of `facts`.
        """
        return self._ask(machine_facts.AskBurnIn(for_s=for_s), tuple[Burned, ...], within_s)

    def _ask(self, question: Question, kind: type[T], within_s: float) -> T:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line_of(question))
            self._process.stdin.flush()
            return result_of(self._answers.get(timeout=within_s), kind)
        except queue.Empty as error:
            raise NoAnswerError(f"no answer within {within_s:g} s") from error
        except OSError as error:
            raise NoAnswerError(f"{self._command[0]} has ended") from error

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as answers:
            while line := answers.readline(_LINE_BYTES):
                self._answers.put(line)
        self._answers.put(b"")


def result_of(line: bytes, kind: type[T]) -> T:
    """Return the result in an answer.

    Raises:
        CannotError: the machine says why there is none.
        NoAnswerError: it is none; an empty line is the end.
    """
    if not line:
        raise NoAnswerError("it has ended")
    answer = _ANSWERS.read(line)
    if answer.problem:
        raise CannotError(answer.problem)
    try:
        return read_json(kind, answer.result, on_unknown=lambda _: None)
    except ConfigError as error:
        raise NoAnswerError(error.problems[0].message) from error


def examined_here(wanted: Wanted, within_s: float = 30.0) -> Facts:
    """Return what this machine is like.

    Raises:
        NoAnswerError: it cannot be told.
    """
    with Examiner() as examiner:
        return examiner.facts(wanted, within_s)
