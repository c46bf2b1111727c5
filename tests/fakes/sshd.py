"""A real sshd on loopback, for the user who runs the tests, with keys of its own."""

from __future__ import annotations

import getpass
import os
import pwd
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from tests.fakes.waiting import wait_for

ROOT = Path(__file__).parents[2]
SSHD = "/usr/sbin/sshd"
SEPARATION = Path("/run/sshd")
"""sshd wants it where it runs as root."""


@dataclass
class Sshd:
    """Where it listens, and the files that get in."""

    folder: Path
    port: int
    pid: int
    user: str
    """Who may log in."""

    def launcher(
        self,
        python: str,
        folder: Path,
        *,
        key: str = "key",
        known: str = "known",
        kind: str = "ssh",
        options: str = "[]",
    ) -> str:
        """Return a site's launcher, as YAML."""
        return (
            f"{{kind: {kind}, options: {options}, host: 127.0.0.1, port: {self.port}, "
            f"user: {self.user}, "
            f"key: {self.folder / key}, known_hosts: {self.folder / known}, python: {python}, "
            f"folder: {folder}}}"
        )

    def inner(self) -> list[str]:
        """Return the arguments of an ssh from one host of a site to another: both are here."""
        return [
            *("-p", str(self.port), "-i", str(self.folder / "key"), "-o", "HostName=127.0.0.1"),
            *("-o", f"UserKnownHostsFile={self.folder / 'known'}"),
        ]

    def sessions(self) -> list[psutil.Process]:
        """Return the processes that serve connections: children of the one that listens."""
        return psutil.Process(self.pid).children()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _key(path: Path) -> None:
    command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)]
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL)


def _as_nobody(folder: Path, home: Path) -> list[str]:
    """Return what gives a command a /etc/passwd of its own, in which `nobody` may log in."""
    own = folder / "passwd"
    lines = Path("/etc/passwd").read_text().splitlines()
    kept = [line for line in lines if not line.startswith("nobody:")]
    account = pwd.getpwnam("nobody")
    entry = f"nobody:x:{account.pw_uid}:{account.pw_gid}::{home}:/bin/sh"
    own.write_text("\n".join([*kept, entry]) + "\n")
    own.chmod(0o644)
    mounted = f'mount --bind {own} /etc/passwd && exec "$@"'
    return ["unshare", "--mount", "sh", "-c", mounted, "sh"]


def _let_in(folder: Path, home: Path) -> None:
    """Have the key log in who has that home."""
    (home / ".ssh").mkdir(mode=0o755)
    (home / ".ssh" / "authorized_keys").write_bytes((folder / "key.pub").read_bytes())


@contextmanager
def nobodys(folder: Path) -> Iterator[tuple[Sshd, Path, Path]]:
    """Run one that lets in `nobody`; give it, their home, and a Python that they may read.

    It is the system's, with our packages. `folder` is made for the server.
    """
    account = pwd.getpwnam("nobody")
    with tempfile.TemporaryDirectory(prefix="isthmus-nobody-") as made:
        home = Path(made)
        python = home / "python"
        packages = os.pathsep.join([str(ROOT / ".src"), sysconfig.get_paths()["purelib"]])
        system = f"/usr/bin/python{sys.version_info[0]}.{sys.version_info[1]}"
        python.write_text(f'#!/bin/sh\nPYTHONPATH={packages} exec {system} "$@"\n')
        python.chmod(0o755)
        with sshd(folder, home=home) as server:
            shutil.chown(home, account.pw_uid, account.pw_gid)
            yield server, home, python


@contextmanager
def sshd(folder: Path, environment: str = "", home: Path | None = None) -> Iterator[Sshd]:
    """Run one for as long as the block lasts. Skips the test where there is none.

    Args:
        folder: Made for it.
        environment: What all sessions find in theirs, as `A=B`.
        home: It lets in `nobody`, who has this one, by the keys in there. That takes root.
    """
    if home is not None and os.geteuid() != 0:
        pytest.skip("takes root")
    if not Path(SSHD).exists() or shutil.which("ssh-keygen") is None:
        pytest.skip("no sshd here: apt install openssh-server")
    if os.geteuid() == 0:
        SEPARATION.mkdir(mode=0o755, exist_ok=True)
    folder.mkdir(mode=0o700)
    for name in ("host", "key", "foreign"):
        _key(folder / name)
    port = _free_port()
    (folder / "authorized_keys").write_bytes((folder / "key.pub").read_bytes())
    host_key = " ".join((folder / "host.pub").read_text().split()[:2])
    (folder / "known").write_text(f"[127.0.0.1]:{port} {host_key}\n")
    (folder / "nobody_known").write_text("")
    keys = folder / "authorized_keys" if home is None else ".ssh/authorized_keys"
    (folder / "config").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {folder / 'host'}\n"
        f"PidFile {folder / 'sshd.pid'}\nAuthorizedKeysFile {keys}\n"
        "PasswordAuthentication no\nUsePAM no\nStrictModes no\nPermitRootLogin yes\n"
        + (f"SetEnv {environment}\n" if environment else "")
    )
    namespace: list[str] = []
    if home is not None:
        _let_in(folder, home)
        namespace = _as_nobody(folder, home)
    with (folder / "sshd.log").open("wb") as log:
        process = subprocess.Popen(
            [*namespace, SSHD, "-D", "-e", "-f", str(folder / "config")],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
        try:
            wait_for((folder / "sshd.pid").exists, lambda: (folder / "sshd.log").read_text(), 10)
            user = getpass.getuser() if home is None else "nobody"
            yield Sshd(folder, port, process.pid, user)
        finally:
            for session in psutil.Process(process.pid).children(recursive=True):
                session.kill()
            process.kill()
            process.wait()
