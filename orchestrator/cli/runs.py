"""`isthmus runs`: the runs that this machine keeps, and their removal."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from isthmus.orchestrator.api.errors import CommandError
from isthmus.orchestrator.cli.options import RUN_NAME, Parsed, home_option, json_option, with_output
from isthmus.orchestrator.cli.output import Output
from isthmus.orchestrator.cli.views import run_lines
from isthmus.orchestrator.client.run_reader import TERMINAL, known_run
from isthmus.orchestrator.evidence.view import formats
from isthmus.orchestrator.run_folder.home import RunFolder, find_run, home_folder, run_folders
from isthmus.orchestrator.run_folder.removal import folders_of, remove, size_of
from isthmus.protos.control.v1 import control_pb2
from isthmus.topology.spec.units import parse_duration

_DAYS = re.compile(r"(\d{1,5}) ?d")
DAY_S = 86_400.0


def _age(text: str) -> float:
    """Return seconds of `30d`, or of any duration."""
    days = _DAYS.fullmatch(text)
    return int(days[1]) * DAY_S if days else parse_duration(text)


@dataclass(frozen=True, slots=True)
class Kept:
    """A run that this machine keeps."""

    folder: RunFolder
    run: control_pb2.Run
    folders: tuple[Path, ...]
    problem: str
    """Why it is not to be removed; empty: it has ended."""

    @property
    def num_bytes(self) -> int:
        """What its folders take on the disk."""
        return size_of(list(self.folders))

    @property
    def ended_wall_s(self) -> float:
        """When it ended; where that is not known, when it was submitted."""
        return self.run.ended_wall_s or self.run.created_wall_s

    def view(self) -> dict[str, Any]:
        """Return it as --json shows it."""
        return {
            "run_id": self.folder.run_id,
            "name": self.run.name,
            "state": formats.run_state(self.run),
            "created_wall_s": self.run.created_wall_s,
            "ended_wall_s": self.run.ended_wall_s or None,
            "bytes": self.num_bytes,
            "folders": [str(each) for each in self.folders],
            "checkpoints": self.folder.checkpoint_stores,
        }


def kept_run(home: Path, folder: RunFolder) -> Kept:
    """Return what is known of a run that this machine keeps."""
    places = tuple(folders_of(home, folder))
    run = known_run(home, folder)
    if run.state in TERMINAL:
        return Kept(folder, run, places, "")
    if run.state == control_pb2.RUN_STATE_UNSPECIFIED:
        return Kept(folder, run, places, f"nobody knows whether it goes on: {run.reason}")
    unled = f", {run.notes[-1]}" if run.notes else ""
    return Kept(folder, run, places, f"it is {formats.run_state(run)}{unled}")


@click.group("runs")
@json_option
def command() -> None:
    """List, remove and prune the runs that this machine keeps."""


@command.command("list")
@home_option
@with_output
def list_runs(output: Output, home: Path | None) -> int:
    """List the runs that this machine keeps, newest first, and what they take on its disk."""
    place = home_folder(home)
    kept = [kept_run(place, folder) for folder in run_folders(place)]
    views = [each.view() for each in kept]
    sizes = [formats.size(view["bytes"]) for view in views]
    text = run_lines([each.run for each in kept], sizes) if kept else "no runs"
    return output.result({"runs": views}, text)


_yes = click.option("-y", "--yes", is_flag=True, help="Do not ask.")


@command.command("remove")
@click.argument("run_ids", metavar="RUN...", nargs=-1, required=True, type=RUN_NAME)
@click.option("--force", is_flag=True, help="A run, too, of which nobody knows whether it goes on.")
@_yes
@home_option
@with_output
def remove_runs(
    output: Output, run_ids: tuple[str, ...], force: bool, yes: bool, home: Path | None
) -> int:
    """Remove what this machine keeps of RUN: its journal, logs, figures and sites' files.

    Its checkpoints stay. A run that goes on is never removed.
    """
    place = home_folder(home)
    kept = [kept_run(place, find_run(place, run_id)) for run_id in dict.fromkeys(run_ids)]
    for each in kept:
        if each.problem and not (force and _is_unknown(each)):
            hint = "; --force removes it all the same" if _is_unknown(each) else ""
            raise CommandError(
                "REFUSED",
                f"run {each.folder.run_id} is not removed: {each.problem}{hint}",
                {"run_id": each.folder.run_id},
            )
    return _remove(output, kept, yes=yes)


@command.command("prune")
@click.option(
    "--older-than",
    type=Parsed("AGE", _age),
    help="Those that ended longer ago than this, as 30d or 12h.",
)
@click.option("--keep", type=click.IntRange(min=0), help="All but the newest so many.")
@_yes
@home_option
@with_output
def prune(
    output: Output, older_than: float | None, keep: int | None, yes: bool, home: Path | None
) -> int:
    """Remove runs that have ended: old ones, or all but the newest, or those that are both.

    Checkpoints stay, and so does each run that goes on, or of which nobody knows.
    """
    if older_than is None and keep is None:
        raise click.UsageError("say which: --older-than AGE, --keep N, or both")
    place = home_folder(home)
    since_s = time.time() - (older_than or 0.0)
    chosen = []
    for folder in run_folders(place)[keep or 0 :]:
        kept = kept_run(place, folder)
        if kept.problem:
            output.note(f"stays: {folder.run_id}: {kept.problem}")
        elif kept.ended_wall_s <= since_s:
            chosen.append(kept)
    return _remove(output, chosen, yes=yes)


def is_terminal() -> bool:
    """Whether somebody can be asked."""
    return sys.stdin.isatty() and sys.stderr.isatty()


def _is_unknown(kept: Kept) -> bool:
    """Whether no coordinator answers that says how a run is."""
    return bool(kept.problem) and (
        kept.run.state == control_pb2.RUN_STATE_UNSPECIFIED
        or kept.folder.coordinator_address is None
    )


def _remove(output: Output, kept: Sequence[Kept], *, yes: bool) -> int:
    """Remove runs, after a question where nobody has answered it before.

    Raises:
        CommandError: nobody can be asked, or the answer was no.
    """
    views = [each.view() for each in kept]
    num_bytes = sum(view["bytes"] for view in views)
    data = {"runs": views, "bytes": num_bytes}
    if not kept:
        return output.result(data, "no run to remove")
    names = ", ".join(each.folder.run_id for each in kept)
    what = f"{len(kept)} {'run' if len(kept) == 1 else 'runs'}, {formats.size(num_bytes)}: {names}"
    if not yes:
        if output.as_json or not is_terminal():
            raise click.UsageError(f"nobody can be asked about {what}: say -y")
        if not click.confirm(f"Remove {what}?", err=True):
            raise CommandError("REFUSED", "nothing was removed")
    for each in kept:
        remove(list(each.folders))
    stores = [store for view in views for store in view["checkpoints"]]
    stay = f"\ncheckpoints stay: {', '.join(stores)}" if stores else ""
    return output.result(data, f"removed {what}{stay}")
