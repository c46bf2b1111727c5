"""Makes machine code of a kernel.

Only where there is none yet: numba alone takes a second to import.

No flag lets the compiler contract a product and a sum, reorder sums or divide by multiplying:
kernels give the bits that IEEE 754 prescribes, on every processor.
"""

from __future__ import annotations

import ctypes
import types
from collections.abc import Callable, Sequence, Set
from typing import Any, Final

import llvmlite.binding as llvm
import numba

from sites.codecs.kernels.machine_code import target_machine
from sites.codecs.kernels.signatures import ARRAY_MACHINE, Type

_LLVM_NAMES: Final = {
    ctypes.c_void_p: "ptr",
    ctypes.c_int64: "i64",
    ctypes.c_uint32: "i32",
    ctypes.c_float: "float",
}


def translate(
    function: Callable[..., Any],
    inlined: Set[Callable[..., Any]],
    returns: Type,
    arguments: Sequence[Type],
    symbol: str,
) -> bytes:
    """Return an object file for this processor that needs nothing but itself.

    Args:
        function: the kernel.
        inlined: the functions that it or they may call, by any name of their modules.
        returns: type of its result.
        arguments: of each argument.
        symbol: what the function is called in the file.
    """
    scope = _scope(function.__globals__, inlined, {})
    signature = f"{returns.name}({', '.join(each.name for each in arguments)})"
    copy = types.FunctionType(function.__code__, scope, function.__name__)
    compiled = numba.njit(signature, error_model="numpy")(copy)
    overload: Any = next(iter(compiled.overloads.values()))
    module = llvm.parse_assembly(overload.library.get_llvm_str())
    return _object_file(module, overload.fndesc.llvm_func_name, symbol, arguments)


def _scope(
    names: dict[str, Any], inlined: Set[Callable[..., Any]], known: dict[int, dict[str, Any]]
) -> dict[str, Any]:
    """Return a module's names with what is inlined compiled, as in the modules they come from."""
    scope = known[id(names)] = dict(names)
    for name, each in names.items():
        if isinstance(each, types.FunctionType) and each in inlined:
            theirs = each.__globals__
            home = known.get(id(theirs)) or _scope(theirs, inlined, known)
            copy = types.FunctionType(each.__code__, home, each.__name__)
            scope[name] = numba.njit(error_model="numpy")(copy)
    return scope


def _object_file(
    module: llvm.ModuleRef, name: str, symbol: str, arguments: Sequence[Type]
) -> bytes:
    """Keep one function, and see that it is called as machine_code.py does and calls nobody."""
    entry = module.get_function(name)
    expected: list[Any] = [ctypes.c_void_p, ctypes.c_void_p]
    for each in arguments:
        expected += ARRAY_MACHINE if each.machine is None else [each.machine]
    found = [str(each.type) for each in entry.arguments]
    wanted = [_LLVM_NAMES[each] for each in expected]
    assert found == wanted, f"{symbol} takes {found}; expected {wanted}"
    entry.name = symbol
    entry.linkage = "external"
    for each in module.functions:
        if not each.is_declaration and each.name != symbol:
            each.linkage = "internal"
    machine = target_machine()
    builder = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options())
    manager = llvm.create_new_module_pass_manager()
    manager.add_global_dead_code_eliminate_pass()
    manager.add_strip_dead_prototype_pass()
    manager.run(module, builder)
    callees = [each.name for each in module.functions if each.is_declaration]
    missing = [each for each in callees if not _is_there(each)]
    assert not missing, f"{symbol} calls {missing}"
    return bytes(machine.emit_object(module))


def _is_there(name: str) -> bool:
    """Whether machine code can call a function by this name.

    LLVM's own become instructions, or libc's.
    """
    return name.startswith("llvm.") or llvm.address_of_symbol(name) is not None
