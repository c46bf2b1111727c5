"""Copies of tensors on the host, in memory that is kept from one save to the next.

On CUDA the copies are enqueued on the stream that is current, into page-locked memory: what comes
after on that stream may change the tensors, and the thread that writes waits for the copies.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from isthmus.sites.worker.exchange.sharding import is_sharded

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

Tensors = dict[str, Tensor]


class Staging:
    """One copy of a state. For the training thread; `wait` is for the thread that writes."""

    def __init__(self, device: torch.device) -> None:
        """`device` is this rank's."""
        self._on_cuda = device.type == "cuda"
        self._kept: Tensors = {}
        self._copied: list[torch.cuda.Event] = []

    def copies(self, tensors: Mapping[str, Tensor]) -> Tensors:
        """Return copies, which stay as they are until `copies` is called with the same names.

        A tensor that has two names is copied once. Of a sharded one, what this rank holds.
        """
        by_tensor: dict[int, Tensor] = {}
        for name, each in tensors.items():
            if id(each) not in by_tensor:
                by_tensor[id(each)] = self._copy(name, each.detach())
        self.mark()
        return {name: by_tensor[id(each)] for name, each in tensors.items()}

    def mark(self) -> None:
        """Have `order` and `wait` wait for all that is on the current stream by now."""
        if self._on_cuda:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            self._copied.append(event)

    def order(self) -> None:
        """Have the current stream go on once all copies are made, if it is another one."""
        if self._copied:
            self._copied[-1].wait()

    def wait(self) -> None:
        """Wait until all copies are made."""
        copied, self._copied = self._copied, []
        for each in copied:
            each.synchronize()

    def _copy(self, name: str, tensor: Tensor) -> Tensor:
        if is_sharded(tensor):
            return _with_local(tensor, self._copy(name, tensor.to_local()))
        if type(tensor) is not Tensor or tensor.layout != torch.strided:
            return tensor.to("cpu", copy=True)  # it knows best what it consists of
        kept = self._kept.get(name)
        if kept is None or (kept.shape, kept.dtype) != (tensor.shape, tensor.dtype):
            kept = torch.empty_like(tensor, device="cpu", pin_memory=self._on_cuda)
            self._kept[name] = kept
        kept.copy_(tensor, non_blocking=self._on_cuda)
        return kept


def _with_local(tensor: DTensor, local: Tensor) -> Tensor:
    """Return a sharded tensor like another one, whose part of this rank is on the host.

    `DTensor.from_local` would bring it to the device of the mesh.
    """
    from torch.distributed.tensor import DTensor

    sharded: Tensor = DTensor(local, tensor._spec, requires_grad=False)  # type: ignore[no-untyped-call]
    return sharded


def tensors_in(held: object) -> Iterator[Tensor]:
    """Yield the tensors in what a script has saved along: in mappings, lists and tuples."""
    if isinstance(held, Tensor):
        yield held
    elif isinstance(held, Mapping):
        for each in held.values():
            yield from tensors_in(each)
    elif isinstance(held, list | tuple):
        for each in held:
            yield from tensors_in(each)
