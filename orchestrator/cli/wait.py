"""`isthmus wait`: a run's end, as an exit status."""

from __future__ import annotations

import time
from collections import deque

import click

from orchestrator.cli.display import finish
from orchestrator.cli.options import Duration, RunChoice, run_options
from orchestrator.cli.output import Output
from orchestrator.cli.reader import reading


@click.command("wait")
@run_options
@click.option(
    "--timeout", "timeout_s", type=Duration(), help="Exit with 5 after this long, as 90s."
)
@click.pass_obj
def command(
    output: Output,
    choice: RunChoice,
    timeout_s: float | None,
) -> int:
    """Wait until RUN, by default the latest, has ended; its outcome is the exit status."""
    deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
    with reading(choice) as reader:
        run = deque(reader.watch(deadline_s), maxlen=1).pop()
        return finish(output, run)
