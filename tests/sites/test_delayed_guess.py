"""The regime `delayed`: parameters are a guess inside passes, and nowhere else."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import backward
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from isthmus.sites.worker.api.site import Site
from isthmus.sites.worker.exchange.sharding import whole_of
from isthmus.topology.spec.regime import Regime
from tests.fakes.lone_exchanges import RecordingLink
from tests.fakes.lone_sites import lone_site

pytestmark = pytest.mark.usefixtures("process_group")

Wrap = Callable[[nn.Module], Any]
X = torch.ones(2, 3)


def _sharded(model: Any) -> Any:  # noqa: ANN401 - a Sequential, then an FSDPModule
    fully_shard(model[0])
    return fully_shard(model)


def _kept_gathered(model: Any) -> Any:  # noqa: ANN401 - a Sequential, then an FSDPModule
    return fully_shard(model, reshard_after_forward=False)


SHARDED = [_sharded, _kept_gathered]
WRAPS = [lambda each: each, DistributedDataParallel, *SHARDED]
in_all_layouts = pytest.mark.parametrize("wrap", WRAPS, ids=["lone", "ddp", "fsdp2", "gathered"])


class Run:
    """A lone site some steps into a run, whose next pass has a guess to compute at."""

    def __init__(self, wrap: Wrap = WRAPS[0], *, lr: float = 0.1, steps: int = 3) -> None:
        torch.manual_seed(0)
        self.inner: Any = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        self.model = wrap(self.inner)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=lr, momentum=0.9)
        self.site: Site = lone_site(RecordingLink(), regime=Regime(kind="delayed"))
        self.site.attach(self.model, self.optimizer)
        self.seen: list[torch.Tensor] = []
        """What the last layer has computed with, in each forward pass."""
        self.inner[2].register_forward_pre_hook(lambda layer, _: self.seen.append(_flat(layer)))
        for _ in range(steps):
            self.step()

    def step(self) -> None:
        self.optimizer.zero_grad()
        backward(self.model(X).square().mean())
        self.optimizer.step()

    def values(self) -> torch.Tensor:
        return _flat(self.inner)


def _flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([whole_of(each).detach().reshape(-1) for each in model.parameters()]).clone()


def _at(values: torch.Tensor, x: torch.Tensor = X) -> torch.Tensor:
    """Return what a model of these values says."""
    twin = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    nn.utils.vector_to_parameters(values, twin.parameters())
    with torch.no_grad():
        said: torch.Tensor = twin(x)
    return said


@in_all_layouts
def test_between_passes_and_after_a_failed_one_parameters_are_those_of_all_sites(
    wrap: Wrap,
) -> None:
    run = Run(wrap)
    before = run.values()
    out = run.model(X)
    assert not torch.equal(run.seen[-1], before[16:]), "it was computed at the guess"
    with torch.no_grad():
        assert torch.equal(run.model(X), _at(before)), "evaluated as they are"
    assert torch.equal(run.values(), before)
    run.optimizer.zero_grad()
    backward(out.square().mean())
    assert torch.equal(run.values(), before)
    run.optimizer.step()
    after = run.values()
    with pytest.raises(RuntimeError):
        run.model(torch.ones(2, 7))
    if wrap not in SHARDED:  # which leaves its parameters gathered after an error
        assert torch.equal(run.values(), after)
    run.site.leave()


def test_memory_that_parameters_share_stays_theirs() -> None:
    """What a script has of a parameter is never the guess; a part of larger memory is no other."""
    run = Run(steps=0)
    flat = torch.cat([each.detach().reshape(-1) for each in run.inner.parameters()])
    first = run.inner[0]
    first.weight.data = flat[:12].view(4, 3)
    held, view = run.inner[2].weight.detach(), first.weight.detach()
    for _ in range(3):
        run.step()
    seen: list[torch.Tensor] = []
    handle = run.inner[2].register_forward_pre_hook(lambda *_: seen.append(held.clone()))
    before = held.clone()
    run.model(X)
    handle.remove()
    assert torch.equal(seen[0], before)
    assert view.data_ptr() == first.weight.data_ptr() == flat.data_ptr()
    assert held.data_ptr() == run.inner[2].weight.data_ptr()
    run.site.leave()


@in_all_layouts
def test_weights_that_are_loaded_after_a_pass_without_a_backward_one_stay(wrap: Wrap) -> None:
    run = Run(wrap)
    run.model(X).mean().item()
    state = run.model.state_dict()
    loaded = {name: torch.full_like(each, 5.0) for name, each in state.items()}
    run.model.load_state_dict(loaded)
    assert bool((run.values() == 5.0).all())
    run.step()
    assert bool((run.seen[-1] == 5.0).all()), "computed at what was loaded"
    assert float((run.values() - 5.0).abs().max()) < 1.0
    run.site.leave()


@pytest.mark.parametrize("change", ["clamp", "data", "load", "mask", "swap"])
def test_weights_that_change_between_steps_are_where_the_guess_begins(change: str) -> None:
    """The guess lies one step of the optimizer from them, not from what they were."""
    run = Run()
    layer = run.inner[2]
    with torch.no_grad():
        if change == "clamp":
            layer.weight.clamp_(-0.01, 0.01)
        elif change == "data":
            layer.weight.data.clamp_(-0.01, 0.01)
        elif change == "load":
            layer.load_state_dict({"weight": torch.ones(1, 4), "bias": torch.ones(1)})
        elif change == "mask":
            layer.weight.mul_(torch.tensor([1.0, 0.0, 1.0, 0.0]))
        else:
            layer.weight.data = torch.ones(1, 4)
    before = _flat(layer)
    run.step()  # by the gradient that the guess was made of, for the site is alone
    torch.testing.assert_close(run.seen[-1], _flat(layer))
    assert not torch.equal(before, _flat(layer))
    run.site.leave()


def test_what_a_script_saves_or_copies_amid_a_step_is_what_all_sites_have() -> None:
    run = Run(DistributedDataParallel)
    before = run.values()
    loss = run.model(X).square().mean()
    average = copy.deepcopy(run.inner)
    file = io.BytesIO()
    torch.save(run.model.state_dict(), file)
    total = sum(each.sum() for each in run.model.parameters())
    assert torch.equal(_flat(average), before)
    file.seek(0)
    saved = torch.load(file)
    assert torch.equal(torch.cat([each.reshape(-1) for each in saved.values()]), before)
    torch.testing.assert_close(total, before.sum())
    backward(loss)
    run.site.leave()


def _gradient(run: Run, loss_of: Callable[[Any], torch.Tensor]) -> torch.Tensor:
    """Return the site's gradient of a step, which is what it keeps to be applied in the next."""
    run.optimizer.zero_grad()
    backward(loss_of(run.model))
    run.optimizer.step()
    run.optimizer.zero_grad()
    backward(run.model(X).sum() * 0.0)
    grads = [each.grad for each in run.inner.parameters()]
    return torch.cat([whole_of(each).reshape(-1) for each in grads if each is not None]).clone()


LOSSES: dict[str, Callable[[Any], torch.Tensor]] = {
    "plain": lambda model: model(X).square().mean(),
    "two passes": lambda model: model(X).square().mean() + model(2 * X).square().mean(),
    "recomputed": lambda model: (
        checkpoint(model, X.clone().requires_grad_(), use_reentrant=False).square().mean()
    ),
    "decay by hand": lambda model: (
        model(X).square().mean() + 0.1 * sum(each.square().sum() for each in model.parameters())
    ),
    "penalty": lambda model: _penalty(model),
}


def _penalty(model: Any) -> torch.Tensor:  # noqa: ANN401 - any wrapper
    x = X.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    loss: torch.Tensor = model(x).square().mean() + slope.square().sum()
    return loss


@pytest.mark.parametrize("what", LOSSES)
def test_gradients_are_those_at_the_guess(what: str) -> None:
    """Also of a graph that is gone through twice, and where losses take parameters by hand."""
    run = Run()
    before = run.values()
    guess: list[torch.Tensor] = []
    handle = run.inner.register_forward_pre_hook(lambda *_: guess.append(run.values()))
    run.model(X)
    handle.remove()
    assert not torch.equal(guess[0], before)
    found = _gradient(run, LOSSES[what])
    twin = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    nn.utils.vector_to_parameters(guess[0], twin.parameters())
    backward(LOSSES[what](twin))
    wanted = torch.cat(
        [each.grad.reshape(-1) for each in twin.parameters() if each.grad is not None]
    )
    torch.testing.assert_close(found, wanted)
    run.site.leave()


def test_the_guess_is_made_with_the_learning_rate_that_the_scheduler_has_set() -> None:
    run = Run()
    scheduler = torch.optim.lr_scheduler.StepLR(run.optimizer, 1, gamma=0.01)
    for _ in range(2):
        run.optimizer.zero_grad()
        backward(run.model(X).square().mean())
        run.optimizer.step()
        scheduler.step()
    run.step()
    torch.testing.assert_close(run.seen[-1], run.values()[16:], rtol=0.0, atol=1e-9)
    run.site.leave()


def test_the_guess_of_what_no_pass_has_used_is_where_it_is() -> None:
    """An optimizer leaves out what has no gradient; its momentum does not move it."""
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(3, 1), nn.Linear(3, 1)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    site = lone_site(RecordingLink(), regime=Regime(kind="delayed"))
    seen: list[torch.Tensor] = []

    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = model

        def forward(self, x: torch.Tensor, which: int) -> Any:  # noqa: ANN401
            seen.append(_flat(model[1]))
            return model[which](x)

    whole = Part()
    site.attach(whole, optimizer)
    for which in (1, 1, 1, 0, 0, 0):
        optimizer.zero_grad()
        backward(whole(X, which).square().mean())
        optimizer.step()
    assert torch.equal(seen[-1], _flat(model[1]))
    site.leave()


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")
def test_compiled_models_compute_at_the_guess() -> None:
    found = []
    for is_compiled in (False, True):
        torch.manual_seed(0)
        inner = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        model: Any = torch.compile(inner, backend="eager") if is_compiled else inner
        optimizer = torch.optim.SGD(inner.parameters(), lr=0.1)
        site = lone_site(RecordingLink(), regime=Regime(kind="delayed"))
        site.attach(model, optimizer)
        for _ in range(4):
            optimizer.zero_grad()
            backward(model(X).square().mean())
            optimizer.step()
        found.append(_flat(inner))
        site.leave()
    torch.testing.assert_close(*found)
