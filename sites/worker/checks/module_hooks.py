"""Hooks of ours in a script's modules, of which copies of these have none.

Scripts copy models: `copy.deepcopy` and `AveragedModel` for an average of weights, `torch.save` and
pickle for whole modules. A copy is not attached. Nor does what reads it back have to know isthmus.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch


class ModuleHook:
    """Calls something of ours; a copy or a pickle has a standard function that does nothing."""

    def __init__(self, call: Callable[..., Any]) -> None:
        """Take what torch is to call; its arguments are those of the hook."""
        self._call = call

    def __call__(self, *args: object) -> Any:  # noqa: ANN401 - what torch takes
        """Call it."""
        return self._call(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        """Return what takes any arguments and returns None, wherever it is read."""
        return getattr, (nullcontext(), "__exit__")


class UntracedModuleHook(ModuleHook):
    """One that runs as it is in a compiled model, too."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, *args: object) -> Any:  # noqa: ANN401 - what torch takes
        """Call it."""
        return self._call(*args)
