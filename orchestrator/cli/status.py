"""`isthmus status`: a run, or all of them."""

from __future__ import annotations

import click

from orchestrator.cli.display import print_run, progress
from orchestrator.cli.options import RunChoice, run_options
from orchestrator.cli.output import Output
from orchestrator.cli.reader import RunReader, reading
from orchestrator.cli.views import run_line, run_view
from orchestrator.client.coordinator_client import Client
from orchestrator.run_folder.home import home_folder, run_folders
from protos.control.v1 import control_pb2
from protos.errors import IsthmusError


@click.command("status")
@run_options
@click.option("--watch", is_flag=True, help="Show it until it has ended.")
@click.option("--all", "every", is_flag=True, help="List all runs, newest first.")
@click.pass_obj
def command(
    output: Output,
    choice: RunChoice,
    watch: bool,
    every: bool,
) -> int:
    """Show RUN, by default the latest. The exit status is 0 whatever the run's is: see wait."""
    if every:
        if choice.run_id or watch:
            raise click.UsageError("--all takes neither RUN nor --watch")
        runs = _all_runs(choice)
        text = "\n".join(run_line(run) for run in runs) or "no runs"
        return output.result({"runs": [run_view(run) for run in runs]}, text)
    with reading(choice) as reader:
        run = _watch(output, reader) if watch else reader.get()
    if not output.as_json:
        print_run(run)
    return output.result(run_view(run))


def _watch(output: Output, reader: RunReader) -> control_pb2.Run:
    """Show the run until it has ended; return it as it is then."""
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
    return [
        _one_run(RunChoice(run_id=folder.run_id, home=choice.home))
        for folder in run_folders(home_folder(choice.home))
    ]


def _one_run(choice: RunChoice) -> control_pb2.Run:
    """Return a run; where nobody tells about it, a run that says why not."""
    try:
        with reading(choice) as reader:
            return reader.get()
    except IsthmusError as error:
        return control_pb2.Run(run_id=choice.run_id, reason_code=error.code, reason=str(error))
