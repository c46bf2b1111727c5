"""What lies in DDP's buckets: strides, complex numbers, and dtypes that change later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from torch import nn
from torch.autograd import backward
from torch.nn.parallel import DistributedDataParallel

from isthmus.sites.local.rank_messages import Reduce
from isthmus.sites.worker.api.site import Site
from isthmus.topology.spec.job import Exchange
from tests.fakes.lone_exchanges import RecordingLink
from tests.fakes.lone_sites import lone_site

pytestmark = pytest.mark.usefixtures("process_group")


class Crossing(RecordingLink):
    """Keeps what crosses of each bucket."""

    def __init__(self) -> None:
        super().__init__()
        self.crossed: list[torch.Tensor] = []

    def reduce(self, request: Reduce) -> None:
        region = torch.from_numpy(self._regions[request.region])
        self.crossed.append(region[: request.numel].clone())
        super().reduce(request)


class Model(nn.Module):
    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, factors: torch.Tensor) -> Any:  # noqa: ANN401 - a Tensor to torch only
        products = self.weight * factors
        return (torch.view_as_real(products) if products.is_complex() else products).sum()


def _attached(
    weight: torch.Tensor,
    exchange: Exchange | None = None,
    **options: Any,  # noqa: ANN401 - of DDP
) -> tuple[Site, Crossing, Any]:
    link = Crossing()
    site = lone_site(link, exchange=exchange)
    model = DistributedDataParallel(Model(weight), **options)
    site.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
    link.crossed.clear()
    return site, link, model


SHAPE = (2, 3, 2, 2)
WEIGHTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda zeros: zeros,
    "channels_last": lambda zeros: zeros.contiguous(memory_format=torch.channels_last),
    "transposed": lambda zeros: zeros.transpose(0, 3).contiguous().transpose(0, 3),
    "with gaps": lambda zeros: zeros.repeat(1, 1, 1, 2)[..., ::2],
}


@pytest.mark.parametrize("kind", WEIGHTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.float64])
@pytest.mark.parametrize("codec", ["fp32", "int8"])
@pytest.mark.parametrize("as_view", [False, True])
def test_elements_cross_in_row_major_order_whatever_the_strides(
    kind: str, dtype: torch.dtype, codec: Literal["fp32", "int8"], *, as_view: bool
) -> None:
    weight = WEIGHTS[kind](torch.zeros(SHAPE, dtype=dtype))
    site, link, model = _attached(weight, Exchange(codec=codec), gradient_as_bucket_view=as_view)
    factors = torch.arange(24.0).view(SHAPE)
    for _ in range(2):
        model.zero_grad()
        backward(model(factors.to(dtype)))
        grad = model.module.weight.grad
        values = torch.view_as_real(grad) if dtype.is_complex else grad
        assert torch.equal(values[..., 0] if dtype.is_complex else values, factors)
        assert torch.equal(torch.cat(link.crossed), values.reshape(-1).float())
        link.crossed.clear()
    site.leave()


@pytest.mark.parametrize("change", [nn.Module.double, nn.Module.bfloat16, nn.Module.half])
def test_another_dtype_after_attach_is_refused_by_name(
    change: Callable[[nn.Module], nn.Module],
) -> None:
    site, _, model = _attached(torch.ones(3))
    change(model)
    with pytest.raises(
        TypeError, match=r"parameter weight .* was of torch\.float32 on the host when"
    ):
        model(torch.ones(3))
    with torch.no_grad():
        model(torch.ones_like(model.module.weight))
    site.leave()


@pytest.mark.parametrize("beside_shards", [False, True])
def test_beside_shards_too(*, beside_shards: bool) -> None:
    site = lone_site(Crossing())
    model = DistributedDataParallel(nn.Linear(3, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    site.attach(model, optimizer, beside_shards=beside_shards)
    model.double()
    with pytest.raises(TypeError, match=r"parameter weight is of torch\.float64"):
        model(torch.ones(1, 3).double())
    site.leave()


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_tensors_are_averaged_as_they_lie(dtype: torch.dtype) -> None:
    """Conjugated ones, too, which torch only marks as such."""
    link = Crossing()
    site = lone_site(link)
    values = torch.complex(torch.arange(6.0), -torch.arange(6.0)).to(dtype).view(2, 3)
    tensors = [values.clone(), values.clone().t(), values.clone().conj()]
    site.all_reduce(tensors)
    assert [each.numel() for each in link.crossed] == [36]
    for each, expected in zip(tensors, [values, values.t(), values.conj()], strict=True):
        assert torch.equal(each, expected)
    site.broadcast(tensors)
    site.leave()


def test_what_is_expanded_is_refused() -> None:
    site = lone_site(Crossing())
    with pytest.raises(TypeError, match="expanded"):
        site.all_reduce([torch.ones(3, 1).expand(3, 4)])
    site.all_reduce([torch.ones(3, 1).expand(3, 1), torch.ones(1, 0).expand(4, 0)])
    site.leave()


def test_what_only_others_have_used_is_given_complex_memory() -> None:
    """With find_unused_parameters, no gradient of this rank's own is there to write to."""
    site, _, model = _attached(
        torch.zeros(2, 3, dtype=torch.complex64), find_unused_parameters=True
    )
    backward(model(torch.ones(2, 3, dtype=torch.complex64)))
    assert model.module.weight.grad.dtype == torch.complex64
    site.leave()
