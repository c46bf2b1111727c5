"""Children of an agent or a supervisor: started on a leash, and all gone after any end of a run.

Their parent adopts whatever they leave behind (PR_SET_CHILD_SUBREAPER), so that everything a run
ever started is a descendant that can be found and ended. One run at a time, so all descendants
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
"""Between two looks at processes that are not children, which cannot be waited for."""
KILL_S = 5.0
"""SIGKILL takes effect within this, unless the kernel itself hangs."""
LINE_BYTES = 256 << 10
"""A line from a child's stdout may be this long: twice what a rank may send its gateway."""


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
    """Start a command in a process group of its own that dies with this process.

    Call it from the main thread: the leash follows the thread. stderr goes to `log`, which the
    caller closes. A child that `talks` has pipes for stdin and stdout; else stdout goes to the log,
    too, and stdin is empty. `namespaces` are files of a user
    namespace (may be empty) and a network namespace to enter. `umask` is the child's; -1: as this
    process has it. A line that it says may be `line_bytes` long.
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
    """Send a signal to a child's process group; nothing happens when it has ended.

    A child that is still its leash may not lead a group yet: then it gets the signal alone.
    """
    if process.returncode is None:
        try:
            os.killpg(process.pid, signum)
        except ProcessLookupError:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signum)


async def wait_ended(processes: Sequence[asyncio.subprocess.Process], deadline_s: float) -> bool:
    """Wait for children to end; False when the deadline came first."""
    waits = [asyncio.ensure_future(process.wait()) for process in processes]
    if not waits:
        return True
    left_s = max(0.0, deadline_s - time.monotonic())
    _, pending = await asyncio.wait(waits, timeout=left_s)
    for wait in pending:
        wait.cancel()
    return not pending


async def kill_descendants(children: Sequence[asyncio.subprocess.Process]) -> bool:
    """SIGKILL whatever lives below this process, until nothing does; False if something stays.

    asyncio reaps `children`; adopted ones are reaped here.
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
    """Let go of zombies that were adopted, so that they are not counted as left behind."""
    for process in psutil.Process().children():
        if process.pid not in own:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(process.pid, os.WNOHANG)


def _lives(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
