"""`isthmus events`: what happened to a run, from its journal."""

from __future__ import annotations

import click

from orchestrator.cli.options import RunChoice, run_options
from orchestrator.cli.output import Output
from orchestrator.cli.reader import reading
from orchestrator.cli.views import event_line, event_view


@click.command("events")
@run_options
@click.option("-f", "--follow", is_flag=True, help="Go on until the run has ended.")
@click.pass_obj
def command(
    output: Output,
    choice: RunChoice,
    follow: bool,
) -> int:
    """Print the events of RUN, by default the latest, in their order."""
    at_once = output.as_json and not follow
    views = []
    num_events = 0
    with reading(choice) as reader:
        for event in reader.events(follow=follow):
            num_events += 1
            if at_once:
                views.append(event_view(event))
            else:
                output.event("event", event_view(event), event_line(event))
        return output.result({"events": views if at_once else num_events})
