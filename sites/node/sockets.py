"""A short private folder for the gateways' Unix sockets, removed after any end of the agent.

A socket's path must fit into 108 bytes, which a path in a run's folder may exceed. The folder's
name holds the agent's pid. A lock, which the kernel releases with the agent, shows across pid
namespaces whether the agent lives.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SOCKET_PATH_BYTES = 108 - 1
"""sun_path of unix(7), less its final zero."""
_PREFIX = "isthmus-agent-"
_OWN_BYTES = len(f"/{_PREFIX}{2**22}-12345678/gateway9999.sock")
"""What is added to the temporary folder's path, at most."""


@contextmanager
def socket_folder() -> Iterator[Path]:
    """Yield a folder of mode 0700 for sockets; remove it at the end, and those of dead agents.

    It is in the temporary folder, or in /tmp where the path of that one is too long.

    Raises:
        OSError: no folder can be made there.
    """
    base = Path(tempfile.gettempdir())
    if len(os.fsencode(base)) > SOCKET_PATH_BYTES - _OWN_BYTES:
        base = Path("/tmp")  # noqa: S108 - mkdtemp makes a private folder in it
    _sweep(base)
    folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=base))
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _sweep(base: Path) -> None:
    """Remove folders of killed agents: the pid is gone, and the lock is free."""
    for folder in base.glob(f"{_PREFIX}*"):
        pid = folder.name.removeprefix(_PREFIX).partition("-")[0]
        if Path("/proc", pid).exists():
            continue
        try:
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:
            continue  # another user's, or just removed
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pass
        else:
            if os.fstat(lock).st_uid == os.getuid():
                shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(lock)
