"""Finds out what torch is doing while it calls one of our hooks, for it tells no hook."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any

import torch

_NO_BACKWARD = -1
"""The number of the graph in a thread in which no backward pass goes on."""


def in_backward() -> bool:
    """Whether autograd goes through a backward pass, or is at its end; a schedule reduces later."""
    return torch._C._current_graph_task_id() != _NO_BACKWARD


def has_closure(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether an optimizer's step, called with these, was given a closure."""
    return any(callable(each) for each in (*args, kwargs.get("closure")))


def calls() -> Iterator[FrameType]:
    """Yield the calls that are under way in this thread, from the caller's outwards."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def call_of(name: str) -> Mapping[str, Any]:
    """Return the variables of the innermost call of a function of this name; {}: there is none."""
    return next((each.f_locals for each in calls() if each.f_code.co_name == name), {})
