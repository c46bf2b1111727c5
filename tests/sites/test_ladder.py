"""A run that goes over to another regime and back, as one does it that does the same by hand."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import backward
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from isthmus.protos import metrics
from isthmus.protos.checkpoint.store import checkpoint_name
from isthmus.protos.errors import ScriptError
from isthmus.sites.worker.api.site import Site
from isthmus.sites.worker.exchange.sharding import whole_of
from isthmus.sites.worker.regimes.ladder import Ladder
from isthmus.sites.worker.regimes.look_ahead import look_ahead, settings_of
from isthmus.topology.spec.regime import OuterOptimizer, Rung, regime_of
from tests.fakes.lone_exchanges import RecordingLink
from tests.fakes.lone_sites import lone_site
from tests.fakes.two_sites import run
from tests.sites import layout_programs as programs
from tests.sites import test_sharded_checkpoints as saved
from tests.sites.test_local_steps import check_trained
from tests.sites.test_worker_layouts import write_plan

alone = pytest.mark.usefixtures("process_group")
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
                look_ahead(guess.data, value.data, self.under_way[at], state, self.optimizer, group)
        backward(loss_of(twin, step))
        return [each.grad for each in twin.parameters() if each.grad is not None]

    def apply(self, gradient: Sequence[torch.Tensor] | None) -> None:
        for at, each in enumerate(self.model.parameters()):
            each.grad = None if gradient is None else gradient[at].clone()
        self.optimizer.step()

    def sync(self, step: int) -> None:
        """Apply the step's gradient; in the first step after delayed, the one under way, too."""
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
        self.site._parts.regimes.change(Rung(1, "" if kind == SYNC else kind))

    def step(self, step: int) -> None:
        self.optimizer.zero_grad()
        backward(loss_of(self.model, step))
        self.optimizer.step()

    def rungs(self) -> list[float | None]:
        self.site._parts.rank.steps.flush()
        steps = [values for kind, _, values in self.link.metrics if kind == metrics.STEP]
        return [each.get(metrics.RUNG) for each in steps]


@alone
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


@alone
@pytest.mark.parametrize("lower", [DELAYED, DILOCO])
def test_a_script_that_scales_gradients_keeps_sync_and_it_is_said_once(lower: str) -> None:
    run = Run()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    for step in range(1, 4):
        if step == 2:
            run.change(lower)
        run.optimizer.zero_grad()
        backward(scaler.scale(loss_of(run.model, step)))
        scaler.step(run.optimizer)
        scaler.update()
    assert run.rungs() == [None, None, None]
    ((_, why),) = run.link.reasons
    assert why.startswith("the regime stays sync: a GradScaler leaves out steps")


@alone
def test_a_scaler_in_another_regime_is_refused() -> None:
    run = Run()
    run.change(DELAYED)
    run.step(1)
    scaler = torch.amp.GradScaler("cpu")
    backward(scaler.scale(loss_of(run.model, 2)))
    with pytest.raises(ScriptError, match="regime delayed: a GradScaler"):
        scaler.step(run.optimizer)


@alone
def test_a_run_goes_back_to_sync_where_a_step_has_two_rounds() -> None:
    """In diloco that is allowed, and in delayed it is not: so the run does not go there."""
    run = Run()
    run.change(DILOCO)
    run.step(1)
    for step in range(2, 5):
        backward(loss_of(run.model, step))
        run.step(step)
    run.change(DELAYED)
    run.step(5)
    assert run.rungs() == [0, None, None, None, None]
    assert isinstance(run.site._parts.regimes.loop, Ladder)
    run.step(6)
    run.step(7)
    run.step(8)
    run.step(9)
    backward(loss_of(run.model, 10))
    run.step(10)  # delayed would refuse it


@alone
def test_another_model_is_attached_in_the_regime_of_the_run() -> None:
    run = Run()
    run.change(DELAYED)
    run.step(1)
    run.step(2)
    run.site.attach(run.model, run.optimizer)
    run.step(3)
    run.change(SYNC)
    run.step(4)
    run.step(5)
    run.site.attach(run.model, [run.optimizer, torch.optim.SGD([nn.Parameter(torch.ones(1))])])
    assert not isinstance(run.site._parts.regimes.loop, Ladder)
    assert run.rungs() == [0, 1, 1, 1, 1]


@alone
@pytest.mark.parametrize(
    ("optimizers", "why"),
    [
        (lambda own: [torch.optim.Adagrad(own)], "looks ahead by the steps of SGD, Adam and AdamW"),
        (
            lambda own: [torch.optim.SGD(own[:2], lr=0.1), torch.optim.SGD(own[2:], lr=0.1)],
            "several optimizers are attached",
        ),
    ],
)
def test_what_no_other_regime_trains_keeps_sync(
    optimizers: Callable[[list[nn.Parameter]], list[torch.optim.Optimizer]], why: str
) -> None:
    link, model = RecordingLink(), net()
    site, own = lone_site(link, rungs=RUNGS), optimizers([*model.parameters()])
    site.attach(model, own)
    site._parts.regimes.change(Rung(1, DELAYED))
    backward(loss_of(model, 1))
    for optimizer in own:
        optimizer.step()
    site._parts.rank.steps.flush()
    assert not any(metrics.RUNG in values for *_, values in link.metrics)
    ((_, reason),) = link.reasons
    assert reason.startswith("the regime stays sync: ")
    assert why in reason


# ---------------------------------------------------------------- two sites

LADDER = ["plan.replan.regime=follow", f"plan.max_sync_period={EVERY}"]
DILOCO_RUNG = regime_of(DILOCO, sync_every=EVERY)
THROUGH = {1: DELAYED, 4: SYNC, 6: DILOCO, 11: SYNC, 13: DELAYED, 15: DILOCO, 19: DELAYED}
"""By step, from 0, the regime of those that follow."""
NUM_STEPS = 22


def regimes(changes: Mapping[int, str], num_steps: int) -> list[str]:
    """Return the regime of each step."""
    found, now = [], SYNC
    for step in range(num_steps):
        found.append(now)
        now = changes.get(step, now)
    return found


class Sites:
    """All sites in one process, each with a model of its own: an oracle."""

    def __init__(self, layouts: Sequence[str]) -> None:
        self.layouts = layouts
        self.models = [programs.net(seed=0) for _ in layouts]
        self.optimizers = [
            torch.optim.SGD(each.parameters(), lr=programs.LEARNING_RATE, momentum=0.9)
            for each in self.models
        ]
        counts = [programs.DATA_RANKS[each] for each in layouts]
        ends = [*itertools.accumulate(counts)]
        self.places = [range(end - count, end) for end, count in zip(ends, counts, strict=True)]
        self.under_way: list[torch.Tensor] | None = None
        self.own: list[list[torch.Tensor]] = []
        """Of each site, its own mean gradient of the step before."""
        self.common: list[torch.Tensor] = []
        """Global parameters; none unless sites take steps of their own."""
        self.momentum: list[torch.Tensor] = []
        self.tokens: list[float] = []
        """Of each site, in the round."""

    def step(self, step: int, regime: str) -> tuple[list[float], list[float]]:
        """Take a step; return losses by rank with data, and norms by site."""
        losses: list[float] = []
        gradients, weights = [], []
        for site, places in enumerate(self.places):
            values = [each.detach().clone() for each in self.models[site].parameters()]
            if self.under_way is not None:
                self._look_ahead(site, values)
            self.optimizers[site].zero_grad()
            counted = [
                programs.tokens_of(self.layouts[site], step, at - places[0]) for at in places
            ]
            for at, count in zip(places, counted, strict=True):
                inputs, targets = programs.data(step, at)
                loss = programs.loss_of(self.models[site](inputs), targets)
                backward(loss * count / sum(counted))
                losses.append(float(loss.detach()))
            for each, value in zip(self.models[site].parameters(), values, strict=True):
                each.data = value
            grads = [each.grad for each in self.models[site].parameters()]
            gradients.append([each.clone() for each in grads if each is not None])
            weights.append(sum(counted))
        if regime == DILOCO and self.under_way is None:
            return losses, self._local(step, gradients, weights)
        self.common = []
        mean = [
            sum(w * g for w, g in zip(weights, of, strict=True)) / sum(weights)
            for of in zip(*gradients, strict=True)
        ]
        before, self.under_way, self.own = self.under_way, None, gradients
        applied: list[torch.Tensor] | None = mean
        if regime == DELAYED:
            self.under_way, applied = mean, before
        elif before is not None:
            applied = [(one + other) / 2 for one, other in zip(before, mean, strict=True)]
        return losses, [self._apply(site, applied) for site in range(len(self.models))]

    def _look_ahead(self, site: int, values: Sequence[torch.Tensor]) -> None:
        own, optimizer = self.own[site], self.optimizers[site]
        scale = min(1.0, programs.CLIP_NORM / (float(nn.utils.get_total_norm(own)) + 1e-6))
        for each, value, gradient in zip(self.models[site].parameters(), values, own, strict=True):
            buffer = optimizer.state[each].get("momentum_buffer")
            momentum = 0.0 if buffer is None else buffer * 0.9
            each.data = value - programs.LEARNING_RATE * (momentum + scale * gradient)

    def _apply(self, site: int, gradient: Sequence[torch.Tensor] | None) -> float:
        if gradient is None:
            return 0.0
        parameters = [*self.models[site].parameters()]
        for each, of in zip(parameters, gradient, strict=True):
            each.grad = of.clone()
        norm = float(nn.utils.clip_grad_norm_(parameters, programs.CLIP_NORM))
        self.optimizers[site].step()
        return norm

    def _local(
        self, step: int, gradients: Sequence[Sequence[torch.Tensor]], weights: Sequence[float]
    ) -> list[float]:
        if not self.common:
            self.common = [each.detach().clone() for each in self.models[0].parameters()]
            self.momentum = [torch.zeros_like(each) for each in self.common]
            self.tokens = [0.0] * len(self.models)
        norms = [self._apply(site, of) for site, of in enumerate(gradients)]
        self.tokens = [sum(each) for each in zip(self.tokens, weights, strict=True)]
        if (step + 1) % EVERY == 0:
            self._meet(step + 1)
        return norms

    def _meet(self, step: int) -> None:
        lr, mu = DILOCO_RUNG.outer_rates(step, len(self.models))
        shares = [each / sum(self.tokens) for each in self.tokens]
        of_sites = [[*each.parameters()] for each in self.models]
        for at, value in enumerate(self.common):
            moved = [
                share * (value - of[at].detach())
                for share, of in zip(shares, of_sites, strict=True)
            ]
            mean = torch.stack(moved).sum(0)
            self.momentum[at] = mu * self.momentum[at] + mean
            self.common[at] = value - lr * (mean + mu * self.momentum[at])
            for of in of_sites:
                of[at].data = self.common[at].clone()
        self.shares, self.tokens = shares, [0.0] * len(self.models)

    def average_moments(self) -> None:
        """Have all sites' inner optimizers have the mean, weighted by the last round's tokens."""
        for at_sites in zip(*(model.parameters() for model in self.models), strict=True):
            states = [
                optimizer.state[parameter]
                for optimizer, parameter in zip(self.optimizers, at_sites, strict=True)
            ]
            mean = torch.stack(
                [
                    share * state["momentum_buffer"]
                    for share, state in zip(self.shares, states, strict=True)
                ]
            ).sum(0)
            for state in states:
                state["momentum_buffer"] = mean.clone()


def reference(
    layouts: Sequence[str], of_steps: Sequence[str]
) -> tuple[list[list[float]], list[list[float]]]:
    sites, found = Sites(layouts), []
    for step, (regime, before) in enumerate(zip(of_steps, [SYNC, *of_steps], strict=False)):
        if before == DILOCO != regime:
            sites.average_moments()
        found.append(sites.step(step, regime))
    return [losses for losses, _ in found], [norms for _, norms in found]


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("lone", "fsdp2"),
        *(
            pytest.param(*pair, marks=pytest.mark.exhaustive)
            for pair in [
                ("ddp", "fsdp2"),
                ("lone", "pp"),
                ("tp", "ep"),
                ("hsdp", "fsdp3"),
                ("lone-tp", "ddp"),
            ]
        ),
    ],
)
def test_two_layouts_go_through_all_regimes_as_one_process_does(
    tmp_path: Path, first: str, second: str
) -> None:
    """Losses and norms are those of the oracle; all ranks hold the same whenever they can."""
    layouts, of_steps = (first, second), regimes(THROUGH, NUM_STEPS)
    changes = {str(step): kind for step, kind in THROUGH.items()}
    write_plan(tmp_path, layouts, NUM_STEPS, changes=changes)
    ranks = [programs.RANKS[each] for each in layouts]
    job = ["exchange.bucket=64KiB", *LADDER]
    found, gateways = run(tmp_path, programs.train, ranks, job=job)
    compared = {0} | {
        step
        for step, (kind, before) in enumerate(zip(of_steps, [SYNC, *of_steps], strict=False), 1)
        # The first step after delayed applies what is under way.
        if kind != DILOCO or before == DELAYED or step % EVERY == 0
    }
    by_step: dict[int, list[int]] = {}
    for _, _, each in gateways.digests:
        by_step.setdefault(each["step"], []).append(each["combined"])
    assert by_step.keys() == compared
    assert all(len(each) == sum(ranks) and len(set(each)) == 1 for each in by_step.values())
    check_trained(found, layouts, *reference(layouts, of_steps))


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("layouts", "lower", "codec"),
    [
        (("lone", "fsdp2"), DELAYED, None),
        *(
            pytest.param(*case, marks=pytest.mark.exhaustive)
            for case in [
                (("ddp", "fsdp2"), DELAYED, None),
                (("ddp", "fsdp2"), DELAYED, "int8"),
                (("ddp", "fsdp2"), DILOCO, None),
                (("lone", "tp"), DELAYED, None),
                (("lone", "tp"), DILOCO, "int8"),
            ]
        ),
    ],
)
def test_a_run_that_is_resumed_goes_on_in_sync_as_the_one_that_goes_back_there(
    tmp_path: Path, layouts: tuple[str, ...], lower: str, codec: str | None
) -> None:
    """The gradient under way is in the checkpoint, and so are moments that all sites have."""
    more = ["plan.replan.regime=follow", "plan.max_sync_period=2"]
    # Step 2 is saved, the second one of the lower regime.
    changes = {0: lower, saved.SAVED - 1: SYNC}
    whole = saved.run(tmp_path / "whole", layouts, more=more, changes=changes, codec=codec)
    resume = whole / checkpoint_name(saved.SAVED)
    resumed = saved.run(tmp_path / "resumed", layouts, resume=resume, more=more, codec=codec)
    expected, found = saved.final(whole), saved.final(resumed)
    assert found.keys() == expected.keys()
    assert not [name for name, each in found.items() if not torch.equal(each, expected[name])]
