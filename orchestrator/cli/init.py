"""`isthmus init`: files to start from."""

from __future__ import annotations

from pathlib import Path

import click

from orchestrator.cli.command_errors import CommandError
from orchestrator.cli.options import json_option
from orchestrator.cli.output import Output
from orchestrator.run_folder.home import JOB, TOPOLOGY
from topology.presets.templates import DEFAULT_PRESET, PRESETS, job_yaml, topology_yaml


@click.command("init")
@click.argument("folder", metavar="[DIR]", type=click.Path(path_type=Path), default=".")
@click.option(
    "--preset",
    type=click.Choice(list(PRESETS)),
    default=DEFAULT_PRESET,
    show_default=True,
    help="Which case to start from; `isthmus topology presets` says what they are.",
)
@click.option("--force", is_flag=True, help="Overwrite files that are there.")
@json_option
@click.pass_obj
def command(output: Output, folder: Path, preset: str, force: bool) -> int:
    """Write a commented topology.yaml and job.yaml into DIR; they run as they are."""
    texts = {folder / TOPOLOGY: topology_yaml(preset), folder / JOB: job_yaml(preset)}
    there = [str(path) for path in texts if path.exists()]
    if there and not force:
        raise CommandError("FILE_EXISTS", f"already there: {', '.join(there)}", {"files": there})
    folder.mkdir(parents=True, exist_ok=True)
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")
    files = [str(path) for path in texts]
    output.note(f"next: isthmus launch {folder / JOB}")
    return output.result({"files": files}, "\n".join(files))
