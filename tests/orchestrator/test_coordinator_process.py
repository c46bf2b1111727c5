"""The coordinator as a process: how it starts, is refused, is stopped, is killed and comes back."""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from isthmus.orchestrator.client.coordinator_client import Client, CoordinatorUnreachableError
from isthmus.orchestrator.coordinator.journal import JournalReader
from isthmus.orchestrator.coordinator.service import server_options
from isthmus.protos.control.v1 import control_pb2
from isthmus.protos.errors import StateConflictError
from isthmus.topology.documents.load import load_topology
from isthmus.topology.spec.timeouts import Timeouts
from tests.fakes.marked_processes import MarkedProcesses
from tests.fakes.waiting import DEADLINE_S, PROCESSES_S, wait_for
from tests.fakes.worlds import JOB, topology_text

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]


class Bench:
    """A state folder, and coordinators started on it."""

    def __init__(self, folder: Path) -> None:
        self.state = folder / "state"
        self.topology = folder / "topology.yaml"
        self.topology.write_text(topology_text(detect_within="2s", start_within="4s"))
        self.processes = MarkedProcesses()
        self.started: list[subprocess.Popen[str]] = []

    def start(self, *more: str, bind: str = "127.0.0.1:0") -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "isthmus.sites.leash", str(os.getpid()), "--"),
                *(
                    sys.executable,
                    "-m",
                    "isthmus.orchestrator.coordinator",
                    "--state",
                    str(self.state),
                ),
                *("--topology", str(self.topology), "--bind", bind, *more),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=self.processes.env,
        )
        self.started.append(process)
        return process

    def listening(self) -> str:
        path = self.state / "coordinator.json"
        pid = self.started[-1].pid

        def is_there() -> bool:
            assert self.started[-1].poll() is None, self.started[-1].communicate()
            return path.is_file() and json.loads(path.read_text())["pid"] == pid

        wait_for(is_there, "coordinator.json")
        address = json.loads(path.read_text())["address"]
        assert isinstance(address, str)
        return address

    def refused(self, *more: str, bind: str = "127.0.0.1:0") -> tuple[int, str]:
        process = self.start(*more, bind=bind)
        _, err = process.communicate(timeout=DEADLINE_S)
        assert "Traceback" not in err
        *_, said, hint = err.splitlines()
        assert hint.startswith("hint: ")
        return process.returncode, said

    def submit(self, address: str, run_id: str = "run-1") -> None:
        with Client(address) as client:
            client.submit(
                run_id,
                control_pb2.Document(source="job.yaml", text=JOB),
                control_pb2.Document(source="topology.yaml", text=self.topology.read_text()),
            )

    def close(self) -> None:
        for process in self.started:
            process.kill()
            process.communicate(timeout=DEADLINE_S)
        self.processes.wait_gone()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    try:
        yield made
    finally:
        made.close()


def test_a_second_one_is_refused_at_the_same_folder_and_address(
    bench: Bench, tmp_path: Path
) -> None:
    bench.start()
    address = bench.listening()
    assert bench.refused() == (8, f"error: another coordinator uses {bench.state}")
    bench.state = tmp_path / "other"
    code, said = bench.refused(bind=address)
    assert (code, "something else listens on" in said) == (8, True)


@pytest.mark.exhaustive
def test_files_that_cannot_be_used_are_named(bench: Bench, tmp_path: Path) -> None:
    assert bench.refused("--set", "failure.detect_within=never")[0] == 2
    bench.topology = tmp_path / "none.yaml"
    code, said = bench.refused()
    assert (code, "none.yaml" in said) == (2, True)
    (tmp_path / "file").write_text("")
    bench.topology, bench.state = tmp_path / "topology.yaml", tmp_path / "file"
    code, said = bench.refused()
    assert (code, str(tmp_path / "file") in said) == (8, True)


def test_errors_are_an_envelope_with_json(bench: Bench) -> None:
    process = bench.start("--json", bind="0.0.0.0:0")
    out, _ = process.communicate(timeout=DEADLINE_S)
    envelope = json.loads(out)
    assert (process.returncode, envelope["exit_code"]) == (3, 3)
    assert envelope["error"]["code"] == "INSECURE_ADDRESS"
    assert "not a loopback address" in envelope["error"]["message"]

    bench.state.write_text("not a folder")
    out, _ = bench.start("--json").communicate(timeout=DEADLINE_S)
    error = json.loads(out)["error"]
    assert (error["code"], str(bench.state) in error["message"]) == ("FILE_ERROR", True)


def test_sigterm_cancels_the_run_and_takes_the_announcement_back(bench: Bench) -> None:
    process = bench.start()
    bench.submit(bench.listening())

    process.terminate()

    process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 128 + signal.SIGTERM
    assert not (bench.state / "coordinator.json").exists()
    with JournalReader(bench.state) as reader:
        view = reader.view("run-1")
    assert view.state == "CANCELLED"
    assert "SIGTERM" in view.reason


def test_after_sigkill_the_run_is_lost_and_the_next_start_goes_on(bench: Bench) -> None:
    bench.start()
    bench.submit(bench.listening())
    bench.started[-1].kill()
    bench.started[-1].communicate(timeout=DEADLINE_S)
    with JournalReader(bench.state) as reader:
        before = reader.view("run-1")
        assert reader.final_view("run-1").reason_code == "COORDINATOR_LOST"

    bench.start()
    address = bench.listening()

    with Client(address) as client:
        lost = client.get_run("run-1")
        assert (lost.reason_code, lost.state) == ("COORDINATOR_LOST", control_pb2.RUN_STATE_FAILED)
        bench.submit(address, "run-2")
        assert client.get_run("").generation > before.generation + 1
        bench.submit(address, "run-3")
        assert client.get_run("run-3").state == control_pb2.RUN_STATE_QUEUED


def full_disk(pid: int, *, is_full: bool) -> None:
    """No file of the process may grow any more, as on a full disk; or again."""
    _, most = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (1 if is_full else most, most))


def run_of(address: str) -> control_pb2.Run:
    with Client(address) as client:
        return client.get_run("run-1")


def wait_for_pause(address: str) -> None:
    def is_paused() -> bool:
        return any("paused" in each for each in run_of(address).notes)

    wait_for(is_paused, "a note", look_s=PROCESSES_S)


def test_one_whose_journal_cannot_be_written_says_so_and_goes_on_when_it_can(
    bench: Bench,
) -> None:
    process = bench.start()
    address = bench.listening()
    bench.submit(address)
    full_disk(process.pid, is_full=True)
    wait_for_pause(address)
    run = run_of(address)
    assert run.state == control_pb2.RUN_STATE_FORMING
    (note,) = [each for each in run.notes if "paused" in each]
    assert f"the coordinator is paused: {bench.state}/journal.sqlite3" in note
    assert "goes on once its journal can be written" in note
    with Client(address) as client, pytest.raises(StateConflictError, match="is paused: "):
        client.cancel_run("run-1")
    assert process.poll() is None

    full_disk(process.pid, is_full=False)

    def goes_on() -> bool:
        try:
            return not any("paused" in each for each in run_of(address).notes)
        except CoordinatorUnreachableError:
            return False

    wait_for(goes_on, "the coordinator to go on", look_s=PROCESSES_S)
    with Client(address) as client:
        client.cancel_run("run-1")
    assert process.poll() is None


def test_a_paused_one_ends_when_it_is_asked_to(bench: Bench) -> None:
    process = bench.start()
    address = bench.listening()
    bench.submit(address)
    full_disk(process.pid, is_full=True)
    wait_for_pause(address)
    process.terminate()
    _, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 128 + signal.SIGTERM, err


@pytest.mark.parametrize("trouble", [pytest.param("full", marks=pytest.mark.exhaustive), "removed"])
def test_the_run_of_an_embedded_one_ends_by_name_when_its_journal_is_gone_or_full(
    bench: Bench, trouble: str
) -> None:
    process = bench.start("--embedded")
    address = bench.listening()
    bench.submit(address)
    with Client(address) as client:
        seen = []
        for run in client.watch_run("run-1"):
            seen.append(run)
            if len(seen) == 1:
                if trouble == "full":
                    full_disk(process.pid, is_full=True)
                else:
                    shutil.rmtree(bench.state)
    assert seen[-1].state == control_pb2.RUN_STATE_FAILED
    assert seen[-1].reason_code == "FILE_ERROR"
    assert str(bench.state) in seen[-1].reason
    assert ("removed or replaced" in seen[-1].reason) == (trouble == "removed")
    _, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 8, err
    assert f"error: {bench.state}" in err
    assert "Traceback" not in err


def test_an_embedded_one_takes_one_run_and_no_other(bench: Bench) -> None:
    bench.topology.write_text(topology_text(start_within="60s"))
    bench.start("--embedded")
    address = bench.listening()
    bench.submit(address)
    with pytest.raises(StateConflictError, match="run-1 is going on"):
        bench.submit(address, "run-2")


def test_an_embedded_one_that_nobody_wants_ends_with_its_agents(bench: Bench) -> None:
    bench.topology.write_text(topology_text(detect_within="1s", start_within="2s"))
    process = bench.start("--embedded", "--runs", str(bench.state.parent))
    bench.listening()
    _, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, err
    assert "no run was submitted within 2 s" in err
    assert not bench.processes.living()


def test_agents_die_with_an_embedded_coordinator_that_is_killed(bench: Bench) -> None:
    bench.topology.write_text(topology_text(start_within="60s"))
    process = bench.start("--embedded")
    with Client(bench.listening()) as client:
        bench.submit(client.address)
        wait_for(
            lambda: all(site.host for site in client.get_run("").sites),
            "both sites' hellos",
            look_s=PROCESSES_S,
        )
        assert len(bench.processes.pids("isthmus.sites.agent")) == 2
    process.kill()
    bench.processes.wait_gone()


def test_an_agent_that_cannot_start_fails_the_run_at_once(bench: Bench) -> None:
    # The agents write here; a file where their folder belongs ends them as they start.
    bench.topology.write_text(topology_text(start_within="60s"))
    bench.state.mkdir()
    (bench.state / "sites").write_text("")
    process = bench.start("--embedded")
    bench.submit(bench.listening())
    _, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, err
    with JournalReader(bench.state) as reader:
        view = reader.view("run-1")
    assert view.reason_code == "LAUNCH_FAILED"
    assert view.failure is not None
    assert view.failure.log_path == str(bench.state / "coordinator.log")


def test_every_channel_option_is_one_that_grpc_knows() -> None:
    """GRPC ignores an unknown key in silence, so each has to be among those in its binary."""
    library = Path(grpc._cython.cygrpc.__file__).read_bytes()  # type: ignore[attr-defined]
    timeouts = Timeouts.derive(load_topology(topology_text(), "t").failure)
    for key, _ in server_options(timeouts):
        assert key.encode() in library, key
