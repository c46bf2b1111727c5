"""Compiles kernels when their module is imported, and keeps what came of it for the next process.

The first import on a machine compiles for seconds, later ones load what was kept. That lies in a folder of
its own for each processor, LLVM and text of these modules, so nothing in it is ever out of date, and
processes that start together write the same to it; each file under another name first. Where no folder
can be written, each process compiles for itself.
"""

from __future__ import annotations

import hashlib
import logging
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar, cast

import llvmlite
import llvmlite.binding as llvm
import platformdirs

from sites.codecs.kernels.machine_code import load
from sites.codecs.kernels.signatures import Type

_log = logging.getLogger(__name__)

Function = TypeVar("Function", bound=Callable[..., Any])

_DIGEST_BYTES: Final = hashlib.sha256().digest_size
_helpers: Final[dict[str, dict[str, Callable[..., Any]]]] = {}
"""By module and name."""


def inlined(function: Function) -> Function:
    """Let kernels of the same module call a function of numbers; compiled with each of them."""
    _helpers.setdefault(function.__module__, {})[function.__name__] = function
    return function


def kernel(returns: Type, *arguments: Type) -> Callable[[Function], Function]:
    """Compile a function for arguments of these types; it runs without the interpreter's lock.

    Sizes are not checked: an array that is too short is read and written behind its end. The codecs and
    sites/codecs/parts.py see to that.

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

    helpers = _helpers.get(function.__module__, {})
    return translate(function, helpers, returns, arguments, symbol)


def _folder() -> Path:
    """Return where this processor's kernels are kept: in the user's folder for what can be made again."""
    digest = hashlib.sha256()
    for module in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(module.read_bytes())
    processor = llvm.get_host_cpu_name()
    features = llvm.get_host_cpu_features().flatten()
    digest.update(f"{llvmlite.__version__} {processor} {features}".encode())
    base = platformdirs.user_cache_path("isthmus") / "kernels"
    return base / f"{processor}-{digest.hexdigest()[:16]}"


_FOLDER: Final = _folder()


def _kept(symbol: str) -> bytes | None:
    """Return a kernel's object file, if it is there and whole."""
    try:
        data = (_FOLDER / f"{symbol}.o").read_bytes()
    except OSError:
        return None
    digest, object_file = data[:_DIGEST_BYTES], data[_DIGEST_BYTES:]
    return object_file if hashlib.sha256(object_file).digest() == digest else None


def _keep(symbol: str, object_file: bytes) -> None:
    data = hashlib.sha256(object_file).digest() + object_file
    try:
        _FOLDER.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=_FOLDER, delete=False) as file:
            file.write(data)
        Path(file.name).replace(_FOLDER / f"{symbol}.o")
    except OSError as error:
        _log.warning("%s is compiled again at the next start: %s", symbol, error)
