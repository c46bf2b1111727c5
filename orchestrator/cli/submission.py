"""Gives a run to its coordinator, an embedded one unless an address is named."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from orchestrator.cli.command_errors import CommandError
from orchestrator.cli.embedded import started_coordinator
from orchestrator.client.coordinator_client import Client
from orchestrator.documents import Pair
from orchestrator.run_folder.home import TOPOLOGY, RunFolder, claim_run_folder
from protos.control.v1 import control_pb2


def submit(
    pair: Pair,
    home: Path,
    run_id: str,
    coordinator: str | None = None,
    faults: Sequence[str] = (),
) -> RunFolder:
    """Submit to the coordinator, or to one started for this run; return the run's folder here.

    Args:
        pair: What to run.
        home: Where the run's folder is made.
        run_id: Names it.
        coordinator: Its address; None: one is started.
        faults: Arguments of such a one that name a fault script, which has been checked.

    Raises:
        CommandError: an embedded coordinator does not start, or the run was there and has ended.
        ConfigError: the coordinator found mistakes in the documents.
        IsthmusError: it refused, or does not answer.
    """
    folder, is_new = claim_run_folder(home, run_id, pair.job_text)
    if not is_new:
        return _submit_again(pair, folder, coordinator)
    try:
        topology = folder.path / TOPOLOGY
        topology.write_text(pair.topology_text, encoding="utf-8")
        if coordinator is not None:
            folder.remember_remote(coordinator)
            _submit_to(coordinator, pair, run_id)
        else:
            with started_coordinator(
                folder,
                topology,
                pair.topology_overrides,
                faults=faults,
                sites=[each.site for each in pair.job.placement],
            ) as address:
                _submit_to(address, pair, run_id)
    except BaseException:
        folder.give_back()
        raise
    return folder


def _submit_again(pair: Pair, folder: RunFolder, coordinator: str | None) -> RunFolder:
    """Give a run that is there to its coordinator once more: a retry must not start a second."""
    address = coordinator or folder.remote_address or folder.living_coordinator()
    if address is None:
        raise CommandError(
            "REFUSED",
            f"there was a run {folder.run_id!r} already, and it has ended: choose another --run-id",
            {"run_id": folder.run_id, "folder": str(folder.path)},
        )
    _submit_to(address, pair, folder.run_id)
    return folder


def _submit_to(address: str, pair: Pair, run_id: str) -> None:
    with Client(address) as client:
        client.submit(
            run_id,
            control_pb2.Document(
                source=str(pair.job_path.absolute()),
                text=pair.job_text,
                overrides=[*pair.job_overrides, *_anchored(pair)],
            ),
            control_pb2.Document(
                source=str(pair.topology_path.absolute()),
                text=pair.topology_text,
                overrides=pair.topology_overrides,
            ),
        )


def _anchored(pair: Pair) -> list[str]:
    """Return overrides that make the job's relative paths absolute: sites have other folders."""
    base = pair.job_path.absolute().parent
    overrides = []
    if pair.job.entrypoint is not None:
        overrides.append(f"entrypoint={json.dumps(str(base / pair.job.entrypoint))}")
    files = pair.job.trainer.data.files
    if files:
        overrides.append(f"trainer.data.files={json.dumps([str(base / glob) for glob in files])}")
    return overrides
