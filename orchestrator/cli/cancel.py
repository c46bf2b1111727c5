"""`isthmus cancel`: the end of a run, before its own."""

from __future__ import annotations

import click

from orchestrator.cli.options import RunChoice, run_options
from orchestrator.cli.output import Output
from orchestrator.cli.reader import reading
from orchestrator.cli.views import TERMINAL, run_view, state_name


@click.command("cancel")
@run_options
@click.pass_obj
def command(output: Output, choice: RunChoice) -> int:
    """Stop RUN, by default the latest, at all sites. A run that has ended stays as it is."""
    with reading(choice) as reader:
        run = reader.cancel()
    ended = run.state in TERMINAL
    text = f"{run.run_id}: {state_name(run)}" if ended else f"{run.run_id}: stopping"
    return output.result(run_view(run), text)
