"""`isthmus up`: starts coordinator and agents of a topology where they belong."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import click

from isthmus.orchestrator.api.errors import CommandError
from isthmus.orchestrator.cli.options import (
    home_option,
    set_option,
    timeout_option,
    topology_argument,
    with_output,
)
from isthmus.orchestrator.cli.output import Output
from isthmus.orchestrator.documents import load_topology_file, protect
from isthmus.orchestrator.interruption import INTERRUPTION
from isthmus.orchestrator.launchers.slurm import SAVE_S
from isthmus.orchestrator.launchers.standing import (
    AGAIN,
    COORDINATOR,
    FAILED,
    LOG,
    RESTARTING,
    UP,
    Part,
    Standing,
    folder_of,
    is_up,
    read,
)
from isthmus.orchestrator.run_folder.home import home_folder
from isthmus.orchestrator.run_folder.log_files import last_line
from isthmus.protos.errors import StateConflictError
from isthmus.protos.own_processes import own_command
from isthmus.protos.private_files import private_folder
from isthmus.protos.save_time import save_within_s
from isthmus.topology.spec.hashing import topology_hash
from isthmus.topology.spec.world import Topology

POLL_S = 0.1
DOWN_S = 80.0
"""Once agents have had their last checkpoints, they end their sites, and then the coordinator ends:
so long at most."""


@click.command("up")
@topology_argument
@set_option
@timeout_option("2min", "How long all may take to join.")
@home_option
@with_output
def command(
    output: Output,
    topology_path: Path,
    overrides: tuple[str, ...],
    timeout_s: float,
    home: Path | None,
) -> int:
    """Start the coordinator and all agents of TOPOLOGY, and keep them until `isthmus down`."""
    topology = load_topology_file(topology_path, overrides)
    protect(topology, topology_path)
    place = home_folder(home)
    folder = folder_of(place, topology)
    private_folder(folder)
    with INTERRUPTION.holding():
        if not is_up(folder):
            process = _start_keeper(folder, topology_path, place, overrides)
        else:
            process = None
            _require_same(folder, read(folder), topology)
            _wake(folder)
        try:
            standing = _wait(output, folder, topology, process, time.monotonic() + timeout_s)
        except BaseException:
            if process is not None:
                bring_down(folder, process)
            raise
    sites = [f"  {name}: joined" for name in standing.sites]
    text = "\n".join([f"{topology.name} is up: coordinator {standing.address}", *sites])
    return output.result(described(folder, standing), text)


def bring_down(folder: Path, keeper: subprocess.Popen[bytes] | None = None) -> Standing | None:
    """End what is up in a folder, and wait until it has; return what its keeper said last.

    Args:
        folder: Of what is up.
        keeper: End what this one keeps, and nothing that another does. It may keep nothing yet.

    Raises:
        CommandError: it does not end.
        SaveTimeError: the environment says no time.
    """
    within_s = save_within_s(os.environ, SAVE_S) + DOWN_S
    deadline_s = time.monotonic() + within_s
    asked: int | None = None
    while is_up(folder) if keeper is None else keeper.poll() is None:
        if asked is None and (asked := _keeper_of(folder) if keeper is None else keeper.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(asked, signal.SIGTERM)
        if time.monotonic() > deadline_s:
            raise CommandError(
                "SITE_NOT_ENDED", f"the keeper has not ended within {within_s:g} s: {folder / LOG}"
            )
        time.sleep(POLL_S)
    return read(folder)


def described(folder: Path, standing: Standing) -> dict[str, Any]:
    """Return what is up, for programs."""
    sites = [
        {
            "site": name,
            "state": part.state,
            "reason": part.reason,
            "message": part.message,
            "cure": part.cure,
            "restarts": part.restarts,
        }
        for name, part in standing.sites.items()
    ]
    return {"folder": str(folder), "coordinator": standing.address, "sites": sites}


def _start_keeper(
    folder: Path, topology_path: Path, home: Path, overrides: tuple[str, ...]
) -> subprocess.Popen[bytes]:
    with (folder / LOG).open("ab") as lines:
        return subprocess.Popen(
            [
                *own_command("isthmus.orchestrator.launchers"),
                *("--topology", str(topology_path.absolute()), "--home", str(home)),
                *(word for override in overrides for word in ("--set", override)),
            ],
            stdin=subprocess.DEVNULL,
            stdout=lines,
            stderr=lines,
            start_new_session=True,  # a terminal's Ctrl-C and hang-up are not for it
        )


def _require_same(folder: Path, standing: Standing | None, topology: Topology) -> None:
    if standing is not None and standing.topology_hash != topology_hash(topology):
        raise StateConflictError(
            f"{folder}: another topology {topology.name!r} is up: `isthmus down` it first"
        )


def _keeper_of(folder: Path) -> int | None:
    """Return who keeps what is up; None: it has not said so yet."""
    standing = read(folder)
    return None if standing is None else standing.pid


def _wake(folder: Path) -> None:
    """Have the keeper start at once what waits to be started again."""
    keeper = _keeper_of(folder)
    if keeper is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(keeper, AGAIN)


def _wait(
    output: Output,
    folder: Path,
    topology: Topology,
    process: subprocess.Popen[bytes] | None,
    deadline_s: float,
) -> Standing:
    """Return what is up once all have joined.

    Args:
        output: Is told what is up, and what is being started again.
        folder: Of what is up.
        topology: Of the deployment.
        process: The keeper, if this command has started it. Another one goes on trying what failed.
        deadline_s: On time.monotonic's clock.

    Raises:
        CommandError: a part failed, or was not there in time; with what is known of each.
    """
    told: set[str] = set()
    while True:
        if process is not None and process.poll() is not None and is_up(folder):
            process = None  # another command was sooner: its keeper has the folder
        standing = read(folder)
        if process is None:
            _require_same(folder, standing, topology)
        elif standing is not None and standing.pid != process.pid:
            standing = None  # left from before
        parts = {} if standing is None else standing.parts
        for name, part in parts.items():
            said = {UP: f"{name}: up", RESTARTING: f"{name}: {part.message}"}.get(part.state)
            if said is not None and said not in told:
                told.add(said)
                output.note(said)
        is_final = process is not None
        failed = {name: part for name, part in parts.items() if is_final and part.state == FAILED}
        num_decided = len(failed) + sum(part.state == UP for part in parts.values())
        if standing is not None and not failed and num_decided == 1 + len(topology.sites):
            return standing
        is_late = time.monotonic() > deadline_s
        is_gone = not is_up(folder) if process is None else process.poll() is not None
        if (
            COORDINATOR in failed
            or is_late
            or is_gone
            or (failed and num_decided == 1 + len(topology.sites))
        ):
            late = {name: part for name, part in parts.items() if part.state != UP and not is_gone}
            raise _not_started(folder, late, last_line(folder / LOG))
        INTERRUPTION.check()
        time.sleep(POLL_S)


def _not_started(folder: Path, parts: dict[str, Part], keeper_said: str) -> CommandError:
    lines, where = [], []
    for name, part in parts.items():
        message = part.message or "has not joined in time"
        lines.append(f"{name}: {message}")
        if part.cure:
            lines.append(f"  cure: {part.cure}")
        where.append({"part": name, "reason": part.reason, "message": message, "cure": part.cure})
    if not parts:
        lines.append(f"keeper: {keeper_said}")
    one = next((f"{each['part']}: {each['message']}" for each in where), keeper_said)
    more = f", and {len(where) - 1} more" if len(where) > 1 else ""
    return CommandError(
        "SITE_NOT_STARTED",
        f"{one}{more}",
        {"log_path": str(folder / LOG), "parts": where},
        "\n".join(lines),
    )
