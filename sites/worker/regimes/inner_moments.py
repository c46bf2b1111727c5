"""Averages the moments of inner optimizers over the sites, where one state of all is needed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from isthmus.sites.worker.exchange.sharding import local_of
from isthmus.sites.worker.regimes.outer_buckets import Entry, OuterBuckets, written

_COUNT = "step"
"""The key of an optimizer's own count of steps, which is the same at all sites."""


def average_moments(
    buckets: OuterBuckets,
    trained: Mapping[str, nn.Parameter],
    optimizers: Iterable[Optimizer],
    tokens: float,
) -> None:
    """Average what optimizers have of each element of a parameter over the sites.

    First all ranks of all sites tell which moments they have. Where a site has not used a
    parameter, it gets the others' moments of it, and the count of the first site that has any:
    so all have what a run has that goes on from here. Where only sites are left that have just
    caught up, and so none has a token, each counts as much as any other.

    Args:
        buckets: in which they cross.
        trained: the parameters, by name.
        optimizers: of these.
        tokens: this rank's, by which its moments weigh.
    """
    names = {id(each): name for name, each in trained.items()}
    owners = {
        names[id(each)]: (optimizer.state, group)
        for optimizer in optimizers
        for group in optimizer.param_groups
        for each in group["params"]
        if id(each) in names
    }
    kept, has_tokens = buckets.agree_on_entries(
        {
            name: _entries_of(state.get(trained[name], {}), trained[name])
            for name, (state, _) in owners.items()
        },
        tokens,
    )
    weight = tokens if has_tokens else 1.0
    moments: dict[str, dict[str, torch.Tensor]] = {}
    for name, entries in kept.items():
        for key, entry in entries.items():
            of_key = moments.setdefault(key, {}) if entry[1] is None else {}
            if name in owners:
                state, group = owners[name]
                parameter = trained[name]
                _keep(state[parameter], key, entry, parameter, group)
                of_key[name] = state[parameter][key]
    for place, (key, found) in enumerate(sorted(moments.items())):
        with written(found) as flats:
            absent = {
                name: torch.zeros_like(local_of(each)).view(-1)
                for name, each in trained.items()
                if name not in found
            }
            buckets.average_exactly(weight, absent | flats, key, place)


def _entries_of(state: Mapping[str, Any], parameter: torch.Tensor) -> dict[str, Entry]:
    """Return what an optimizer keeps of a parameter: its moments, and what is a number."""
    entries: dict[str, Entry] = {}
    for key, value in state.items():
        if not isinstance(value, torch.Tensor):
            if type(value) in (int, float):
                entries[key] = ("", value)
            continue
        dtype = str(value.dtype).removeprefix("torch.")
        if value.shape == parameter.shape and value.is_floating_point() and key != _COUNT:
            entries[key] = (dtype, None)
        elif value.numel() == 1:
            entries[key] = (dtype, value.item())
    return entries


@torch.no_grad()
def _keep(
    state: dict[str, Any],
    key: str,
    entry: Entry,
    parameter: torch.Tensor,
    group: Mapping[str, Any],
) -> None:
    """Have an optimizer's state of a parameter keep a number, or a moment: zeros, if it is new."""
    dtype, number = entry
    if not dtype:
        state[key] = number
    elif isinstance(state.get(key), torch.Tensor):
        if number is not None:
            state[key].fill_(number)
    elif number is None:
        state[key] = torch.zeros_like(parameter, dtype=getattr(torch, dtype), requires_grad=False)
    else:
        is_on_host = key == _COUNT and not (group.get("fused") or group.get("capturable"))
        device = "cpu" if is_on_host else local_of(parameter).device
        state[key] = torch.tensor(number, dtype=getattr(torch, dtype), device=device)
