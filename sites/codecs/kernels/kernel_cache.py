"""Loads compiled kernels from a cache file, without importing numba.

The first process on a machine compiles all kernels, for seconds (translating.py), and writes the
machine code to a file in the user's cache folder. Later processes load it in milliseconds, without
the half a second and the 75 MiB of numba itself.

A file's name contains the processor and a digest of the compiler and of these modules' text, so no
file is ever out of date. Processes that start together write the same file, each first under
another name. The code is executed, so it is loaded only from a file that no other user can write,
and its checksum covers its name. If no such file can be written, each process compiles for itself.
Files that were not loaded for a month are removed when a new one is written.
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
"""Resolution of a file's recorded last use: most starts then write nothing."""

_DIGEST_BYTES: Final = hashlib.sha256().digest_size
_NAME: Final = re.compile(r"[A-Za-z0-9._-]+-[0-9a-f]{16}\.o(\.[A-Za-z0-9_]+)?")
"""Names of cache files, complete or unfinished."""

Function = TypeVar("Function", bound=Callable[..., Any])


# ---------------------------------------------------------------- declaring kernels


@dataclass(frozen=True, slots=True)
class Type:
    """The type of an argument or a result."""

    name: str
    """The type's name in numba's signatures."""
    machine: Any = None
    """The type in ctypes; None: a contiguous array of one dimension."""
    item: str = ""
    """numpy's name of an array's element type."""


_READ: Final = "Array({}, 1, 'C', readonly=True, aligned=False)"
"""numba's type of a read-only array, which may be unaligned, as in a frame."""

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
    ctypes.c_void_p,  # owner of the memory: none for a kernel
    ctypes.c_void_p,
    ctypes.c_int64,  # elements
    ctypes.c_int64,  # bytes per element
    ctypes.c_void_p,  # the first element
    ctypes.c_int64,  # elements of the one dimension
    ctypes.c_int64,  # stride in bytes
)
"""numba's calling convention for an array; translating.py refuses functions with another one."""


class Kernel:
    """A function over arrays that runs as machine code, without the interpreter's lock.

    Sizes are not checked: too short an array is accessed beyond its end. The codecs check them.
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
        """Set the address of the machine code."""
        self._native = ctypes.CFUNCTYPE(ctypes.c_int32, *machine_types(self.arguments))(address)

    def __call__(self, *given: Any) -> Any:  # noqa: ANN401 - as `arguments` say
        """Run the machine code."""
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
    """Mark a function of scalars that kernels may call; it is compiled into each kernel."""
    _inlined.add(function)
    return function


def kernel(returns: Type, *arguments: Type) -> Callable[[Function], Function]:
    """Declare a kernel with these types; it can be called after `load_kernels`."""

    def declared(function: Function) -> Function:
        _kernels.append(Kernel(function, returns, arguments))
        return cast("Function", _kernels[-1])

    return declared


def machine_types(arguments: tuple[Type, ...]) -> list[Any]:
    """Return the machine code's ctypes: pointers for result and error, then all arguments."""
    machine: list[Any] = [ctypes.c_void_p, ctypes.c_void_p]
    for each in arguments:
        machine += ARRAY_MACHINE if each.machine is None else [each.machine]
    return machine


def _flat(array: np.ndarray[Any, Any], dtype: np.dtype[Any]) -> tuple[Any, ...]:
    """Return an array's fields in the form of ARRAY_MACHINE."""
    assert array.dtype == dtype, f"{array.dtype} where {dtype} belongs"
    assert array.flags.c_contiguous
    size, item_bytes = array.size, array.itemsize
    return None, None, size, item_bytes, array.ctypes.data, size, item_bytes


# ---------------------------------------------------------------- this processor

llvm.initialize_native_target()
llvm.initialize_native_asmprinter()


def _processor() -> tuple[str, str]:
    """Return LLVM's name and features of this processor."""
    try:
        features = llvm.get_host_cpu_features().flatten()
    except RuntimeError:  # unknown on this system: use the features implied by the name
        features = ""
    return llvm.get_host_cpu_name(), features


def target_machine() -> llvm.TargetMachine:
    """Return the target machine for code that is loaded at a fixed address."""
    target = llvm.Target.from_default_triple()
    name, features = _processor()
    return target.create_target_machine(
        cpu=name,
        features=features,
        opt=3,
        # On x86 the loader has no global offset table, and constants would be misread.
        reloc="static" if target.name.startswith("x86") else "default",
        codemodel="jitdefault",
        jit=True,
    )


_engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), target_machine())
"""Owns the code until the process ends."""


def load_kernels() -> None:
    """Bind all declared kernels to machine code, from the cache or freshly compiled."""
    file = cache_file()
    machine_code = None if file is None else read_kept(file)
    if machine_code is None:
        # Import late: numba takes longer than all other imports together.
        from isthmus.sites.codecs.kernels.translating import translate

        machine_code = translate(_kernels, _inlined)
        keep(file, machine_code)
    _engine.add_object_file(llvm.ObjectFileRef.from_data(machine_code))
    _engine.finalize_object()
    for each in _kernels:
        each.bind(_engine.get_function_address(each.symbol))


# ---------------------------------------------------------------- the file


def cache_file() -> Path | None:
    """Return the cache file for this processor; None: the user has no cache folder."""
    digest = hashlib.sha256()
    for module in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(module.read_bytes())
    name, features = _processor()
    versions = (llvmlite.__version__, metadata.version("numba"), sys.implementation.cache_tag)
    digest.update(" ".join((*versions, llvm.get_process_triple(), name, features)).encode())
    try:
        base = platformdirs.user_cache_path("isthmus")
    except RuntimeError:  # the user has no home
        return None
    # Older releases of platformdirs then return "~/.cache", a relative path.
    return base / "kernels" / f"{name}-{digest.hexdigest()[:16]}.o" if base.is_absolute() else None


def read_kept(path: Path) -> bytes | None:
    """Return the machine code in a file; None if missing, damaged, or writable by others."""
    try:
        if not _is_ours(path.parent.stat()):
            return None
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            data = file.read() if _is_ours(status) else b""
    except OSError:
        return None
    digest, machine_code = data[:_DIGEST_BYTES], data[_DIGEST_BYTES:]
    if _digest(path, machine_code) != digest:
        return None
    if time.time() - status.st_mtime > NOTED_S:
        with contextlib.suppress(OSError):  # a read-only disk
            os.utime(path)
    return machine_code


def keep(path: Path | None, machine_code: bytes) -> None:
    """Write machine code atomically, and remove cache files no longer used.

    A failure is only logged.
    """
    try:
        if path is None:
            raise FileNotFoundError("this user has no home folder: set XDG_CACHE_HOME")
        _write(path, machine_code)
    except OSError as error:
        _log.warning("kernels are compiled again at the next start: cannot cache them: %s", error)


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
    """Return the digest of a file's name and code, so that a renamed file is not valid."""
    return hashlib.sha256(f"{path.name}\n".encode() + machine_code).digest()


def _is_ours(found: os.stat_result) -> bool:
    """Whether only this user can have written a file, or into a folder."""
    return found.st_uid == os.geteuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
