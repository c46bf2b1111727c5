"""The `wan` fixture: a relay for the tests of whoever installs this."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from isthmus.orchestrator.emulator.wan_fixture import Wan
from isthmus.topology.faults.script import Change
from isthmus.topology.spec.errors import ConfigError
from tests.fakes.emulator_configs import relay_config

DEADLINE_S = 60.0


@pytest.mark.slow
@pytest.mark.multiprocess
def test_the_fixture_plays_fault_scripts_and_counts(wan: Wan) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        made = relay_config(server.getsockname()[1])
        [dial] = wan(made.links, made.endpoints, seed=3)
        with socket.create_connection((dial.host, dial.port), DEADLINE_S) as near:
            server.settimeout(DEADLINE_S)
            far, _ = server.accept()
            with far:
                far.settimeout(DEADLINE_S)
                faults = wan.run_faults(
                    "version: 1\nfaults:\n"
                    "  - {at: 0s, link: [eu, us], rtt: 20ms}\n"
                    "  - {at: 10ms..20ms, cut: [eu, us], for: 10ms}\n"
                    "  - {at: 50ms, reset: [eu, us]}\n",
                    seed=5,
                )
                assert [timed.fault for timed in faults.times].count(1) == 6
                faults.wait(DEADLINE_S)
                with pytest.raises(ConnectionResetError):
                    near.recv(1)
                with pytest.raises(ConnectionResetError):
                    far.recv(1)
    assert wan.counters()["us", "eu"]["delivered_bytes"] == 0


@pytest.mark.slow
@pytest.mark.multiprocess
def test_the_fixture_tells_what_it_cannot_do(wan: Wan) -> None:
    made = relay_config(9)
    wan(made.links, made.endpoints)
    with pytest.raises(ConfigError, match="there is no link from eu to mars"):
        wan.apply([Change(kind="cut", source="eu", target="mars")])
    with pytest.raises(ConfigError, match="unknown site 'eux' \\(did you mean 'eu'"):
        wan.run_faults("version: 1\nfaults:\n  - {at: 1s, cut: [eux, us]}\n")
    with pytest.raises(ConfigError, match="cannot pause a site"):
        wan.run_faults("version: 1\nfaults:\n  - {at: 1s, pause: eu, for: 1s}\n")
    endless = wan.run_faults("version: 1\nfaults:\n  - {at: 1h, cut: [eu, us]}\n")
    with pytest.raises(TimeoutError, match="goes on after"):
        endless.wait(0.0)


USER_TEST = """
import pathlib
import socket

import pytest

from isthmus.orchestrator.emulator.emulator_config import RelayEndpoint
from isthmus.orchestrator.emulator.link_shape import LinkShape


@pytest.mark.parametrize("name", ["passes", "fails"])
def test_user(wan, name):
    links = [
        LinkShape(source="eu", target="us", bytes_per_s=1e8, delay_s=0.01),
        LinkShape(source="us", target="eu", bytes_per_s=1e8, delay_s=0.01),
    ]
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        [dial] = wan(
            links, [RelayEndpoint(source="eu", target="us", gateway=0, host="127.0.0.1", port=port)]
        )
        with open("ports", "a") as ports:
            print(dial.port, file=ports)
        with socket.create_connection((dial.host, dial.port), 30) as near:
            far, _ = server.accept()
            with far:
                far.settimeout(30)
                near.sendall(b"hello")
                assert far.recv(5) == b"hello"
    assert name == "passes"
"""


@pytest.mark.slow
@pytest.mark.multiprocess
def test_the_fixture_ends_its_relay_even_when_the_test_fails(tmp_path: Path) -> None:
    (tmp_path / "test_user.py").write_text(USER_TEST)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "isthmus.orchestrator.emulator.pytest_plugin",
            ".",
        ],
        cwd=tmp_path,
        env={
            **os.environ,
            "PYTHONPATH": str(Path(__file__).parents[2]),
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        },
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert "1 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    ports = [int(port) for port in (tmp_path / "ports").read_text().split()]
    assert len(ports) == 2
    for port in ports:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), DEADLINE_S)


@pytest.mark.slow
@pytest.mark.multiprocess
def test_the_plugin_loads_nothing_of_ours_before_it_is_used() -> None:
    script = (
        "import sys, isthmus.orchestrator.emulator.pytest_plugin\n"
        "print([name for name in sys.modules if name.startswith('isthmus')])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=True,
    )
    assert done.stdout.strip() == str(
        [
            "isthmus",
            "isthmus.orchestrator",
            "isthmus.orchestrator.emulator",
            "isthmus.orchestrator.emulator.pytest_plugin",
        ]
    )
