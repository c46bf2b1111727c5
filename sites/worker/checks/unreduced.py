"""Notices backward passes of which DistributedDataParallel reduces nothing.

After a forward pass DDP waits for one backward pass. What a second one through the same graph adds
to gradients stays at this rank, without a word.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from isthmus.protos.errors import ScriptError
from isthmus.sites.worker.checks.step_watch import spread

_SAMPLED = 8
"""Parameters of an optimizer that are watched, from all over."""


class ReducedCheck:
    """Refuses to step with gradients that have not been reduced. Watches some parameters."""

    def __init__(
        self, models: Sequence[DistributedDataParallel], names: Mapping[torch.Tensor, str]
    ) -> None:
        """Watch nothing yet. `names` are those of the models' parameters."""
        self._names = names
        self._owners = {each: model for model in models for each in model.module.parameters()}
        self._added: set[str] = set()
        """Names of parameters whose gradients have changed in a backward pass, and not crossed."""
        self._crossed: set[str] = set()
        """Those that have crossed since the latest step."""
        self._watched: set[str] = set()
        self._handles: list[RemovableHandle] = []

    def watch(self, optimizer: torch.optim.Optimizer) -> None:
        """Check before each of its steps."""
        groups = (group["params"] for group in optimizer.param_groups)
        own = [each for params in groups for each in params if each in self._owners]
        own = [each for each in own if each.requires_grad]
        sample = spread(own, _SAMPLED)
        for each in sample:
            name = self._names[each]
            if name not in self._watched:
                self._watched.add(name)
                note = self._noter(name, self._owners[each])
                handle = each.register_post_accumulate_grad_hook(note)  # type: ignore[no-untyped-call]
                self._handles.append(handle)
        names = [self._names[each] for each in sample]
        handle = optimizer.register_step_pre_hook(lambda *_: self._check(names))
        self._handles.append(handle)

    def close(self) -> None:
        """Watch no more."""
        for each in self._handles:
            each.remove()
        self._handles.clear()

    def note_crossed(self, names: Iterable[str]) -> None:
        """The gradients of these are reduced, whatever they hold."""
        watched = self._watched.intersection(names)
        self._added -= watched
        self._crossed |= watched

    def _noter(self, name: str, model: DistributedDataParallel) -> Callable[[torch.Tensor], None]:
        def note(_: torch.Tensor) -> None:
            if not torch.compiler.is_compiling() and model.require_backward_grad_sync:
                self._added.add(name)

        return note

    def _check(self, names: Sequence[str]) -> None:
        """Refuse a step with gradients of which some have crossed; step_watch.py has the others.

        Raises:
            ScriptError: and what to do.
        """
        name = next((each for each in names if each in self._added & self._crossed), None)
        self._crossed.difference_update(names)
        if name is not None:
            raise ScriptError(
                f"a backward pass has added to the gradient of {name}, and "
                "DistributedDataParallel has not reduced it: it was a second one through the same "
                "forward pass (retain_graph), the second of two after two forward passes, or one past "
                "the wrapper (model.module). Add the losses up and call backward once"
            )
