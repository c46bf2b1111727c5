"""Files and folders readable only by their user: secrets, and the files of runs."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from isthmus.protos.errors import IsthmusError

OTHERS = 0o077
"""Permission bits of everybody except the owner."""
SECRET_BYTES_MAX = 64 << 10


class UnsafeFileError(IsthmusError):
    """A secret's file is not safe: other users may read it, or have created it."""

    code = "UNSAFE_FILE"


def keep_private() -> None:
    """Set the umask so that files written from now on are readable only by the user."""
    _umasks.append(os.umask(OTHERS))


def users_umask() -> int:
    """Return the umask from before `keep_private`, for users' scripts.

    -1, which means no change, if `keep_private` was never called.
    """
    return _umasks[0] if _umasks else -1


_umasks: list[int] = []


def private_folder(path: Path) -> None:
    """Make a folder for this user only, or check that an existing one is the user's.

    Raises:
        UnsafeFileError: the folder is another user's, or writable by everybody.
        OSError: the folder cannot be made.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = path.stat()
    if found.st_uid != os.geteuid():
        raise UnsafeFileError(f"{path}: belongs to user {found.st_uid}")
    if found.st_mode & stat.S_IWOTH:
        raise UnsafeFileError(f"{path}: everybody may write into it")


def read_secret(path: Path) -> bytes:
    """Return the content of a secret's file.

    Raises:
        UnsafeFileError: the file is a link, another user's, or readable by others.
        OSError: the file cannot be read.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if path.is_symlink():
            raise UnsafeFileError(f"{path}: a symbolic link is not followed here") from error
        raise
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise UnsafeFileError(f"{path}: want a file, and nothing else")
        if status.st_uid not in (os.geteuid(), 0):
            raise UnsafeFileError(f"{path}: belongs to user {status.st_uid}")
        if status.st_mode & OTHERS:
            mode = stat.S_IMODE(status.st_mode)
            raise UnsafeFileError(f"{path}: others may read or write it (mode {mode:o})")
        return file.read(SECRET_BYTES_MAX)


def make_secret(path: Path, content: bytes) -> None:
    """Write a secret's file atomically; an existing one is kept.

    Raises:
        OSError: the file cannot be written.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor, scratch = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # mode 0600
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(descriptor)
        os.link(scratch, path)
    except FileExistsError:
        return
    finally:
        Path(scratch).unlink(missing_ok=True)
