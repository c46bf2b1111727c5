"""`isthmus status`, `logs`, `events`, `wait` and `cancel`: what is asked of one run."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import click

from isthmus.orchestrator.api.checkpoint_request import saved
from isthmus.orchestrator.cli import log_tracebacks
from isthmus.orchestrator.cli.options import DURATION, run_options, timeout_option
from isthmus.orchestrator.cli.output import Output
from isthmus.orchestrator.cli.views import (
    event_line,
    log_line,
    log_view,
    run_lines,
    run_view,
)
from isthmus.orchestrator.client.coordinator_client import Client
from isthmus.orchestrator.client.run_reader import TERMINAL, RunReader, known_run, reading
from isthmus.orchestrator.core.journaled_run import RecordedEvent
from isthmus.orchestrator.evidence.view import formats
from isthmus.orchestrator.run_folder.home import RunChoice, home_folder, run_folders
from isthmus.protos.control.v1 import control_pb2

Item = TypeVar("Item")


@click.command("status")
@run_options
@click.option("--watch", is_flag=True, help="Show it until it has ended.")
@click.option(
    "--all",
    "every",
    is_flag=True,
    help="Without RUN, list all runs, newest first. With RUN, show all of its links.",
)
def status(output: Output, choice: RunChoice, watch: bool, every: bool) -> int:
    """Show RUN, by default the latest. The exit status is 0 whatever the run's is: see wait."""
    if every and watch:
        raise click.UsageError("--all does not go with --watch")
    if every and not choice.run_id:
        runs = _all_runs(choice)
        text = run_lines(runs) if runs else "no runs"
        return output.result({"runs": [run_view(run) for run in runs]}, text)
    from isthmus.orchestrator.cli.display import print_run  # brings rich

    with reading(choice) as reader:
        run = _watch(output, reader) if watch else reader.get()
    if not output.as_json:
        print_run(run, all_links=every)
    return output.result(run_view(run))


def _watch(output: Output, reader: RunReader) -> control_pb2.Run:
    """Show the run until it has ended; return it as it is then."""
    from isthmus.orchestrator.cli.display import progress

    run = control_pb2.Run()
    if output.as_json:
        for run in reader.watch():
            output.event("run", run_view(run), "")
        return run
    with progress() as show:
        for run in reader.watch():
            show(run)
    return run


def _all_runs(choice: RunChoice) -> list[control_pb2.Run]:
    if choice.coordinator is not None:
        with Client(choice.coordinator) as client:
            return client.list_runs()
    home = home_folder(choice.home)
    return [known_run(home, folder) for folder in run_folders(home)]


@click.command("logs")
@run_options
@click.option("-f", "--follow", is_flag=True, help="Go on until the run has ended.")
@click.option("--site", default="", show_default=False, help="Only this site.")
@click.option("--rank", type=click.IntRange(min=0), help="Only this rank of a site.")
@click.option(
    "--tail",
    type=click.IntRange(1, 1_000_000),
    help="Only the last lines, this many of each source.",
)
@click.option("--since", "since_s", type=DURATION, help="Only lines since then, as 5min.")
@click.option("--grep", "wanted", metavar="TEXT", default="", help="Only lines with this text.")
def logs(
    output: Output,
    choice: RunChoice,
    follow: bool,
    site: str,
    rank: int | None,
    tail: int | None,
    since_s: float | None,
    wanted: str,
) -> int:
    """Print RUN's logs by time, by default the latest's: `time site/source | line`."""
    from_wall_s = None if since_s is None else time.time() - since_s
    with reading(choice) as reader:
        lines = reader.logs(
            follow=follow, site=site, rank=-1 if rank is None else rank, tail=tail or 0
        )
        kept = LogFilter(from_wall_s, wanted)
        line = functools.partial(log_line, has_colour=output.has_colour)
        wanted_lines: Iterable[control_pb2.LogLine] = filter(kept, lines)
        if not output.as_json and not wanted:  # a part of a traceback is none
            wanted_lines = log_tracebacks.told_once(wanted_lines)
        code = _print_each(output, "line", wanted_lines, log_view, line, follow=follow)
    if kept.num_late == 0 and kept.latest_wall_s and from_wall_s is not None:
        output.note(f"nothing since then: the last line is of {formats.clock(kept.latest_wall_s)}")
    return code


class LogFilter:
    """Tells which log lines are wanted: late ones, with a text."""

    def __init__(self, from_wall_s: float | None, text: str) -> None:
        """None: lines of any time; an empty text: whatever they say."""
        self._from_wall_s = from_wall_s
        self._text = text
        self._is_late: dict[tuple[str, str], bool] = {}
        self.latest_wall_s = 0.0
        self.num_late = 0

    def __call__(self, line: control_pb2.LogLine) -> bool:
        """Whether a line is wanted; one without a time is as late as the line before it."""
        source = (line.site, line.source)
        self.latest_wall_s = max(self.latest_wall_s, line.wall_s)
        if self._from_wall_s is not None and line.wall_s:
            self._is_late[source] = line.wall_s >= self._from_wall_s
        is_late = self._from_wall_s is None or self._is_late.get(source, False)
        self.num_late += is_late
        return is_late and self._text in line.text


@click.command("events")
@run_options
@click.option("-f", "--follow", is_flag=True, help="Go on until the run has ended.")
def events(output: Output, choice: RunChoice, follow: bool) -> int:
    """Print the events of RUN, by default the latest, in their order."""
    with reading(choice) as reader:
        found = reader.events(follow=follow)
        return _print_each(output, "event", found, RecordedEvent.to_json, event_line, follow=follow)


def _print_each(
    output: Output,
    kind: str,
    items: Iterable[Item],
    view: Callable[[Item], dict[str, Any]],
    line: Callable[[Item], str],
    *,
    follow: bool,
) -> int:
    """Print items as they come; with --json and without --follow, all of them in one envelope."""
    views, num_items = [], 0
    for item in items:
        num_items += 1
        if output.as_json and not follow:
            views.append(view(item))
        else:
            output.event(kind, view(item), line(item))
    return output.result({f"{kind}s": views if output.as_json and not follow else num_items})


@click.command("wait")
@run_options
@timeout_option(None, "Exit with 5 after this long, as 90s.")
def wait(output: Output, choice: RunChoice, timeout_s: float | None) -> int:
    """Wait until RUN, by default the latest, has ended; its outcome is the exit status."""
    from isthmus.orchestrator.cli.display import NoteLines, finish

    deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
    notes = NoteLines()
    with reading(choice) as reader:
        run = control_pb2.Run()
        for run in reader.watch(deadline_s):
            for line in notes.new(run):
                output.note(line)
        return finish(output, run, reader)


@click.command("cancel")
@run_options
@click.option("--checkpoint", is_flag=True, help="Have all sites write a checkpoint first.")
@timeout_option("2min", "Stop it after this long with the last checkpoint there is.")
def cancel(output: Output, choice: RunChoice, checkpoint: bool, timeout_s: float) -> int:
    """Stop RUN, by default the latest, at all sites. A run that has ended stays as it is."""
    with reading(choice) as reader:
        if checkpoint:
            output.note(saved(reader, home_folder(choice.home), time.monotonic() + timeout_s))
        run = reader.cancel()
    ended = run.state in TERMINAL
    text = f"{run.run_id}: {formats.outcome(run)}" if ended else f"{run.run_id}: stopping"
    return output.result(run_view(run), text)
