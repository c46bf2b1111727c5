"""Looks at what a site's models are called with, and at their buffers, when a step begins.

At other sites a model is called with other inputs, or they read the same data: gradients do not
show it where dropout or augmentation is of each rank's own. And buffers are the same, or the models
are not: one that moves by what a site counts makes another model of it. Hashes of both go to the
coordinator, which compares them and takes note.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
import xxhash
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_leaves

from isthmus.sites.worker.checks.module_hooks import ModuleHook
from isthmus.sites.worker.exchange.rounds import HASHED_NUMEL
from isthmus.sites.worker.exchange.tensor_hashes import ParameterHashes, as_bytes, hashes_of

HASHED_STEPS = 8
"""Inputs of so many steps are hashed, the first ones: on a GPU each costs a wait for it."""


class ForwardWatch:
    """Watches the forward passes of one rank's models. For the training thread."""

    def __init__(
        self,
        models: Sequence[nn.Module],
        num_steps: Callable[[], int],
        *,
        averaged: Callable[[], Collection[torch.Tensor]],
        verify_every: int,
        send_buffers: Callable[[int, ParameterHashes], None],
    ) -> None:
        """Watch the models that are attached.

        Args:
            models: from whose forward passes on.
            num_steps: returns how many have been taken.
            averaged: returns the buffers that the script has averaged over all sites.
            verify_every: steps from one look at buffers to the next; 0: there is none.
            send_buffers: is given the number of steps, and the hashes of buffers.
        """
        self._models = models
        self._num_steps = num_steps
        self._averaged = averaged
        self._verify_every = verify_every
        self._send_buffers = send_buffers
        self._inputs: xxhash.xxh3_64 | None = None
        """Hash of the current step's inputs; None: nothing has come that tells data apart."""
        self._last_step = num_steps() + HASHED_STEPS
        """From here on inputs are not looked at."""
        self._sent_at = 0
        """Steps that had been taken when buffers were hashed the last time."""
        hook = ModuleHook(self._before_forward)
        self.undo = [
            each.register_forward_pre_hook(hook, with_kwargs=True).remove for each in models
        ]

    def take_inputs(self) -> int:
        """Return 52 bits that tell the inputs of a step; 0: they tell nothing. Begin the next."""
        inputs, self._inputs = self._inputs, None
        return 0 if inputs is None else inputs.intdigest() >> 12

    def _before_forward(self, _: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:  # noqa: ANN401 - what a model is called with
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        step = self._num_steps()
        if step < self._last_step:
            for each in tree_leaves((args, dict(kwargs))):
                self._note_input(each)
        if self._verify_every and step % self._verify_every == 0 and step > self._sent_at:
            self._sent_at = step
            hashes = hashes_of(self._buffers())
            if hashes.names:
                self._send_buffers(step, hashes)

    def _note_input(self, value: object) -> None:
        """Hash the beginning of a tensor in which not all elements are equal."""
        if type(value) is not torch.Tensor or value.layout is not torch.strided or value.is_nested:
            return
        values = value.detach().reshape(-1)[:HASHED_NUMEL].cpu()
        if values.numel() and not bool((values == values[0]).all()):
            self._inputs = self._inputs or xxhash.xxh3_64()
            self._inputs.update(as_bytes(values).numpy().data)

    def _buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the buffers that checkpoints hold, with their names.

        But for those of BatchNorm and its like, which are each rank's own as in
        DistributedDataParallel, and those that are averaged.
        """
        averaged = {id(each) for each in self._averaged()}
        for number, model in enumerate(self._models):
            prefix = f"{number}." if len(self._models) > 1 else ""
            for path, module in model.named_modules():
                if isinstance(module, _NormBase):
                    continue
                for name, each in module.named_buffers(recurse=False):
                    is_kept = name not in module._non_persistent_buffers_set
                    if is_kept and type(each) is torch.Tensor and id(each) not in averaged:
                        yield prefix + f"{path}.{name}".removeprefix("module.").lstrip("."), each
