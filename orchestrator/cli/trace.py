"""`isthmus trace`: a run as trace events, for Perfetto and chrome://tracing."""

from __future__ import annotations

from pathlib import Path

import click

from isthmus.orchestrator.api.errors import CommandError
from isthmus.orchestrator.cli.options import out_option, run_options
from isthmus.orchestrator.cli.output import Output
from isthmus.orchestrator.evidence.record.run_record import read_run_record
from isthmus.orchestrator.evidence.trace_events import trace
from isthmus.orchestrator.run_folder.home import RunChoice
from isthmus.orchestrator.run_folder.run_files import strict_json, write_atomically

TRACE = "trace.json"


@click.command("trace")
@run_options
@out_option(f"Write this file. [{TRACE} in the run's folder]")
def command(
    output: Output,
    choice: RunChoice,
    out: Path | None,
) -> int:
    """Write RUN as trace events, by default the latest: open the file at https://ui.perfetto.dev.

    It shows each site's compute, every kept bucket's phases, each link's rate, faults and events.
    """
    record = read_run_record(choice)
    if out is None:
        if record.folder is None:
            message = "the run's folder is not on this machine: name the file with --out FILE"
            raise CommandError("USAGE", message)
        out = record.folder / TRACE
    made = trace(record)
    write_atomically(out, strict_json(made) + "\n")
    for gap in record.gaps:
        output.note(f"not shown: {gap}")
    if not record.timelines:
        output.note("this run kept no buckets' times: links and events only")
    data = {
        "run_id": record.run.run_id,
        "trace": str(out.absolute()),
        "events": len(made["traceEvents"]),
        "steps": len(record.timelines),
        "gaps": record.gaps,
    }
    return output.result(data, str(out.absolute()))
