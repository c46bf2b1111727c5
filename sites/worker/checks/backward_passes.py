"""Tells when backward passes begin and end, and what broke one off: torch has no hook for that."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch

from isthmus.sites.worker.checks.torch_calls import in_backward


class PassWatcher(Protocol):
    """Is told of backward passes, but of none that is nested in another one."""

    def begin_backward(self) -> None:
        """A pass begins, through any graph."""

    def end_backward(self, error: Exception | None) -> None:
        """It has ended, or `error` has broken it off."""


_watchers: WeakKeyDictionary[PassWatcher, int] = WeakKeyDictionary()
"""And their threads."""


class _Engine(torch._C._ImperativeEngine):
    """What torch.autograd hands all passes to."""

    def run_backward(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - torch's own
        """Go through a graph; called by `backward` and `torch.autograd.grad`."""
        here = threading.get_ident()
        told = [] if in_backward() else [each for each, at in _watchers.items() if at == here]
        for each in told:
            each.begin_backward()
        error: Exception | None = None
        try:
            return super().run_backward(*args, **kwargs)
        except Exception as raised:
            error = raised
            raise
        finally:
            for each in told:
                each.end_backward(error)


def watch_backward(watcher: PassWatcher) -> Callable[[], None]:
    """Tell a watcher of this thread's passes as long as it lives; return what ends that."""
    if not isinstance(torch.autograd.Variable._execution_engine, _Engine):
        torch.autograd.Variable._execution_engine = _Engine()
    _watchers[watcher] = threading.get_ident()

    def end() -> None:
        _watchers.pop(watcher, None)

    return end
