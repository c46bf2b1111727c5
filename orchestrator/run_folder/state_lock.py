"""The lock that keeps a second coordinator out of a state folder.

The kernel releases the lock, however its holder ends.
"""

from __future__ import annotations

import fcntl
import os
import time
from contextlib import suppress
from pathlib import Path

from isthmus.protos.errors import IsthmusError

LOCK = "lock"
LOCK_ATTEMPTS = 5
LOCK_PAUSE_S = 0.02
"""Pause between attempts: a reader that tests the lock holds it for microseconds."""


class StateLockedError(IsthmusError):
    """Another coordinator uses the state folder."""

    code = "STATE_LOCKED"


def is_abandoned(folder: Path, name: str = LOCK) -> bool:
    """Whether no process holds the lock `name` in a folder; a missing file is not held.

    By default, the lock with which a coordinator holds its state folder.
    """
    try:
        descriptor = os.open(folder / name, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True


def lock(path: Path) -> int:
    """Return a descriptor that holds the lock.

    The kernel releases the lock however the process ends.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    for _ in range(LOCK_ATTEMPTS):
        with suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return descriptor
        time.sleep(LOCK_PAUSE_S)
    os.close(descriptor)
    raise StateLockedError(f"another coordinator uses {path.parent}")
