"""Failures of a node's ranks, as lines on their launcher's stdout.

Lines and no file, because a rank may be killed while the disk is full.

This module does not import torch, because the agent uses it too.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from signal import SIGABRT, SIGBUS, SIGFPE, SIGILL, SIGSEGV, SIGTERM, SIGXCPU, SIGXFSZ
from typing import Any

from isthmus.protos.catalogue import CATALOGUE
from isthmus.protos.errors import RemoteProtocolError
from isthmus.protos.failure import Failure, one_line
from isthmus.sites.local.rank_messages import Failed
from isthmus.topology.spec.json_lines import Kinds

COLLATERAL_EXIT_CODE = 75
"""A rank's exit status when the exchange failed under it: EX_TEMPFAIL, not the script's fault."""
FAULTY_EXIT_CODE = 74
"""A rank's exit status when its machine is at fault: EX_IOERR. On a full disk nothing else says so.
"""
LAST_BYTES = 4096
"""Bytes at the end of a rank's stderr that are searched for its last line."""
PID_FILE = "pid"
"""File beside a rank's error.json, which the rank writes as the first thing it does."""
LAUNCHER_LINES: Kinds[Failed] = Kinds("launcher to supervisor", Failed, RemoteProtocolError)
"""The kinds of lines that a launcher writes."""

_CRASHES = {
    SIGSEGV: "it used memory that is not there, a bug of native code",
    SIGBUS: "memory that it had mapped has gone: shared memory (/dev/shm) or a disk is full, "
    "or a file was cut",
    SIGABRT: "native code gave up, by an assertion or an exception of C++",
    SIGFPE: "native code divided a whole number by zero",
    SIGILL: "native code was built for another processor",
    SIGXFSZ: "a file has become larger than `ulimit -f` allows",
    SIGXCPU: "it has used more processor time than `ulimit -t` allows",
}
"""What signals mean that a process brings upon itself."""


def explain_crash(exit_code: int) -> str:
    """Return what a process did that ended by one of these signals; else an empty string."""
    why = {-signal: why for signal, why in _CRASHES.items()}.get(exit_code, "")
    return why and f"{why}; see the end of its log"


def describe_failure(folder: Path, *, rank: int, exit_code: int, at_s: float) -> Failure:
    """Return the failure of a rank whose exit status was not 0.

    Args:
        folder: The rank's log folder, with its own error.json.
        rank: Rank inside the site.
        exit_code: Negative: the signal's number.
        at_s: When the rank's end was seen.
    """
    said = _read_error_file(folder / "error.json")
    said_s = said.get("time_s")
    is_collateral = bool(said.get("collateral", False)) or exit_code == COLLATERAL_EXIT_CODE
    is_scripts = not (is_collateral or said.get("outage", False))
    code = "RANK_KILLED" if exit_code < 0 else "SCRIPT_FAILED" if is_scripts else "RANK_EXITED"
    code = "NODE_FAULTY" if exit_code == FAULTY_EXIT_CODE else code
    if said.get("code") in CATALOGUE:
        code = str(said["code"])  # which says more than how the rank ended
    return Failure(
        code=code,
        message=one_line(str(said.get("message", ""))),
        # The rank's own clock says when it broke; when it ended is later.
        at_s=said_s if isinstance(said_s, float) and math.isfinite(said_s) else at_s,
        rank=rank,
        exit_code=exit_code,
        log_path=str(folder / "stderr.log"),
        is_collateral=is_collateral,
    )


def cause_first(failure: Failure) -> tuple[bool, int, float]:
    """Return a sort key that puts the first failure not caused by another to the front.

    Ends seen in one check have no order of their own: a signal comes from outside, a bare exit
    status is deliberate, an exception may follow from either. Among victims, those that torchrun
    ended with SIGTERM come last.
    """
    if failure.is_collateral:
        kind = int(failure.exit_code == -SIGTERM)
    else:
        kind = 0 if failure.exit_code < 0 else 2 if failure.message else 1
    return failure.is_collateral, kind, failure.at_s


def write_error_file(path: str | None, details: Mapping[str, Any], traceback: str) -> None:
    """Write an error.json that torchelastic reads too; `details` are ours, beside its fields.

    Args:
        path: $TORCHELASTIC_ERROR_FILE; None: torchrun did not start this process.
        details: `message`, `code` (empty: how it ended says enough), `collateral`, `outage` (not
            the script's fault), `time_s` and `wall_s`.
        traceback: as Python prints it.
    """
    if not path:
        return
    said = {
        "message": details["message"],
        "extraInfo": {"py_callstack": traceback, "timestamp": str(int(details["wall_s"]))},
    }
    # torchrun may end this process meanwhile, and would not survive half a file.
    scratch = Path(path).with_name("error.json.new")
    scratch.write_text(json.dumps({"message": said, "isthmus": dict(details)}))
    scratch.replace(path)


def last_words(log: Path) -> str:
    """Return the last line of a script's stderr; empty: none.

    For a wrong argument, argparse names it there.
    """
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - LAST_BYTES))
            lines = file.read(LAST_BYTES).decode(errors="replace").split("\n")
    except OSError:
        return ""
    said = [line.strip() for line in lines if line.strip()]
    return said[-1] if said else ""


def write_pid_file(error_file: str | None) -> None:
    """Write down a rank's pid, so that its death can be seen before torchrun reports it.

    On a full disk there is no file, and the death is seen a little later.
    """
    if error_file:
        scratch = Path(error_file).with_name(f"{PID_FILE}.new")
        with contextlib.suppress(OSError):
            scratch.write_text(str(os.getpid()))
            scratch.replace(scratch.with_name(PID_FILE))


def _read_error_file(path: Path) -> Mapping[str, Any]:
    """Return our part of error.json; a rank that was killed may have left none, or half of one."""
    try:
        fields = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(fields, dict):
        return {}
    # A script that uses torch's own `record` overwrites the file with torch's fields only.
    message, ours = fields.get("message", ""), fields.get("isthmus")
    theirs = {"message": message.get("message", "") if isinstance(message, dict) else message}
    return {**theirs, **(ours if isinstance(ours, dict) else {})}
