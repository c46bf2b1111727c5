"""`isthmus emulate`: up, entered, changed, ended, killed; and nothing is left."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Isthmus
from tests.fakes.marked_processes import MarkedProcesses
from tests.fakes.worlds import topology_text

WITHIN_S = 60.0
FOREVER = "import signal; signal.pause()"
ECHO_ONCE = """
import socket, sys
with socket.create_server((sys.argv[1], 7000)) as server:
    print("listening", flush=True)
    connection, _ = server.accept()
    with connection:
        connection.sendall(connection.recv(100))
"""
ASK_ONCE = """
import socket, sys
with socket.create_connection((sys.argv[1], 7000), timeout=30) as connection:
    connection.sendall(b"hello")
    print(connection.recv(100).decode())
"""

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]


class Bench:
    """Emulations started in a HOME of their own, and their processes, found by a mark."""

    def __init__(self, folder: Path) -> None:
        self.home = folder / "home"
        self.topology = folder / "topology.yaml"
        self.topology.write_text(topology_text(2))
        self.processes = MarkedProcesses()
        self.env = {**self.processes.env, "ISTHMUS_HOME": str(self.home), "NO_COLOR": "1"}
        self.started: list[subprocess.Popen[str]] = []

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "isthmus.orchestrator.cli.main", "emulate", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=self.env,
        )
        self.started.append(process)
        return process

    def up(self, *arguments: str) -> dict[str, Any]:
        """Start an emulation; return what it says when it is up."""
        process = self.start(str(self.topology), "--json", *arguments)
        return self.event(process, "up")

    def event(self, process: subprocess.Popen[str], kind: str) -> dict[str, Any]:
        """Return the next JSON line of a kind."""
        assert process.stdout is not None
        deadline_s = time.monotonic() + WITHIN_S
        while True:
            ready, _, _ = select.select([process.stdout], [], [], deadline_s - time.monotonic())
            assert ready, f"no {kind} event in time"
            line = process.stdout.readline()
            assert line, process.communicate()[1]
            event: dict[str, Any] = json.loads(line)
            if event["event"] == kind:
                return event

    def run(self, *arguments: str) -> tuple[int, str, str]:
        """Run a command in a process of its own, to its end."""
        process = self.start(*arguments)
        out, err = process.communicate(timeout=WITHIN_S)
        return process.returncode, out, err

    def folders(self) -> list[str]:
        root = self.home / "emulations"
        return sorted(path.name for path in root.iterdir()) if root.is_dir() else []

    def close(self) -> None:
        for process in self.started:
            process.kill()
            process.communicate()
        self.processes.wait_gone()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    try:
        yield made
    finally:
        made.close()


def test_sites_are_entered_and_reach_each_other(
    bench: Bench, isthmus: Isthmus, needs_netns: None
) -> None:
    state = bench.up("--emulator", "netns")
    assert bench.folders() == ["small"]
    address = {each["site"]: each["address"] for each in state["sites"]}
    python = ("--", sys.executable, "-c")

    server = bench.start("--enter", "small", "b", *python, ECHO_ONCE, address["b"])
    assert server.stdout is not None
    assert server.stdout.readline() == "listening\n", server.communicate()
    asked = bench.run("--enter", "small", "a", *python, ASK_ONCE, address["b"])

    assert asked == (0, "hello\n", "")
    assert server.wait(WITHIN_S) == 0
    done = isthmus("emulate", "--enter", "small", "c", "--", "true")
    assert (done.code, "has no site 'c'; it has a, b" in done.err) == (2, True)

    done = isthmus("emulate", "--apply", "small", "link: [a, b], rtt: 300ms, oneway: true")
    assert (done.code, done.out) == (0, "a -> b: 100Mbit/s, 150ms one way, jitter 0s, loss 0%\n")
    done = isthmus("emulate", "--apply", "small", "link: [a, bb], rtt: 300ms")
    assert (done.code, "'bb'" in done.err, "Traceback" in done.err) == (2, True, False)
    done = isthmus("emulate", "--apply", "small", "reset: [a, b]")
    assert (done.code, "only the relay" in done.err) == (2, True)
    done = isthmus("emulate", "--apply", "small", "pause: a, for: 1s")
    assert (done.code, "has no processes here" in done.err) == (2, True)

    bench.started[0].send_signal(signal.SIGINT)
    end = bench.event(bench.started[0], "terminal")
    assert (end["exit_code"], bench.started[0].wait(WITHIN_S)) == (130, 130)
    assert bench.folders() == []
    bench.processes.wait_gone()


def test_the_relay_carries_what_is_served_and_its_faults_are_told(
    bench: Bench, isthmus: Isthmus, tmp_path: Path
) -> None:
    faults = tmp_path / "faults.yaml"
    faults.write_text("version: 1\nfaults:\n  - {at: 0s, reset: [a, b]}\n")
    with socket.create_server(("127.0.0.1", 0)) as server:
        served = f"b=127.0.0.1:{server.getsockname()[1]}"
        state = bench.up("--serve", served, "--faults", str(faults), "--seed", "3")
        fault = bench.event(bench.started[0], "fault")
        assert fault["change"] == {"kind": "reset", "source": "a", "target": "b"}
        (endpoint,) = state["endpoints"]
        assert (endpoint["source"], endpoint["target"]) == ("a", "b")
        with socket.create_connection((endpoint["host"], endpoint["port"]), WITHIN_S) as dialled:
            server.settimeout(WITHIN_S)
            accepted, _ = server.accept()
            with accepted:
                dialled.sendall(b"hello")
                accepted.settimeout(WITHIN_S)
                assert accepted.recv(100) == b"hello"
    done = isthmus("emulate", "--enter", "small", "a", "--", "true")
    assert (done.code, "no place to enter" in done.err) == (3, True)
    bench.started[0].terminate()
    assert bench.event(bench.started[0], "terminal")["exit_code"] == 143
    assert bench.folders() == []


def test_it_ends_with_its_command_and_as_it_did(bench: Bench) -> None:
    code, out, _ = bench.run(
        *(str(bench.topology), "--emulator", "relay", "--name", "mine", "--"),
        *(sys.executable, "-c", "import os; print(os.environ['ISTHMUS_EMULATION']); os._exit(7)"),
    )
    assert (code, out.splitlines()[-1]) == (7, "mine")
    assert bench.folders() == []
    bench.processes.wait_gone()


@pytest.mark.parametrize(
    "victim", ["owner", pytest.param("emulator", marks=pytest.mark.exhaustive)]
)
def test_after_sigkill_only_a_folder_may_be_left(
    bench: Bench, isthmus: Isthmus, victim: str
) -> None:
    command = ("--", sys.executable, "-c", FOREVER)
    state = bench.up("--emulator", "relay", *command)
    os.kill(state["pid"] if victim == "owner" else state["emulator"]["pid"], signal.SIGKILL)
    _, err = bench.started[0].communicate(timeout=WITHIN_S)

    bench.processes.wait_gone()
    if victim == "emulator":
        assert (bench.started[0].returncode, "it ended with SIGKILL" in err) == (3, True)
        assert bench.folders() == []
        return
    assert bench.folders() == ["small"]
    done = isthmus("emulate", "--clean", "--json")
    assert done.envelope["data"] == {"removed": [{"name": "small", "ended_pids": []}], "up": []}
    assert bench.folders() == []
    assert isthmus("emulate", "--clean").out == "nothing was left behind\n"


def test_what_cannot_be_emulated_is_refused_in_a_line(
    isthmus: Isthmus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "topology.yaml"
    path.write_text(topology_text(2))
    faults = tmp_path / "faults.yaml"
    faults.write_text("version: 1\nfaults:\n  - {at: 0s, pause: a, for: 1s}\n")
    monkeypatch.setattr(
        "isthmus.orchestrator.emulator.standing.netns_problem", lambda: "there is no TUN"
    )

    asked = isthmus("emulate", path, "--emulator", "netns")
    assert (asked.code, "cannot be here: there is no TUN" in asked.err) == (3, True)
    auto = isthmus("emulate", path)
    assert auto.code == 3
    assert "no slow start, congestion control or retransmission" in auto.err
    assert "because there is no TUN" in auto.err
    assert "--serve" in auto.err
    paused = isthmus("emulate", path, "--emulator", "relay", "--faults", faults)
    assert (paused.code, "isthmus launch --faults" in paused.err) == (2, True)
    assert not list((tmp_path / "home" / "emulations").iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--clean", "--enter", "wan", "a"], "--clean and --enter: one at a time"),
        (["--clean", "--seed", "3"], "--seed: does not go with --clean"),
        (["--apply", "wan", "heal: all", "--name", "x"], "--name: does not go with --apply"),
        (["TOPOLOGY", "--emulator", "netns", "--serve", "a=h:1"], "--serve: goes with the relay"),
    ],
)
def test_no_option_is_ignored(
    isthmus: Isthmus, tmp_path: Path, arguments: list[str], message: str
) -> None:
    path = tmp_path / "topology.yaml"
    path.write_text(topology_text(2))
    done = isthmus("emulate", *(str(path) if each == "TOPOLOGY" else each for each in arguments))
    assert done.code == 2
    assert message in done.err
