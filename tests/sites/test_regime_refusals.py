"""What the regime `delayed` refuses by name, and where it looks ahead."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import backward

from isthmus.protos import metrics
from isthmus.protos.errors import ScriptError
from isthmus.sites.worker.api.site import Site
from isthmus.sites.worker.regimes.look_ahead import look_ahead, settings_of
from isthmus.topology.spec.regime import OuterOptimizer, Regime, regime_of
from tests.fakes.lone_exchanges import RecordingLink
from tests.fakes.lone_sites import lone_site

pytestmark = pytest.mark.usefixtures("process_group")

OPTIMIZERS: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.SGD, {"lr": 0.1}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "maximize": True}),
    (torch.optim.Adam, {"lr": 0.01, "weight_decay": 0.1}),
    (torch.optim.Adam, {"lr": 0.01, "amsgrad": True, "maximize": True}),
    (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1, "betas": (0.8, 0.95)}),
    (torch.optim.AdamW, {"lr": 0.01, "fused": True}),
]


@pytest.mark.parametrize("num_steps", [0, 1, 3])
@pytest.mark.parametrize(("kind", "settings"), OPTIMIZERS)
def test_looking_ahead_comes_to_where_the_optimizer_steps(
    kind: Any,  # noqa: ANN401 - an optimizer's class
    settings: dict[str, Any],
    num_steps: int,
) -> None:
    generator = torch.Generator().manual_seed(num_steps)
    parameter = nn.Parameter(torch.randn(50, generator=generator))
    optimizer = kind([parameter], **settings)
    for _ in range(num_steps):
        parameter.grad = torch.randn(50, generator=generator)
        optimizer.step()
    gradient = torch.randn(50, generator=generator)
    kept, target = gradient.clone(), torch.empty(50)
    before = parameter.detach().clone()
    ((_, _, group),) = settings_of([optimizer])
    state = optimizer.state.get(parameter, {})
    look_ahead(target, parameter.detach(), gradient, state, optimizer, group)
    assert torch.equal(parameter.detach(), before), "nothing else changes"
    assert torch.equal(gradient, kept), "nothing else changes"
    parameter.grad = gradient
    optimizer.step()
    torch.testing.assert_close(target, parameter.detach(), rtol=1e-5, atol=1e-7)


def delayed_site(**settings: Any) -> tuple[Site, nn.Module]:  # noqa: ANN401 - of the regime
    torch.manual_seed(0)
    regime = Regime(kind="delayed", **settings)
    return lone_site(RecordingLink(), regime=regime), nn.Linear(3, 1)


def train_once(model: nn.Module) -> None:
    backward(model(torch.ones(2, 3)).square().mean())


def test_parameters_are_the_guess_in_passes_only() -> None:
    """A lone site: the guess is where its optimizer steps next, from the second step on."""
    site, model = delayed_site()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    site.attach(model, optimizer)
    seen: list[torch.Tensor] = []
    model.register_forward_pre_hook(lambda *_: seen.append(_flat(model)))
    after = [_flat(model)]
    for _ in range(4):
        optimizer.zero_grad()
        train_once(model)
        assert torch.equal(_flat(model), after[-1]), "the passes leave them"
        optimizer.step()
        after.append(_flat(model))
        with torch.no_grad():
            model(torch.ones(2, 3))
        assert torch.equal(seen.pop(), after[-1]), "evaluated as they are"
    site.leave()
    assert torch.equal(after[1], after[0]), "the first step has nothing to apply"
    assert torch.equal(seen[0], after[0])
    for guess, wanted in zip(seen[1:], after[2:], strict=True):
        torch.testing.assert_close(guess, wanted)


def test_without_looking_a_lone_site_lags_a_step() -> None:
    """Gradients are of the parameters that there are: as without delay, for they do not differ."""
    site, model = delayed_site(look=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    site.attach(model, optimizer)
    values, before = [_flat(model)], torch.zeros(4)
    for _ in range(3):
        optimizer.zero_grad()
        train_once(model)
        optimizer.step()
        values.append(_flat(model))
        torch.testing.assert_close(values[-1], values[-2] - 0.1 * before)
        before = _gradient_at(model, values[-2])
    site.leave()


def _flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([each.detach().reshape(-1) for each in model.parameters()])


def _gradient_at(model: nn.Module, values: torch.Tensor) -> torch.Tensor:
    """Return the gradient of the loss at other values of a `nn.Linear(3, 1)`."""
    twin = nn.Linear(3, 1)
    with torch.no_grad():
        twin.weight.copy_(values[:3].view(1, 3))
        twin.bias.copy_(values[3:])
    train_once(twin)
    return torch.cat([each.grad.reshape(-1) for each in twin.parameters() if each.grad is not None])


def test_two_rounds_in_one_step_are_refused() -> None:
    site, model = delayed_site()
    site.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
    train_once(model)
    with pytest.raises(ScriptError, match="use no_sync in all but the last"):
        train_once(model)
    site.leave()


def test_a_gradient_that_is_not_finite_is_told_by_its_own_step() -> None:
    torch.manual_seed(0)
    link = RecordingLink()
    site, model = lone_site(link, regime=Regime(kind="delayed")), nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    site.attach(model, optimizer)
    for step in (1, 2, 3, 4):
        optimizer.zero_grad()
        backward(model(torch.full((2, 3), math.nan if step == 3 else 1.0)).sum())
        optimizer.step()
    site.leave()
    told = [step for kind, step, _ in link.metrics if kind == metrics.NON_FINITE]
    assert told == [3]
    reasons = [reason for kind, reason in link.reasons if kind == metrics.NON_FINITE]
    assert reasons[0].startswith("in step 3 the gradient of weight held a NaN"), reasons


def test_accumulated_gradients_count_once() -> None:
    site, model = delayed_site()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    site.attach(model, optimizer)
    for _ in range(3):
        optimizer.zero_grad()
        with site.no_sync():
            train_once(model)
        train_once(model)
        optimizer.step()
    assert site.grad_norm > 0.0
    site.leave()


def test_a_scaler_is_refused() -> None:
    site, model = delayed_site()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    site.attach(model, optimizer)
    scaler = torch.amp.GradScaler("cpu")
    train_once(model)
    optimizer.step()
    backward(scaler.scale(model(torch.ones(2, 3)).square().mean()))
    with pytest.raises(ScriptError, match="regime delayed: a GradScaler"):
        scaler.step(optimizer)
    site.leave()


def test_what_delayed_cannot_do_is_refused_before_the_first_step() -> None:
    site, model = delayed_site()
    with pytest.raises(TypeError, match="this optimizer is Adagrad: say"):
        site.attach(model, torch.optim.Adagrad(model.parameters()))
    site.leave()
    site, model = delayed_site()
    with pytest.raises(RuntimeError, match="regime is delayed, which needs"):
        site.average_gradients(torch.optim.SGD(model.parameters(), lr=0.1))
    site.leave()


REGIMES = [
    Regime(kind="delayed"),
    regime_of("diloco", sync_every=2, outer=OuterOptimizer(lr=0.5, ramp_steps=0)),
    regime_of("streaming", sync_every=4, fragments=1, delay=1),
]


@pytest.mark.parametrize("regime", REGIMES, ids=lambda each: each.kind)
def test_several_optimizers_train_as_one_does(regime: Regime) -> None:
    found = []
    for is_split in (False, True):
        torch.manual_seed(0)
        site, model = lone_site(RecordingLink(), regime=regime), nn.Linear(3, 1)
        weight, bias = model.parameters()
        parts = [[weight], [bias]] if is_split else [[weight, bias]]
        optimizers = [torch.optim.SGD(each, lr=0.1, momentum=0.9) for each in parts]
        site.attach(model, optimizers)
        for _ in range(9):
            train_once(model)
            for each in optimizers:
                each.step()
                each.zero_grad()
        found.append([each.detach().clone() for each in model.parameters()])
        site.leave()
    assert all(map(torch.equal, *found))


def test_an_optimizer_that_steps_after_the_last_one_is_refused() -> None:
    torch.manual_seed(0)
    site, model = lone_site(RecordingLink(), regime=REGIMES[1]), nn.Linear(3, 1)
    first, last = (torch.optim.SGD([each], lr=0.1) for each in model.parameters())
    site.attach(model, [first, last])
    train_once(model)
    last.step()
    with pytest.raises(ScriptError, match="give them in the order in which they step"):
        first.step()
    site.leave()


def test_gradients_that_are_averaged_by_hand_are_refused() -> None:
    site, model = delayed_site()
    train_once(model)
    grads = [each.grad for each in model.parameters() if each.grad is not None]
    with pytest.raises(RuntimeError, match="what is averaged by hand may be gradients"):
        site.all_reduce(grads)
    site.all_reduce([torch.ones(1)], exact=True)
    site.leave()


def test_passes_amid_a_step_may_want_the_parameters_of_all_sites() -> None:
    """Also where they compute gradients."""
    site, model = delayed_site()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    site.attach(model, optimizer)
    for _ in range(2):
        optimizer.zero_grad()
        train_once(model)
        optimizer.step()
    seen: list[torch.Tensor] = []
    model.register_forward_pre_hook(lambda *_: seen.append(_flat(model)))
    common = _flat(model)
    with site.global_parameters():
        model(torch.ones(2, 3))
    model(torch.ones(2, 3))
    assert torch.equal(seen[0], common)
    assert not torch.equal(seen[1], common)
    site.leave()


def test_without_looking_any_optimizer_will_do() -> None:
    site, model = delayed_site(look=False)
    optimizer = torch.optim.Adagrad(model.parameters())
    site.attach(model, optimizer)
    for _ in range(2):
        optimizer.zero_grad()
        train_once(model)
        optimizer.step()
    site.leave()
