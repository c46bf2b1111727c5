"""launch: what is submitted, what it says first, how it ends, and what a repetition does."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import grpc
import pytest

from isthmus.orchestrator.api import submission
from isthmus.orchestrator.client import run_reader
from isthmus.orchestrator.coordinator.journal import Journal
from isthmus.orchestrator.run_folder.home import run_folders
from isthmus.protos.checkpoint.requests import requested_step
from isthmus.protos.control.v1 import control_pb2
from isthmus.sites.facts.machine import collect
from isthmus.topology.spec.machine_facts import Wanted
from tests.cli.conftest import Isthmus
from tests.cli.runs import a_folder, a_run, announce, full_disk
from tests.fakes.run_specs import submission_of
from tests.fakes.scripted_coordinator import ScriptedCoordinator, serving


@pytest.fixture
def scripted() -> ScriptedCoordinator:
    return ScriptedCoordinator(watched=[a_run("ACTIVE", ""), a_run("SUCCEEDED", "")])


@pytest.fixture
def address(scripted: ScriptedCoordinator) -> Iterator[str]:
    with serving(scripted) as found:
        yield found


def test_the_run_id_is_the_first_line_and_the_end_is_told(
    isthmus: Isthmus, files: Path, scripted: ScriptedCoordinator, address: str
) -> None:
    done = isthmus("launch", files / "job.yaml", "--coordinator", address)
    assert done.code == 0
    (request,) = scripted.submitted
    assert done.out.splitlines()[0] == request.run_id
    assert "SUCCEEDED" in done.out
    assert "ACTIVE" in done.err


def test_what_is_submitted_can_be_loaded_anywhere(
    isthmus: Isthmus, files: Path, scripted: ScriptedCoordinator, address: str
) -> None:
    job = files / "job.yaml"
    job.write_text(job.read_text().replace("# entrypoint", "entrypoint"))
    overrides = ("--set", "links.0.rtt=120ms", "--set", 'trainer.data.files=["*.txt"]')

    done = isthmus(
        *("launch", job, "--coordinator", address, "--no-emulate", "--detach", *overrides)
    )

    assert done.code == 0
    (request,) = scripted.submitted
    assert request.code.is_carried
    assert request.code.num_files == 2
    spec = submission_of(request).spec
    assert spec.job.entrypoint == str(files / "train.py")
    assert spec.job.trainer.data.files == (str(files / "*.txt"),)
    topology = spec.topology
    assert topology.links[0].rtt_s == pytest.approx(0.12)
    assert not topology.emulate
    assert request.job.source == str(job)


def test_words_after_two_dashes_are_added_to_the_scripts_arguments(
    isthmus: Isthmus, files: Path, scripted: ScriptedCoordinator, address: str
) -> None:
    job = files / "job.yaml"
    job.write_text(job.read_text() + 'arguments: [--lr, "0.1"]\n')
    words = ("--lr", "0.2", "--json", "a b", "é", "--", "x: [1]")
    done = isthmus("launch", job, "--coordinator", address, "--detach", "--json", "--", *words)
    assert done.envelope["data"]["detached"] is True
    (request,) = scripted.submitted
    assert submission_of(request).spec.job.arguments == ("--lr", "0.1", *words)
    refused = isthmus("launch", job, "--coordinator", address, "stray")
    assert (refused.code, "stray" in refused.err) == (2, True)


def test_a_variable_to_pass_on_has_to_be_set_and_its_value_is_in_no_document(
    isthmus: Isthmus,
    files: Path,
    home: Path,
    scripted: ScriptedCoordinator,
    address: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = files / "job.yaml"
    job.write_text(job.read_text() + "pass_env: [HOME, TOKEN_OF_TEST]\n")
    monkeypatch.delenv("TOKEN_OF_TEST", raising=False)
    done = isthmus("launch", job, "--coordinator", address, "--json")
    assert done.code == 2
    (where,) = done.envelope["error"]["where"]
    assert where["path"] == "pass_env.1"
    assert "export TOKEN_OF_TEST=" in where["message"]
    assert not (home / "runs").exists()
    monkeypatch.setenv("TOKEN_OF_TEST", "5ecret")
    done = isthmus("launch", job, "--coordinator", address, "--json")
    assert done.code == 0
    assert "5ecret" not in done.out + done.err
    (request,) = scripted.submitted
    assert dict(request.passed_env) == {"HOME": os.environ["HOME"], "TOKEN_OF_TEST": "5ecret"}
    assert "5ecret" not in request.job.text + str(request.job.overrides)
    kept = [path for path in home.rglob("*") if path.is_file()]
    assert kept
    assert not any(b"5ecret" in path.read_bytes() for path in kept)


def test_a_dashboard_needs_the_journal_here(isthmus: Isthmus, files: Path, address: str) -> None:
    pytest.importorskip("starlette", reason="wants pip install 'isthmus[dashboard]'")
    arguments = ("launch", files / "job.yaml", "--coordinator", address, "--detach")
    done = isthmus(*arguments, "--dashboard")
    assert done.code == 0
    assert f"no dashboard here: the run's journal is where its coordinator is, at {address}" in (
        done.err
    )


def test_detached_it_says_how_to_follow(isthmus: Isthmus, files: Path, address: str) -> None:
    arguments = ("launch", files / "job.yaml", "--coordinator", address, "--detach")
    plain = isthmus(*arguments)
    assert plain.code == 0
    (run_id,) = plain.out.splitlines()
    assert f"isthmus status {run_id}" in plain.err
    data = isthmus(*arguments, "--json").envelope["data"]
    assert data["detached"] is True
    assert Path(data["folder"]).name == data["run_id"]


def test_a_run_given_to_a_coordinator_is_found_there_again(
    isthmus: Isthmus, files: Path, home: Path, address: str
) -> None:
    isthmus("launch", files / "job.yaml", "--coordinator", address, "--detach")
    (folder,) = run_folders(home)
    assert folder.remote_address == address
    assert (folder.path / "job.yaml").read_text() == (files / "job.yaml").read_text()
    assert (folder.path / "topology.yaml").read_text() == (files / "topology.yaml").read_text()
    status = isthmus("status", "--json")
    assert status.envelope["data"]["run_id"] == folder.run_id


def test_what_was_refused_leaves_no_run(
    isthmus: Isthmus, files: Path, home: Path, scripted: ScriptedCoordinator, address: str
) -> None:
    scripted.refuses_with = (grpc.StatusCode.ALREADY_EXISTS, "another run is going on")
    assert isthmus("launch", files / "job.yaml", "--coordinator", address).code == 8
    assert run_folders(home) == []
    scripted.refuses_with = None
    arguments = ("launch", files / "job.yaml", "--coordinator", address, "--run-id", "again")
    assert isthmus(*arguments).code == 0


@pytest.mark.parametrize("command", ["launch", "probe"])
def test_an_unreachable_coordinator_leaves_nothing(
    isthmus: Isthmus, files: Path, home: Path, command: str
) -> None:
    document = files / ("job.yaml" if command == "launch" else "topology.yaml")
    done = isthmus(command, document, "--coordinator", "127.0.0.1:1", "--json")
    assert done.code == 4
    assert done.envelope["error"]["code"] == "COORDINATOR_UNREACHABLE"
    assert list((home / "runs").iterdir()) == []


def test_a_full_disk_is_told_with_the_runs_folder_and_leaves_nothing(
    isthmus: Isthmus, files: Path, home: Path
) -> None:
    topology = files / "topology.yaml"
    topology.write_text(topology.read_text() + "#" * 50_000)
    arguments = ("launch", files / "job.yaml", "--coordinator", "127.0.0.1:1", "--run-id", "mine")
    with full_disk(20_000):
        done = isthmus(*arguments, "--json")
    error = done.envelope["error"]
    assert error["code"] == "FILE_ERROR"
    assert error["message"] == f"{home / 'runs' / 'mine'}: File too large"
    assert run_folders(home) == []


def test_an_error_that_is_no_files_keeps_what_it_says(
    isthmus: Isthmus, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise TimeoutError("nobody has answered")

    monkeypatch.setattr(submission, "_submit_to", refuse)
    done = isthmus("launch", files / "job.yaml", "--coordinator", "127.0.0.1:1")
    assert "nobody has answered" in done.err


def test_the_same_run_id_is_the_same_run(
    isthmus: Isthmus, files: Path, home: Path, scripted: ScriptedCoordinator, address: str
) -> None:
    arguments = ("launch", files / "job.yaml", "--run-id", "mine", "--json")
    first = isthmus(*arguments, "--coordinator", address)
    again = isthmus(*arguments)  # it knows by now which coordinator has it
    assert first.envelope["data"]["run_id"] == again.envelope["data"]["run_id"] == "mine"
    assert len(scripted.runs) == len(run_folders(home)) == 1


def test_the_run_id_of_a_run_that_has_ended_is_refused(
    isthmus: Isthmus, files: Path, home: Path
) -> None:
    a_folder(home, "over")
    done = isthmus("launch", files / "job.yaml", "--run-id", "over", "--json")
    assert done.code == 8
    assert done.envelope["error"]["code"] == "REFUSED"
    assert "--run-id" in done.envelope["error"]["message"]


def test_a_living_embedded_run_is_joined_not_started_twice(
    isthmus: Isthmus, files: Path, home: Path, scripted: ScriptedCoordinator, address: str
) -> None:
    folder = a_folder(home, "mine")
    announce(folder, address)
    with Journal(folder.path):
        done = isthmus("launch", files / "job.yaml", "--run-id", "mine", "--json")
    assert done.code == 0
    assert [request.run_id for request in scripted.submitted] == ["mine"]


@pytest.mark.parametrize("command", ["launch", "cancel"])
def test_a_run_that_is_being_launched_is_waited_for(
    isthmus: Isthmus,
    files: Path,
    home: Path,
    scripted: ScriptedCoordinator,
    address: str,
    monkeypatch: pytest.MonkeyPatch,
    command: str,
) -> None:
    scripted.runs.append(a_run("ACTIVE", "mine"))
    folder = a_folder(home, "mine")
    launching = contextlib.ExitStack()
    launching.enter_context(folder.being_launched())

    def submitted(_wait_s: float) -> None:
        folder.remember_remote(address)
        launching.close()

    clock = SimpleNamespace(sleep=submitted, monotonic=time.monotonic)
    monkeypatch.setattr(run_reader, "time", clock)
    about = (files / "job.yaml", "--run-id", "mine") if command == "launch" else ("mine",)
    assert isthmus(command, *about, "--json").code == 0


def test_a_run_that_was_given_back_meanwhile_is_none(
    isthmus: Isthmus, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = a_folder(home, "mine")
    launching = contextlib.ExitStack()
    launching.enter_context(folder.being_launched())

    def refused(_wait_s: float) -> None:
        folder.give_back()
        launching.close()

    clock = SimpleNamespace(sleep=refused, monotonic=time.monotonic)
    monkeypatch.setattr(run_reader, "time", clock)
    done = isthmus("status", "mine", "--json")
    assert done.envelope["error"]["code"] == "RUN_NOT_FOUND"


def test_a_run_that_has_taken_no_step_is_cancelled_without_a_checkpoint(
    isthmus: Isthmus, home: Path, scripted: ScriptedCoordinator, address: str, tmp_path: Path
) -> None:
    run = a_run("QUEUED", "mine")
    for site in run.sites:
        site.step = 0
        site.latest.clear()
    scripted.runs.append(run)
    folder = a_folder(home, "mine")
    folder.remember_remote(address)
    folder.remember_checkpoints((str(tmp_path / "store"),), None)
    begun_s = time.monotonic()
    done = isthmus("cancel", "mine", "--checkpoint", "--timeout", "1min")
    assert done.code == 0
    assert "no checkpoint: the run has taken no step" in done.err
    assert time.monotonic() - begun_s < 60.0
    assert requested_step(str(tmp_path / "store")) is None


def test_a_store_that_hangs_holds_no_cancellation_up(
    isthmus: Isthmus, home: Path, scripted: ScriptedCoordinator, address: str, tmp_path: Path
) -> None:
    scripted.runs.append(a_run("ACTIVE", "mine"))
    folder = a_folder(home, "mine")
    folder.remember_remote(address)
    folder.remember_checkpoints((str(tmp_path / "store"),), None)
    request = tmp_path / "store" / "request.json"
    request.parent.mkdir()
    os.mkfifo(request)  # who opens it waits for somebody at its other end
    try:
        done = isthmus("cancel", "mine", "--checkpoint", "--timeout", "1500ms", "--json")
    finally:
        os.close(os.open(request, os.O_RDONLY | os.O_NONBLOCK))
    assert done.envelope["data"]["state"] == "STOPPING"
    assert f"no checkpoint: {request.parent} does not answer" in done.err


def test_ctrl_c_detaches(
    isthmus: Isthmus,
    files: Path,
    scripted: ScriptedCoordinator,
    address: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupt(run: control_pb2.Run) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("isthmus.orchestrator.cli.display.plain_line", interrupt)
    arguments = ("launch", files / "job.yaml", "--coordinator", address)
    plain = isthmus(*arguments)
    assert plain.code == 130
    (run_id,) = plain.out.splitlines()
    assert f"isthmus status {run_id}" in plain.err
    assert f"isthmus cancel {run_id}" in plain.err
    told = isthmus(*arguments, "--json")
    assert told.envelope["exit_code"] == told.code == 130
    assert told.envelope["data"]["detached"] is True
    assert len(scripted.submitted) == 2


def test_following_has_a_timeout_after_which_the_run_goes_on(
    isthmus: Isthmus, files: Path, scripted: ScriptedCoordinator, address: str
) -> None:
    scripted.watched = [a_run("ACTIVE", "")]
    scripted.holds_streams = True
    arguments = ("launch", files / "job.yaml", "--coordinator", address)
    done = isthmus(*arguments, "--timeout", "200ms", "--json")
    assert done.code == 5
    assert done.envelope["error"]["code"] == "TIMED_OUT"


def test_the_summary_is_shown_and_stands_in_the_envelope(
    isthmus: Isthmus, files: Path, scripted: ScriptedCoordinator, address: str, tmp_path: Path
) -> None:
    summary = {"run_id": "r", "state": "SUCCEEDED", "steps": 7, "losses": [[1, 5.5], [7, 2.5]]}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    scripted.watched = [a_run("SUCCEEDED", "", folder=str(tmp_path))]
    arguments = ("launch", files / "job.yaml", "--coordinator", address)
    assert "after 7 steps" in isthmus(*arguments).out
    data = isthmus(*arguments, "--json").envelope["data"]
    assert data["losses"] == [[1, 5.5], [7, 2.5]]
    assert data["state"] == "SUCCEEDED"


def test_cpus_in_place_of_accelerators_have_to_be_allowed(isthmus: Isthmus, files: Path) -> None:
    if collect(Wanted()).gpus != ():
        pytest.skip("this machine has a GPU")
    wanted = ("--no-emulate", *("--set", "sites.0.accelerator=h100-sxm"))
    done = isthmus("launch", files / "job.yaml", *wanted, "--json")
    assert done.envelope["error"]["code"] == "PREFLIGHT_FAILED"
    assert "h100-sxm" in done.envelope["error"]["message"]
    assert "--allow-cpu" in done.out
    # One mistake later it would start: this is what it hears of next.
    ends = ("--faults", files / "job.yaml")
    done = isthmus("launch", files / "job.yaml", *wanted, *ends, "--allow-cpu")
    assert "warning: the topology says" in done.err
    assert "ranks compute on CPUs then" in done.err
    assert "--faults: the WAN is not emulated here" in done.err


def test_that_cpus_are_allowed_goes_to_the_coordinator(
    isthmus: Isthmus, files: Path, scripted: ScriptedCoordinator, address: str
) -> None:
    done = isthmus("launch", files / "job.yaml", "--coordinator", address, "--allow-cpu")
    assert done.code == 0
    assert submission_of(scripted.submitted[0]).spec.job.allow_cpu
