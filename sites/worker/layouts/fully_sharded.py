"""What fully_shard made of a model: which parameters it reduces together, and over which ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from isthmus.sites.worker.exchange.collectives import Ranks
from isthmus.sites.worker.exchange.exactness import bare_name


@dataclass(frozen=True, slots=True)
class ShardGroup:
    """Parameters whose gradients fully_shard reduces in one go."""

    module: FSDPModule | None
    """None: nothing reduces them, for this rank's gradients are the site's."""
    ranks: Ranks
    """The mean is made over these."""
    num_shards: int
    num_replicas: int
    is_alone: bool
    """The module has no other group, so that a reduce-scatter of ours may take its place."""
    record: Any
    """torch's own."""

    @property
    def divisor(self) -> float:
        """By what fully_shard divides the sum of gradients over these ranks, as it is now."""
        told: float | None = getattr(self.record, "gradient_divide_factor", None)
        return float(len(self.ranks)) if told is None else told

    @property
    def is_weighed(self) -> bool:
        """Whether ranks can be weighed by their tokens: there is a reduce-scatter to replace."""
        return self.is_alone and self.num_shards > 1


def groups_of(models: Sequence[nn.Module]) -> dict[int, ShardGroup]:
    """Return the group of each parameter that fully_shard manages, by the parameter's id."""
    found: dict[int, ShardGroup] = {}
    for module in sharded_modules(models):
        groups = _param_groups(module)
        for each in groups:
            info = each.mesh_info
            group = ShardGroup(
                module,
                tuple(info.mesh.mesh.flatten().tolist()),
                getattr(info, "shard_mesh_size", 1),
                getattr(info, "replicate_mesh_size", 1),
                len(groups) == 1,
                each,
            )
            found |= {id(param.sharded_param): group for param in each.fsdp_params}
    return found


def lone_groups_of(models: Sequence[nn.Module], rank: int) -> dict[int, ShardGroup]:
    """Return groups for parameters whose gradients nothing reduces, as `groups_of` does."""
    alone = ShardGroup(None, (rank,), 1, 1, is_alone=False, record=None)
    return {id(each): alone for model in models for each in model.parameters()}


def is_lone(models: Sequence[nn.Module]) -> bool:
    """Whether fully_shard was called on no part of these."""
    return next(sharded_modules(models), None) is None


def tell_reduced(
    models: Sequence[nn.Module], told: Callable[[Set[int]], None]
) -> Callable[[], None]:
    """Have `told` be called whenever fully_shard has reduced all gradients that a pass has.

    It is given the ids of the parameters, those without a gradient, too. Returns what ends that.
    """
    states = states_of(models)
    for state in states:
        state._root_post_backward_final_callback = functools.partial(
            _end_and_tell, state, state._root_post_backward_final_callback, told
        )

    def end() -> None:
        for state in states:
            del state._root_post_backward_final_callback  # the class has torch's own

    return end


def _end_and_tell(state: Any, end: Callable[[], None], told: Callable[[Set[int]], None]) -> None:  # noqa: ANN401 - torch's own
    end()
    if state._state_ctx.is_last_backward:
        told(
            {
                id(param.sharded_param)
                for each in state._state_ctx.all_states
                for group in _groups_of_state(each)
                for param in group.fsdp_params
            }
        )


def states_of(models: Sequence[nn.Module]) -> list[Any]:
    """Return torch's own states of all modules that fully_shard was called on."""
    return [each._get_fsdp_state() for each in sharded_modules(models)]


def awaits_callback(states: Sequence[Any]) -> bool:
    """Whether a backward pass is under way whose end fully_shard has a callback for."""
    return any(each._state_ctx.post_backward_final_callback_queued for each in states)


def named_tensors(models: Sequence[nn.Module]) -> dict[str, torch.Tensor]:
    """Return parameters, in the order in which gradients are expected, and then buffers.

    Backward reduces the modules that fully_shard was called on from the last to the first, each
    after those inside it; where it was called on none, modules as they are. Of a buffer that
    several parts of a pipeline have, as tables of positions are, the last part's counts.

    Raises:
        TypeError: two parts of a model have a parameter of the same name.
    """
    parameters: dict[str, torch.Tensor] = {}
    buffers: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    named: list[tuple[str, torch.Tensor]]
    are_lone = is_lone(models)
    for model in reversed(models):
        blocks: dict[str, list[tuple[str, torch.Tensor]]] = {}
        owner: dict[str, str] = {}
        for path, module in model.named_modules():
            is_root = are_lone or isinstance(module, FSDPModule) or not path
            owner[path] = path if is_root else owner[path.rpartition(".")[0]]
            blocks.setdefault(owner[path], [])
        for name, each in model.named_parameters():
            blocks[owner[name.rpartition(".")[0]]].append((name, each))
        named = [pair for path in reversed(blocks) for pair in blocks[path]]
        for name, parameter in named:
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            if bare_name(name) in parameters:
                raise TypeError(
                    f"site.attach: two parts of the model have a parameter {name}: give them "
                    "the names that they have in the whole model"
                )
            parameters[bare_name(name)] = parameter
        for name, buffer in model.named_buffers():
            buffers.setdefault(bare_name(name), buffer)
    return {**parameters, **buffers}


def parameters_now(models: Sequence[nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters that models have now, as optimizers have them, by name.

    A pass may have left whole ones in the place of shards.
    """
    shards = {
        id(whole): param.sharded_param
        for module in sharded_modules(models)
        for group in _param_groups(module)
        for param in group.fsdp_params
        if (whole := getattr(param, "_unsharded_param", None)) is not None
    }
    for name, each in named_tensors(models).items():
        if isinstance(each, nn.Parameter):
            yield name, shards.get(id(each), each)


def twin_buffers(models: Sequence[nn.Module]) -> list[tuple[str, torch.Tensor]]:
    """Return the buffers that `named_tensors` leaves out: other parts have them, too."""
    taken = named_tensors(models)
    return [
        (bare_name(name), each)
        for model in models
        for name, each in model.named_buffers()
        if taken[bare_name(name)] is not each
    ]


def sharded_modules(models: Sequence[nn.Module]) -> Iterator[FSDPModule]:
    """Return all parts of these that fully_shard was called on."""
    for model in models:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                yield module


def _param_groups(module: FSDPModule) -> list[Any]:
    """Return torch's own records of a module."""
    return _groups_of_state(module._get_fsdp_state())


def _groups_of_state(state: Any) -> list[Any]:  # noqa: ANN401 - torch's own
    """Return a state's groups; before torch 2.13 it has one at most."""
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [state._fsdp_param_group]
    return [each for each in groups if each is not None]
