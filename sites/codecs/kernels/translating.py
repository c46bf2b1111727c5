"""Compiles kernels to machine code with numba.

No flag lets the compiler fuse a product and a sum, reorder sums, or divide by multiplying. So
kernels give the bits that IEEE 754 prescribes, on every processor.
"""

from __future__ import annotations

import ctypes
import types
from collections.abc import Callable, Sequence, Set
from typing import Any, Final

import llvmlite.binding as llvm
import numba

from isthmus.sites.codecs.kernels.kernel_cache import Kernel, machine_types, target_machine

_LLVM_NAMES: Final = {
    ctypes.c_void_p: "ptr",
    ctypes.c_int64: "i64",
    ctypes.c_float: "float",
}


def translate(kernels: Sequence[Kernel], inlined: Set[Callable[..., Any]]) -> bytes:
    """Return a self-contained object file of all kernels for this processor.

    Args:
        kernels: what to compile: functions of one module.
        inlined: the functions of that module that they may call.
    """
    machine = target_machine()
    whole = llvm.parse_assembly("")
    whole.triple = machine.triple
    whole.data_layout = str(machine.target_data)
    scope = _scope(kernels[0].function.__globals__, inlined)
    for each in kernels:
        whole.link_in(_module_of(each, scope, machine))
    callees = [each.name for each in whole.functions if each.is_declaration]
    missing = [each for each in callees if not _is_there(each)]
    assert not missing, f"kernels call {missing}"
    return bytes(machine.emit_object(whole))


def _scope(names: dict[str, Any], inlined: Set[Callable[..., Any]]) -> dict[str, Any]:
    """Return a module's names, with the inlined functions compiled."""
    scope = dict(names)
    for name, each in names.items():
        if isinstance(each, types.FunctionType) and each in inlined:
            copy = types.FunctionType(each.__code__, scope, each.__name__)
            scope[name] = numba.njit(error_model="numpy")(copy)
    return scope


def _module_of(
    kernel: Kernel, scope: dict[str, Any], machine: llvm.TargetMachine
) -> llvm.ModuleRef:
    """Compile one kernel, and check its calling convention against kernel_cache.py."""
    signature = f"{kernel.returns.name}({', '.join(each.name for each in kernel.arguments)})"
    copy = types.FunctionType(kernel.function.__code__, scope, kernel.function.__name__)
    compiled = numba.njit(signature, error_model="numpy")(copy)
    overload: Any = next(iter(compiled.overloads.values()))
    module = llvm.parse_assembly(overload.library.get_llvm_str())
    entry = module.get_function(overload.fndesc.llvm_func_name)
    found = [str(each.type) for each in entry.arguments]
    wanted = [_LLVM_NAMES[each] for each in machine_types(kernel.arguments)]
    assert found == wanted, f"{kernel.symbol} takes {found}; expected {wanted}"
    entry.name = kernel.symbol
    entry.linkage = "external"
    for each in module.functions:
        if not each.is_declaration and each.name != kernel.symbol:
            each.linkage = "internal"
    builder = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options())
    manager = llvm.create_new_module_pass_manager()
    manager.add_global_dead_code_eliminate_pass()
    manager.add_strip_dead_prototype_pass()
    manager.run(module, builder)
    return module


def _is_there(name: str) -> bool:
    """Whether machine code can call a function by this name.

    LLVM's intrinsics become instructions or calls to libc.
    """
    return name.startswith("llvm.") or llvm.address_of_symbol(name) is not None
