"""What kernels take and return, as numba names it and as the processor is handed it."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any, Final


@dataclass(frozen=True, slots=True)
class Type:
    """Of an argument or a result."""

    name: str
    """In numba's signatures."""
    machine: Any = None
    """Of ctypes; None: an array of one dimension, contiguous."""
    item: str = ""
    """Of an array: numpy's name of its elements."""


_READ: Final = "Array({}, 1, 'C', readonly=True, aligned=False)"
"""What is only read may begin anywhere, as it does in a frame."""

OCTETS: Final = Type("uint8[::1]", item="uint8")
READ_OCTETS: Final = Type(_READ.format("uint8"), item="uint8")
HALVES: Final = Type("uint16[::1]", item="uint16")
READ_HALVES: Final = Type(_READ.format("uint16"), item="uint16")
WORDS: Final = Type("uint32[::1]", item="uint32")
FLOATS: Final = Type("float32[::1]", item="float32")
READ_FLOATS: Final = Type(_READ.format("float32"), item="float32")
FLOAT: Final = Type("float32", ctypes.c_float)
WORD: Final = Type("uint32", ctypes.c_uint32)
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
