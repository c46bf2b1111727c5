"""Shows a run to people.

Live on a terminal, a plain line now and then elsewhere; what is noted, at once; its summary at the
end.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import click
from rich.console import Console
from rich.live import Live
from rich.text import Text

from isthmus.orchestrator.api.errors import CommandError
from isthmus.orchestrator.cli import log_text
from isthmus.orchestrator.cli.output import Output
from isthmus.orchestrator.cli.views import (
    exit_code_of,
    outcome_view,
    reason_code,
    where_of,
)
from isthmus.orchestrator.client.run_reader import RunReader, read_summary
from isthmus.orchestrator.core.event_kinds import EventKind
from isthmus.orchestrator.core.first_failure import failure_of
from isthmus.orchestrator.evidence.view import formats
from isthmus.orchestrator.evidence.view.alike import and_others, is_alike
from isthmus.orchestrator.evidence.view.live import (
    LiveTable,
    current_phase,
    noted,
    plain_line,
)
from isthmus.orchestrator.evidence.view.summary import RunSummary
from isthmus.orchestrator.interruption import INTERRUPTION
from isthmus.protos.catalogue import CATALOGUE
from isthmus.protos.control.v1 import control_pb2
from isthmus.protos.errors import IsthmusError

PLAIN_EVERY_S = 5.0
"""Between two plain lines of a run whose state stays the same."""


def live_on_stderr() -> Live | None:
    """Return what shows something as it changes; None where stderr is no terminal."""
    console = Console(stderr=True)
    if not console.is_terminal or console.is_dumb_terminal:
        return None
    return Live(console=console, auto_refresh=False, transient=True)


@contextmanager
def progress() -> Iterator[Callable[[control_pb2.Run | control_pb2.LogLine], None]]:
    """Give a function that shows a run as it is now, or what a rank prints, on stderr."""
    live = live_on_stderr()
    if live is None:
        plain = PlainProgress()

        def show_plain(each: control_pb2.Run | control_pb2.LogLine) -> None:
            if isinstance(each, control_pb2.Run):
                plain(each)
            else:
                click.echo(log_text.shown(each.text, has_colour=False), err=True)

        yield show_plain
        return
    notes, console = NoteLines(stays_in_table=EventKind.CHECKPOINT_WRITTEN), live.console

    def show(each: control_pb2.Run | control_pb2.LogLine) -> None:
        if isinstance(each, control_pb2.LogLine):
            text = log_text.shown(each.text, has_colour=not console.no_color)
            console.print(Text.from_ansi(text), soft_wrap=True)
            return
        for line in notes.new(each):
            console.print(Text(line, style="yellow"), soft_wrap=True)
        live.update(LiveTable(notes.without_told(each)), refresh=True)

    with INTERRUPTION.holding(), live:
        yield show


class NoteLines:
    """Finds what is noted of a run since it was seen last: a loss, a return, no checkpoint."""

    def __init__(self, stays_in_table: str = "") -> None:
        """Nothing was seen yet. Notes of one kind may stay in a table, which has the latest."""
        self._last, self._stays = 0, stays_in_table

    def new(self, run: control_pb2.Run) -> list[str]:
        """Return a line a note that is new, each with its time."""
        new = [each for each in run.noted if each.sequence > self._last]
        self._last = max([self._last, *(each.sequence for each in new)])
        told = [each for each in new if each.kind != self._stays]
        return noted(told, [site.site for site in run.sites])

    def without_told(self, run: control_pb2.Run) -> control_pb2.Run:
        """Return the run with the notes alone that stay in the table."""
        shown = control_pb2.Run()
        shown.CopyFrom(run)
        del shown.noted[:]
        shown.noted.extend(each for each in run.noted if each.kind == self._stays)
        return shown


class PlainProgress:
    """Prints a line when a run's state changes, or the phase in which it starts.

    Otherwise at most one each PLAIN_EVERY_S.
    """

    def __init__(self, now_s: Callable[[], float] = time.monotonic) -> None:
        self._now_s = now_s
        self._state = ("", "")
        self._line = ""
        self._next_s = 0.0
        self._notes = NoteLines()

    def __call__(self, run: control_pb2.Run) -> None:
        """Print what is noted at once, and a line about the run if one is due."""
        for note in self._notes.new(run):
            click.echo(note, err=True)
        now_s, line = self._now_s(), plain_line(run)
        state = (formats.run_state(run), current_phase(run))
        if state == self._state and (line == self._line or now_s < self._next_s):
            return
        self._state, self._line, self._next_s = state, line, now_s + PLAIN_EVERY_S
        click.echo(line, err=True)


def print_run(run: control_pb2.Run, *, all_links: bool = False) -> None:
    """Print the table of a run on stdout."""
    Console().print(LiveTable(run, all_links=all_links), crop=False)


def finish(output: Output, run: control_pb2.Run, reader: RunReader) -> int:
    """Print how an ended run ended; return its exit status, 0 if it has plainly succeeded.

    Raises:
        CommandError: it has not succeeded; with the run's reason code.
    """
    summary, others = read_summary(run), _others(run, reader)
    if not output.as_json:
        told = {} if run.state == control_pb2.RUN_STATE_SUCCEEDED else {"reason": ""}
        if summary is None:
            shown = control_pb2.Run()
            shown.CopyFrom(run)
            if told:  # the error says why
                shown.ClearField("reason_code")
            print_run(shown)
        else:
            Console().print(RunSummary({**summary, **told}), crop=False)
    if run.state == control_pb2.RUN_STATE_SUCCEEDED:
        exit_code = exit_code_of(run)
        if exit_code and run.failure.log_path:
            output.note(f"log: {run.failure.log_path}")
        if exit_code:
            output.note(f"hint: {CATALOGUE[run.reason_code].hint}")
        return output.result(outcome_view(run, summary), exit_code=exit_code)
    code = reason_code(run)
    message = and_others(run.reason or CATALOGUE[code].message, others)
    raise CommandError(code, message, {**where_of(run), "others": others})


def _others(run: control_pb2.Run, reader: RunReader) -> int:
    """Return at how many other ranks and sites the same has failed as the run has ended of."""
    if not run.HasField("failure"):
        return 0
    first, sites = run.failure, [site.site for site in run.sites]
    alike = set()
    with contextlib.suppress(IsthmusError):  # only its coordinator has them, and has gone
        for event in reader.events(follow=False):
            if event.kind != EventKind.FAILURE_REPORTED:
                continue
            other = failure_of(event.detail)
            is_same = other.code == first.code and is_alike(other.message, first.message, sites)
            if is_same and not other.is_collateral:
                alike.add((other.site, other.rank))
    return len(alike - {(first.site, first.rank)})
