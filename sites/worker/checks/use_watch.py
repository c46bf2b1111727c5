"""Warns where a script evaluates or saves parameters that only its own site has."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from isthmus.sites.worker.checks.module_hooks import ModuleHook


class UseWatch:
    """Watches what models are used for, and warns once. For the training thread."""

    def __init__(
        self, models: Iterable[nn.Module], since: Callable[[], str], warn: Callable[[str], None]
    ) -> None:
        """Watch from now on.

        Args:
            models: that are trained.
            since: returns since when parameters are the site's own, for people; empty: they are
                those of all sites.
            warn: tells people something.
        """
        self._since = since
        self._warn = warn
        self._has_warned = False
        self._undo: list[Callable[[], None]] = []
        for model in models:
            self._watch(model.module if isinstance(model, DistributedDataParallel) else model)

    def close(self) -> None:
        """Watch no more."""
        for undo in self._undo:
            undo()

    def _watch(self, model: nn.Module) -> None:
        def note_pass(module: nn.Module, _: object) -> None:
            if module is model and not (torch.compiler.is_compiling() or torch.is_grad_enabled()):
                self._note("is evaluated")

        def note_saved(module: nn.Module, *_: object) -> None:
            if module is model:  # a copy has the hooks, too
                self._note("gives its state_dict()")

        self._undo.append(model.register_forward_pre_hook(ModuleHook(note_pass)).remove)
        self._undo.append(model.register_state_dict_pre_hook(ModuleHook(note_saved)).remove)  # type: ignore[no-untyped-call]

    def _note(self, what: str) -> None:
        since = "" if self._has_warned else self._since()
        if since:
            self._has_warned = True
            self._warn(
                f"{since} the model {what} with parameters that only this site has: evaluate, "
                "save and average weights inside `with site.global_parameters():`"
            )
