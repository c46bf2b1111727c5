"""`isthmus logs`: what the run's processes wrote, of all sites."""

from __future__ import annotations

import click

from orchestrator.cli.options import RunChoice, run_options
from orchestrator.cli.output import Output
from orchestrator.cli.reader import reading
from orchestrator.cli.views import log_line, log_view


@click.command("logs")
@run_options
@click.option("-f", "--follow", is_flag=True, help="Go on until the run has ended.")
@click.option("--site", default="", help="Only this site.")
@click.option("--rank", type=click.IntRange(min=0), help="Only this rank of a site.")
@click.option(
    "--tail", type=click.IntRange(1, 1_000_000), help="Only the last lines, this many a source."
)
@click.pass_obj
def command(
    output: Output,
    choice: RunChoice,
    follow: bool,
    site: str,
    rank: int | None,
    tail: int | None,
) -> int:
    """Print RUN's logs, by default the latest's: `site/source | line`, `coordinator | line`."""
    at_once = output.as_json and not follow
    views = []
    num_lines = 0
    with reading(choice) as reader:
        for line in reader.logs(
            follow=follow, site=site, rank=-1 if rank is None else rank, tail=tail or 0
        ):
            num_lines += 1
            if at_once:
                views.append(log_view(line))
            else:
                output.event("line", log_view(line), log_line(line))
        return output.result({"lines": views if at_once else num_lines})
