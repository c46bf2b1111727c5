"""Checks the arguments that a script hands over, before anything is sent."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from isthmus.sites.worker.checks.refusals import check_replica, check_wrapper
from isthmus.sites.worker.exchange.sharding import is_sharded


def check_list(caller: str, tensors: object) -> None:
    """Raise TypeError for what is no sequence of tensors."""
    if isinstance(tensors, torch.Tensor | str) or not isinstance(tensors, Sequence):
        raise TypeError(f"{caller}: want a list of tensors, got a {type(tensors).__name__}")
    for index, each in enumerate(tensors):
        if not isinstance(each, torch.Tensor):
            raise TypeError(f"{caller}: tensors[{index}] is a {type(each).__name__}, want a tensor")


def check_tensors(caller: str, tensors: Sequence[torch.Tensor]) -> None:
    """Refuse what cannot be averaged in place.

    Raises:
        TypeError: no list of tensors, or one of them is made of whole numbers, or expanded.
        ValueError: one of them comes twice, or two of them share elements.
    """
    check_list(caller, tensors)
    for index, each in enumerate(tensors):
        problem = why_not_averaged(each)
        if problem is not None:
            raise TypeError(f"{caller}: tensors[{index}] is {problem}")
    if len({id(each) for each in tensors}) != len(tensors):
        raise ValueError(f"{caller}: a tensor comes twice; name each once")
    overlap = _overlapping(tensors)
    if overlap is not None:
        first, second = overlap
        raise ValueError(
            f"{caller}: tensors[{first}] and tensors[{second}] have elements in common: each is "
            "averaged in place"
        )


def _overlapping(tensors: Sequence[torch.Tensor]) -> tuple[int, int] | None:
    """Return two tensors of which one begins before another has ended; those with strides aside."""
    spans = sorted(
        (each.data_ptr(), each.data_ptr() + each.nbytes, index)
        for index, each in enumerate(tensors)
        if each.numel() and each.is_contiguous()
    )
    for (_, end, first), (start, _, second) in itertools.pairwise(spans):
        if start < end:
            return min(first, second), max(first, second)
    return None


def why_not_averaged(tensor: torch.Tensor) -> str | None:
    """Return what is wrong with a tensor and the cure; None: it can be averaged."""
    if tensor.layout != torch.strided:
        return f"of layout {tensor.layout}: call to_dense(), or make gradients with sparse=False"
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return f"of {tensor.dtype}: convert it to a floating-point dtype"
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    if tensor.numel() and any(size > 1 and step == 0 for size, step in pairs):
        return "expanded, so that elements share their memory: call clone()"
    if is_sharded(tensor):
        return "a DTensor: let site.attach(model, optimizer) average a sharded model's gradients"
    return None


def check_not_complex(name: str, parameter: torch.Tensor, regime: str) -> None:
    """Raise TypeError for a complex parameter, of which shards are not averaged."""
    if parameter.is_complex():
        how = "in shards" if regime == "sync" else f"under the regime {regime}"
        raise TypeError(
            f"site.attach: parameter {name} is of {parameter.dtype}, which does not cross {how}: "
            "hold it as real numbers (torch.view_as_real), or "
            f"{only_sync(regime)}let all sites have DistributedDataParallel"
        )


def only_sync(regime: str) -> str:
    """Return what comes before a way out that there is under the regime `sync` alone."""
    return "" if regime == "sync" else "say `regime: sync` and "


def check_training(models: Sequence[nn.Module], optimizers: Sequence[object]) -> None:
    """Raise TypeError for what `site.attach` cannot train."""
    if not models or not optimizers:
        raise TypeError("site.attach: want a model and an optimizer, got an empty list")
    for value in models:
        check_module(value)
    for model in models:
        check_wrapper(model)
    kinds = {_kind(each): each for each in models}
    if len(kinds) > 1:
        raise TypeError(
            "site.attach: want all models wrapped alike, got "
            + " and ".join(f"{type(each).__name__} ({kind})" for kind, each in kinds.items())
        )
    for model in models:
        if isinstance(model, DistributedDataParallel):
            check_replica(model)
        elif _is_fully_sharded(model) and not hasattr(model, "set_custom_reduce_scatter"):
            raise TypeError(
                f"site.attach: fully_shard of torch {torch.__version__} has no "
                "set_custom_reduce_scatter: use torch 2.9 or later"
            )
    for each in optimizers:
        check_optimizer("site.attach", each)


def check_optimizer(caller: str, optimizer: object) -> None:
    """Raise TypeError for what is no optimizer."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"{caller}: want a torch.optim.Optimizer, got {type(optimizer).__name__}")


def check_module(value: object) -> None:
    """Raise TypeError for what is no module."""
    if not isinstance(value, nn.Module):
        raise TypeError(f"site.attach: want a torch.nn.Module, got {type(value).__name__}")


def _kind(model: nn.Module) -> str:
    """Return how a model is wrapped.

    Raises:
        TypeError: a part of it is, and it is not.
    """
    if isinstance(model, DistributedDataParallel):
        return "DistributedDataParallel"
    if _is_fully_sharded(model):
        return "fully_shard"
    for path, part in model.named_modules():
        if isinstance(part, DistributedDataParallel):
            raise TypeError(
                f"site.attach: {path} of the {type(model).__name__} is a "
                "DistributedDataParallel: give that in place of the whole, or let it wrap the whole"
            )
        if _is_fully_sharded(part):
            raise TypeError(
                f"site.attach: fully_shard was called on {path} of the {type(model).__name__}, "
                "and not on the model: call it on that, too"
            )
    return "nothing wraps it"


def _is_fully_sharded(model: object) -> bool:
    """Whether fully_shard was called on it, for which torch.distributed.fsdp must be imported."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return isinstance(model, getattr(fsdp, "FSDPModule", ()))
