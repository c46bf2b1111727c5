"""What a fuzz target is: one decoder, what it may refuse with, and how much memory it may take."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass

KIB = 1 << 10
MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One decoder, fed with bytes that anybody may have written."""

    name: str
    """Also the name of its folder in the corpus."""
    decode: Callable[[bytes], object]
    """Returns, whatever it is, or raises one of `refusals`. Anything else is a crash."""
    refusals: tuple[type[Exception], ...]
    samples: Callable[[], list[bytes]]
    """Valid inputs, from the real encoders: the corpus begins with them."""
    most_bytes: Callable[[bytes], int]
    """The most memory that one call may hold at a time, its result included."""
    mutations: int = 300
    """How many of them the tests try; fewer where one takes long."""


def attempt(target: Target, data: bytes) -> str | None:
    """Decode; return what the decoder refused with, or None when it took the input.

    Raises:
        Exception: what it crashed with.
        AssertionError: it refused without a word.
    """
    try:
        target.decode(data)
    except target.refusals as error:
        refusal = error
    else:
        return None
    assert str(refusal), f"{type(refusal).__name__} without a message"
    return f"{type(refusal).__name__}: {refusal}"


def peak_bytes(target: Target, data: bytes) -> int:
    """Return the most memory that decoding held at a time; numpy's is counted too.

    tracemalloc has to be on.
    """
    before = tracemalloc.get_traced_memory()[0]
    tracemalloc.reset_peak()
    attempt(target, data)
    return tracemalloc.get_traced_memory()[1] - before
