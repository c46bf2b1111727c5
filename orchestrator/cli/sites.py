"""`isthmus sites`: who takes part in a run that goes on."""

from __future__ import annotations

import time

import click

from isthmus.orchestrator.api.checkpoint_request import saved
from isthmus.orchestrator.api.errors import CommandError
from isthmus.orchestrator.cli.options import json_option, run_options, timeout_option
from isthmus.orchestrator.cli.output import Output
from isthmus.orchestrator.cli.views import run_view
from isthmus.orchestrator.client.run_reader import TERMINAL, reading
from isthmus.orchestrator.evidence.view import formats
from isthmus.orchestrator.run_folder.home import RunChoice, home_folder
from isthmus.protos.control.v1 import control_pb2

site_argument = click.argument("site", metavar="SITE")


@click.group("sites")
@json_option
def command() -> None:
    """Drop a site from a running run, or add one."""


@command.command("drop")
@site_argument
@run_options
@click.option("--checkpoint", is_flag=True, help="Have all sites write a checkpoint first.")
@timeout_option("2min", "Drop it after this long with the last checkpoint there is.")
def drop(output: Output, choice: RunChoice, site: str, checkpoint: bool, timeout_s: float) -> int:
    """Have RUN, by default the latest, go on without SITE, which is not started again.

    The others lose no step. SITE's processes end.
    """
    with reading(choice) as reader:
        if checkpoint:
            output.note(saved(reader, home_folder(choice.home), time.monotonic() + timeout_s))
        run = reader.drop_site(site)
    return _told(output, run, f"continues without {site}", f"site {site} was not dropped")


@command.command("add")
@site_argument
@run_options
def add(output: Output, choice: RunChoice, site: str) -> int:
    """Add SITE to RUN, by default the latest.

    It was dropped or lost, and is started as soon as its agent is there and nothing of the run is
    left at it; or the run did not begin with it.
    """
    with reading(choice) as reader:
        run = reader.add_site(site)
    return _told(output, run, f"{site} is to take part", f"site {site} was not added")


def _told(output: Output, run: control_pb2.Run, what: str, nothing: str) -> int:
    if run.state in TERMINAL:
        state = formats.run_state(run)
        where = {"run_id": run.run_id}
        raise CommandError("REFUSED", f"run {run.run_id} has ended, {state}: {nothing}", where)
    return output.result(run_view(run), f"{run.run_id}: {what}")
