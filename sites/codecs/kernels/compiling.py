"""Compiles kernels when their module is imported, and keeps what came of it for the next process.

The first import on a machine compiles for seconds, later ones load what was kept. That lies in a folder of
its own for each processor, numba and text of these modules, so nothing in it is ever out of date, and
processes that start together write the same to it; each file under another name first. Where no folder
can be written, each process compiles for itself.

No flag lets the compiler contract a product and a sum, reorder sums or divide by multiplying: kernels
give the bits that IEEE 754 prescribes, on every processor.
"""

from __future__ import annotations

import hashlib
import logging
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

import llvmlite.binding as llvm
import numba
import platformdirs
from numba import types

_log = logging.getLogger(__name__)

Function = TypeVar("Function", bound=Callable[..., Any])

OCTETS: Final = types.uint8[::1]
READ_OCTETS: Final = types.Array(types.uint8, 1, "C", readonly=True)
HALVES: Final = types.uint16[::1]
READ_HALVES: Final = types.Array(types.uint16, 1, "C", readonly=True, aligned=False)
WORDS: Final = types.uint32[::1]
FLOATS: Final = types.float32[::1]
READ_FLOATS: Final = types.Array(types.float32, 1, "C", readonly=True, aligned=False)
"""Arrays of one dimension, contiguous. What is only read may begin anywhere, as it does in a frame."""
FLOAT: Final = types.float32
WORD: Final = types.uint32
INTEGER: Final = types.int64
NOTHING: Final = types.void

_config: Any = numba.config
"""What $NUMBA_CACHE_DIR and its like say; read whenever something is compiled."""


def kernel(returns: Any, *arguments: Any) -> Callable[[Function], Function]:  # noqa: ANN401 - numba's
    """Compile a function for arguments of these types, now; it runs without the interpreter's lock.

    Args:
        returns: type of the result: one of those above, like the others.
        arguments: of each argument.
    """

    def compiled(function: Function) -> Function:
        signature = returns(*arguments)
        if _KEEPS:
            try:
                return _jit(signature, cache=True)(function)
            except Exception as error:  # noqa: BLE001 - what a damaged file makes of unpickling is anything
                _log.warning("%s: not kept, compiled: %s", function.__name__, error)
        return _jit(signature)(function)

    return compiled


def inlined(function: Function) -> Function:
    """Let kernels of the same module call a function of numbers; compiled with each of them."""
    return _jit()(function)


def _jit(*arguments: Any, **options: Any) -> Callable[[Function], Function]:  # noqa: ANN401 - numba's
    jit: Callable[[Function], Function] = numba.njit(
        *arguments, nogil=True, error_model="numpy", **options
    )
    return jit


def _folder() -> Path:
    """Return where this processor's kernels are kept: below $NUMBA_CACHE_DIR, or the user's cache folder."""
    digest = hashlib.sha256()
    for module in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(module.read_bytes())
    processor = llvm.get_host_cpu_name()
    features = llvm.get_host_cpu_features().flatten()
    digest.update(f"{numba.__version__} {processor} {features}".encode())
    given = _config.CACHE_DIR
    base = Path(given) if given else platformdirs.user_cache_path("isthmus") / "kernels"
    return base / f"{processor}-{digest.hexdigest()[:16]}"


def _keeps_in(folder: Path) -> bool:
    """Have numba keep what it compiles in a folder; return whether it can."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        _log.warning("kernels are compiled at each start: %s", error)
        return False
    _config.CACHE_DIR = str(folder)
    return True


_KEEPS: Final = _keeps_in(_folder())
