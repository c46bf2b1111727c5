"""Prints a command's output: the result alone on stdout, all other text on stderr."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import click

from isthmus.orchestrator.api.errors import CommandError
from isthmus.orchestrator.interruption import INTERRUPTION
from isthmus.protos import envelope
from isthmus.protos.envelope import finite

CLOSED_PIPE = 141
"""128 + SIGPIPE, as a shell reports a program that wrote to a closed pipe."""


class Output:
    """One command's streams.

    With --json: one envelope, or JSON Lines that end in a terminal event.
    """

    def __init__(self, *, as_json: bool, streaming: bool) -> None:
        self.as_json = as_json
        self.streaming = streaming
        self.command = "isthmus"
        """Known once the command line was read that far."""
        self._is_told = False
        # Sites' names and logs may hold what a terminal's encoding does not; never die of it.
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="replace")

    @classmethod
    def of(cls, arguments: Sequence[str]) -> Output:
        """Return the output that `arguments` ask for, even where they are wrong otherwise."""
        options = list(arguments)
        if "--" in options:
            options = options[: options.index("--")]
        follows = not {"-f", "--follow", "--watch"}.isdisjoint(options)
        return cls(as_json="--json" in options, streaming=follows)

    @property
    def has_colour(self) -> bool:
        """Whether what goes to stdout may have colours."""
        return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and not self.as_json

    def text(self, text: str) -> None:
        """Print a part of the result for people; with --json, nothing."""
        if not self.as_json:
            _write(text, err=False)

    def note(self, text: str) -> None:
        """Print text beside the result, on stderr."""
        _write(text, err=True)

    def event(self, kind: str, fields: Mapping[str, Any], text: str) -> None:
        """Print one item of something that is followed: a JSON line, or `text`."""
        if self.as_json:
            _write(json.dumps({"event": kind, **finite(fields)}), err=False)
        else:
            _write(text, err=False)

    def result(self, data: Mapping[str, Any], text: str = "", exit_code: int = 0) -> int:
        """Print the result and return the exit status."""
        if self.as_json:
            self._last(envelope.success(self.command, finite(data), exit_code))
        elif text:
            _write(text, err=False)
        return exit_code

    def failed(self, error: CommandError) -> int:
        """Print an error, to people and with --json to programs; return the exit status."""
        if self.as_json:
            where = finite(error.where)
            self._last(envelope.failure(self.command, error.code, str(error), where))
        if error.details:
            self.note(error.details)
        self.note(f"{click.style('error:', fg='red', bold=True)} {error.brief or error}")
        if isinstance(error.where, Mapping) and error.where.get("log_path"):
            self.note(f"log: {error.where['log_path']}")
        more = "" if error.code == "USAGE" else f" (more: isthmus explain {error.code})"
        self.note(f"{click.style('hint:', fg='cyan')} {error.hint}{more}")
        return error.exit_code

    def interrupted(self, exit_code: int) -> int:
        """End after Ctrl-C or SIGTERM; return the exit status. What has been told stays told."""
        if self._is_told:
            return exit_code
        return self.result({"interrupted": True}, exit_code=exit_code)

    def _last(self, line: str) -> None:
        if self.streaming:
            line = json.dumps({"event": "terminal", **json.loads(line)})
        with INTERRUPTION.holding():  # all of it, or nothing
            self._is_told = True
            click.echo(line)


def discard_streams() -> None:
    """Point stdout and stderr to nowhere, after one turned out to be a closed pipe.

    Otherwise the interpreter's own flush at exit fails, and says so.
    """
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        os.dup2(nowhere, descriptor)
    os.close(nowhere)


def _write(text: str, *, err: bool) -> None:
    color = False if os.environ.get("NO_COLOR") else None  # None: only on a terminal
    with INTERRUPTION.releasing():  # who reads may take its time
        click.echo(text, err=err, color=color)
