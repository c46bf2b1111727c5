"""`isthmus checkpoints`: what was kept of a run, whether it is whole, and as one file."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

from isthmus.orchestrator.api.checkpoint_choice import named_checkpoints, newest_good_checkpoint
from isthmus.orchestrator.api.errors import CommandError
from isthmus.orchestrator.cli.options import home_option, json_option, out_option, with_output
from isthmus.orchestrator.cli.output import Output
from isthmus.orchestrator.run_folder.home import home_folder
from isthmus.protos.checkpoint.manifest import Manifest
from isthmus.protos.checkpoint.store import StoredCheckpoint, checkpoint_name
from isthmus.protos.errors import BadCheckpointError
from isthmus.protos.own_processes import own_command
from isthmus.protos.training_part import require_training_part
from isthmus.topology.spec.units import format_size

choice_argument = click.argument("choice", metavar="[RUN|PATH]", default="")


@click.group("checkpoints")
@json_option
def command() -> None:
    """List, verify and export a run's checkpoints."""


@command.command("list")
@choice_argument
@home_option
@with_output
def list_command(output: Output, choice: str, home: Path | None) -> int:
    """List the checkpoints of RUN, by default the latest, newest first; see verify."""
    _, found = named_checkpoints(output.note, choice, home_folder(home))
    looked = [_looked_at(each, StoredCheckpoint.manifest) for each in found]
    lines = "\n".join(_line(each) for each in looked) or "no checkpoints"
    return output.result({"checkpoints": looked}, lines)


@command.command("verify")
@choice_argument
@home_option
@with_output
def verify_command(output: Output, choice: str, home: Path | None) -> int:
    """Read all files of RUN's checkpoints, by default the latest run's, and compare digests."""
    _, found = named_checkpoints(output.note, choice, home_folder(home))
    looked = [_looked_at(each, StoredCheckpoint.verified) for each in found]
    bad: list[Mapping[str, Any]] = [each for each in looked if each["problem"]]
    if bad:
        raise CommandError(
            "BAD_CHECKPOINT",
            f"{len(bad)} of {len(looked)} checkpoints: {bad[0]['problem']}",
            bad,
            details="\n".join(_line(each) for each in looked),
        )
    lines = "\n".join(_line(each) for each in looked) or "no checkpoints"
    return output.result({"checkpoints": looked}, lines)


@command.command("export")
@choice_argument
@out_option("Write it here. [RUN-step-N.safetensors]")
@click.option("--force", is_flag=True, help="Overwrite the file that is there.")
@home_option
@with_output
def export_command(
    output: Output, choice: str, out: Path | None, force: bool, home: Path | None
) -> int:
    """Write parameters and buffers of RUN's newest good checkpoint as a safetensors file."""
    place, manifest = newest_good_checkpoint(output.note, choice, home_folder(home))
    out = out or Path(f"{manifest.run}-{checkpoint_name(manifest.step)}.safetensors")
    if out.exists() and not force:
        raise CommandError("FILE_EXISTS", f"already there: {out}", {"files": [str(out)]})
    require_training_part()
    # In a process of its own: it takes torch, and what runs at sites knows what is in the files.
    done = subprocess.run(
        own_command("isthmus.sites.checkpoint.export", place, str(out)),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        *before, last = done.stderr.strip().splitlines() or ["it was killed"]
        where, details = {"file": str(out)}, "\n".join(before)
        raise CommandError("FILE_ERROR", f"{out}: {last}", where, details)
    data = {"file": str(out), "checkpoint": place, "run": manifest.run, "step": manifest.step}
    return output.result(data, str(out))


def _looked_at(
    stored: StoredCheckpoint, look: Callable[[StoredCheckpoint], Manifest]
) -> dict[str, Any]:
    """Return what programs are told of a checkpoint."""
    try:
        found = look(stored)
    except BadCheckpointError as error:
        return {"name": stored.name, "place": stored.place, "problem": str(error)}
    return {
        "name": stored.name,
        "place": stored.place,
        "problem": "",
        "run": found.run,
        "job": found.job,
        "step": found.step,
        "written_s": found.written_s,
        "bytes": found.num_bytes,
        "ranks": dict(found.ranks),
        "missing": list(found.missing),
        "data": dict(found.data),
    }


def _line(looked: dict[str, Any]) -> str:
    if looked["problem"]:
        return f"{looked['place']}  refused: {looked['problem']}"
    written = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(looked["written_s"]))
    sites = " ".join(f"{site}:{ranks}" for site, ranks in looked["ranks"].items())
    size = format_size(looked["bytes"])
    return f"{looked['place']}  step {looked['step']}  {written}  {size}  {sites}"
