"""Starts child processes that die with their parent, and ends all descendants of a run.

The parent, an agent or a supervisor, adopts orphans (PR_SET_CHILD_SUBREAPER), so that every process
of a run is a descendant that can be found and ended. There is one run at a time, so all descendants
belong to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Mapping, Sequence
from typing import IO

import psutil

from isthmus.protos.own_processes import leashed

_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
_LOOK_S = 0.02
"""Poll interval for processes that are not children, which cannot be waited for."""
KILL_S = 5.0
"""Time for SIGKILL to take effect, unless the kernel itself hangs."""
LINE_BYTES = 256 << 10
"""Longest line of a child's stdout: twice the longest message of a rank to its gateway."""


def adopt_orphans() -> None:
    """Make this process the parent of descendants whose own parent has died.

    Raises:
        OSError: the kernel refused.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl(PR_SET_CHILD_SUBREAPER): {os.strerror(code)}")


async def start_leashed(
    command: Sequence[str],
    *,
    env: Mapping[str, str],
    log: IO[bytes],
    talks: bool,
    namespaces: tuple[str, str] | None = None,
    umask: int = -1,
    line_bytes: int = LINE_BYTES,
) -> asyncio.subprocess.Process:
    """Start a command in its own process group that dies with this process.

    Call it from the main thread: the leash follows the thread. stderr goes to `log`, which the
    caller closes. A child that `talks` has pipes for stdin and stdout; else stdout goes to the log,
    too, and stdin is empty. `namespaces` are files of a user namespace (may be empty) and a network
    namespace to enter. `umask` is the child's; -1: this process's. `line_bytes` limits the child's
    lines on stdout.
    """
    pipe, null = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
    return await asyncio.create_subprocess_exec(
        *leashed(command, namespaces),
        stdin=pipe if talks else null,
        stdout=pipe if talks else log,
        stderr=log,
        env=env,
        umask=umask,
        limit=line_bytes,
    )


def descendants() -> list[psutil.Process]:
    """Return every living process below this one, zombies not counted."""
    below = psutil.Process().children(recursive=True)
    return [process for process in below if _lives(process)]


def send(process: asyncio.subprocess.Process, signum: signal.Signals) -> None:
    """Send a signal to a child's process group, unless the child has ended.

    A child that has just started may not lead a group yet; then only it gets the signal.
    """
    if process.returncode is None:
        try:
            os.killpg(process.pid, signum)
        except ProcessLookupError:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signum)


async def wait_ended(processes: Sequence[asyncio.subprocess.Process], deadline_s: float) -> bool:
    """Wait for children to end; False if the deadline came first."""
    waits = [asyncio.ensure_future(process.wait()) for process in processes]
    if not waits:
        return True
    left_s = max(0.0, deadline_s - time.monotonic())
    _, pending = await asyncio.wait(waits, timeout=left_s)
    for wait in pending:
        wait.cancel()
    return not pending


async def kill_descendants(children: Sequence[asyncio.subprocess.Process]) -> bool:
    """SIGKILL all descendants until none is left; False if some process stays.

    asyncio reaps `children`; adopted processes are reaped here.
    """
    deadline_s = time.monotonic() + KILL_S
    own = {process.pid for process in children}
    while True:
        alive = descendants()
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        _reap_adopted(own)
        if not alive:
            break
        if time.monotonic() > deadline_s:
            return False
        await asyncio.sleep(_LOOK_S)
    return await wait_ended(children, deadline_s)


def _reap_adopted(own: set[int]) -> None:
    """Reap adopted zombies, so that they do not count as left behind."""
    for process in psutil.Process().children():
        if process.pid not in own:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(process.pid, os.WNOHANG)


def _lives(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
