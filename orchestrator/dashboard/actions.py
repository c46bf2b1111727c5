"""What may be done to a run from its page: what `isthmus cancel` does, by that command.

A process of its own each: it has the certificate that the run was launched with, or else this
server's, and is refused where the command would be.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from isthmus.orchestrator.dashboard.run_places import RunPlace
from isthmus.orchestrator.run_folder.home import RunFolder
from isthmus.protos.failure import one_line
from isthmus.protos.own_processes import own_command

COMMAND = "isthmus.orchestrator.cli.main"
TOLD_S = 600.0
"""More than a command takes."""
END_S = 5.0


@dataclass(frozen=True, slots=True)
class Action:
    """One thing that may be done."""

    label: str
    title: str
    """What is asked before it is done."""
    words: str
    """What it comes to."""
    doing: str
    options: tuple[str, ...]
    """Options for `isthmus cancel`."""


ACTIONS: Mapping[str, Action] = {
    "stop": Action(
        "Stop…",
        "Stop this run?",
        "All sites end it now. What was trained since the last checkpoint is lost.",
        "Stopping",
        (),
    ),
    "checkpoint-and-stop": Action(
        "Checkpoint and stop…",
        "Have this run write a checkpoint and stop?",
        "All sites write a checkpoint, which takes a while, and then end the run. "
        "`isthmus launch --resume` goes on from it.",
        "Writing a checkpoint, then stopping",
        ("--checkpoint",),
    ),
}


@dataclass(frozen=True, slots=True)
class Attempt:
    """What became of the last action on a run."""

    action: Action
    is_over: bool = False
    trouble: str = ""
    """Why it was not done."""
    note: str = ""
    """What the command said beside that."""


class RunActions:
    """Does what pages ask for, one action on a run at a time. Any thread may ask."""

    def __init__(
        self, home: Path, state: Path | None, command: Callable[..., list[str]] = own_command
    ) -> None:
        """Do nothing yet.

        Args:
            home: HOME of the runs.
            state: The standing coordinator's state folder, whose runs they are; None: HOME's.
            command: Returns the command line of a module.
        """
        self._home, self._state, self._command = home, state, command
        self._lock = threading.Lock()
        self._attempts: dict[str, Attempt] = {}
        self._processes: set[subprocess.Popen[str]] = set()
        self._is_closed = False

    def close(self) -> None:
        """End what is being done: nobody would be told of it."""
        with self._lock:
            self._is_closed = True
            processes = list(self._processes)
        for process in processes:
            process.terminate()
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END_S)

    def attempt(self, run_id: str) -> Attempt | None:
        """Return the last one on a run."""
        with self._lock:
            return self._attempts.get(run_id)

    def begin(self, place: RunPlace, name: str) -> bool:
        """Begin an action; return False if one on this run goes on."""
        attempt = Attempt(ACTIONS[name])
        with self._lock:
            last = self._attempts.get(place.run_id)
            if self._is_closed or (last is not None and not last.is_over):
                return False
            self._attempts[place.run_id] = attempt
        threading.Thread(
            target=self._do, args=(place, attempt), name=f"action-{name}", daemon=True
        ).start()
        return True

    def _do(self, place: RunPlace, attempt: Attempt) -> None:
        try:
            ended = self._outcome(place, attempt)
        except OSError as error:
            ended = replace(attempt, is_over=True, trouble=f"no process: {error.strerror}")
        with self._lock:
            self._attempts[place.run_id] = ended

    def _outcome(self, place: RunPlace, attempt: Attempt) -> Attempt:
        ways = self._way_to_coordinator()
        if ways is None:
            return replace(attempt, is_over=True, trouble="its coordinator has ended")
        command = [
            *self._command(COMMAND, "cancel", place.run_id, "--json"),
            *ways,
            *attempt.action.options,
        ]
        with self._lock:
            if self._is_closed:
                return replace(attempt, is_over=True, trouble="the dashboard ends")
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            self._processes.add(process)
        try:
            out, err = process.communicate(timeout=TOLD_S)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
        finally:
            with self._lock:
                self._processes.discard(process)
        return replace(attempt, is_over=True, trouble=_trouble(out), note=_note(err))

    def _way_to_coordinator(self) -> Sequence[str] | None:
        if self._state is None:
            return ("--home", str(self._home))
        address = RunFolder(self._state).living_coordinator()
        return None if address is None else ("--coordinator", address, "--home", str(self._home))


def _trouble(out: str) -> str:
    """Return why the command failed, as its envelope says; empty: it did not."""
    try:
        envelope: dict[str, Any] = json.loads(out)
        if envelope["status"] == "ok":
            return ""
        return one_line(f"{envelope['error']['code']}: {envelope['error']['message']}")
    except (ValueError, KeyError, TypeError):
        return "isthmus cancel ended without an answer"


def _note(err: str) -> str:
    """Return the command's last words that are no part of an error."""
    lines = [line for line in err.splitlines() if not line.startswith(("error:", "hint:"))]
    return one_line(lines[-1]) if lines else ""
