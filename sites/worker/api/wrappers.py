"""Finds the model and the optimizer inside what other libraries wrap around them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn
from torch.optim import Optimizer

_INNER_MODULES = ("_orig_mod", "_forward_module")
"""Where torch.compile and Lightning Fabric keep the module that they wrap."""
_WRAPPERS = ("OptimizedModule", "_FabricModule")


def unwrapped_model(model: nn.Module) -> nn.Module:
    """Return the module that torch.compile or Lightning Fabric stands in front of.

    Accelerate and the Hugging Face Trainer put no module of their own around it.
    """
    while type(model).__name__ in _WRAPPERS:
        inner = [model._modules[name] for name in _INNER_MODULES if name in model._modules]
        if not inner or inner[0] is None:
            break
        model = inner[0]
    return model


def unwrapped_optimizer(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer of torch whose `step` runs when that of Accelerate or Fabric does."""
    inner = getattr(optimizer, "optimizer", None)
    return optimizer if inner is None else unwrapped_optimizer(inner)


def unwrapped_models(models: nn.Module | Sequence[nn.Module]) -> list[nn.Module]:
    """Return one model, or each of several, as `unwrapped_model` does."""
    if isinstance(models, nn.Module) or not isinstance(models, Iterable):
        return [unwrapped_model(models)]
    return [unwrapped_model(each) for each in models]


def unwrapped_optimizers(optimizers: Optimizer | Sequence[Optimizer]) -> list[Optimizer]:
    """Return one optimizer, or each of several, as `unwrapped_optimizer` does."""
    if not isinstance(optimizers, Iterable):
        return [unwrapped_optimizer(optimizers)]
    return [unwrapped_optimizer(each) for each in optimizers]
