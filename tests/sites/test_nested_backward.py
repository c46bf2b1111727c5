"""Reentrant activation checkpointing: a backward pass inside another one. Together, one round."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import backward
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from isthmus.protos.errors import ScriptError
from isthmus.sites.worker.api.site import Site
from isthmus.sites.worker.exchange.sharding import whole_of

pytestmark = pytest.mark.usefixtures("process_group")


class Model(nn.Module):
    """Layers whose activations are computed anew; `ends`: the first and the last one's are not."""

    def __init__(self, *, ends: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))
        self._kept = {0, 3} if ends else set()

    def forward(self, values: Any) -> Any:  # noqa: ANN401 - a Tensor to torch only
        for index, each in enumerate(self.layers):
            if index in self._kept:
                values = each(values)
            else:
                values = checkpoint(each, values, use_reentrant=True)
        return values


def _sharded(model: Model) -> nn.Module:
    for each in model.layers:
        fully_shard(each)
    fully_shard(model)
    return model


def _sharded_as_one(model: Model) -> nn.Module:
    fully_shard(model)
    return model


def _replicated(model: Model) -> nn.Module:
    return DistributedDataParallel(model, bucket_cap_mb=1e-5)


def _bare(model: Model) -> nn.Module:
    return model


def _static(model: Model) -> nn.Module:
    return DistributedDataParallel(model, bucket_cap_mb=1e-5, static_graph=True)


@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize(
    ("wrap", "beside_shards"),
    [
        (_replicated, False),
        (_static, False),
        (_replicated, True),
        (_sharded, False),
        (_sharded_as_one, False),
        (_bare, False),
    ],
)
def test_nested_passes_are_one_round_with_the_norm_of_all(
    site: Site, wrap: Callable[[Model], nn.Module], *, beside_shards: bool, ends: bool
) -> None:
    model = wrap(Model(ends=ends))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    site.attach(model, optimizer, beside_shards=beside_shards)
    assert site._parts.attachment.hook is not None
    for _ in range(3):
        optimizer.zero_grad()
        backward(model(torch.ones(2, 3, requires_grad=True)).square().sum())
        grads = [whole_of(each.grad) for each in model.parameters() if each.grad is not None]
        assert len(grads) == 8
        assert site.grad_norm == pytest.approx(float(nn.utils.get_total_norm(grads)), rel=1e-6)
        assert len(site._parts.attachment.hook._rounds) == 1
        optimizer.step()


def test_an_outer_pass_that_brings_no_gradient_is_refused_by_name(site: Site) -> None:
    """Where nothing wraps the model, nobody knows that the nested pass was the last one."""
    model = Model(ends=False)
    model.spare = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    site.attach(model, optimizer)
    backward(model(torch.ones(2, 3, requires_grad=True)).sum())
    with pytest.raises(ScriptError, match=r"some parameters have none: .*use_reentrant"):
        optimizer.step()


@pytest.mark.parametrize("wrap", [_replicated, _static])
def test_of_several_models_it_is_refused_by_name(
    site: Site, wrap: Callable[[Model], nn.Module]
) -> None:
    models = [wrap(Model(ends=False)), wrap(Model(ends=False))]
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in models]
    site.attach(models, optimizers)
    values = torch.ones(2, 3, requires_grad=True)
    if wrap is _static:  # DDP looks at all gradients at the end of the outer pass
        backward(models[1](models[0](values)).sum())
        assert site._parts.attachment.hook is not None
        assert len(site._parts.attachment.hook._rounds) == 1
    else:
        with pytest.raises(ScriptError, match="use_reentrant=False"):
            backward(models[1](models[0](values)).sum())


@pytest.mark.parametrize("wrap", [_replicated, _sharded_as_one])
def test_several_models_in_one_pass_that_is_not_nested_are_one_round(
    site: Site,
    wrap: Callable[[Any], nn.Module],
) -> None:
    models = [wrap(nn.Sequential(OrderedDict({each: nn.Linear(3, 3)}))) for each in "ab"]
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in models]
    site.attach(models, optimizers)
    for used in (models, models[:1], models):
        for each in optimizers:
            each.zero_grad()
        values: Any = torch.ones(2, 3)
        for model in used:
            values = model(values)
        backward(values.sum())
        assert site._parts.attachment.hook is not None
        assert len(site._parts.attachment.hook.take_rounds()) == 1
        grads = [whole_of(p.grad) for m in used for p in m.parameters() if p.grad is not None]
        assert site.grad_norm == pytest.approx(float(nn.utils.get_total_norm(grads)), rel=1e-6)
