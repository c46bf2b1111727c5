"""Copies tensors to host memory that is reused from one save to the next.

On CUDA the copies are enqueued on the current stream, into page-locked memory. Later work on that
stream may change the tensors; the writing thread waits for the copies.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from isthmus.sites.worker.exchange.sharding import is_sharded, with_local

Tensors = dict[str, Tensor]


class Staging:
    """Host memory for one copy of a state. The writing thread only calls `wait`."""

    def __init__(self, device: torch.device) -> None:
        """`device` is the device of this rank."""
        self._on_cuda = device.type == "cuda"
        self._kept: Tensors = {}
        self._copied: list[torch.cuda.Event] = []

    def copies(self, tensors: Mapping[str, Tensor]) -> Tensors:
        """Return copies, which are valid until `copies` is called with the same names.

        A tensor with two names is copied once. Of a sharded tensor, only this rank's part is.
        """
        by_tensor: dict[int, Tensor] = {}
        for name, each in tensors.items():
            if id(each) not in by_tensor:
                by_tensor[id(each)] = self._copy(name, each.detach())
        self.mark()
        return {name: by_tensor[id(each)] for name, each in tensors.items()}

    def mark(self) -> None:
        """Record the current stream's work, for which `order` and `wait` then wait."""
        if self._on_cuda:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            self._copied.append(event)

    def order(self) -> None:
        """Make the current stream wait for all copies, if it is another one."""
        if self._copied:
            self._copied[-1].wait()

    def wait(self) -> None:
        """Wait until all copies are made."""
        copied, self._copied = self._copied, []
        for each in copied:
            each.synchronize()

    def _copy(self, name: str, tensor: Tensor) -> Tensor:
        if is_sharded(tensor):
            return with_local(tensor, self._copy(name, tensor.to_local()))
        if type(tensor) is not Tensor or tensor.layout != torch.strided:
            return tensor.to("cpu", copy=True)  # a tensor subclass copies its own parts
        kept = self._kept.get(name)
        if kept is None or (kept.shape, kept.dtype) != (tensor.shape, tensor.dtype):
            kept = torch.empty_like(tensor, device="cpu", pin_memory=self._on_cuda)
            self._kept[name] = kept
        kept.copy_(tensor, non_blocking=self._on_cuda)
        return kept


def tensors_in(held: object) -> Iterator[Tensor]:
    """Yield the tensors within nested mappings, lists and tuples."""
    if isinstance(held, Tensor):
        yield held
    elif isinstance(held, Mapping):
        for each in held.values():
            yield from tensors_in(each)
    elif isinstance(held, list | tuple):
        for each in held:
            yield from tensors_in(each)
