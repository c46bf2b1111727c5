"""Nodes that wait for their site's agent: who may dial them, and what lives as long as a stream."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from isthmus.sites.node.stream import GREETING
from tests.fakes.certified import certify, speak_tls
from tests.fakes.waiting import wait_for

pytestmark = pytest.mark.slow
WITHIN_S = 30.0


@pytest.fixture
def certified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Have this process and its children be parties of a deployment; return its folder."""
    speak_tls(monkeypatch, certify(tmp_path / "certs", "a", "b"))
    return tmp_path / "certs"


@contextmanager
def served(site: str, folder: Path) -> Iterator[tuple[psutil.Process, str]]:
    """Run a node that waits; yield its process, and where it waits."""
    log = folder / "served.log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "isthmus.sites.leash", str(os.getpid()), "--"),
                *(sys.executable, "-m", "isthmus.sites.node.serve", "--site", site),
                *("--bind", "127.0.0.1:0"),
            ],
            stderr=file,
        )
    try:
        wait_for(lambda: "may dial" in log.read_text())
        found = re.search(r"may dial (\S+)", log.read_text())
        assert found is not None
        yield psutil.Process(process.pid), found[1]
    finally:
        process.terminate()
        assert process.wait(WITHIN_S) in (0, -15)


def dialled(site: str, address: str, **env: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "isthmus.sites.node.dial", "--site", site, address],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, **env},
    )


def test_a_stream_is_a_supervisor_and_ends_with_it(certified: Path, tmp_path: Path) -> None:
    with served("a", tmp_path) as (server, address):
        stream = dialled("a", address)
        assert stream.stdout is not None
        assert stream.stdin is not None
        assert stream.stdout.readline().startswith(GREETING.encode())
        (supervisor,) = server.children()
        stream.stdin.close()
        assert stream.wait(WITHIN_S) == 0
        supervisor.wait(WITHIN_S)
        stream.stdout.close()
        assert stream.stderr is not None
        stream.stderr.close()
        # A supervisor that dies ends its stream.
        again = dialled("a", address)
        assert again.stdout is not None
        assert again.stdout.readline().startswith(GREETING.encode())
        (supervisor,) = server.children()
        supervisor.kill()
        assert again.wait(WITHIN_S) == 1
        assert b"closed its stream" in again.communicate(timeout=WITHIN_S)[1]


def test_who_is_not_the_sites_agent_gets_no_supervisor(certified: Path, tmp_path: Path) -> None:
    """Another site's agent, its gateway, another authority's, and who shows nothing."""
    foreign = tmp_path / "foreign"
    certify(foreign, "a")
    gateway = {
        "ISTHMUS_CERT": f"{certified}/a.gateway.pem",
        "ISTHMUS_KEY": f"{certified}/a.gateway.key",
    }
    other = {
        name: f"{foreign}/{{name}}.{kind}"
        for name, kind in (("ISTHMUS_CERT", "pem"), ("ISTHMUS_KEY", "key"))
    }
    with served("a", tmp_path) as (server, address):
        for stream in (
            dialled("b", address),
            dialled("a", address, **gateway),
            dialled("a", address, **other),
            dialled("a", address, **other, ISTHMUS_CA=f"{foreign}/ca.pem"),
        ):
            out, err = stream.communicate(timeout=WITHIN_S)
            assert out == b""
            assert stream.returncode == 1, err
        host, _, port = address.rpartition(":")
        probe = f"import socket; s = socket.create_connection(('{host}', {port})); s.sendall(b'x' * 100); s.recv(9); print(s.recv(9))"
        said = subprocess.run(
            [sys.executable, "-c", probe], capture_output=True, timeout=WITHIN_S, check=False
        )
        assert GREETING.encode() not in said.stdout
        assert server.children() == []


def test_renewed_certificates_count_without_a_restart(certified: Path, tmp_path: Path) -> None:
    """They are another authority's, so that nothing of the former ones helps."""
    with served("a", tmp_path) as (_, address):
        newer = tmp_path / "newer"
        certify(newer, "a")
        for name in ("ca.pem", "a.agent.pem", "a.agent.key"):
            (newer / name).replace(certified / name)
        stream = dialled("a", address)
        assert stream.stdout is not None
        said = stream.stdout.readline()
        _, err = stream.communicate(timeout=WITHIN_S)
        assert said.startswith(GREETING.encode()), err


def test_without_tls_there_is_nothing_to_dial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ISTHMUS_CA", "ISTHMUS_CERT", "ISTHMUS_KEY"):
        monkeypatch.delenv(name, raising=False)
    done = subprocess.run(
        [sys.executable, "-m", "isthmus.sites.node.serve", "--site", "a", "--bind", "127.0.0.1:0"],
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
        check=False,
    )
    assert done.returncode == 1
    assert "mutual TLS" in done.stderr
