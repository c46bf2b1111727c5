"""What a model and its optimizer hold, under names that do not depend on how ranks share it.

Flat: `model/NAME` for parameters and buffers, `optimizer/NAME/KEY` for tensors of the optimizer's
state, NAME as `model.named_parameters()` has it without wrappers. A sharded tensor stands for all
of it, so torch.distributed.checkpoint may cut it in one way when it saves and in another when it
loads. A pipeline's ranks have each the tensors of their stages, under the whole model's names.

torch's own get_optimizer_state_dict is not used: where an optimizer has no state yet, it takes a
step to make one, and each step of this optimizer is one of the run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from protos.errors import ConfigMismatchError
from sites.worker.exactness import bare_name
from sites.worker.sharding import check_is_box

Tensors = dict[str, Tensor]
Forms = Mapping[str, tuple[torch.Size, torch.dtype]]
"""Shapes and types of tensors, by name."""
MODEL, _OPTIMIZER = "model/", "optimizer/"
_NAMES = {"params", "param_names"}
"""What a group of an optimizer has beside its settings."""


class TrainingState:
    """One model and one optimizer. Holds references only."""

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        optimizer: torch.optim.Optimizer,
        *,
        is_split: bool = False,
    ) -> None:
        """Find the optimizer's parameters among the model's.

        Args:
            model: or its parts, where this rank has several of a pipeline.
            optimizer: of its parameters.
            is_split: ranks of the site have unlike parameters, as a pipeline's. Then this is a
                collective of the site.

        Raises:
            TypeError: one of them is not there, is laid out in a way that cannot be saved, or ranks
                of a pipeline have unlike groups of parameters.
        """
        models = [model] if isinstance(model, nn.Module) else model
        self._models: list[nn.Module] = [
            each.module if isinstance(each, DistributedDataParallel) else each for each in models
        ]
        self._optimizer = optimizer
        self.is_split = is_split
        named = [pair for each in self._models for pair in each.named_parameters()]
        names = {id(each): bare_name(name) for name, each in named}
        self._parameter_names = {
            bare_name(name)
            for each in self._models
            for name, _ in each.named_parameters(remove_duplicate=False)
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
        for name, each in named:
            check_is_box(name, each)
        self._site_groups = self._groups_of_site() if is_split else self._groups

    def _groups_of_site(self) -> list[list[str]]:
        """Return the names of each group's parameters at all ranks of the site.

        Raises:
            TypeError: groups of one number have unlike settings.
        """
        own = (self._groups, [repr(each) for each in self._group_settings()])
        told: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(told, own)
        for rank, (_, settings) in enumerate(told):
            if settings != told[0][1]:
                raise TypeError(
                    f"site.checkpoint: the optimizer of rank {rank} has groups {settings}, that of "
                    f"rank 0 {told[0][1]}: each stage of a pipeline needs as many groups, with the "
                    "same settings, in the same order, if need be empty ones"
                )
        return [
            list(dict.fromkeys(name for groups, _ in told for name in groups[index]))
            for index in range(len(self._groups))
        ]

    def _group_settings(self) -> list[dict[str, Any]]:
        return [
            {key: value for key, value in group.items() if key not in _NAMES}
            for group in self._optimizer.param_groups
        ]

    def tensors(self) -> Tensors:
        """Return all tensors. Parameters and the optimizer's are the very ones; buffers copies.

        Only the optimizer's step changes the former; a forward pass may change the latter.
        """
        found: Tensors = {}
        for model in self._models:
            for wrapped_name, each in model.state_dict().items():
                name = bare_name(wrapped_name)
                if isinstance(each, Tensor):
                    is_parameter = name in self._parameter_names
                    found[f"{MODEL}{name}"] = each if is_parameter else each.clone()
        for name, parameter in self._named.items():
            for key, value in self._optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    found[f"{_OPTIMIZER}{name}/{key}"] = value
        return found

    def other_state(self) -> dict[str, dict[str, Any]]:
        """Return what the optimizer's state has of this rank's parameters that is no tensor."""
        return {
            name: {key: value for key, value in state.items() if not isinstance(value, Tensor)}
            for name, parameter in self._named.items()
            if (state := self._optimizer.state.get(parameter))
        }

    def settings(self, other_state: Mapping[str, Any]) -> dict[str, Any]:
        """Return what is no tensor: each group's settings by its parameters, and other state."""
        return {
            "groups": [
                {"names": names, "settings": settings}
                for names, settings in zip(self._site_groups, self._group_settings(), strict=True)
            ],
            "state": {**other_state},
        }

    def to_load(self, stored: Forms) -> Tensors:
        """Return tensors to read what is stored into: the model's own, new ones for the optimizer.

        Of a pipeline's rank, those of its stages.

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
        elsewhere = {name for names in self._site_groups for name in names} - self._named.keys()
        for path, (size, dtype) in stored.items():
            name, _, key = path.removeprefix(_OPTIMIZER).rpartition("/")
            if not path.startswith(_OPTIMIZER) or name in elsewhere:
                continue
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
        for model in self._models:
            found = {name: tensors.get(f"{MODEL}{bare_name(name)}") for name in model.state_dict()}
            model.load_state_dict(
                {name: each for name, each in found.items() if each is not None}, strict=False
            )
        for path, value in tensors.items():
            if path.startswith(_OPTIMIZER):
                name, _, key = path.removeprefix(_OPTIMIZER).rpartition("/")
                self._optimizer.state[self._named[name]][key] = value
        for name in settings["state"].keys() & self._named.keys():
            self._optimizer.state[self._named[name]].update(settings["state"][name])
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
