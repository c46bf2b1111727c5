"""Compiles kernels when their module is imported, and keeps what came of it for the next process.

The first import on a machine compiles for seconds, later ones load what was kept. That lies in a
folder of its own for each processor, compiler and text of these modules, so nothing in it is ever
out of date, and processes that start together write the same to it; each file under another name
first. What is loaded is run: so it is taken only from files that nobody else can write, and each
names the place that it was made for. Where no such folder can be written, each process compiles for
itself. What nobody uses any more is removed: unused.py.
"""

from __future__ import annotations

import hashlib
import logging
import os
import stat
import sys
import tempfile
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any, Final, TypeVar, cast

import llvmlite
import llvmlite.binding as llvm
import platformdirs

from sites.codecs.kernels.machine_code import load, processor
from sites.codecs.kernels.signatures import Type
from sites.codecs.kernels.unused import note_use, remove_unused

_log = logging.getLogger(__name__)

Function = TypeVar("Function", bound=Callable[..., Any])

_DIGEST_BYTES: Final = hashlib.sha256().digest_size
_inlined: Final[set[Callable[..., Any]]] = set()


def inlined(function: Function) -> Function:
    """Let kernels, and others like it, call a function of numbers; compiled with each kernel."""
    _inlined.add(function)
    return function


def kernel(returns: Type, *arguments: Type) -> Callable[[Function], Function]:
    """Compile a function for arguments of these types; it runs without the interpreter's lock.

    Sizes are not checked: an array that is too short is read and written behind its end. The codecs
    and sites/codecs/parts.py see to that.

    Args:
        returns: type of the result.
        arguments: of each argument.
    """

    def compiled(function: Function) -> Function:
        symbol = f"{function.__module__}.{function.__name__}".replace(".", "_")
        object_file = _kept(symbol)
        if object_file is None:
            object_file = _translate(function, returns, arguments, symbol)
            _keep(symbol, object_file)
        return cast("Function", load(object_file, symbol, returns, arguments))

    return compiled


def _translate(
    function: Callable[..., Any], returns: Type, arguments: tuple[Type, ...], symbol: str
) -> bytes:
    from sites.codecs.kernels.translating import translate

    return translate(function, _inlined, returns, arguments, symbol)


def _folder() -> Path | None:
    """Return where this processor's kernels are kept.

    None where the user has no folder for such things.
    """
    digest = hashlib.sha256()
    for module in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(module.read_bytes())
    name, features = processor()
    versions = (llvmlite.__version__, metadata.version("numba"), sys.implementation.cache_tag)
    digest.update(" ".join((*versions, llvm.get_process_triple(), name, features)).encode())
    try:
        base = platformdirs.user_cache_path("isthmus")
    except RuntimeError:  # a user that the system has no home of
        return None
    # Older releases of platformdirs say "~/.cache" then, which would be below any folder.
    return base / "kernels" / f"{name}-{digest.hexdigest()[:16]}" if base.is_absolute() else None


_FOLDER: Final = _folder()
if _FOLDER is not None:
    note_use(_FOLDER, time.time())


def _kept(symbol: str) -> bytes | None:
    """Return a kernel's object file, if it is there, whole, and of nobody else's making."""
    if _FOLDER is None:
        return None
    try:
        if not _is_ours(_FOLDER.stat()):
            return None
        with (_FOLDER / f"{symbol}.o").open("rb") as file:
            data = file.read() if _is_ours(os.fstat(file.fileno())) else b""
    except OSError:
        return None
    digest, object_file = data[:_DIGEST_BYTES], data[_DIGEST_BYTES:]
    return object_file if _digest(_FOLDER, symbol, object_file) == digest else None


def _keep(symbol: str, object_file: bytes) -> None:
    try:
        _write(symbol, object_file)
    except OSError as error:
        _log.warning("%s is compiled again at the next start: %s", symbol, error)


def _write(symbol: str, object_file: bytes) -> None:
    """Write a kernel's object file, whole or not at all.

    Raises:
        OSError: it cannot be kept.
    """
    if _FOLDER is None:
        raise FileNotFoundError("this user has no home folder: set XDG_CACHE_HOME")
    _FOLDER.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not _is_ours(_FOLDER.stat()):
        raise PermissionError(f"{_FOLDER} is another user's, or others may write there")
    with tempfile.NamedTemporaryFile(dir=_FOLDER, delete=False) as file:
        written = Path(file.name)
        try:
            file.write(_digest(_FOLDER, symbol, object_file) + object_file)
            file.flush()
            written.replace(_FOLDER / f"{symbol}.o")
        except OSError:
            written.unlink(missing_ok=True)
            raise
    remove_unused(_FOLDER, time.time())


def _digest(folder: Path, symbol: str, object_file: bytes) -> bytes:
    """Return the digest of a kernel made for a folder's processor.

    One that was moved has another.
    """
    return hashlib.sha256(f"{folder.name}/{symbol}\n".encode() + object_file).digest()


def _is_ours(found: os.stat_result) -> bool:
    """Whether nobody but this user can have written a file, or into a folder."""
    return found.st_uid == os.geteuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
