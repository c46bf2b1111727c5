"""Run a command that lives no longer than this process's stdin: what a launcher starts at a site.

Usage: python -m isthmus.sites.tether

1. It prints GREETING and Versions (topology/spec/tether_messages.py), so that the other end can
   refuse.
2. It reads one line, Spec. Secrets come this way, and never on a command line.
3. It runs the command. Both of its streams go to this process's own.
4. When stdin ends, or says nothing for `silence_s`, it ends the command, and then itself. It does
   so too on SIGTERM, SIGINT and SIGHUP. It depends on none of them: who kills an SSH client leaves
   what that has started running, and sends no signal.

One command runs in a folder at a time: the later one ends the former.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from isthmus.protos.failure import text_of
from isthmus.protos.private_files import UnsafeFileError, keep_private, private_folder, users_umask
from isthmus.protos.save_time import LEAVE_S, SaveTimeError, save_within_s
from isthmus.protos.versions import (
    CONTROL_PROTOCOL_MAX,
    CONTROL_PROTOCOL_MIN,
    EXCHANGE_PROTOCOL_MAX,
    EXCHANGE_PROTOCOL_MIN,
    build,
)
from isthmus.sites.leash import die_with_parent
from isthmus.topology.spec.json_lines import Kinds, line_of
from isthmus.topology.spec.tether_messages import CREDENTIALS, FOLDER, GREETING, Spec, Versions

LOCK = "tether.lock"
FORMER_S = 5.0
"""A former one may take so much longer than its command."""
SPEC_S = 60.0
SPEC_BYTES = 4 << 20
POLL_S = 0.1


class TetherError(Exception):
    """What was asked for cannot be started here; in one line."""


SPECS: Kinds[Spec] = Kinds("launcher to tether", Spec, TetherError, on_unknown=lambda _: None)


def main() -> int:
    """Greet, read what to run, run it; return its exit status, 128 and more for a signal."""
    versions = Versions(
        build=build(),
        control=(CONTROL_PROTOCOL_MIN, CONTROL_PROTOCOL_MAX),
        exchange=(EXCHANGE_PROTOCOL_MIN, EXCHANGE_PROTOCOL_MAX),
    )
    ended = Ended()
    _say(f"{GREETING}{line_of(versions).decode().rstrip()}")
    try:
        spec = _read_spec()
        if spec is None:
            return 0
        keep_private()
        folder = Path(spec.folder).expanduser().absolute()
        private_folder(folder)
        os.chdir(folder)  # it keeps no other one busy, and tells people what this is
        terminate_s = save_within_s({**os.environ, **spec.env}) + LEAVE_S
        with _locked(folder, terminate_s + FORMER_S):
            return _run(spec, folder, ended, terminate_s)
    except (TetherError, SaveTimeError, UnsafeFileError, OSError) as error:
        _say(f"error: cannot start here: {text_of(error)}")
        return 126


class Ended:
    """Whether a signal has asked for the end."""

    def __init__(self) -> None:
        self.signum = 0
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(signum, self._note)

    def _note(self, signum: int, _frame: object) -> None:
        self.signum = signum


def _read_spec() -> Spec | None:
    """Return what to run; None: the other end does not want it after all."""
    line = bytearray()
    deadline_s = time.monotonic() + SPEC_S
    while not line.endswith(b"\n"):
        wait_s = deadline_s - time.monotonic()
        if wait_s <= 0 or not select.select([0], [], [], wait_s)[0]:
            raise TetherError("nobody said what to run")
        read = os.read(0, 1)  # a byte at a time: what follows is for the watch
        if not read:
            return None
        line += read
        if len(line) > SPEC_BYTES:
            raise TetherError("what to run is too long")
    return SPECS.read(bytes(line))


@contextlib.contextmanager
def _locked(folder: Path, within_s: float) -> Iterator[None]:
    """Hold a folder's lock, which names this process; end whoever holds it.

    Raises:
        TetherError: that one does not end within so long.
    """
    path = folder / LOCK
    deadline_s = time.monotonic() + within_s
    asked = ""
    while (descriptor := _lock(path)) is None:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            former = path.read_text()
            if former.isdecimal() and former != asked:
                os.kill(int(former), signal.SIGTERM)
                asked = former
        if time.monotonic() > deadline_s:
            raise TetherError(f"another one runs in {folder}, and does not end")
        time.sleep(POLL_S)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)
        os.close(descriptor)


def _lock(path: Path) -> int | None:
    """Return a descriptor that holds the lock; None while somebody else does."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Its last owner may have removed it between our two calls.
        if path.exists() and path.stat().st_ino == os.fstat(descriptor).st_ino:
            os.ftruncate(descriptor, 0)  # one that was killed has left its number
            os.write(descriptor, str(os.getpid()).encode())
            return descriptor
    except BlockingIOError:
        pass
    os.close(descriptor)
    return None


def _run(spec: Spec, folder: Path, ended: Ended, terminate_s: float) -> int:
    """Run the command to its end, or to that of stdin. The credentials go with it."""
    credentials = folder / CREDENTIALS
    shutil.rmtree(credentials, ignore_errors=True)  # of one that was killed
    try:
        credentials.mkdir(mode=0o700)
        for name, content in spec.files.items():
            path = credentials / name
            if path.parent != credentials:
                raise TetherError(f"{name!r} is not the name of a file")
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
        return _supervise(spec, folder, ended, terminate_s)
    finally:
        shutil.rmtree(credentials, ignore_errors=True)


def _supervise(spec: Spec, folder: Path, ended: Ended, terminate_s: float) -> int:
    placed = {name: value.replace(FOLDER, str(folder)) for name, value in spec.env.items()}
    own_pid = os.getpid()
    process = subprocess.Popen(
        [word.replace(FOLDER, str(folder)) for word in spec.command],
        env={**os.environ, **placed},
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        umask=users_umask(),
        # One thread only, so that this is safe; and the command does not outlive a SIGKILL of us.
        preexec_fn=lambda: die_with_parent(own_pid),
    )
    heard_s = time.monotonic()
    while process.poll() is None:
        if ended.signum or time.monotonic() - heard_s > spec.silence_s:
            break
        if select.select([0], [], [], POLL_S)[0]:
            if not os.read(0, 4096):
                break
            heard_s = time.monotonic()
    return _end(process, terminate_s)


def _end(process: subprocess.Popen[bytes], terminate_s: float) -> int:
    """End the command and all of its process group; return its exit status.

    `terminate_s` lies between SIGTERM and SIGKILL at most: an agent saves a checkpoint meanwhile.
    """
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(terminate_s)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    status = process.wait()
    return 128 - status if status < 0 else status


def _say(text: str) -> None:
    """Print a line, unless nobody reads any more."""
    with contextlib.suppress(OSError):
        print(text, flush=True)  # noqa: T201


if __name__ == "__main__":
    sys.exit(main())
