"""`isthmus coordinator`: becomes the coordinator's process."""

from __future__ import annotations

from pathlib import Path

import click

from orchestrator.cli.become import become
from orchestrator.cli.options import Address, json_option, set_option
from orchestrator.cli.output import Output
from orchestrator.documents import load_topology_file


@click.command("coordinator")
@click.option("--topology", required=True, type=click.Path(path_type=Path), help="The topology.")
@click.option(
    "--state",
    required=True,
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder of the journal and of the runs; one coordinator at a time uses it.",
)
@click.option(
    "--bind",
    type=Address(),
    help="Listen here; port 0 lets the system choose. [the topology's coordinator.bind]",
)
@set_option
@json_option
@click.pass_obj
def command(
    output: Output, topology: Path, state: Path, bind: str | None, overrides: tuple[str, ...]
) -> int:
    """Run a coordinator until it is stopped. STATE/coordinator.json says where it listens."""
    load_topology_file(topology, overrides)
    return become(
        output,
        "orchestrator.coordinator",
        [
            *("--topology", str(topology), "--state", str(state)),
            *(("--bind", bind) if bind else ()),
            *(word for override in overrides for word in ("--set", override)),
        ],
    )
