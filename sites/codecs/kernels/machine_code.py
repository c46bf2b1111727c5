"""Loads object files into this process, and calls what is in them; numba has no part in it.

So a gateway starts as fast as without kernels, once they have been compiled on its machine.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import llvmlite.binding as llvm
import numpy as np

from sites.codecs.kernels.signatures import ARRAY_MACHINE, Type

llvm.initialize_native_target()
llvm.initialize_native_asmprinter()


def processor() -> tuple[str, str]:
    """Return this processor's name and features, as LLVM knows them."""
    try:
        features = llvm.get_host_cpu_features().flatten()
    except RuntimeError:  # LLVM cannot tell on this system: then those that the name implies
        features = ""
    return llvm.get_host_cpu_name(), features


def target_machine() -> llvm.TargetMachine:
    """Return this processor, for code that is loaded where it will stay."""
    target = llvm.Target.from_default_triple()
    name, features = processor()
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


def load(
    object_file: bytes, symbol: str, returns: Type, arguments: Sequence[Type]
) -> Callable[..., Any]:
    """Return the function of that name, which runs without the interpreter's lock.

    How long arrays are is its callers' business.

    Args:
        object_file: from translating.py.
        symbol: no other file's in this process.
        returns: type of its result.
        arguments: of each argument.
    """
    _engine.add_object_file(llvm.ObjectFileRef.from_data(object_file))
    _engine.finalize_object()
    machine: list[Any] = [ctypes.c_void_p, ctypes.c_void_p]
    for each in arguments:
        machine += ARRAY_MACHINE if each.machine is None else [each.machine]
    native = ctypes.CFUNCTYPE(ctypes.c_int32, *machine)(_engine.get_function_address(symbol))
    dtypes = [np.dtype(each.item) if each.machine is None else None for each in arguments]

    def call(*given: Any) -> Any:  # noqa: ANN401 - as `arguments` say
        result = returns.machine()
        error = ctypes.c_void_p()
        flat: list[Any] = [ctypes.byref(result), ctypes.byref(error)]
        for value, dtype in zip(given, dtypes, strict=True):
            flat += (value,) if dtype is None else _flat(value, dtype)
        status = native(*flat)
        assert status == 0, f"{symbol} cannot fail; it returned {status}"
        return result.value

    return call


def _flat(array: np.ndarray[Any, Any], dtype: np.dtype[Any]) -> tuple[Any, ...]:
    """Return an array as ARRAY_MACHINE says."""
    assert array.dtype == dtype, f"{array.dtype} where {dtype} belongs"
    assert array.flags.c_contiguous
    size, item_bytes = array.size, array.itemsize
    return None, None, size, item_bytes, array.ctypes.data, size, item_bytes
