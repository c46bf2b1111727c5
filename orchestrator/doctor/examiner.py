"""Asks a machine what it is like, by `python -m isthmus.sites.facts --serve` on that machine."""

from __future__ import annotations

import contextlib
import json
import math
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from isthmus.protos.own_processes import own_command
from isthmus.topology.spec.errors import ConfigError
from isthmus.topology.spec.json_fields import read_json, to_json
from isthmus.topology.spec.machine_facts import Burned, Facts, Wanted
from isthmus.topology.spec.world import PortRange

FACTS = own_command("isthmus.sites.facts", "--serve")[1:]
"""The arguments with which Python answers for its machine."""
HERE = (sys.executable, *FACTS)
"""The command that answers for this machine. Any other has the same streams."""
_LINE_BYTES = 8 << 20


class NoAnswerError(Exception):
    """A machine cannot be examined: its process does not start, ended, or says nothing."""


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
        return facts_of(self._ask({"ask": "facts", "wanted": to_json(wanted)}, within_s))

    def clock_ahead_s(self, within_s: float) -> tuple[float, float]:
        """Return by how much its clock is ahead of this one, and by how much that may be wrong.

        Raises:
            NoAnswerError: as of `facts`.
        """
        before_s, begun_s = time.time(), time.monotonic()
        answer = self._ask({"ask": "clock"}, within_s)
        round_trip_s = time.monotonic() - begun_s
        clock_s = answer.get("clock_s")
        if not isinstance(clock_s, float) or not math.isfinite(clock_s):
            raise NoAnswerError(f"its clock says {clock_s!r:.100}")
        return clock_s - before_s - round_trip_s / 2, round_trip_s / 2

    def listen(self, host: str, ports: PortRange | None, within_s: float) -> int | str:
        """Have the machine listen; return the port, or why it cannot.

        `ports` are those that may be listened on; None: any.

        Raises:
            NoAnswerError: as of `facts`.
        """
        question: dict[str, object] = {"ask": "listen", "host": host}
        if ports is not None:
            question["ports"] = [ports.first, ports.last]
        answer = self._ask(question, within_s)
        port = answer.get("port")
        return port if type(port) is int and 0 < port < 1 << 16 else str(answer.get("error"))

    def reach(self, source: str, host: str, port: int, within_s: float) -> str | None:
        """Return why the machine's `source` cannot exchange data with `host`; None: it can.

        Raises:
            NoAnswerError: as of `facts`.
        """
        asked = {
            "ask": "reach",
            "source": source,
            "host": host,
            "port": port,
            "within_s": within_s,
        }
        reason = self._ask(asked, 4 * within_s + 5.0).get("error")
        return None if reason is None else str(reason)

    def burn_in(self, for_s: float, within_s: float) -> list[Burned]:
        """Load the machine's devices for a while; return what became of each.

        Raises:
            NoAnswerError: as of `facts`.
        """
        answer = self._ask({"ask": "burn_in", "for_s": for_s}, within_s)
        try:
            return [read_json(Burned, each, on_unknown=lambda _: None) for each in answer["burned"]]
        except (ConfigError, KeyError, TypeError, ValueError) as error:
            raise NoAnswerError(f"it says {answer.get('error')!r:.200}") from error

    def _ask(self, question: Mapping[str, Any], within_s: float) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(question).encode() + b"\n")
            self._process.stdin.flush()
            return answer_of(self._answers.get(timeout=within_s))
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


def answer_of(line: bytes) -> dict[str, Any]:
    """Return one answer.

    Raises:
        NoAnswerError: it is none; an empty line is the end.
    """
    try:
        answer = json.loads(line)
    except (ValueError, RecursionError) as error:
        told = f"it says {line[:100]!r}" if line else "it has ended"
        raise NoAnswerError(told) from error
    if not isinstance(answer, dict):
        raise NoAnswerError(f"it says {line[:100]!r}")
    return answer


def facts_of(answer: Mapping[str, Any]) -> Facts:
    """Return the facts in an answer.

    Raises:
        NoAnswerError: there are none, or not in these terms.
    """
    if "facts" not in answer:
        raise NoAnswerError(f"it says {answer.get('error')!r:.200}")
    try:
        return read_json(Facts, answer["facts"], on_unknown=lambda _: None)
    except ConfigError as error:
        raise NoAnswerError(str(error.problems[0].message)) from error


def examined_here(wanted: Wanted, within_s: float = 30.0) -> Facts:
    """Return what this machine is like.

    Raises:
        NoAnswerError: it cannot be told.
    """
    with Examiner() as examiner:
        return examiner.facts(wanted, within_s)
