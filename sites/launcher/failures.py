"""How the ranks of a node ended, as their launcher leaves it in failures.json for the agent.

No torch: the agent reads this too.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from signal import SIGTERM
from typing import Any

COLLATERAL_EXIT_CODE = 75
"""A rank's exit status when the exchange failed under it: EX_TEMPFAIL, not the script's fault."""
PID_FILE = "pid"
"""Beside a rank's error.json: written by the rank itself as the first thing it does."""
MESSAGE_CHARS = 500
"""A longer message is cut: it becomes one line of a report."""


_TYPES: Mapping[str, type | tuple[type, ...]] = {
    "int": int,
    "str": str,
    "bool": bool,
    "float": (int, float),
}
"""What JSON may hold for a field of that type."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFailure:
    """One rank that did not end with status 0."""

    rank: int
    """Inside the site."""
    local_rank: int
    pid: int
    exit_code: int
    """Negative: the signal's number."""
    time_s: float
    """CLOCK_MONOTONIC of this machine: comparable between all processes of the site."""
    code: str
    """A key of protos/catalogue.py when the rank named one, else empty."""
    message: str
    """What the rank said, one line; empty if it said nothing."""
    collateral: bool
    """It ended because something else did."""
    log_path: str
    """Its stderr."""

    @property
    def order(self) -> tuple[bool, int, float]:
        """Sorts the one that failed first, and not because of another, to the front.

        Deaths that are seen in one look have no order of their own: a signal comes out of nowhere,
        a bare exit status is deliberate, an exception may be an answer to either. SIGTERM to a
        victim comes last, from torchrun.
        """
        if self.collateral:
            kind = int(self.exit_code == -SIGTERM)
        else:
            kind = 0 if self.exit_code < 0 else 2 if self.message else 1
        return self.collateral, kind, self.time_s


def describe_failure(
    folder: Path, *, rank: int, local_rank: int, pid: int, exit_code: int, time_s: float
) -> RankFailure:
    """Return one rank's failure, with what it left in error.json in its log folder."""
    said = _read_error_file(folder / "error.json")
    said_s = said.get("time_s")
    return RankFailure(
        rank=rank,
        local_rank=local_rank,
        pid=pid,
        exit_code=exit_code,
        # The rank's own clock says when it broke; when it ended is later.
        time_s=said_s if isinstance(said_s, float) and math.isfinite(said_s) else time_s,
        code=str(said.get("code", "")),
        message=one_line(str(said.get("message", ""))),
        collateral=bool(said.get("collateral", False)) or exit_code == COLLATERAL_EXIT_CODE,
        log_path=str(folder / "stderr.log"),
    )


def one_line(text: str) -> str:
    """Return `text` on one line, cut where it gets too long."""
    line = " ".join(text.split())
    return line if len(line) <= MESSAGE_CHARS else line[: MESSAGE_CHARS - 1] + "…"


def write_failures(path: Path, failures: Iterable[RankFailure]) -> None:
    """Replace the file at once, the first failure first: a reader sees the old or the new."""
    ordered = sorted(failures, key=lambda failure: failure.order)
    scratch = path.with_suffix(".new")
    scratch.write_text(json.dumps([dataclasses.asdict(failure) for failure in ordered], indent=1))
    scratch.replace(path)


def read_failures(path: Path) -> list[RankFailure]:
    """Return what `write_failures` wrote; nothing when there is no file.

    Raises:
        ValueError: the file is damaged; names it.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return []
    try:
        return [_failure(fields) for fields in json.loads(data)]
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not a list of failures: {error}") from error


def _failure(fields: dict[str, Any]) -> RankFailure:
    failure = RankFailure(**fields)
    for field in dataclasses.fields(failure):
        value = getattr(failure, field.name)
        if not isinstance(value, _TYPES[str(field.type)]):
            raise TypeError(f"{field.name}: want {field.type}, got {value!r:.100}")
    return failure


def write_error_file(path: str | None, details: Mapping[str, Any], traceback: str) -> None:
    """Write an error.json that torchelastic reads too; `details` are ours, beside its fields.

    Args:
        path: $TORCHELASTIC_ERROR_FILE; None: torchrun did not start this process.
        details: `message`, `code`, `collateral`, `time_s` and `wall_s`.
        traceback: as Python prints it.
    """
    if not path:
        return
    said = {
        "message": details["message"],
        "extraInfo": {"py_callstack": traceback, "timestamp": str(int(details["wall_s"]))},
    }
    Path(path).write_text(json.dumps({"message": said, "isthmus": dict(details)}))


def write_pid_file(error_file: str | None) -> None:
    """Say under which pid a rank runs, so that its death can be told before torchrun tells it."""
    if error_file:
        scratch = Path(error_file).with_name(f"{PID_FILE}.new")
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
