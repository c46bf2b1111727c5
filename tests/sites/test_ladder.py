"""A run that goes over to another regime and back, as one does it that does the same by hand."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import backward
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from isthmus.protos import metrics
from isthmus.protos.errors import ScriptError
from isthmus.sites.worker.api.site import Site
from isthmus.sites.worker.exchange.sharding import whole_of
from isthmus.sites.worker.regimes.look_ahead import look_ahead, settings_of
from isthmus.topology.spec.regime import OuterOptimizer, Rung, regime_of
from tests.fakes.lone_exchanges import RecordingLink
from tests.fakes.lone_sites import lone_site

pytestmark = pytest.mark.usefixtures("process_group")

EVERY = 4
OUTER = OuterOptimizer(lr=0.7, momentum=0.9, ramp_steps=8)
RUNGS = (regime_of("delayed"), regime_of("diloco", sync_every=EVERY, outer=OUTER))
SYNC, DELAYED, DILOCO = "sync", "delayed", "diloco"
Wrap = Callable[[Any], Any]
WRAPS: Mapping[str, Wrap] = {
    "lone": lambda model: model,
    "ddp": DistributedDataParallel,
    "fsdp2": fully_shard,
}


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def loss_of(model: Any, step: int) -> torch.Tensor:  # noqa: ANN401 - wrapped or not
    inputs = torch.randn(5, 3, generator=torch.Generator().manual_seed(step))
    loss: torch.Tensor = model(inputs).square().mean()
    return loss


def values(model: nn.Module) -> torch.Tensor:
    return torch.cat([whole_of(each).detach().reshape(-1) for each in model.parameters()])


class ByHand:
    """One process that applies gradients as each regime does, by plain torch."""

    def __init__(self) -> None:
        self.model = net()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.under_way: list[torch.Tensor] | None = None
        """The gradient of the step before, which is still to be applied."""

    def gradient_at_guess(self, step: int) -> list[torch.Tensor]:
        """Return the gradient where the optimizer would arrive by the one under way."""
        twin = copy.deepcopy(self.model)
        for at, (value, guess) in enumerate(
            zip(self.model.parameters(), twin.parameters(), strict=True)
        ):
            if self.under_way is not None:
                *_, group = next(iter(settings_of([self.optimizer])))
                state = self.optimizer.state.get(value, {})
                look_ahead(
                    guess.data, value.data, self.under_way[at], state, self.optimizer, group
                )
        backward(loss_of(twin, step))
        return [each.grad for each in twin.parameters() if each.grad is not None]

    def apply(self, gradient: Sequence[torch.Tensor] | None) -> None:
        for at, each in enumerate(self.model.parameters()):
            each.grad = None if gradient is None else gradient[at].clone()
        self.optimizer.step()

    def sync(self, step: int) -> None:
        own = self.gradient_at_guess(step)
        before, self.under_way = self.under_way, None
        if before is None:
            self.apply(own)
        else:
            self.apply([(one + other) * 0.5 for one, other in zip(before, own, strict=True)])

    def delayed(self, step: int) -> None:
        own = self.gradient_at_guess(step)
        self.apply(self.under_way)
        self.under_way = own


class Run:
    """A lone site whose regime changes."""

    def __init__(self, wrap: Wrap = WRAPS["lone"]) -> None:
        self.link = RecordingLink()
        self.inner = net()
        self.model = wrap(self.inner)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.site: Site = lone_site(self.link, rungs=RUNGS)
        self.site.attach(self.model, self.optimizer)

    def change(self, kind: str) -> None:
        """Have another regime from the step on that follows the next one."""
        self.site._parts.attachment.change_regime(Rung(1, "" if kind == SYNC else kind))

    def step(self, step: int) -> None:
        self.optimizer.zero_grad()
        backward(loss_of(self.model, step))
        self.optimizer.step()

    def rungs(self) -> list[float | None]:
        self.site._parts.steps.flush()
        steps = [values for kind, _, values in self.link.metrics if kind == metrics.STEP]
        return [each.get(metrics.RUNG) for each in steps]


@pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
def test_from_sync_to_delayed_and_back_leaves_the_bits_of_who_does_so_by_hand(wrap: Wrap) -> None:
    run, by_hand = Run(wrap), ByHand()
    changes = {2: DELAYED, 6: SYNC, 9: DELAYED, 12: SYNC}
    is_delayed = [*range(3, 7), *range(10, 13)]
    for step in range(1, 16):
        if step in changes:
            run.change(changes[step])
        run.step(step)
        by_hand.delayed(step) if step in is_delayed else by_hand.sync(step)
        assert torch.equal(values(run.inner), values(by_hand.model)), step
    # The step that applies two gradients still averages as delayed does.
    assert run.rungs() == [0, 0, 1, 1, 1, 1, 1, 0, 0, 1, 1, 1, 1, 0, 0]
