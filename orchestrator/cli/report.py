"""`isthmus report`: runs and benchmarks as a page, as Markdown, or as JSON."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import click

from isthmus.orchestrator.api.errors import CommandError
from isthmus.orchestrator.cli.options import (
    coordinator_option,
    home_option,
    out_option,
    with_output,
)
from isthmus.orchestrator.cli.output import Output
from isthmus.orchestrator.evidence.record.bench_record import BENCH, Bench, read_bench
from isthmus.orchestrator.evidence.record.run_record import read_run_record
from isthmus.orchestrator.evidence.report.markdown import markdown
from isthmus.orchestrator.evidence.report.page import page
from isthmus.orchestrator.evidence.report.run_facts import RunFacts, run_facts
from isthmus.orchestrator.run_folder.home import RunChoice, home_folder, is_folder_name
from isthmus.orchestrator.run_folder.run_files import write_atomically
from isthmus.protos.errors import NotFoundError
from isthmus.protos.versions import build

REPORT = "report.html"


@click.command("report")
@click.argument("names", metavar="[RUN|BENCH]...", nargs=-1)
@out_option(f"Write this file. [{REPORT} in the folder of the run or benchmark]")
@click.option(
    "--md", "as_markdown", is_flag=True, help="Write Markdown, on stdout unless --out is given."
)
@coordinator_option()
@home_option
@with_output
def command(
    output: Output,
    names: tuple[str, ...],
    out: Path | None,
    as_markdown: bool,
    coordinator: str | None,
    home: Path | None,
) -> int:
    """Write a page about runs and benchmarks, by default about the latest run.

    Several are put side by side. The page is one file that loads nothing from elsewhere.
    """
    runs: list[RunFacts] = []
    benches: list[Bench] = []
    folders: list[Path | None] = []
    for name in dict.fromkeys(names or ("",)):
        bench = None if coordinator else _bench_folder(home_folder(home), name)
        if bench is not None:
            benches.append(read_bench(bench / BENCH))
            folders.append(bench)
        else:
            record = read_run_record(RunChoice(run_id=name, home=home, coordinator=coordinator))
            runs.append(run_facts(record))
            folders.append(record.folder)
    if as_markdown:
        text, path = markdown(runs, benches), out
    else:
        text, path = page(runs, benches, build()), out or _default_path(folders)
    if path is not None:
        write_atomically(path, text)
    data: dict[str, Any] = {
        "report": None if path is None else str(path.absolute()),
        "runs": [run.to_json() for run in runs],
        "benchmarks": [dataclasses.asdict(bench) for bench in benches],
    }
    return output.result(data, text.rstrip("\n") if path is None else str(path.absolute()))


def _bench_folder(home: Path, name: str) -> Path | None:
    """Return the folder of a benchmark: of that name, or the folder itself, as bench printed it."""
    if not name:
        return None
    folders = [home / "bench" / name] if is_folder_name(name) else [Path(name)]
    found = next((folder for folder in folders if (folder / BENCH).is_file()), None)
    if found is None and not is_folder_name(name):
        raise NotFoundError(f"{name!r} is neither a run, nor a benchmark, nor a benchmark's folder")
    return found


def _default_path(folders: list[Path | None]) -> Path:
    """Return where the page goes that nobody named a file for.

    Raises:
        CommandError: there is no one folder that it belongs to, or it is on another machine.
    """
    if len(folders) > 1:
        raise CommandError("USAGE", "several are compared: name the file with --out FILE")
    if folders[0] is None:
        message = "the run's folder is not on this machine: name the file with --out FILE"
        raise CommandError("USAGE", message)
    return folders[0] / REPORT
