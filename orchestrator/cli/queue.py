"""`isthmus queue`: the runs that go on at a coordinator, and those that wait."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import click

from isthmus.orchestrator.cli.options import coordinator_option, home_option, with_output
from isthmus.orchestrator.cli.output import Output
from isthmus.orchestrator.cli.views import run_view
from isthmus.orchestrator.client.coordinator_client import Client
from isthmus.orchestrator.client.run_reader import TERMINAL
from isthmus.orchestrator.evidence.view import formats
from isthmus.orchestrator.evidence.view.formats import visible
from isthmus.orchestrator.run_folder.home import find_run, home_folder
from isthmus.protos.control.v1 import control_pb2


@click.command("queue")
@coordinator_option()
@home_option
@with_output
def command(output: Output, coordinator: str | None, home: Path | None) -> int:
    """List the runs that go on, then those that wait, in the order in which they will begin.

    A run waits for its sites until those that have them, and those before it in the queue, end.

    Asks the coordinator of the latest run unless --coordinator names one.
    """
    runs = [run for run in _runs(coordinator, home) if run.state not in TERMINAL]
    runs.sort(key=lambda run: run.position)
    sites = {
        site.site: run.run_id for run in reversed(runs) if not run.position for site in run.sites
    }
    waits_for = waits_of(runs)
    views = [{**run_view(run), "waits_for": waits_for[run.run_id]} for run in runs]
    text = "\n".join(_line(run, waits_for[run.run_id]) for run in runs)
    return output.result({"runs": views, "sites": sites}, text or "no run goes on or waits")


def waits_of(runs: Sequence[control_pb2.Run]) -> dict[str, dict[str, list[str]]]:
    """Return what each run waits for: the runs that end before it begins, each with its sites.

    Args:
        runs: Those that go on, then those that wait, in order.
    """
    waits: dict[str, dict[str, list[str]]] = {}
    holders: dict[str, str] = {}
    for run in runs:
        waits[run.run_id] = {}
        for site in run.sites:
            holder = holders.setdefault(site.site, run.run_id)
            if run.position and holder != run.run_id:
                waits[run.run_id].setdefault(holder, []).append(site.site)
    return waits


def _runs(coordinator: str | None, home: Path | None) -> list[control_pb2.Run]:
    """Return what a coordinator knows; nothing where the latest run's has ended.

    Raises:
        NotFoundError: there is no run that names one.
    """
    address = coordinator
    if address is None:
        folder = find_run(home_folder(home), "")
        folder.use_tls()
        address = folder.coordinator_address
    if address is None:
        return []
    with Client(address) as client:
        return client.list_runs()


def _line(run: control_pb2.Run, waits_for: Mapping[str, Sequence[str]]) -> str:
    place = f"{run.position:>3}" if run.position else "  -"
    what = ", ".join(site.site for site in run.sites)
    if waits_for:
        what = "waits for " + ", ".join(
            f"{' '.join(sites)} of {holder}" for holder, sites in waits_for.items()
        )
    state = formats.run_state(run)
    return visible(f"{place}  {run.run_id}  {state:<9}  priority {run.priority}  {what}")
