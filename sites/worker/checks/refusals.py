"""Wrappers of models, and what a DistributedDataParallel cannot have: each is refused by name.

Checks that cost nothing: they read what torch holds.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from isthmus.protos.errors import ScriptError
from isthmus.sites.worker.checks.module_hooks import ModuleHook
from isthmus.sites.worker.checks.torch_calls import in_backward

_INSTEAD = "let torch.nn.parallel.DistributedDataParallel or fully_shard wrap the model"
_WRAPPERS = {
    "DataParallel": "computes on several devices in one process: start one a device, and "
    + _INSTEAD,
    "FullyShardedDataParallel": "is FSDP1, which reduces gradients past any hook: call "
    "torch.distributed.fsdp.fully_shard (FSDP2) on the model",
    "DeepSpeedEngine": "reduces gradients and steps by itself: " + _INSTEAD,
    "PipelineEngine": "reduces gradients and steps by itself: see Pipelines in docs/integration.md",
}
"""Wrappers of models that cannot be attached, by the names of their classes."""
_watching: WeakKeyDictionary[Optimizer, Callable[[], None]] = WeakKeyDictionary()
"""What is called where a `GradScaler` scales, by optimizer."""
_counting: WeakKeyDictionary[Optimizer, tuple[Callable[[], int], Callable[[], None]]] = (
    WeakKeyDictionary()
)
"""How many steps an optimizer has taken, and what counts one that a `GradScaler` leaves out."""


def check_wrapper(model: nn.Module) -> None:
    """Refuse a model that something wraps, all of it or a part, that reduces gradients elsewhere.

    Raises:
        TypeError: and what to do.
    """
    for path, module in model.named_modules():
        for kind in type(module).__mro__:
            why = _WRAPPERS.get(kind.__name__)
            if kind.__name__ == "DistributedDataParallel" and kind is not DistributedDataParallel:
                why = f"is that of {kind.__module__}, and not torch's: {_INSTEAD}"
            if why is not None:
                where = f"{path} is a" if path else "got a"
                raise TypeError(f"site.attach: {where} {kind.__name__}, which {why}")


def check_replica(model: DistributedDataParallel) -> None:
    """Refuse a model whose gradients no hook can take; watch the first pass of a static graph.

    Raises:
        TypeError: and what to do.
    """
    if getattr(model, "_use_python_reducer", False):
        raise TypeError(
            'site.attach: torch._dynamo.config.optimize_ddp is "python_reducer", which '
            "reduces gradients past DistributedDataParallel's hook: set it to True before "
            "DistributedDataParallel wraps the model"
        )
    if model.mixed_precision is not None:
        raise TypeError(
            "site.attach: DistributedDataParallel has mixed_precision=, which computes "
            "gradients of copies, in another dtype than the parameters': leave it out, and "
            "compute under torch.autocast"
        )
    for path, module in model.module.named_modules():
        if not isinstance(module, nn.Embedding | nn.EmbeddingBag):
            continue
        if module.sparse and module.weight.requires_grad:
            raise TypeError(
                f"site.attach: {path or 'the model'} is an {type(module).__name__} of sparse "
                "gradients, which do not cross: make it with sparse=False"
            )
    if model.static_graph:
        model.register_forward_hook(ModuleHook(FirstPassCheck(model)))


def refuse_scaler(optimizers: Iterable[Optimizer], why: str) -> Callable[[], None]:
    """Refuse a `GradScaler` that scales for these, when it unscales or steps.

    torch calls no hook where it leaves the step out, or finds no gradient. Returns what ends that.
    """

    def refuse() -> None:
        raise ScriptError(why)

    return watch_scaler(optimizers, refuse)


def watch_scaler(optimizers: Iterable[Optimizer], note: Callable[[], None]) -> Callable[[], None]:
    """Call `note` where a `GradScaler` that scales for these unscales or steps.

    Returns what ends that.
    """
    _watch_scalers()
    watched = [*optimizers]
    _watching.update(dict.fromkeys(watched, note))

    def end() -> None:
        for optimizer in watched:
            _watching.pop(optimizer, None)

    return end


def count_left_out(
    optimizer: Optimizer, num_steps: Callable[[], int], count: Callable[[], None]
) -> Callable[[], None]:
    """Have steps counted that a `GradScaler` leaves out, for a gradient was not finite.

    Where `num_steps` is what it was before, `count` is called. Returns what ends that.
    """
    _watch_scalers()
    _counting[optimizer] = num_steps, count

    def end() -> None:
        _counting.pop(optimizer, None)

    return end


def _watch_scalers() -> None:
    if not hasattr(GradScaler.step, "__wrapped__"):
        for name in ("unscale_", "step"):
            setattr(GradScaler, name, _checked(getattr(GradScaler, name)))


def _checked(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(scaler: GradScaler, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        note = _watching.get(optimizer)
        if note is not None and scaler.is_enabled():
            note()
        counting = _counting.get(optimizer) if method.__name__ == "step" else None
        before = counting[0]() if counting is not None else 0
        result = method(scaler, optimizer, *args, **kwargs)
        if counting is not None and counting[0]() == before:
            counting[1]()
        return result

    return call


def scaler_refusal(regime: str) -> str:
    """Return why a regime other than sync refuses a `GradScaler`."""
    return (
        f"regime {regime}: a GradScaler leaves out steps at one site and not at another, and divides "
        "by its present scale what may have an older one: train in bf16 without a scaler, or say "
        "`regime: sync`"
    )


SCALER_ON_AVERAGES = (
    "a GradScaler decides by this rank's own gradients whether optimizer.step() runs, within which "
    "site.average_gradients averages them: an infinity at one rank would have the others wait. "
    "Leave average_gradients out, and average the gradients by site.all_reduce before "
    "scaler.step(optimizer); or use site.attach"
)
"""Why `site.average_gradients` refuses a `GradScaler`."""


def check_in_backward() -> None:
    """Refuse a bucket that no backward pass brings: of torch's `Join`, for a rank without data.

    Raises:
        ScriptError: and what to do.
    """
    if not in_backward():
        raise ScriptError(
            "torch's Join goes on for a rank whose data has ended, while others of its site have "
            "more: it does so for one site only. Leave Join out, and give all ranks as many "
            "batches (site.sampler)"
        )


class FirstPassCheck:
    """Refuses a first backward pass under `no_sync` of a model with `static_graph=True`.

    In its first pass DDP notes the graph, and fails by an assertion where it is not to reduce. It
    may be any later one. A forward hook.
    """

    def __init__(self, model: DistributedDataParallel) -> None:
        """Check nothing yet."""
        self._model = model

    def __call__(self, _: object, __: object, outputs: object) -> None:
        """Let a backward pass that begins at these outputs raise the error."""
        model = self._model
        if torch.compiler.is_compiling():
            return
        if model._static_graph_delay_allreduce_enqueued or model.require_backward_grad_sync:
            return
        for each in tree_leaves(outputs):
            if isinstance(each, torch.Tensor) and each.requires_grad:
                each.register_hook(self._refuse)  # type: ignore[no-untyped-call]

    def _refuse(self, _: torch.Tensor) -> None:
        raise ScriptError(
            "DistributedDataParallel has static_graph=True, and its first backward pass is under "
            "no_sync: torch fails there. Let the first pass synchronise, or leave static_graph out"
        )
