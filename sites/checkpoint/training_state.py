"""The tensors of a model and its optimizers, under names independent of the sharding.

Flat: `model/NAME` for parameters and buffers, `optimizer/NAME/KEY` for tensors of the optimizer's
state, NAME as `model.named_parameters()` has it without wrappers. A sharded tensor represents the
whole, so torch.distributed.checkpoint may load it with another sharding than it was saved with. A
pipeline's rank has the tensors of its stages, under the whole model's names. If several models
share parameter names, as in a GAN, names begin with the model's number.

torch's own get_optimizer_state_dict is not used: if an optimizer has no state yet, it takes a step
to create one, and that would count as a step of the run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from isthmus.protos.errors import ConfigMismatchError
from isthmus.sites.checkpoint.site_group import SiteGroup
from isthmus.sites.worker.exchange.exactness import bare_name
from isthmus.sites.worker.exchange.sharding import check_is_box

Tensors = dict[str, Tensor]
Forms = Mapping[str, tuple[torch.Size, torch.dtype]]
"""Shapes and types of tensors, by name."""
MODEL, _OPTIMIZER, _OUTER = "model/", "optimizer/", "outer/"
_Value = TypeVar("_Value")
_NAMES = {"params", "param_names"}
"""Keys of an optimizer's group that are not settings."""


class OuterState(Protocol):
    """What a regime has of all sites beside model and optimizer, in paths of its own."""

    def tensors(self) -> Tensors:
        """Return references to its tensors, equal at all sites."""

    def to_load(self, stored: Forms) -> Tensors:
        """Return tensors to load `stored` into, of what this rank has a part of."""

    def take(self, tensors: Tensors) -> None:
        """Go on from what was loaded."""


class TrainingState:
    """The models and optimizers of one rank, and its regime's state. Holds references only."""

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        *,
        is_split: bool = False,
        outer: OuterState | None = None,
    ) -> None:
        """Find the optimizers' parameters among the model's.

        Args:
            model: one or several models, or this rank's stages of a pipeline.
            optimizer: one or several optimizers of disjoint parameters.
            is_split: whether ranks of the site have different parameters, as in a pipeline. Then
                this is a collective of the site.
            outer: the regime's state; None: it has none.

        Raises:
            TypeError: a parameter is not the model's, two optimizers share one, a tensor has a
                layout that cannot be saved, or ranks of a pipeline have different groups.
        """
        models = [model] if isinstance(model, nn.Module) else model
        self._models: list[nn.Module] = [
            each.module if isinstance(each, DistributedDataParallel) else each for each in models
        ]
        self._optimizers = (
            [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else [*optimizer]
        )
        self.is_split = is_split
        self._outer = outer
        self._group = SiteGroup() if is_split else None
        self._prefixes = self._told_apart()
        self.refresh()
        self._forms = {
            f"{MODEL}{name}": (each.shape, each.dtype) for name, each in self._parameters()
        }

    def refresh(self) -> None:
        """Find the optimizers' parameters again: groups may have been added.

        With `is_split` this is a collective of the site, also after the script has destroyed its
        process groups.

        Raises:
            TypeError: as in the constructor.
        """
        self._num_groups = [len(each.param_groups) for each in self._optimizers]
        names = {id(each): name for name, each in self._parameters()}
        self._parameter_names = {name for name, _ in self._parameters(remove_duplicate=False)}
        self._named: dict[str, nn.Parameter] = {}
        self._owners: dict[str, torch.optim.Optimizer] = {}
        """Optimizer by parameter name."""
        self._groups: list[list[str]] = []
        for index, (owner, group) in enumerate(self._all_groups()):
            if any(id(each) not in names for each in group["params"]):
                raise TypeError(
                    f"site.checkpoint: group {index} of the optimizer has a parameter that the "
                    "model has not"
                )
            self._groups.append([names[id(each)] for each in group["params"]])
            for name, each in zip(self._groups[-1], group["params"], strict=True):
                if self._owners.setdefault(name, owner) is not owner:
                    raise TypeError(
                        f"site.checkpoint: two optimizers train {name}: its state would be saved "
                        "once"
                    )
                self._named[name] = each
        for name, each in self._parameters():
            check_is_box(name, each)
        self._site_groups, self._site_names = self._groups, self._all_names()
        if self.is_split:
            self._site_groups, self._site_names = self._of_site()

    def _told_apart(self) -> list[str]:
        """Return the name prefix of each model: its number if models share names, else "".

        Stages of a pipeline have the whole model's names, and may share a tensor.
        """
        names = [{name for name, _ in model.named_parameters()} for model in self._models]
        shared = sum(map(len, names)) > len(set().union(*names))
        if self.is_split or not shared:
            return ["" for _ in self._models]
        return [f"{index}." for index, _ in enumerate(self._models)]

    def _parameters(self, *, remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
        for prefix, model in zip(self._prefixes, self._models, strict=True):
            for name, each in model.named_parameters(remove_duplicate=remove_duplicate):
                yield prefix + bare_name(name), each

    def _all_names(self) -> set[str]:
        """Return the names of all parameters and buffers."""
        buffers = {
            prefix + bare_name(name)
            for prefix, model in zip(self._prefixes, self._models, strict=True)
            for name, _ in model.named_buffers(remove_duplicate=False)
        }
        return self._parameter_names | buffers

    def _all_groups(self) -> Iterator[tuple[torch.optim.Optimizer, dict[str, Any]]]:
        for optimizer, num_groups in zip(self._optimizers, self._num_groups, strict=True):
            for group in optimizer.param_groups[:num_groups]:
                yield optimizer, group

    def _of_site(self) -> tuple[list[list[str]], set[str]]:
        """Return parameter names by group, and all tensor names, over all ranks of the site.

        Raises:
            TypeError: a group has different settings at two ranks.
        """
        settings_here = [repr(each) for each in self._group_settings()]
        own = (self._groups, settings_here, self._all_names())
        assert self._group is not None, "the model is split"
        of_ranks = self._group.gather(own)
        for rank, (_, settings, _) in enumerate(of_ranks):
            if settings != of_ranks[0][1]:
                raise TypeError(
                    f"site.checkpoint: the optimizer of rank {rank} has groups {settings}, that of "
                    f"rank 0 {of_ranks[0][1]}: each stage of a pipeline needs as many groups, with the "
                    "same settings, in the same order, if need be empty ones"
                )
        groups_of_site = [
            list(dict.fromkeys(name for groups, *_ in of_ranks for name in groups[index]))
            for index in range(len(self._groups))
        ]
        return groups_of_site, set().union(*(names for *_, names in of_ranks))

    def _group_settings(self) -> list[dict[str, Any]]:
        return [
            {key: value for key, value in group.items() if key not in _NAMES}
            for _, group in self._all_groups()
        ]

    def model_tensors(self) -> Tensors:
        """Return references to parameters and buffers. Call between two steps.

        During a forward or backward pass, sharded parameters may be replaced.
        """
        return {
            f"{MODEL}{prefix}{bare_name(name)}": each
            for prefix, model in zip(self._prefixes, self._models, strict=True)
            for name, each in model.state_dict(keep_vars=True).items()
            if isinstance(each, Tensor)
        }

    def check_forms(self, tensors: Tensors) -> None:
        """Check that parameters still have their original shapes and dtypes.

        Raises:
            TypeError: a script has replaced them.
        """
        for path, each in tensors.items():
            shape, dtype = self._forms.get(path, (each.shape, each.dtype))
            if (each.shape, each.dtype) != (shape, dtype):
                raise TypeError(
                    f"{path.removeprefix(MODEL)} is {[*each.shape]} of {each.dtype} now, and was "
                    f"{[*shape]} of {dtype} in training: call site.leave() before the model "
                    "becomes another one"
                )

    def optimizer_tensors(self) -> Tensors:
        """Return references to the tensors of the optimizers' and the regime's state."""
        outer = {} if self._outer is None else self._outer.tensors()
        return {
            f"{_OPTIMIZER}{name}/{key}": value
            for name, state in self._states()
            for key, value in state.items()
            if isinstance(value, Tensor)
        } | {f"{_OUTER}{path}": value for path, value in outer.items()}

    def tensors(self) -> Tensors:
        """Return all tensors, detached; buffers are copied, as a forward pass may change them."""
        return {
            path: each.detach() if self.is_common(path) else each.detach().clone()
            for path, each in (self.model_tensors() | self.optimizer_tensors()).items()
        }

    def _states(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield (name, optimizer state) of each trained parameter."""
        for name, parameter in self._named.items():
            if state := self._owners[name].state.get(parameter):
                yield name, state

    def other_state(self) -> dict[str, dict[str, Any]]:
        """Return the optimizers' state of this rank's parameters that is no tensor."""
        return {
            name: {key: value for key, value in state.items() if not isinstance(value, Tensor)}
            for name, state in self._states()
        }

    def settings(self, other_state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the groups' settings with their parameters' names, and `other_state`."""
        return {
            "groups": [
                {"names": names, "settings": settings}
                for names, settings in zip(self._site_groups, self._group_settings(), strict=True)
            ],
            "state": {**other_state},
        }

    def to_load(self, stored: Forms) -> Tensors:
        """Return tensors to load `stored` into: the model's own, and new ones for the optimizer.

        For a rank of a pipeline, only those of its stages.

        Raises:
            ConfigMismatchError: the stored model is another one.
        """
        own = {name: each for name, each in self.tensors().items() if name.startswith(MODEL)}
        for name, each in own.items():
            shape = list(stored[name][0]) if name in stored else "none"
            if shape != list(each.shape):
                raise ConfigMismatchError(
                    f"the checkpoint is of another model: {name.removeprefix(MODEL)} has shape "
                    f"{list(each.shape)} here, {shape} there"
                )
        for path, (size, _) in stored.items():
            name = path.removeprefix(MODEL)
            if path.startswith(MODEL) and name not in self._site_names:
                raise ConfigMismatchError(
                    f"the checkpoint is of another model: it has {name} of shape {[*size]}, which "
                    "this one has not: build the model as it was then, with what was added since "
                    "the run began"
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
        if self._outer is not None:
            outer = {path: form for path, form in stored.items() if path.startswith(_OUTER)}
            targets = self._outer.to_load(_without(_OUTER, outer))
            own |= {f"{_OUTER}{path}": each for path, each in targets.items()}
        return own

    def is_common(self, path: str) -> bool:
        """Whether a tensor has the same bits at all sites; buffers may differ."""
        is_model = path.startswith(MODEL)
        return not is_model or path.removeprefix(MODEL) in self._parameter_names

    @torch.no_grad()
    def adopt(self, tensors: Tensors, settings: Mapping[str, Any]) -> None:
        """Install loaded tensors and settings; the optimizer's groups may differ."""
        for prefix, model in zip(self._prefixes, self._models, strict=True):
            values = {
                name: tensors.get(f"{MODEL}{prefix}{bare_name(name)}")
                for name in model.state_dict()
            }
            model.load_state_dict(
                {name: each for name, each in values.items() if each is not None}, strict=False
            )
        for path, value in tensors.items():
            if path.startswith(_OPTIMIZER):
                name, _, key = path.removeprefix(_OPTIMIZER).rpartition("/")
                self._state_of(name)[key] = value
        for name in settings["state"].keys() & self._named.keys():
            self._state_of(name).update(settings["state"][name])
        if self._outer is not None:
            outer = {path: each for path, each in tensors.items() if path.startswith(_OUTER)}
            self._outer.take(_without(_OUTER, outer))
        by_name = {name: each["settings"] for each in settings["groups"] for name in each["names"]}
        for names, (_, group) in zip(self._groups, self._all_groups(), strict=True):
            if names and names[0] in by_name:
                group.update(by_name[names[0]])

    def _state_of(self, name: str) -> dict[str, Any]:
        state: dict[str, Any] = self._owners[name].state[self._named[name]]
        return state

    def _device(self, name: str, key: str) -> torch.device:
        """Return the device of a state tensor with another shape, such as a step count."""
        parameter = self._named[name]
        group = next(
            group
            for names, (_, group) in zip(self._groups, self._all_groups(), strict=True)
            if name in names
        )
        on_host = key == "step" and not (group.get("fused") or group.get("capturable"))
        return torch.device("cpu") if on_host else parameter.device


def _without(prefix: str, paths: Mapping[str, _Value]) -> dict[str, _Value]:
    return {path.removeprefix(prefix): each for path, each in paths.items()}
