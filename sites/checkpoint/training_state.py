"""What a model and its optimizer hold, under names that do not depend on how ranks share it.

Flat: `model/NAME` for parameters and buffers, `optimizer/NAME/KEY` for tensors of the optimizer's
state, NAME as `model.named_parameters()` has it. A sharded tensor stands for all of it, so
torch.distributed.checkpoint may cut it in one way when it saves and in another when it loads.

torch's own get_optimizer_state_dict is not used: where an optimizer has no state yet, it takes a
step to make one, and each step of this optimizer is one of the run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from protos.errors import ConfigMismatchError

Tensors = dict[str, Tensor]
Forms = Mapping[str, tuple[torch.Size, torch.dtype]]
"""Shapes and types of tensors, by name."""
MODEL, _OPTIMIZER = "model/", "optimizer/"


class TrainingState:
    """One model and one optimizer. Holds references only."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Find the optimizer's parameters among the model's.

        Raises:
            TypeError: one of them is not there.
        """
        self._model: nn.Module = (
            model.module if isinstance(model, DistributedDataParallel) else model
        )
        self._optimizer = optimizer
        names = {id(each): name for name, each in self._model.named_parameters()}
        self._parameter_names = {
            name for name, _ in self._model.named_parameters(remove_duplicate=False)
        }
        self._named: dict[str, nn.Parameter] = {}
        self._groups: list[list[str]] = []
        for index, group in enumerate(optimizer.param_groups):
            if any(id(each) not in names for each in group["params"]):
                raise TypeError(
                    f"site.checkpoint: group {index} of the optimizer has a parameter that the "
                    "model has not"
                )
            self._groups.append([names[id(each)] for each in group["params"]])
            self._named |= {names[id(each)]: each for each in group["params"]}

    def tensors(self) -> Tensors:
        """Return all tensors. Parameters and the optimizer's are the very ones; buffers copies.

        Only the optimizer's step changes the former; a forward pass may change the latter.
        """
        found = {
            f"{MODEL}{name}": each if name in self._parameter_names else each.clone()
            for name, each in self._model.state_dict().items()
            if isinstance(each, Tensor)
        }
        for name, parameter in self._named.items():
            for key, value in self._optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    found[f"{_OPTIMIZER}{name}/{key}"] = value
        return found

    def settings(self) -> dict[str, Any]:
        """Return what is no tensor: each group's settings by its parameters, and other state."""
        return {
            "groups": [
                {
                    "names": names,
                    "settings": {key: value for key, value in group.items() if key != "params"},
                }
                for names, group in zip(self._groups, self._optimizer.param_groups, strict=True)
            ],
            "state": {
                name: {key: value for key, value in state.items() if not isinstance(value, Tensor)}
                for name, parameter in self._named.items()
                if (state := self._optimizer.state.get(parameter))
            },
        }

    def to_load(self, stored: Forms) -> Tensors:
        """Return tensors to read what is stored into: the model's own, new ones for the optimizer.

        Raises:
            ConfigMismatchError: the model is another one.
        """
        own = {name: each for name, each in self.tensors().items() if name.startswith(MODEL)}
        for name, each in own.items():
            shape = list(stored[name][0]) if name in stored else "none"
            if shape != list(each.shape):
                raise ConfigMismatchError(
                    f"the checkpoint is of another model: {name.removeprefix(MODEL)} has shape "
                    f"{list(each.shape)} here, {shape} there"
                )
        for path, (size, dtype) in stored.items():
            if not path.startswith(_OPTIMIZER):
                continue
            name, _, key = path.removeprefix(_OPTIMIZER).rpartition("/")
            if (parameter := self._named.get(name)) is None:
                raise ConfigMismatchError(
                    f"the checkpoint is of another optimizer: it has {key} of {name}"
                )
            if size == parameter.shape:
                own[path] = torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
            else:
                own[path] = torch.zeros(size, dtype=dtype, device=self._device(name, key))
        return own

    def is_common(self, path: str) -> bool:
        """Whether a tensor has the same bits at all sites: a buffer need not."""
        return path.startswith(_OPTIMIZER) or path.removeprefix(MODEL) in self._parameter_names

    @torch.no_grad()
    def adopt(self, tensors: Tensors, settings: Mapping[str, Any]) -> None:
        """Put what was read in place; the optimizer's groups may be cut in another way."""
        self._model.load_state_dict(
            {
                name.removeprefix(MODEL): each
                for name, each in tensors.items()
                if name.startswith(MODEL)
            },
            strict=False,
        )
        for path, value in tensors.items():
            if path.startswith(_OPTIMIZER):
                name, _, key = path.removeprefix(_OPTIMIZER).rpartition("/")
                self._optimizer.state[self._named[name]][key] = value
        for name, state in settings["state"].items():
            self._optimizer.state[self._named[name]].update(state)
        by_name = {name: each["settings"] for each in settings["groups"] for name in each["names"]}
        for names, group in zip(self._groups, self._optimizer.param_groups, strict=True):
            if names and names[0] in by_name:
                group.update(by_name[names[0]])

    def _device(self, name: str, key: str) -> torch.device:
        """Return where a tensor belongs that has not its parameter's shape, as a count of steps."""
        parameter = self._named[name]
        group = next(
            group
            for names, group in zip(self._groups, self._optimizer.param_groups, strict=True)
            if name in names
        )
        on_host = key == "step" and not (group.get("fused") or group.get("capturable"))
        return torch.device("cpu") if on_host else parameter.device
