"""Runs whose coordinator is gone, or goes while somebody watches: what the folder tells."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from isthmus.orchestrator.coordinator.journal import Journal
from isthmus.orchestrator.run_folder.home import LOG, SUMMARY, RunFolder
from isthmus.orchestrator.run_folder.log_files import LogWriter
from isthmus.orchestrator.run_folder.state_lock import LOCK
from isthmus.protos.control.v1 import control_pb2
from tests.cli.conftest import Isthmus
from tests.cli.runs import a_folder, a_run, announce
from tests.fakes.scripted_coordinator import ScriptedCoordinator, serving

LINK = {"source": "a", "target": "b", "bytes_per_s": 5e7, "rtt_s": 0.01}
PROGRESS = {
    "totals": {"tokens": 99.0},
    "sites": {"a": {"step": 9, "latest": {"loss": 2.0}}},
    "links": [],
    "active_s": 4.5,
}


def record(folder: RunFolder, state: str = "", code: str = "", reason: str = "") -> None:
    """Write what a coordinator would; without `state` the run has not ended."""
    journal = Journal(folder.path)
    generation = journal.raise_generation()

    def append(kind: str, site: str = "", **detail: object) -> None:
        journal.append(
            kind,
            wall_s=1_700_000_000.0,
            generation=generation,
            run_id=folder.run_id,
            site=site,
            detail=detail,
        )

    append("run.submitted", name="test", folder="/gone", sites=["a", "b"], links=[LINK])
    append("site.joined", "a", host="here")
    append("site.running", "a")
    append("run.active")
    journal.save_progress(folder.run_id, PROGRESS)
    if state:
        append("run.ended", state=state, reason_code=code, reason=reason, failure=None)
    journal.close()
    lines = [
        control_pb2.LogLine(site="a", source="rank0", sequence=at, text=f"step {at}")
        for at in range(5)
    ]
    lines.append(control_pb2.LogLine(site="a", source="agent", sequence=0, text="hello"))
    LogWriter(folder.path).append("a", lines)


@pytest.fixture
def folder(home: Path) -> RunFolder:
    return a_folder(home)


def test_a_run_that_succeeded(isthmus: Isthmus, folder: RunFolder) -> None:
    record(folder, "SUCCEEDED", reason="all sites ended well")
    summary = {"run_id": "r1", "verified_steps": 9, "sites": [{"site": "a", "tokens_per_s": 5.0}]}
    (folder.path / SUMMARY).write_text(json.dumps(summary))

    status = isthmus("status", "--json").envelope["data"]
    assert (status["run_id"], status["state"]) == ("r1", "SUCCEEDED")
    assert status["folder"] == str(folder.path)
    assert status["sites"][0]["step"] == 9
    waited = isthmus("wait", "r1", "--json")
    assert waited.code == 0
    data = waited.envelope["data"]
    assert data["verified_steps"] == 9
    assert data["sites"][0]["tokens_per_s"] == 5.0
    assert data["tokens"] == 99.0
    assert isthmus("cancel", "--json").envelope["data"]["state"] == "SUCCEEDED"
    events = isthmus("events", "--json").envelope["data"]["events"]
    assert [event["kind"] for event in events] == [
        "run.submitted",
        "site.joined",
        "site.running",
        "run.active",
        "run.ended",
    ]
    assert isthmus("wait").out


def test_a_run_that_was_cancelled(isthmus: Isthmus, folder: RunFolder) -> None:
    record(folder, "CANCELLED", "CANCELLED", "cancelled by its operator")
    assert isthmus("wait").code == 6
    assert "CANCELLED" in isthmus("status", "--all").out


def test_a_run_whose_coordinator_was_killed(isthmus: Isthmus, folder: RunFolder) -> None:
    record(folder)
    waited = isthmus("wait", "--json")
    assert waited.code == 4
    error = waited.envelope["error"]
    assert error["code"] == "COORDINATOR_LOST"
    assert "active" in error["message"]
    assert error["where"]["folder"] == str(folder.path)
    assert error["where"]["log_path"] == str(folder.path / LOG)
    assert "launch JOB --resume" in error["hint"]
    assert error["where"]["site"] is None
    status = isthmus("status", "--json")
    assert status.code == 0
    assert status.envelope["data"]["reason_code"] == "COORDINATOR_LOST"
    assert [each["state"] for each in status.envelope["data"]["sites"]] == ["LOST", "ABSENT"]
    (last,) = isthmus("status", "--watch", "--json").lines[-1:]
    assert (last["event"], last["data"]["state"]) == ("terminal", "FAILED")


@pytest.mark.parametrize(("verb", "done"), [("drop", "dropped"), ("add", "added")])
def test_no_site_of_a_run_that_has_ended_is_dropped_or_added(
    isthmus: Isthmus, folder: RunFolder, verb: str, done: str
) -> None:
    record(folder, "SUCCEEDED")
    told = isthmus("sites", verb, "b", "--json")
    assert told.code == 8
    said = f"run {folder.run_id} has ended, SUCCEEDED: site b was not {done}"
    assert told.envelope["error"]["message"] == said


def test_logs(isthmus: Isthmus, folder: RunFolder) -> None:
    record(folder, "SUCCEEDED")
    plain = isthmus("logs")
    assert plain.out.splitlines() == ["a/agent | hello"] + [
        f"a/rank0 | step {at}" for at in range(5)
    ]
    assert isthmus("logs", "--rank", "0", "--tail", "2").out.splitlines() == [
        "a/rank0 | step 3",
        "a/rank0 | step 4",
    ]
    assert isthmus("logs", "--site", "b").out == ""
    lines = isthmus("logs", "--json").envelope["data"]["lines"]
    assert lines[0] | {"wall_s": 0} == {
        "site": "a",
        "source": "agent",
        "sequence": 0,
        "wall_s": 0,
        "text": "hello",
    }
    *followed, last = isthmus("logs", "-f", "--json").lines
    assert [line["event"] for line in followed] == ["line"] * 6
    assert last["data"] == {"lines": 6}


@pytest.mark.parametrize("command", ["status", "wait", "events", "cancel"])
def test_a_damaged_journal_is_told_in_one_line(
    isthmus: Isthmus, folder: RunFolder, command: str
) -> None:
    (folder.path / "journal.sqlite3").write_bytes(b"not a journal" * 100)
    done = isthmus(command, "--json")
    assert done.code == 8
    assert "journal.sqlite3" in done.envelope["error"]["message"]


def test_a_folder_whose_journal_was_never_written(isthmus: Isthmus, folder: RunFolder) -> None:
    done = isthmus("status", "--json")
    assert done.code == 8
    assert "no journal" in done.envelope["error"]["message"]


HOLDER = """
import fcntl, sys
sys.stdin.readline()
with open(sys.argv[1]) as lock:
    fcntl.flock(lock, fcntl.LOCK_EX)
    print("locked", flush=True)
    sys.stdin.read()
"""


def test_what_a_lost_coordinator_said_last_is_its_reason(
    isthmus: Isthmus, folder: RunFolder
) -> None:
    record(folder)
    (folder.path / LOG).write_text("a traceback\nerror: j: disk is full\nhint: Free some.\n")
    error = isthmus("wait", "--json").envelope["error"]
    assert error["code"] == "COORDINATOR_LOST"
    assert error["message"].endswith(": j: disk is full")


@pytest.fixture
def process(folder: RunFolder) -> Iterator[subprocess.Popen[bytes]]:
    """A process that stands for a coordinator's: it lives until it is killed."""
    child = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(folder.path / LOCK)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        yield child
    finally:
        child.kill()
        child.communicate(timeout=30)


def take_over(folder: RunFolder, address: str, process: subprocess.Popen[bytes]) -> None:
    """Make `process` the folder's coordinator, with its lock."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(b"\n")
    process.stdin.flush()
    assert process.stdout.readline() == b"locked\n"
    announce(folder, address)


@pytest.mark.multiprocess
@pytest.mark.parametrize("hangs_up", [True, False])
def test_a_coordinator_that_is_killed_under_its_watchers(
    isthmus: Isthmus, folder: RunFolder, process: subprocess.Popen[bytes], hangs_up: bool
) -> None:
    record(folder)
    scripted = ScriptedCoordinator(runs=[a_run("ACTIVE")], watched=[a_run("ACTIVE")])
    scripted.before_end = process.kill
    scripted.breaks_stream_with = None if hangs_up else grpc.StatusCode.UNAVAILABLE
    with serving(scripted) as address:
        take_over(folder, address, process)
        done = isthmus("wait", "--json")
    assert done.code == 4
    assert done.envelope["error"]["code"] == "COORDINATOR_LOST"


@pytest.mark.multiprocess
def test_what_is_followed_goes_on_in_the_folder_and_nothing_comes_twice(
    isthmus: Isthmus, folder: RunFolder, process: subprocess.Popen[bytes]
) -> None:
    record(folder, "SUCCEEDED")
    scripted = ScriptedCoordinator(
        runs=[a_run("ACTIVE")],
        lines=[
            control_pb2.LogLine(site="a", source="rank0", sequence=at, text=f"step {at}")
            for at in range(3)
        ],
        events=[control_pb2.Event(sequence=1, kind="run.submitted")],
        breaks_stream_with=grpc.StatusCode.UNAVAILABLE,
    )
    with serving(scripted) as address:
        take_over(folder, address, process)
        scripted.before_end = process.kill
        logs = isthmus("logs", "-f", "--rank", "0")
    assert logs.out.splitlines() == [f"a/rank0 | step {at}" for at in range(5)]
    process.wait(30)


def test_a_coordinator_that_is_stopped_is_unreachable_and_not_lost(
    isthmus: Isthmus, folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    record(folder)
    monkeypatch.setattr("isthmus.orchestrator.client.run_reader.GONE_S", 0.0)
    with Journal(folder.path):  # of this process, which lives
        announce(folder, "127.0.0.1:1")
        for command in ("status", "wait", "logs", "events", "cancel"):
            done = isthmus(command, "--json")
            assert done.code == 4
            assert done.envelope["error"]["code"] == "COORDINATOR_UNREACHABLE"


def test_an_unfinished_run_can_be_given_up(isthmus: Isthmus, tmp_path: Path) -> None:
    folder = a_folder(tmp_path)
    record(folder)
    giving_up = ("coordinator", "--state", str(folder.path), "--json", "--abandon")
    assert isthmus(*giving_up, "r2").envelope["error"]["code"] == "RUN_NOT_FOUND"
    expected = {"run_id": "r1", "state": "FAILED", "reason_code": "COORDINATOR_LOST"}
    for _ in range(2):  # as often as it is said
        done = isthmus(*giving_up, "r1")
        assert (done.code, done.envelope["data"]) == (0, expected)
    with Journal(folder.path):
        assert isthmus(*giving_up, "r1").envelope["error"]["code"] == "STATE_LOCKED"
