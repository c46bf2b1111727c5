"""Runs, lines and events for tests of the command line."""

from __future__ import annotations

import contextlib
import json
import os
import resource
from collections.abc import Iterator
from pathlib import Path

from isthmus.orchestrator.run_folder.home import ANNOUNCED, RunFolder, claim_run_folder
from isthmus.protos.control.v1 import control_pb2


def a_run(state: str, run_id: str = "r1", **fields: object) -> control_pb2.Run:
    """Return a run with two sites and a link, as a coordinator tells it."""
    run = control_pb2.Run(
        run_id=run_id,
        name="test",
        state=f"RUN_STATE_{state}",  # type: ignore[arg-type]
        generation=3,
        created_wall_s=1_700_000_000.0,
        active_s=12.5,
        sites=[
            control_pb2.SiteStatus(
                site=site,
                state="SITE_STATE_RUNNING",  # type: ignore[arg-type]
                host="here",
                step=7,
                latest={"loss": 2.5, "tokens": 1000.0, "site_tokens": 500.0, "step_s": 0.5},
            )
            for site in ("a", "b")
        ],
        links=[
            control_pb2.LinkStatus(
                source="a",
                target="b",
                bytes_per_s=5e7,
                rtt_s=0.01,
                latest={"sent_bytes": 1e6, "raw_bytes": 2e6},
            )
        ],
        totals={"tokens": 7000.0, "verified_steps": 7.0},
        **fields,  # type: ignore[arg-type]
    )
    if state in {"SUCCEEDED", "FAILED", "CANCELLED"}:
        run.ended_wall_s = 1_700_000_100.0
    return run


def a_failed_run(code: str, run_id: str = "r1") -> control_pb2.Run:
    """Return a run that ended with a reason code, because of rank 1 of site b."""
    failure = control_pb2.Failure(
        code=code,
        message="rank 1 of b ended",
        site="b",
        node=0,
        rank=1,
        exit_code=-9,
        log_path="/logs/b/rank1.log",
    )
    return a_run("FAILED", run_id, reason_code=code, reason="rank 1 of b ended", failure=failure)


LINES = [
    control_pb2.LogLine(site="a", source="rank0", sequence=0, wall_s=1.5, text="step 0"),
    control_pb2.LogLine(site="b", source="gateway0", sequence=0, wall_s=1.6, text="connected ✓"),
]
EVENTS = [
    control_pb2.Event(
        sequence=1,
        wall_s=1.0,
        run_id="r1",
        generation=3,
        kind="run.submitted",
        detail_json='{"name": "test", "sites": ["a", "b"], "links": []}',
    ),
    control_pb2.Event(
        sequence=2, wall_s=1.1, kind="site.joined", site="a", detail_json='{"host": "here"}'
    ),
]


def a_folder(home: Path, run_id: str = "r1") -> RunFolder:
    """Make the folder of a run, without a coordinator."""
    folder, is_new = claim_run_folder(home, run_id, "version: 1\n")
    assert is_new
    return folder


def announce(folder: RunFolder, address: str) -> None:
    """Say that the folder's coordinator, which is whoever holds its lock, listens at `address`."""
    fields = {"address": address, "pid": os.getpid(), "generation": 3}
    (folder.path / ANNOUNCED).write_text(json.dumps(fields))


@contextlib.contextmanager
def full_disk(file_bytes: int) -> Iterator[None]:
    """Let no file of this process become larger, as if the disk had no more room."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
