"""The folders of emulations that run by themselves: HOME/emulations/NAME.

The owner of an emulation holds the lock in its folder, and the kernel releases it with the process.
So the lock alone shows whether an emulation is up, however it ended.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from isthmus.orchestrator.run_folder.home import is_folder_name, read_object
from isthmus.orchestrator.run_folder.state_lock import LOCK, is_abandoned
from isthmus.protos.errors import IsthmusError, StateConflictError

FOLDER = "emulations"
STATE = "emulation.json"
SOCKET = "control.sock"
_MAX_SAME = 1000
"""Limit on simultaneous emulations of one topology."""
_PID_MAX = 1 << 22
"""Linux: PID_MAX_LIMIT."""
_TIME_S_MAX = 1e12
GRACE_S = 0.5
"""Time for an emulator to end by itself after its owner has gone."""
END_S = 3.0


class EmulationNotFoundError(IsthmusError):
    """No emulation of that name is up."""

    code = "EMULATION_NOT_FOUND"


@dataclass(frozen=True, slots=True)
class Leftover:
    """The remains of an emulation whose owner is gone, as found by `clean`."""

    name: str
    ended_pids: tuple[int, ...]
    """Pids of emulators that had outlived the owner."""


@contextlib.contextmanager
def claimed(home: Path, name: str | None, topology: str) -> Iterator[Path]:
    """Yield the folder of a new emulation, and remove it at the end of the block.

    Its name is `name`, or else the topology's, with a number if that is taken.

    Raises:
        StateConflictError: the name is taken.
    """
    base = name or (topology if is_folder_name(topology) else "emulation")
    names = [base] if name else [base, *(f"{base}-{n}" for n in range(2, _MAX_SAME))]
    for each in names:
        folder = home / FOLDER / each
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):  # it is being removed: try the next one
            lock = _lock(folder)
            if lock is not None:
                break
    else:
        raise StateConflictError(f"emulation {base} is up already: choose another --name")
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def find(home: Path, name: str) -> Mapping[str, Any]:
    """Return the state that a running emulation wrote into its folder.

    Raises:
        EmulationNotFoundError: none of that name is up.
    """
    folder = home / FOLDER / name
    state = read_object(folder / STATE) if is_folder_name(name) else {}
    if not state or not is_up(folder):
        there = ", ".join(sorted(each.name for each in folders(home) if is_up(each))) or "none"
        raise EmulationNotFoundError(f"there is no emulation {name!r}; up are: {there}")
    return state


def folders(home: Path) -> list[Path]:
    """Return the folders of all emulations, including dead ones."""
    root = home / FOLDER
    return sorted(path for path in root.iterdir() if path.is_dir()) if root.is_dir() else []


def is_up(folder: Path) -> bool:
    """Whether a process runs the emulation of a folder."""
    return not is_abandoned(folder)


def clean(home: Path) -> list[Leftover]:
    """Remove leftovers of emulations whose owner is gone.

    Emulators that outlived their owner are ended.
    """
    leftovers = []
    for folder in folders(home):
        try:
            lock = _lock(folder)
        except FileNotFoundError:
            continue
        if lock is None:
            continue
        try:
            leftovers.append(Leftover(folder.name, _end_emulator(read_object(folder / STATE))))
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(lock)
    return leftovers


def _lock(folder: Path) -> int | None:
    """Return a descriptor that holds a folder's lock; None while another process does.

    Raises:
        FileNotFoundError: the folder has just been removed.
    """
    path = folder / LOCK
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Its last owner may have removed it between our two calls.
        if path.exists() and path.stat().st_ino == os.fstat(descriptor).st_ino:
            return descriptor
    except BlockingIOError:
        pass
    os.close(descriptor)
    return None


def _end_emulator(state: Mapping[str, Any]) -> tuple[int, ...]:
    """End the emulator that a dead owner named, if it is still that process; return its pid."""
    named = named_emulator(state)
    if named is None:
        return ()
    try:
        process = psutil.Process(named[0])
        if abs(process.create_time() - named[1]) > 0.02:
            return ()  # the pid was reused by another process
        with contextlib.suppress(psutil.TimeoutExpired):
            process.wait(GRACE_S)
            return ()
        if process.status() == psutil.STATUS_ZOMBIE:
            return ()  # a zombie that its adopter has not reaped yet
        process.send_signal(signal.SIGKILL)
        process.wait(END_S)
    except psutil.Error:
        return ()
    return (process.pid,)


def named_emulator(state: Mapping[str, Any]) -> tuple[int, float] | None:
    """Return pid and start time of the emulator in a state; None: there is none.

    Strict, because that process is killed: a time that is no number matches no process.
    """
    match state:
        case {"emulator": {"pid": int(pid), "created_s": int() | float() as created_s}} if (
            not isinstance(pid, bool) and 0 < pid <= _PID_MAX and 0 <= created_s < _TIME_S_MAX
        ):
            return pid, float(created_s)
    return None
