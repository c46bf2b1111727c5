"""Backward passes that are broken off, and scripts that go on as if nothing were."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import backward
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from isthmus.protos.errors import ScriptError
from isthmus.sites.worker.api.site import Site
from isthmus.topology.spec.regime import Regime
from tests.fakes.lone_exchanges import RecordingLink
from tests.fakes.lone_sites import lone_site

pytestmark = pytest.mark.usefixtures("process_group")


class Fails(torch.autograd.Function):
    """Runs out of memory in the backward pass, once armed."""

    armed = False

    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:  # noqa: ANN401 - a context
        return x.clone()

    @staticmethod
    def backward(_: Any, grad: torch.Tensor) -> torch.Tensor:  # noqa: ANN401 - a context
        if Fails.armed:
            Fails.armed = False
            raise torch.OutOfMemoryError("tried to allocate 2.00 GiB")
        return grad


class Net(nn.Module):
    """Three layers, and what fails before the last `place` of them have got their gradients."""

    def __init__(self, place: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self._place = place

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for place, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            x = Fails.apply(x) if place == self._place else x  # type: ignore[no-untyped-call]
        return x


def _sharded(model: Any) -> Any:  # noqa: ANN401 - a Net, then an FSDPModule
    for each in model.layers:
        fully_shard(each)
    return fully_shard(model)


WRAPS: dict[str, Callable[[nn.Module], Any]] = {
    "lone": lambda each: each,
    "ddp": lambda each: DistributedDataParallel(each, bucket_cap_mb=1e-5),
    "ddp in one bucket": DistributedDataParallel,
    "fsdp2": _sharded,
}


class Loop:
    """A lone site that trains, and has a backward pass fail."""

    def __init__(self, wrap: str, regime: str, place: int) -> None:
        torch.manual_seed(0)
        self.site: Site = lone_site(RecordingLink(), regime=Regime(kind=regime))
        self.model = WRAPS[wrap](Net(place))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.site.attach(self.model, self.optimizer)

    def loss(self) -> torch.Tensor:
        loss: torch.Tensor = self.model(torch.ones(2, 4)).square().mean()
        return loss

    def step(self) -> None:
        self.optimizer.zero_grad()
        backward(self.loss())
        self.optimizer.step()

    def fail(self) -> None:
        self.optimizer.zero_grad()
        loss = self.loss()
        Fails.armed = True
        with pytest.raises(torch.OutOfMemoryError):
            backward(loss)


@pytest.mark.parametrize("regime", ["sync", "delayed"])
@pytest.mark.parametrize("wrap", WRAPS)
def test_to_go_on_after_a_pass_that_was_broken_off_amid_a_round_is_refused(
    wrap: str, regime: str
) -> None:
    loop = Loop(wrap, regime, 1)
    loop.step()
    loop.fail()
    text = "broken off while its gradients crossed.*OutOfMemoryError: tried to allocate 2.00 GiB"
    with pytest.raises(ScriptError, match=text) as raised:
        loop.step()
    assert isinstance(raised.value.__cause__, torch.OutOfMemoryError)
    with pytest.raises(ScriptError, match=text):
        loop.optimizer.step()
    loop.site.leave()


@pytest.mark.parametrize("wrap", ["lone", "ddp", "ddp in one bucket"])
def test_a_pass_that_failed_before_any_gradient_was_there_may_be_repeated(wrap: str) -> None:
    loop = Loop(wrap, "sync", 2)
    loop.step()
    loop.fail()
    loop.step()
    loop.site.leave()


@pytest.mark.parametrize("wrap", ["lone", "ddp", "ddp in one bucket"])
def test_a_pass_that_failed_under_no_sync_may_be_repeated(wrap: str) -> None:
    loop = Loop(wrap, "sync", 1)
    loop.step()
    with loop.site.no_sync():
        loop.fail()
    loop.step()
    loop.site.leave()
