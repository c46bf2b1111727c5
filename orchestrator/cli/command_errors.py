"""Turns whatever a command raised into a message and an exit status."""

from __future__ import annotations

import os
import tempfile
import traceback
from typing import Any

import click

from isthmus.orchestrator.api.errors import CommandError
from isthmus.protos.failure import FILE_ERRNOS, reason_of
from isthmus.topology.spec.errors import ConfigError, Problem


def describe(error: Exception) -> CommandError:
    """Return what to show for `error`; what nobody foresaw becomes INTERNAL, with a file."""
    match error:
        case CommandError():
            return error
        case click.UsageError():
            return _usage(error)
        case click.ClickException():
            return CommandError("USAGE", error.format_message())
        case ConfigError():
            return _config(error.problems)
        case OSError() if error.errno in FILE_ERRNOS:
            path = str(error.filename or "")
            message = f"{path}: {error.strerror}" if path else str(error.strerror)
            return CommandError("FILE_ERROR", message, {"file": path})
    return _wire(error) or _internal(error)


def _usage(error: click.UsageError) -> CommandError:
    if error.ctx is None:
        return CommandError("USAGE", error.format_message())
    path = error.ctx.command_path
    if isinstance(error, click.exceptions.NoArgsIsHelpError):
        return CommandError(
            "USAGE", "no command was given", {"command": path}, error.format_message()
        )
    return CommandError(
        "USAGE",
        error.format_message(),
        {"command": path},
        error.ctx.get_usage(),
        f"See `{path} --help`.",
    )


def _config(problems: list[Problem]) -> CommandError:
    count = "1 mistake" if len(problems) == 1 else f"{len(problems)} mistakes"
    first = problems[0].message
    if problems[0].line == 0 and not problems[0].path:  # of a whole file: which one is the message
        first = f"{problems[0].source}: {first}"
    return CommandError(
        "INVALID_CONFIG",
        f"{count}: {first}" if len(problems) == 1 else f"{count}, the first: {first}",
        [where(problem) for problem in problems],
        "\n".join(str(problem) for problem in problems),
        brief=f"{count} in {', '.join(dict.fromkeys(each.source for each in problems))}",
    )


def where(problem: Problem) -> dict[str, Any]:
    """Return a problem and its place, as programs get it."""
    return {
        "file": problem.source,
        "line": problem.line,
        "column": problem.column,
        "path": problem.path,
        "message": problem.message,
    }


def _wire(error: Exception) -> CommandError | None:
    """Return an error of the contracts, unless it says that we have a bug."""
    # Imported here: it brings grpc, which most commands that fail early never needed.
    from isthmus.protos.errors import IsthmusError

    if isinstance(error, IsthmusError) and error.code != "INTERNAL":
        return CommandError(error.code, str(error))
    return None


def _internal(error: Exception) -> CommandError:
    message = reason_of(error)[:200]
    try:
        handle, path = tempfile.mkstemp(prefix="isthmus-error-", suffix=".txt")
        with os.fdopen(handle, "w", encoding="utf-8", errors="replace") as file:
            traceback.print_exception(error, file=file)
    except OSError as refused:  # a full disk must not be all that is told
        message = f"{message}; the traceback could not be kept: {refused.strerror}"
        return CommandError("INTERNAL", message, details="".join(traceback.format_exception(error)))
    return CommandError("INTERNAL", f"{message}; the traceback is in {path}", {"traceback": path})
