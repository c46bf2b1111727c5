"""Models that nothing wraps: how they are attached, and which are refused by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import backward
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from isthmus.sites.worker.api.site import Site
from isthmus.sites.worker.exchange.holdings import Dealt, Holding
from isthmus.sites.worker.exchange.sharding import whole_of
from isthmus.sites.worker.layouts.canonical import Entry, Held, SiteTensors
from isthmus.sites.worker.layouts.lone_hook import as_laid_out

pytestmark = pytest.mark.usefixtures("process_group")


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def _shard(model: nn.Module) -> nn.Module:
    fully_shard(model[0])  # type: ignore[index]
    fully_shard(model)
    return model


@pytest.mark.parametrize("wrap", [lambda each: each, DistributedDataParallel, _shard])
@pytest.mark.parametrize("beside_shards", [False, True])
def test_under_no_sync_gradients_add_up_and_nothing_crosses(
    site: Site, wrap: Callable[[nn.Module], nn.Module], *, beside_shards: bool
) -> None:
    alone, model = _net(), wrap(_net())
    optimizer = _sgd(model)
    with pytest.raises(RuntimeError, match=r"call site.attach first"):
        site.no_sync()
    site.attach(model, optimizer, beside_shards=beside_shards)
    assert site._parts.attachment.hook is not None
    for factor in (1.0, 2.0):
        optimizer.zero_grad()
        with site.no_sync():
            backward(model(torch.ones(2, 3)).sum() * factor)
        assert not site._parts.attachment.hook.take_rounds()
        backward(model(2 * torch.ones(2, 3)).sum())
        assert len(site._parts.attachment.hook.take_rounds()) == 1
        alone.zero_grad()
        backward(alone(torch.ones(2, 3)).sum() * factor)
        backward(alone(2 * torch.ones(2, 3)).sum())
        for each, own in zip(model.parameters(), alone.parameters(), strict=True):
            assert each.grad is not None
            torch.testing.assert_close(whole_of(each.grad), own.grad)


def test_with_average_gradients_nothing_crosses_in_backward_anyway(site: Site) -> None:
    model = _net()
    site.average_gradients(_sgd(model))
    with site.no_sync():
        backward(model(torch.ones(2, 3)).sum())


def test_a_gradient_that_is_not_in_row_major_order_is_brought_there() -> None:
    parameter = nn.Parameter(torch.zeros(2, 3))
    grad = torch.arange(6.0).view(3, 2).t()
    found = as_laid_out(grad, parameter)
    assert found.is_contiguous()
    assert torch.equal(found, grad)


class DeepSpeedEngine(nn.Module):
    """Stands for DeepSpeed's, which is known by its name."""


class MegatronDistributedDataParallel(nn.Module):
    """Stands for a wrapper of the same name as torch's."""


MegatronDistributedDataParallel.__name__ = "DistributedDataParallel"


class Fsdp1(nn.Module):
    """Stands for FSDP1, which needs an accelerator to be made."""


Fsdp1.__name__ = "FullyShardedDataParallel"


def _transposed() -> nn.Module:
    model = nn.Linear(3, 4)
    model.weight = nn.Parameter(torch.zeros(3, 4).t())
    return model


def _mixed() -> nn.Module:
    from torch.nn.parallel.distributed import _MixedPrecision

    return DistributedDataParallel(_net(), mixed_precision=_MixedPrecision(torch.bfloat16))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: nn.DataParallel(_net()), "got a DataParallel, which computes on several devices"),
        (DeepSpeedEngine, "got a DeepSpeedEngine, which reduces gradients and steps by itself"),
        (MegatronDistributedDataParallel, "a DistributedDataParallel, which is that of tests"),
        (lambda: nn.Sequential(Fsdp1()), "0 is a FullyShardedDataParallel, which is FSDP1"),
        (lambda: nn.Sequential(DistributedDataParallel(_net())), "0 of the Sequential is a Dist"),
        (lambda: nn.Sequential(_shard(_net())), "fully_shard was called on 0 of the Sequential"),
        (lambda: "net", "want a torch.nn.Module, got str"),
        (_transposed, "weight is not contiguous, as it has to be where nothing wraps"),
        (lambda: nn.Linear(2, 2, dtype=torch.complex64), "weight is of torch.complex64"),
        (_mixed, "DistributedDataParallel has mixed_precision="),
    ],
)
def test_a_model_that_cannot_be_attached_is_refused(
    site: Site, make: Callable[[], Any], said: str
) -> None:
    with pytest.raises(TypeError, match=said):
        site.attach(make(), _sgd(_net()))


def test_models_that_are_wrapped_in_unlike_ways_are_refused(site: Site) -> None:
    models = [_net(), DistributedDataParallel(_net())]
    with pytest.raises(TypeError, match=r"want all models wrapped alike, got Sequential \(nothing"):
        site.attach(models, [_sgd(each) for each in models])


def test_ranks_with_data_of_their_own_need_a_wrapper(site: Site) -> None:
    model = _net()
    mesh = init_device_mesh("cpu", (1,))
    mesh.size = lambda: 2  # type: ignore[method-assign,assignment,misc]
    with pytest.raises(TypeError, match="data_mesh: nothing wraps the model"):
        site.attach(model, _sgd(model), data_mesh=mesh)


def _held(name: str, rank: int, *mesh: int, content: int = 0) -> Held:
    """What a rank without a wrapper tells of a tensor that a mesh deals out."""
    axes = [Dealt(0, len(mesh), mesh.index(rank))] if mesh else []
    entry = Entry(name, (4, 2), "torch.float32", 4, "trained", exact=False)
    return Held(entry, Holding.of((4, 2), axes), mesh or (rank,), content, is_lone=True)


def test_ranks_of_one_replica_may_have_copies() -> None:
    ranks = [[_held("up", rank, 0, 1), _held("norm", rank)] for rank in (0, 1)]
    stages = [
        [_held(f"{rank // 2}.up", rank, rank // 2 * 2, rank // 2 * 2 + 1)] for rank in range(4)
    ]
    assert SiteTensors.of(ranks).holders["norm"].ranks == (0, 1)
    assert SiteTensors.of(stages).is_split


def test_copies_of_one_replica_begin_with_one_value() -> None:
    ranks = [[_held("up", rank, 0, 1), _held("norm", rank, content=rank)] for rank in (0, 1)]
    with pytest.raises(TypeError, match="ranks 0 and 1 hold the same part of norm, and not the"):
        SiteTensors.of(ranks)


def test_replicas_that_nothing_averages_are_refused() -> None:
    plain = [[_held("up", rank)] for rank in (0, 1)]
    parallel = [[_held("up", rank, rank // 2 * 2, rank // 2 * 2 + 1)] for rank in range(4)]
    for ranks, second in ((plain, 1), (parallel, 2)):
        with pytest.raises(TypeError, match=f"ranks 0 and {second} both have .* nothing averages"):
            SiteTensors.of(ranks)
    wrapped = [[replace(each, is_lone=False) for each in held] for held in plain]
    assert SiteTensors.of(wrapped).holders["up"].ranks == (0, 1)
