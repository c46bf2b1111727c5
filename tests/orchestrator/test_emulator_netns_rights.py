"""The packet emulator with less than all rights: what it makes do with, and what it says."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from isthmus.topology.spec.json_fields import to_json
from tests.fakes.emulator_configs import netns_config

COMMAND = [sys.executable, "-m", "isthmus.orchestrator.emulator.netns"]
DEADLINE_S = 60.0
pytestmark = [
    pytest.mark.slow,
    pytest.mark.multiprocess,
    pytest.mark.usefixtures("needs_root_netns"),
]


def run_as_nobody(permissions: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.fakes.unprivileged_netns", permissions],
        cwd=Path(__file__).parents[2],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_without_access_to_tun_it_says_so_in_one_line() -> None:
    with run_as_nobody("600") as child:
        out, complaint = child.communicate(json.dumps(to_json(netns_config())) + "\n", DEADLINE_S)
    if complaint.startswith("netns: user namespace:"):
        pytest.skip(complaint)
    assert (child.returncode, out) == (2, "")
    assert complaint == (
        "netns: /dev/net/tun: Permission denied; it takes root, or unprivileged user namespaces "
        "and access to /dev/net/tun\n"
    )


def test_root_without_its_capabilities_makes_a_user_namespace_too() -> None:
    setpriv = shutil.which("setpriv")
    if setpriv is None or os.geteuid() != 0:
        pytest.skip("it takes root, and setpriv to give up CAP_SYS_ADMIN")
    done = subprocess.run(
        [setpriv, "--bounding-set", "-sys_admin", "--inh-caps", "-sys_admin", *COMMAND],
        input=json.dumps(to_json(netns_config())) + "\n",
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    if done.stderr.startswith(("netns: user namespace:", "netns: map of the user namespace:")):
        pytest.skip(done.stderr)
    assert (done.returncode, done.stderr) == (0, "")
    ready = json.loads(done.stdout.splitlines()[0])
    assert all(site["user"].endswith("/ns/user") for site in ready["sites"])


ECHO = """
import socket, sys
with socket.create_server((sys.argv[1], 5000)) as server:
    print("listening", flush=True)
    peer, _ = server.accept()
    with peer:
        peer.sendall(peer.recv(64))
"""
ASK = """
import socket, sys
with socket.create_connection((sys.argv[1], 5000), 30) as peer:
    peer.sendall(b"hello")
    print(peer.recv(64).decode())
"""


def test_without_root_it_makes_a_user_namespace_that_its_owner_can_enter() -> None:
    def inside(site: dict[str, str], script: str) -> list[str]:
        entering = ["-m", "isthmus.sites.leash", "-", "--enter", site["user"], site["net"], "--"]
        return [sys.executable, *entering, sys.executable, "-c", script, sites[1]["address"]]

    with run_as_nobody("666") as child:
        stop = threading.Timer(DEADLINE_S, child.kill)
        stop.start()
        try:
            assert child.stdin is not None
            assert child.stdout is not None
            child.stdin.write(json.dumps(to_json(netns_config())) + "\n")
            child.stdin.flush()
            line = child.stdout.readline()
            if not line:
                assert child.stderr is not None
                pytest.skip(child.stderr.read())
            sites = json.loads(line)["sites"]
            assert sites[0]["user"] == f"/proc/{child.pid}/ns/user"
            echo = subprocess.Popen(inside(sites[1], ECHO), stdout=subprocess.PIPE, text=True)
            with echo:
                try:
                    assert echo.stdout is not None
                    assert echo.stdout.readline() == "listening\n"
                    asked = subprocess.run(
                        inside(sites[0], ASK),
                        capture_output=True,
                        text=True,
                        timeout=DEADLINE_S,
                        check=True,
                    )
                    assert asked.stdout == "hello\n"
                finally:
                    echo.kill()
            child.stdin.close()
            assert child.wait(DEADLINE_S) == 0
        finally:
            stop.cancel()
            child.kill()
