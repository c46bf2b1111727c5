"""Computes gradients of a micro-batch once more, and leaves all as it was.

A sample is what a model was called with, and what else its gradients depend on: buffers, which may
be each rank's own, autocast, and whether it trains. Every rank can compute the same from it. The
upstream gradient is drawn alike everywhere, and so are random numbers. `torch.autograd.grad` goes
past gradients, hooks of accumulated ones, and DistributedDataParallel.
"""

from __future__ import annotations

import contextlib
import io
import math
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from isthmus.protos.failure import reason_of
from isthmus.sites.worker.exchange.tensor_hashes import hash_of

SAMPLE_BYTES = 32 << 20
"""The most that a sample may take: it goes to all ranks of all sites."""
_SENT_BUFFER_BYTES = 1 << 20
"""Only the hash of a larger buffer is sent: a rank with another one cannot compute the same."""
_KEPT = (list, dict, set)
"""Attributes of modules that are put back as they were if a forward pass changes them in place."""

Take = Callable[[int, torch.Tensor], None]
"""Is given a parameter's place and its gradient, which is gone after that."""


class NotReplayedError(Exception):
    """The gradients of a sample cannot be computed here; the text says why."""


# ---------------------------------------------------------------- samples


def packed_sample(
    number: int, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> bytes:
    """Return a sample: of what model `number` is about to be called with.

    Raises:
        NotReplayedError: it cannot be sent.
    """
    device = next((each.device.type for each in model.parameters()), "cpu")
    data = io.BytesIO()
    try:
        buffers = dict(model.named_buffers())
        is_large = {name: each.nbytes > _SENT_BUFFER_BYTES for name, each in buffers.items()}
        sample = {
            "model": number,
            "inputs": tree_map(_on_host, (list(args), dict(kwargs))),
            "buffers": {name: _on_host(buffers[name]) for name in buffers if not is_large[name]},
            "hashes": {name: hash_of(buffers[name]) for name in buffers if is_large[name]},
            "training": model.training,
            "autocast": [torch.is_autocast_enabled(device), str(torch.get_autocast_dtype(device))],
        }
        torch.save(sample, data)
        torch.load(io.BytesIO(data.getvalue()), weights_only=True)
    except Exception as error:
        raise NotReplayedError(
            f"the model is called with more than tensors and plain values ({reason_of(error)})"
        ) from error
    if data.tell() > SAMPLE_BYTES:
        raise NotReplayedError(
            f"what the model is called with takes {data.tell() >> 20} MiB, and "
            f"{SAMPLE_BYTES >> 20} MiB may be sent"
        )
    return data.getvalue()


def _on_host(value: Any) -> Any:  # noqa: ANN401 - what a model is called with
    """Return a copy of a tensor; anything else as it is."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().to("cpu", copy=True).contiguous()


class Replay:
    """Computes the gradients of samples at one rank. For the training thread."""

    def __init__(
        self, models: Sequence[nn.Module], names: Mapping[torch.Tensor, str], device: torch.device
    ) -> None:
        """Take what the wrapped models are inside, and their trained parameters by name."""
        self._models = models
        self._device = device
        trained = [each for each in names if each.requires_grad]
        self._parameters = sorted(
            trained, key=names.__getitem__
        )  # layouts have orders of their own
        self.names = [names[each] for each in self._parameters]

    def compute(self, sample: bytes, seed: int, take: Take) -> None:
        """Hand over the gradient of each parameter that the sample's model uses.

        All is as it was afterwards: gradients, buffers, random numbers, and modules' attributes.

        Raises:
            NotReplayedError: they cannot be computed, or not like this.
        """
        try:
            told = torch.load(io.BytesIO(sample), weights_only=True)
            self._compute(told, seed, take)
        except NotReplayedError:
            raise
        except Exception as error:
            raise NotReplayedError(reason_of(error)) from error

    def _compute(self, told: Mapping[str, Any], seed: int, take: Take) -> None:
        model = self._models[told["model"]]
        if any(isinstance(each, nn.SyncBatchNorm) for each in model.modules()):
            raise NotReplayedError("SyncBatchNorm exchanges statistics in the forward pass")
        is_cast, dtype = told["autocast"]
        handles = []
        with (
            torch.inference_mode(mode=False),
            torch.enable_grad(),
            _kept_modules(model),
            _seeded(seed, self._device),
            torch.autocast(
                self._device.type,
                getattr(torch, dtype.removeprefix("torch.")),
                enabled=is_cast,
                cache_enabled=False,
            ),
        ):
            if model.training != told["training"]:
                model.train(told["training"])
            self._set_buffers(model, told)
            args, kwargs = tree_map(self._on_device, told["inputs"])
            outputs = [
                each
                for each in tree_leaves(model.forward(*args, **kwargs))
                if isinstance(each, torch.Tensor) and each.requires_grad
            ]
            if not outputs:
                raise NotReplayedError("the model returns no tensor that has a gradient")
            try:
                for at, each in enumerate(self._parameters):
                    handles.append(each.register_hook(_taker(at, take)))  # type: ignore[no-untyped-call]
                upstream = [self._drawn(each, seed + at) for at, each in enumerate(outputs)]
                torch.autograd.grad(outputs, self._parameters, upstream, allow_unused=True)
            finally:
                for handle in handles:
                    handle.remove()

    def _set_buffers(self, model: nn.Module, told: Mapping[str, Any]) -> None:
        own = dict(model.named_buffers())
        if own.keys() != told["buffers"].keys() | told["hashes"].keys():
            raise NotReplayedError("the model has other buffers than that of another rank")
        for name, number in told["hashes"].items():
            if hash_of(own[name]) != number:
                raise NotReplayedError(f"buffer {name} is not that of another rank")
        with torch.no_grad():
            for name, value in told["buffers"].items():
                if not torch.equal(own[name].to("cpu"), value):
                    own[name].copy_(value)

    def _on_device(self, value: Any) -> Any:  # noqa: ANN401 - what a model is called with
        return value.to(self._device) if isinstance(value, torch.Tensor) else value

    def _drawn(self, output: torch.Tensor, seed: int) -> torch.Tensor:
        """Return a gradient of an output: a product of numbers by row and by column.

        So few are drawn, on the host, where all ranks draw the same.
        """
        draw = torch.Generator().manual_seed(seed)
        columns = output.shape[-1] if output.ndim else 1
        rows = output.numel() // max(1, columns)
        down = torch.randn(rows, 1, generator=draw, device="cpu", dtype=torch.float32)
        across = torch.randn(1, columns, generator=draw, device="cpu", dtype=torch.float32)
        down /= math.sqrt(max(1, output.numel()))
        product = down.to(self._device) * across.to(self._device)
        return product.to(output.dtype).view(output.shape)


def _taker(at: int, take: Take) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a parameter's hook that takes its gradient, and lets go of its memory."""

    def hook(grad: torch.Tensor) -> torch.Tensor:
        take(at, grad.detach())
        return grad.new_zeros(()).expand_as(grad)

    return hook


# ---------------------------------------------------------------- all as it was


@contextlib.contextmanager
def _kept_modules(model: nn.Module) -> Iterator[None]:
    """Have buffers, modes and attributes of all modules be afterwards what they were before.

    But for what lies deeper inside attributes than a list, a dict or a set.
    """
    kept = []
    for module in model.modules():
        buffers = {name: each for name, each in module._buffers.items() if each is not None}
        values = {name: (each, each.clone(), each._version) for name, each in buffers.items()}
        own = {key: value for key, value in vars(module).items() if not _is_torchs(key)}
        inner = {key: _copied(value) for key, value in own.items()}
        kept.append((module, dict(module._buffers), values, own, inner))
    try:
        yield
    finally:
        with torch.no_grad():
            for module, registered, values, own, inner in kept:
                module._buffers.clear()
                module._buffers.update(registered)
                for buffer, value, version in values.values():
                    if buffer._version != version:
                        buffer.copy_(value)
                for key in [each for each in vars(module) if not _is_torchs(each)]:
                    if key not in own:
                        del vars(module)[key]
                vars(module).update(own)
                for key, copied in inner.items():
                    _put_back(own[key], copied)


def _is_torchs(key: str) -> bool:
    return key in {"_parameters", "_buffers", "_modules"}


def _copied(value: object) -> Any:  # noqa: ANN401 - any attribute
    if isinstance(value, torch.Generator):
        return value.get_state()
    return value.copy() if type(value) in _KEPT else None  # type: ignore[attr-defined]


def _put_back(value: Any, copied: Any) -> None:  # noqa: ANN401 - any attribute
    if isinstance(value, torch.Generator):
        value.set_state(copied)
    elif type(value) in _KEPT:
        value.clear()
        (value.extend if type(value) is list else value.update)(copied)


@contextlib.contextmanager
def _seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Have the global generators of torch, Python and NumPy begin with a seed, and go on as before.

    Of torch's those of the host and of this device.
    """
    numpy: Any = sys.modules.get("numpy")
    generators = [torch.default_generator]
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        generators.append(torch.cuda.default_generators[index])
    states = [each.get_state() for each in generators]
    python, of_numpy = random.getstate(), numpy and numpy.random.get_state()
    try:
        for each in generators:
            each.manual_seed(seed)
        random.seed(seed)
        if numpy:
            numpy.random.seed(seed % (1 << 32))
        yield
    finally:
        for each, state in zip(generators, states, strict=True):
            each.set_state(state)
        random.setstate(python)
        if numpy:
            numpy.random.set_state(of_numpy)
