"""Loads compiled kernels, and keeps them for the next process; numba has no part in it.

The first process on a machine compiles all kernels for seconds (translating.py). Their machine code
is then one file in the user's cache folder, which later processes load in milliseconds, without the
half a second and the 75 MiB that numba itself would take.

A file's name has the processor and a digest of the compiler and of these modules' text, so no file
is ever out of date. Processes that start together write the same one, each under another name
first. What is loaded is run: so it is taken only from a file that nobody else can write, and its
checksum covers its name. Where no such file can be written, each process compiles for itself. Files
that nothing has loaded for a month, another version's or processor's, go when a new one is written.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import logging
import os
import re
import stat
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Final, TypeVar, cast

import llvmlite
import llvmlite.binding as llvm
import numpy as np
import platformdirs

_log = logging.getLogger(__name__)

UNUSED_S: Final = 30 * 86400.0
NOTED_S: Final = 86400.0
"""How exactly the time of a file's last use is noted: most starts then write nothing."""

_DIGEST_BYTES: Final = hashlib.sha256().digest_size
_NAME: Final = re.compile(r"[A-Za-z0-9._-]+-[0-9a-f]{16}\.o(\.[A-Za-z0-9_]+)?")
"""A file of ours, or one that was not written to its end."""

Function = TypeVar("Function", bound=Callable[..., Any])


# ---------------------------------------------------------------- declaring kernels


@dataclass(frozen=True, slots=True)
class Type:
    """The type of an argument or a result."""

    name: str
    """The type's name in numba's signatures."""
    machine: Any = None
    """The type in ctypes; None: an array of one dimension, contiguous."""
    item: str = ""
    """Elements of an array, as numpy calls them."""


_READ: Final = "Array({}, 1, 'C', readonly=True, aligned=False)"
"""What is only read may begin anywhere, as it does in a frame."""

OCTETS: Final = Type("uint8[::1]", item="uint8")
READ_OCTETS: Final = Type(_READ.format("uint8"), item="uint8")
HALVES: Final = Type("uint16[::1]", item="uint16")
READ_HALVES: Final = Type(_READ.format("uint16"), item="uint16")
FLOATS: Final = Type("float32[::1]", item="float32")
READ_FLOATS: Final = Type(_READ.format("float32"), item="float32")
FLOAT: Final = Type("float32", ctypes.c_float)
DOUBLE: Final = Type("float64", ctypes.c_double)
INTEGER: Final = Type("int64", ctypes.c_int64)
NOTHING: Final = Type("void", ctypes.c_void_p)

ARRAY_MACHINE: Final = (
    ctypes.c_void_p,  # who owns the memory: nobody that a kernel could ask
    ctypes.c_void_p,
    ctypes.c_int64,  # elements
    ctypes.c_int64,  # bytes of one
    ctypes.c_void_p,  # the first
    ctypes.c_int64,  # elements of the one dimension
    ctypes.c_int64,  # bytes from one to the next
)
"""How numba's functions take an array. translating.py refuses what takes it otherwise."""


class Kernel:
    """A function over arrays that runs as machine code, without the interpreter's lock.

    Sizes are not checked: an array that is too short is read and written behind its end. The codecs
    see to that.
    """

    def __init__(
        self, function: Callable[..., Any], returns: Type, arguments: tuple[Type, ...]
    ) -> None:
        self.function = function
        self.returns = returns
        self.arguments = arguments
        self.symbol = f"{function.__module__}.{function.__name__}".replace(".", "_")
        self._dtypes = [np.dtype(each.item) if each.item else None for each in arguments]
        self._native: Callable[..., int] | None = None

    def bind(self, address: int) -> None:
        """Take the place of the machine code."""
        self._native = ctypes.CFUNCTYPE(ctypes.c_int32, *machine_types(self.arguments))(address)

    def __call__(self, *given: Any) -> Any:  # noqa: ANN401 - as `arguments` say
        """Run."""
        assert self._native is not None, "load_kernels comes first"
        result = self.returns.machine()
        error = ctypes.c_void_p()
        flat: list[Any] = [ctypes.byref(result), ctypes.byref(error)]
        for value, dtype in zip(given, self._dtypes, strict=True):
            flat += (value,) if dtype is None else _flat(value, dtype)
        status = self._native(*flat)
        assert status == 0, f"{self.symbol} cannot fail; it returned {status}"
        return result.value


_kernels: Final[list[Kernel]] = []
_inlined: Final[set[Callable[..., Any]]] = set()


def inlined(function: Function) -> Function:
    """Let kernels, and others like it, call a function of numbers; compiled with each kernel."""
    _inlined.add(function)
    return function


def kernel(returns: Type, *arguments: Type) -> Callable[[Function], Function]:
    """Make a kernel of a function that takes and returns these types, once they are loaded."""

    def declared(function: Function) -> Function:
        _kernels.append(Kernel(function, returns, arguments))
        return cast("Function", _kernels[-1])

    return declared


def machine_types(arguments: tuple[Type, ...]) -> list[Any]:
    """Return what the machine code takes: where its result and its error go, then all arguments."""
    machine: list[Any] = [ctypes.c_void_p, ctypes.c_void_p]
    for each in arguments:
        machine += ARRAY_MACHINE if each.machine is None else [each.machine]
    return machine


def _flat(array: np.ndarray[Any, Any], dtype: np.dtype[Any]) -> tuple[Any, ...]:
    """Return an array as ARRAY_MACHINE says."""
    assert array.dtype == dtype, f"{array.dtype} where {dtype} belongs"
    assert array.flags.c_contiguous
    size, item_bytes = array.size, array.itemsize
    return None, None, size, item_bytes, array.ctypes.data, size, item_bytes


# ---------------------------------------------------------------- this processor

llvm.initialize_native_target()
llvm.initialize_native_asmprinter()


def _processor() -> tuple[str, str]:
    """Return this processor's name and features, as LLVM knows them."""
    try:
        features = llvm.get_host_cpu_features().flatten()
    except RuntimeError:  # LLVM cannot tell on this system: then those that the name implies
        features = ""
    return llvm.get_host_cpu_name(), features


def target_machine() -> llvm.TargetMachine:
    """Return this processor, for code that is loaded where it will stay."""
    target = llvm.Target.from_default_triple()
    name, features = _processor()
    return target.create_target_machine(
        cpu=name,
        features=features,
        opt=3,
        # The loader knows no global offset table on x86, and constants would be read from anywhere.
        reloc="static" if target.name.startswith("x86") else "default",
        codemodel="jitdefault",
        jit=True,
    )


_engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), target_machine())
"""Owns the code until the process ends."""


def load_kernels() -> None:
    """Bind all kernels that are declared to machine code: what is kept, or fresh."""
    file = cache_file()
    machine_code = None if file is None else read_kept(file)
    if machine_code is None:
        # Only here: numba takes longer to import than everything else together.
        from isthmus.sites.codecs.kernels.translating import translate

        machine_code = translate(_kernels, _inlined)
        keep(file, machine_code)
    _engine.add_object_file(llvm.ObjectFileRef.from_data(machine_code))
    _engine.finalize_object()
    for each in _kernels:
        each.bind(_engine.get_function_address(each.symbol))


# ---------------------------------------------------------------- the file


def cache_file() -> Path | None:
    """Return where this processor's kernels are kept; None: this user has no place for it."""
    digest = hashlib.sha256()
    for module in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(module.read_bytes())
    name, features = _processor()
    versions = (llvmlite.__version__, metadata.version("numba"), sys.implementation.cache_tag)
    digest.update(" ".join((*versions, llvm.get_process_triple(), name, features)).encode())
    try:
        base = platformdirs.user_cache_path("isthmus")
    except RuntimeError:  # a user that the system has no home of
        return None
    # Older releases of platformdirs say "~/.cache" then, which would be below any folder.
    return base / "kernels" / f"{name}-{digest.hexdigest()[:16]}.o" if base.is_absolute() else None


def read_kept(path: Path) -> bytes | None:
    """Return the machine code in a file, if it is there, whole, and of nobody else's making."""
    try:
        if not _is_ours(path.parent.stat()):
            return None
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
            data = file.read() if _is_ours(found) else b""
    except OSError:
        return None
    digest, machine_code = data[:_DIGEST_BYTES], data[_DIGEST_BYTES:]
    if _digest(path, machine_code) != digest:
        return None
    if time.time() - found.st_mtime > NOTED_S:
        with contextlib.suppress(OSError):  # a disk that is only read
            os.utime(path)
    return machine_code


def keep(path: Path | None, machine_code: bytes) -> None:
    """Write machine code, whole or not at all, and remove what nothing uses any more.

    Where that cannot be, the log says so.
    """
    try:
        if path is None:
            raise FileNotFoundError("this user has no home folder: set XDG_CACHE_HOME")
        _write(path, machine_code)
    except OSError as error:
        _log.warning("kernels are compiled again at the next start: %s", error)


def _write(path: Path, machine_code: bytes) -> None:
    folder = path.parent
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not _is_ours(folder.stat()):
        raise PermissionError(f"{folder} is another user's, or others may write there")
    with tempfile.NamedTemporaryFile(dir=folder, prefix=f"{path.name}.", delete=False) as file:
        written = Path(file.name)
        try:
            file.write(_digest(path, machine_code) + machine_code)
            file.flush()
            written.replace(path)
        except OSError:
            written.unlink(missing_ok=True)
            raise
    for each in folder.iterdir():
        with contextlib.suppress(OSError):
            if _NAME.fullmatch(each.name) and time.time() - each.lstat().st_mtime > UNUSED_S:
                each.unlink()


def _digest(path: Path, machine_code: bytes) -> bytes:
    """Return the digest of code that was made for a file's name. One that was moved has another."""
    return hashlib.sha256(f"{path.name}\n".encode() + machine_code).digest()


def _is_ours(found: os.stat_result) -> bool:
    """Whether nobody but this user can have written a file, or into a folder."""
    return found.st_uid == os.geteuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
