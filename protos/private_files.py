"""Files and folders that nobody but their user may read: secrets, and what runs leave behind."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from isthmus.protos.errors import IsthmusError

OTHERS = 0o077
"""The permission bits of everybody but the owner."""
SECRET_BYTES_MAX = 64 << 10


class UnsafeFileError(IsthmusError):
    """A file that ought to be secret is not: others may read it, or have put it there."""

    code = "UNSAFE_FILE"


def keep_private() -> None:
    """Have what this process writes from now on be its user's alone."""
    _umasks.append(os.umask(OTHERS))


def users_umask() -> int:
    """Return the umask from before `keep_private`: what users' scripts write is theirs to share.

    -1, which leaves it as it is, in a process that never called that.
    """
    return _umasks[0] if _umasks else -1


_umasks: list[int] = []


def private_folder(path: Path) -> None:
    """Make a folder that nobody else may enter, or see that one which is there is the user's own.

    Raises:
        UnsafeFileError: it is another user's, or everybody may put files into it.
        OSError: it cannot be made.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = path.stat()
    if found.st_uid != os.geteuid():
        raise UnsafeFileError(f"{path}: belongs to user {found.st_uid}")
    if found.st_mode & stat.S_IWOTH:
        raise UnsafeFileError(f"{path}: everybody may write into it")


def read_secret(path: Path) -> bytes:
    """Return what a secret's file holds.

    Raises:
        UnsafeFileError: it is a link, another user's, or others may read it.
        OSError: it cannot be read.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if path.is_symlink():
            raise UnsafeFileError(f"{path}: a symbolic link is not followed here") from error
        raise
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise UnsafeFileError(f"{path}: want a file, and nothing else")
        if found.st_uid not in (os.geteuid(), 0):
            raise UnsafeFileError(f"{path}: belongs to user {found.st_uid}")
        if found.st_mode & OTHERS:
            mode = stat.S_IMODE(found.st_mode)
            raise UnsafeFileError(f"{path}: others may read or write it (mode {mode:o})")
        return file.read(SECRET_BYTES_MAX)


def make_secret(path: Path, content: bytes) -> None:
    """Write a secret's file, whole or not at all; one that is there stays as it is.

    Raises:
        OSError: it cannot be written.
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
