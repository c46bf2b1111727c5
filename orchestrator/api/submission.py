"""Gives a run to its coordinator: the one at an address, or one that is started here for it.

A coordinator that is started here outlives the command that started it.
"""

from __future__ import annotations

import errno
import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from isthmus.orchestrator.api.code import JobCode
from isthmus.orchestrator.api.errors import CommandError
from isthmus.orchestrator.client.coordinator_client import Client
from isthmus.orchestrator.client.run_reader import wait_launched
from isthmus.orchestrator.documents import Pair, passed_on, protect
from isthmus.orchestrator.interruption import INTERRUPTION
from isthmus.orchestrator.run_folder.home import LOG, TOPOLOGY, RunFolder, claim_run_folder
from isthmus.orchestrator.run_folder.log_files import last_line
from isthmus.protos.checkpoint.store import stores_of
from isthmus.protos.control.v1 import control_pb2
from isthmus.protos.own_processes import own_command
from isthmus.topology.spec.job_paths import anchored_checkpoint

START_S = 60.0
"""Imports take a second; on a machine that is busy with training, some more."""
POLL_S = 0.02
STOP_S = 10.0

_WRITE_ERRNOS = frozenset({errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ENOSPC})
"""Errors of a write, which names no file, unlike the open before it."""


def submit(
    pair: Pair,
    home: Path,
    run_id: str,
    coordinator: str | None = None,
    faults: Sequence[str] = (),
    priority: int = 0,
    resumed: str | None = None,
    say: Callable[[str], object] = lambda _: None,
) -> RunFolder:
    """Submit to the coordinator, or to one started for this run; return the run's folder here.

    Args:
        pair: What to run.
        home: Where the run's folder is made.
        run_id: Names it.
        coordinator: Its address; None: one is started.
        faults: Arguments of such a one that name a fault script, which has been checked.
        priority: Of runs that wait for the same sites, the highest begins first.
        resumed: The run whose checkpoint it goes on from.
        say: Called with what is carried to the coordinator.

    Raises:
        CommandError: an embedded coordinator does not start, or the run was there and has ended.
        ConfigError: the coordinator found mistakes in the documents, or a variable that the job
            passes on is not set here.
        IsthmusError: it refused, or does not answer.
        OSError: the run's folder cannot be written.
    """
    protect(pair.described, pair.topology_path)
    passed_on(pair, os.environ)
    code = JobCode(pair, home, run_id, is_remote=coordinator is not None, resumed=resumed)
    if code.message.changes or resumed is not None:
        for line in _code_lines(code.message):
            say(line)
    folder, is_new = claim_run_folder(home, run_id, pair.job_document.written)
    if not is_new:
        wait_launched(folder)
        return _submit_again(pair, folder, coordinator, code)
    with folder.being_launched():
        try:
            topology = folder.path / TOPOLOGY
            topology.write_text(pair.topology_document.written, encoding="utf-8")
            _remember_checkpoints(pair, folder)
            if pair.plan is not None:
                folder.remember_plan(pair.plan.explanation)
            folder.remember_tls()
            code.remember(folder, home)
            if coordinator is not None:
                folder.remember_remote(coordinator)
                state = _submit_to(coordinator, pair, run_id, code, priority, say)
                folder.remember_remote(coordinator, state)
            else:
                with started_coordinator(
                    folder,
                    topology,
                    pair.topology_document.overrides,
                    faults=faults,
                    sites=[each.site for each in pair.job.placement],
                ) as address:
                    _submit_to(address, pair, run_id, code)
        except BaseException as error:
            folder.give_back()
            if (
                isinstance(error, OSError)
                and error.errno in _WRITE_ERRNOS
                and error.filename is None
            ):
                raise OSError(error.errno, error.strerror, str(folder.path)) from error
            raise
    return folder


def _code_lines(code: control_pb2.Code) -> list[str]:
    """Return what has changed of a job's files, in lines for people."""
    if not code.since:
        return []
    if not code.changes:
        return [f"code: as in run {code.since}"]
    return [f"code: changed since run {code.since}:", *(f"  {line}" for line in code.changes)]


def _submit_again(
    pair: Pair, folder: RunFolder, coordinator: str | None, code: JobCode
) -> RunFolder:
    """Give a run that is there to its coordinator once more: a retry must not start a second."""
    address = coordinator or folder.coordinator_address
    if address is None:
        raise CommandError(
            "REFUSED",
            f"there was a run {folder.run_id!r} already, and it has ended: choose another --run-id",
            {"run_id": folder.run_id, "folder": str(folder.path)},
        )
    _submit_to(address, pair, folder.run_id, code)
    return folder


def _remember_checkpoints(pair: Pair, folder: RunFolder) -> None:
    """Note what `launch --resume` and `isthmus checkpoints` will look for."""
    if pair.job.checkpoint is not None:
        anchored = anchored_checkpoint(pair.job.checkpoint, pair.job_path.absolute().parent)
        folder.remember_checkpoints(stores_of(anchored.to, folder.run_id), anchored.resume)


def _submit_to(
    address: str,
    pair: Pair,
    run_id: str,
    code: JobCode,
    priority: int = 0,
    say: Callable[[str], object] = lambda _: None,
) -> str:
    """Send what was asked for, and beside it what a plan decided.

    Returns the coordinator's state folder, on its own machine.
    """
    plan = pair.plan
    passed_env = passed_on(pair, os.environ)
    with Client(address) as client:
        code.carry(client, say)
        response = client.submit(
            run_id,
            control_pb2.Document(
                source=os.path.abspath(pair.job_path),  # noqa: PTH100 - a link stays as written
                text=pair.job_document.written,
                overrides=pair.job_document.overrides if plan is None else plan.asked_overrides,
            ),
            control_pb2.Document(
                source=str(pair.topology_path.absolute()),
                text=pair.topology_document.written,
                overrides=pair.topology_document.overrides,
            ),
            decisions="" if plan is None else json.dumps(plan.decisions),
            priority=priority,
            passed_env=passed_env,
            code=code.message,
        )
    return response.state


@contextmanager
def started_coordinator(
    folder: RunFolder,
    topology_path: Path,
    overrides: Sequence[str],
    start_s: float = START_S,
    faults: Sequence[str] = (),
    sites: Sequence[str] = (),
) -> Iterator[str]:
    """Start a coordinator with an agent for each of `sites`; give its address once it listens.

    None: of all sites.

    Leaving the block in peace leaves the coordinator running; an error in the block, Ctrl-C too,
    stops it again: nothing that nobody submitted to is left behind.

    Raises:
        CommandError: it ended, or was not listening after `start_s`; with its log's last line.
    """
    command = [
        *own_command("isthmus.orchestrator.coordinator", "--embedded"),
        *("--topology", str(topology_path)),
        *(word for override in overrides for word in ("--set", override)),
        *("--state", str(folder.path), "--runs", str(folder.path.parent)),
        *("--bind", "127.0.0.1:0"),
        *faults,
        *(word for site in sites for word in ("--site", site)),
    ]
    with INTERRUPTION.holding():
        process = _started(command, folder.path / LOG)
        try:
            yield _wait_until_listening(process, folder, time.monotonic() + start_s)
        except BaseException:
            _stop(process)
            raise


def _started(command: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("ab") as lines:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=lines,
            stderr=lines,
            start_new_session=True,  # a terminal's Ctrl-C and hang-up are not for it
        )


def _wait_until_listening(
    process: subprocess.Popen[bytes], folder: RunFolder, deadline_s: float
) -> str:
    while True:
        ended = process.poll() is not None
        address = folder.living_coordinator()
        if address is not None and not ended:
            return address
        if ended or time.monotonic() > deadline_s:
            how = f"ended with status {process.returncode}" if ended else "does not listen"
            log = folder.path / LOG
            raise CommandError(
                "COORDINATOR_LOST",
                f"the coordinator {how}: {last_line(log)}",
                {"run_id": folder.run_id, "log_path": str(log)},
            )
        INTERRUPTION.check()
        time.sleep(POLL_S)


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(STOP_S)
