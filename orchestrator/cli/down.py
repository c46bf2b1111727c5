"""`isthmus down`: ends what `isthmus up` has started."""

from __future__ import annotations

from pathlib import Path

import click

from isthmus.orchestrator.api.errors import CommandError
from isthmus.orchestrator.cli.options import home_option, set_option, topology_argument, with_output
from isthmus.orchestrator.cli.output import Output
from isthmus.orchestrator.cli.up import bring_down, described
from isthmus.orchestrator.documents import load_topology_file
from isthmus.orchestrator.launchers.standing import UNKNOWN, folder_of, is_up
from isthmus.orchestrator.run_folder.home import home_folder


@click.command("down")
@topology_argument
@set_option
@home_option
@with_output
def command(
    output: Output, topology_path: Path, overrides: tuple[str, ...], home: Path | None
) -> int:
    """End the coordinator and all agents of TOPOLOGY, and a run that they are at."""
    topology = load_topology_file(topology_path, overrides)
    folder = folder_of(home_folder(home), topology)
    if not folder.is_dir() or not is_up(folder):
        raise CommandError("NOT_UP", f"nothing is up for topology {topology.name!r}: {folder}")
    standing = bring_down(folder)
    if standing is None:
        return output.result({"folder": str(folder), "sites": []}, f"{topology.name} is down")
    lost = {name: part for name, part in standing.parts.items() if part.state == UNKNOWN}
    if lost:
        raise CommandError(
            "SITE_NOT_ENDED",
            f"not known to have ended: {', '.join(lost)}",
            described(folder, standing),
            "\n".join(f"{name}: {part.message}" for name, part in lost.items()),
        )
    return output.result(described(folder, standing), f"{topology.name} is down")
