"""A checkpoint is what the next step begins with, whatever a script does between two steps.

Each script here trains at a site of one rank, is saved as it goes, and goes on from each of its
checkpoints: it has to end in the same bits as the run that nobody interrupted.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from isthmus.protos.checkpoint.store import checkpoint_name, checkpoints_in
from isthmus.sites.checkpoint.export import model_tensors
from isthmus.sites.checkpoint.staging import Staging
from isthmus.sites.local.rank_messages import Welcome
from isthmus.sites.worker.api.environment import lone_spec
from isthmus.sites.worker.api.site import Site
from isthmus.sites.worker.exchange.gateway_link import AloneLink
from isthmus.sites.worker.exchange.rank_context import RankContext
from isthmus.sites.worker.exchange.sharding import local_of
from isthmus.topology.spec.job import Checkpoint

pytestmark = pytest.mark.usefixtures("process_group")

STEPS, EVERY = 6, 2
WIDTH = 16


@pytest.fixture
def sites() -> Iterator[list[Site]]:
    """What was joined; all of it leaves at the end."""
    joined: list[Site] = []
    yield joined
    for site in joined:
        site.leave()


class Run:
    """Joins sites of one rank that save every other step, and go on from there."""

    def __init__(self, folder: Path, sites: list[Site], device: torch.device) -> None:
        self.folder = folder
        self._sites = sites
        self._device = device

    def join(self, name: str, resume: int | None = None) -> Site:
        """Return a site that saves under a name, and goes on from `whole` after a step."""
        taken = None if resume is None else str(self.folder / "whole" / checkpoint_name(resume))
        settings = Checkpoint(every_steps=EVERY, keep=STEPS, to=(str(self.folder),), resume=taken)
        spec = lone_spec(1)
        context = RankContext(
            welcome=Welcome(
                site="alone",
                site_index=0,
                sites=("alone",),
                ranks_per_site=(1,),
                verify_every=0,
                config_hash="",
            ),
            spec=replace(spec, job=replace(spec.job, checkpoint=settings)),
            run_folder=self.folder,
            device=self._device,
            run=name,
        )
        site = Site(context, AloneLink(), owns_group=False)
        self._sites.append(site)
        return site

    def final(self, name: str) -> dict[str, Tensor]:
        """Return the model after the last step, as it was saved."""
        return model_tensors(str(self.folder / name / checkpoint_name(STEPS)))


@pytest.fixture
def run(tmp_path: Path, sites: list[Site]) -> Run:
    return Run(tmp_path, sites, torch.device("cpu"))


def net(seed: int, out: int = WIDTH) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH),
        nn.ReLU(),
        *(nn.Linear(WIDTH, WIDTH) for _ in range(4)),
        nn.Linear(WIDTH, out),
    )


def batch(site: Site, step: int, count: int = 4) -> Tensor:
    drawn = torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(step))
    return drawn.to(site.device)


def backward(loss: Tensor) -> None:
    torch.autograd.backward(loss)


def swapped(site: Site) -> None:
    """Evaluate the average of the weights, in their place."""
    model = DistributedDataParallel(net(1).to(site.device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    ema = copy.deepcopy(model.module)
    site.attach(model, optimizer)
    start = site.checkpoint(model, optimizer, extra={"ema": ema})
    for step in range(start, STEPS):
        optimizer.zero_grad()
        backward(model(batch(site, step)).square().mean())
        optimizer.step()
        with torch.no_grad():
            for mean, each in zip(ema.parameters(), model.parameters(), strict=True):
                mean.lerp_(each, 0.1)
        own = [each.clone() for each in model.parameters()]
        for each, mean in zip(model.parameters(), ema.parameters(), strict=True):
            each.data.copy_(mean)
        with torch.no_grad():
            model(batch(site, 100))
        for each, kept in zip(model.parameters(), own, strict=True):
            each.data.copy_(kept)


def pointed_elsewhere(site: Site) -> None:
    """The same, by pointers: nothing is copied."""
    model = DistributedDataParallel(net(1).to(site.device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    site.attach(model, optimizer)
    start = site.checkpoint(model, optimizer)
    for step in range(start, STEPS):
        optimizer.zero_grad()
        backward(model(batch(site, step)).square().mean())
        optimizer.step()
        own = [each.data for each in model.parameters()]
        for each in model.parameters():
            each.data = torch.zeros_like(each)
        with torch.no_grad():
            model(batch(site, 100))
        for each, kept in zip(model.parameters(), own, strict=True):
            each.data = kept


def clamped(site: Site) -> None:
    """Keep weights within bounds after each step, as a Wasserstein critic's."""
    model = DistributedDataParallel(net(1).to(site.device))
    optimizer = torch.optim.RMSprop(model.parameters(), lr=0.01)
    site.attach(model, optimizer)
    start = site.checkpoint(model, optimizer)
    for step in range(start, STEPS):
        optimizer.zero_grad()
        backward(model(batch(site, step)).square().mean())
        optimizer.step()
        for each in model.parameters():
            each.data.clamp_(-0.02, 0.02)


def moved_to(site: Site) -> None:
    """Put new tensors in place of the weights after each step, as some projections do."""
    model = DistributedDataParallel(net(1).to(site.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    site.attach(model, optimizer)
    start = site.checkpoint(model, optimizer)
    for step in range(start, STEPS):
        optimizer.zero_grad()
        backward(model(batch(site, step)).square().mean())
        optimizer.step()
        for each in model.parameters():
            each.data = each.data / each.data.norm()


class ScheduleFree(torch.optim.Optimizer):
    """Its weights are others for training than for evaluation; each change rounds."""

    def __init__(self, parameters: Iterator[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, {"lr": lr, "train": True})

    def _weights(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        for group in self.param_groups:
            for each in group["params"]:
                if "z" not in self.state[each]:
                    self.state[each]["z"] = each.detach().clone()
                yield each, self.state[each]["z"]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        for each, z in self._weights():
            assert each.grad is not None
            z.sub_(each.grad, alpha=self.param_groups[0]["lr"])
            each.lerp_(z, 0.1)

    @torch.no_grad()
    def eval(self) -> None:
        for each, z in self._weights():
            each.lerp_(z, 1 - 1 / 0.9)

    @torch.no_grad()
    def resume(self) -> None:
        for each, z in self._weights():
            each.lerp_(z, 1 - 0.9)


def schedule_free(site: Site) -> None:
    """Evaluate with the weights of evaluation: the way there and back changes the last bits."""
    model = DistributedDataParallel(net(1).to(site.device))
    optimizer = ScheduleFree(model.parameters(), lr=0.1)
    site.attach(model, optimizer)
    start = site.checkpoint(model, optimizer)
    for step in range(start, STEPS):
        optimizer.zero_grad()
        backward(model(batch(site, step)).square().mean())
        optimizer.step()
        optimizer.eval()
        with torch.no_grad():
            model(batch(site, 100))
        optimizer.resume()


def sharp(site: Site) -> None:
    """Two backward passes a step, with other weights in between (SAM)."""
    model = DistributedDataParallel(net(1).to(site.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    site.attach(model, optimizer)
    start = site.checkpoint(model, optimizer)
    for step in range(start, STEPS):
        optimizer.zero_grad()
        backward(model(batch(site, step)).square().mean())
        own = [each.detach().clone() for each in model.parameters()]
        for each in model.parameters():
            assert each.grad is not None
            each.data.add_(each.grad, alpha=0.05)
        optimizer.zero_grad()
        backward(model(batch(site, step)).square().mean())
        for each, kept in zip(model.parameters(), own, strict=True):
            each.data.copy_(kept)
        optimizer.step()


def decayed_by_hand(site: Site) -> None:
    """Weights shrink between the backward pass and the step."""
    model = DistributedDataParallel(net(1).to(site.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    site.attach(model, optimizer)
    start = site.checkpoint(model, optimizer)
    for step in range(start, STEPS):
        optimizer.zero_grad()
        backward(model(batch(site, step)).square().mean())
        for each in model.parameters():
            each.data.mul_(0.9)
        optimizer.step()


class Pair:
    """A generator and a critic whose parameters have the same names."""

    def __init__(self, site: Site, *, first_counts: bool, in_one: bool = True) -> None:
        """Begin, and go on where there is a checkpoint.

        `first_counts`: the steps of the critic, which steps first, are the run's. `in_one`: the
        checkpoint gets both optimizers; else the second one is something else to save.
        """
        self.site = site
        self.generator, self.critic = (
            DistributedDataParallel(net(seed).to(site.device)) for seed in (1, 2)
        )
        self.generator_optimizer = torch.optim.Adam(self.generator.parameters(), lr=0.01)
        self.critic_optimizer = torch.optim.RMSprop(self.critic.parameters(), lr=0.01)
        models = [self.generator, self.critic]
        optimizers = [self.generator_optimizer, self.critic_optimizer]
        if first_counts:
            models, optimizers = models[::-1], optimizers[::-1]
        site.attach(models, optimizers)
        if in_one:
            self.start = site.checkpoint(models, optimizers)
        else:
            self.start = site.checkpoint(models, optimizers[0], extra={"other": optimizers[1]})

    def step_critic(self, step: int) -> None:
        self.critic_optimizer.zero_grad()
        site = self.site
        noise, real = batch(site, 1000 + step), batch(site, step)
        fake = self.generator(noise).detach()
        backward(self.critic(fake).square().mean() - self.critic(real).square().mean())
        self.critic_optimizer.step()
        for each in self.critic.parameters():
            each.data.clamp_(-0.3, 0.3)

    def step_generator(self, step: int) -> None:
        self.generator_optimizer.zero_grad()
        backward(self.critic(self.generator(batch(self.site, 2000 + step))).square().mean())
        self.generator_optimizer.step()


def critic_counts(site: Site) -> None:
    """The first of two optimizers counts: a step ends with the other one's."""
    pair = Pair(site, first_counts=True)
    for step in range(pair.start, STEPS):
        pair.step_critic(step)
        pair.step_generator(step)


def generator_counts(site: Site) -> None:
    """The last of two optimizers counts."""
    pair = Pair(site, first_counts=False)
    for step in range(pair.start, STEPS):
        pair.step_critic(step)
        pair.step_generator(step)


def other_is_extra(site: Site) -> None:
    """The second optimizer is saved along as something of the script's own."""
    pair = Pair(site, first_counts=True, in_one=False)
    for step in range(pair.start, STEPS):
        pair.step_critic(step)
        pair.step_generator(step)


def three_critic_steps(site: Site) -> None:
    """The critic takes three steps for each that counts."""
    pair = Pair(site, first_counts=False)
    for step in range(pair.start, STEPS):
        for part in range(3):
            pair.step_critic(10 * step + part)
        pair.step_generator(step)


def generator_every_other(site: Site) -> None:
    """The critic's steps count, and the generator steps after each second one."""
    pair = Pair(site, first_counts=True)
    for step in range(pair.start, STEPS):
        pair.step_critic(step)
        if step % 2:
            pair.step_generator(step)


def three_after_the_counted(site: Site) -> None:
    """What steps last, three times, does not count."""
    pair = Pair(site, first_counts=True)
    for step in range(pair.start, STEPS):
        pair.step_critic(step)
        for part in range(3):
            pair.step_generator(10 * step + part)


def averaged(site: Site) -> None:
    """A loop without DistributedDataParallel, whose scheduler has the last word on a step."""
    model = net(1).to(site.device)
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
    site.average_gradients(optimizer)
    start = site.checkpoint(model, optimizer, scheduler=scheduler)
    for step in range(start, STEPS):
        optimizer.zero_grad()
        backward(model(batch(site, step)).square().mean())
        optimizer.step()
        scheduler.step()
        for each in model.parameters():
            each.data.clamp_(-0.02, 0.02)


def normalised(site: Site) -> None:
    """Buffers that a forward pass changes, and a generator of which it draws."""
    model = DistributedDataParallel(
        nn.Sequential(net(1), nn.BatchNorm1d(WIDTH), nn.Dropout(0.3), net(2)).to(site.device)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    site.attach(model, optimizer)
    torch.manual_seed(3)
    start = site.checkpoint(model, optimizer)
    for step in range(start, STEPS):
        optimizer.zero_grad()
        with model.no_sync():
            backward(model(batch(site, step)).square().mean())
        backward(model(batch(site, step, 6)).square().mean())
        optimizer.step()


def looking_ahead(site: Site) -> None:
    """Slow weights of the script's own, which replace the fast ones every third step."""
    model = DistributedDataParallel(net(1).to(site.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    slow = net(1).to(site.device)
    site.attach(model, optimizer)
    start = site.checkpoint(model, optimizer, extra={"slow": slow})
    for step in range(start, STEPS):
        optimizer.zero_grad()
        backward(model(batch(site, step)).square().mean())
        optimizer.step()
        if step % 3 == 1:
            with torch.no_grad():
                for mean, each in zip(slow.parameters(), model.parameters(), strict=True):
                    mean.lerp_(each, 0.5)
            model.module.load_state_dict(slow.state_dict())


def sharded(site: Site) -> None:
    """What a rank holds of a model is kept within bounds, too."""
    model = net(1).to(site.device)
    fully_shard(model[0])
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    site.attach(model, optimizer)
    start = site.checkpoint(model, optimizer)
    for step in range(start, STEPS):
        optimizer.zero_grad()
        backward(model(batch(site, step)).square().mean())
        optimizer.step()
        for each in model.parameters():
            local_of(each).clamp_(-0.02, 0.02)


def half_precision(site: Site) -> None:
    """A scale that changes after each step, and whose first steps are left out."""
    model = DistributedDataParallel(net(1).to(site.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler(site.device.type, init_scale=2.0**120, growth_interval=1)
    site.attach(model, optimizer)
    step = site.checkpoint(model, optimizer, extra={"scaler": scaler})
    while step < STEPS:
        optimizer.zero_grad()
        scale = scaler.get_scale()
        backward(scaler.scale(model(batch(site, step)).square().mean()))
        scaler.step(optimizer)
        scaler.update()
        step += scaler.get_scale() >= scale


SCRIPTS = [
    swapped,
    pointed_elsewhere,
    clamped,
    moved_to,
    schedule_free,
    sharp,
    decayed_by_hand,
    critic_counts,
    generator_counts,
    other_is_extra,
    three_critic_steps,
    generator_every_other,
    three_after_the_counted,
    averaged,
    normalised,
    looking_ahead,
    sharded,
    half_precision,
]


QUICK = {swapped, clamped, schedule_free, critic_counts, other_is_extra, averaged, sharded}


@pytest.mark.slow
@pytest.mark.parametrize(
    "script",
    [
        pytest.param(each, id=each.__name__, marks=[] if each in QUICK else pytest.mark.exhaustive)
        for each in SCRIPTS
    ],
)
def test_a_script_goes_on_in_the_same_bits(run: Run, script: Callable[[Site], None]) -> None:
    check_goes_on(run, script)


def check_goes_on(run: Run, script: Callable[[Site], None]) -> None:
    whole = run.join("whole")
    script(whole)
    whole.leave()
    steps = [each.step for each in checkpoints_in(str(run.folder / "whole"))]
    assert sorted(steps) == [2, 4, 6]
    for step in (2, 4):
        resumed = run.join(f"from-{step}", resume=step)
        script(resumed)
        resumed.leave()
        expected, found = run.final("whole"), run.final(f"from-{step}")
        assert found.keys() == expected.keys()
        different = [name for name, each in found.items() if not torch.equal(each, expected[name])]
        assert not different, f"from step {step}"


def train(site: Site, steps: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        backward(model(batch(site, step)).square().mean())
        optimizer.step()


def told_of(site: Site, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, str]]:
    """Return a list that gets what a site tells of checkpoints: kind, step, and reason."""
    told: list[tuple[str, int, str]] = []

    def note(kind: str, step: int, _: object, labels: dict[str, str] | None = None) -> None:
        if kind.startswith("checkpoint"):
            told.append((kind, step, (labels or {}).get("reason", "")))

    monkeypatch.setattr(site._parts.rank.records, "record", note)
    return told


@pytest.mark.parametrize("change", ["half", "shape"])
def test_a_model_that_has_become_another_one_is_not_saved_as_the_one_that_was_trained(
    run: Run, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As scripts make one for export, at the end."""
    site = run.join("whole")
    model = DistributedDataParallel(net(1).to(site.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    site.attach(model, optimizer)
    told = told_of(site, monkeypatch)
    site.checkpoint(model, optimizer)
    train(site, 3, model, optimizer)
    if change == "half":
        model.module.half()
    else:
        model.module[0].weight.data = torch.zeros(2, WIDTH)
    site.leave()
    assert [(kind, step) for kind, step, _ in told] == [("checkpoint", 2), ("checkpoint_failed", 3)]
    assert "rank 0: TypeError: 0.weight is " in told[1][2]
    assert "call site.leave() before the model becomes another one" in told[1][2]


def test_an_optimizer_that_would_be_lost_is_named(run: Run) -> None:
    site = run.join("whole")
    models = [DistributedDataParallel(net(seed).to(site.device)) for seed in (1, 2)]
    optimizers = [torch.optim.Adam(each.parameters()) for each in models]
    site.attach(models, optimizers)
    with pytest.raises(TypeError, match=r"optimizer 1 of site\.attach would not be saved"):
        site.checkpoint(models, optimizers[0])
    assert site.checkpoint(models, optimizers) == 0


def test_a_parameter_of_two_optimizers_is_named(run: Run) -> None:
    site = run.join("whole")
    model = DistributedDataParallel(net(1).to(site.device))
    optimizers = [torch.optim.Adam(model.parameters()) for _ in range(2)]
    site.attach(model, optimizers)
    with pytest.raises(TypeError, match=r"two optimizers train 0\.weight"):
        site.checkpoint(model, optimizers)


class Unreadable:
    """Its state cannot be had."""

    def state_dict(self) -> dict[str, Any]:
        raise KeyError("mean")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise AssertionError(state_dict)


def test_what_cannot_be_copied_is_named_with_its_place_and_ends_no_training(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = run.join("whole")
    model = DistributedDataParallel(net(1).to(site.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    site.attach(model, optimizer)
    told = told_of(site, monkeypatch)
    site.checkpoint(model, optimizer, extra={"ema": Unreadable()})
    train(site, 4, model, optimizer)
    site.leave()
    assert [(kind, step) for kind, step, _ in told] == [
        ("checkpoint_failed", 2),
        ("checkpoint_failed", 4),
    ]
    place = "KeyError: 'mean', in state_dict, sites/test_checkpoint_of_one_step.py:"
    assert told[0][2].startswith(f"rank 0: {place}")


def test_memory_of_copies_is_kept() -> None:
    staging = Staging(torch.device("cpu"))
    weight = nn.Parameter(torch.arange(6.0).view(2, 3).t())
    first = staging.copies({"a": weight, "tied": weight, "count": torch.tensor(1)})
    assert torch.equal(first["a"], weight)
    assert first["a"].stride() == weight.stride()
    assert first["tied"] is first["a"]
    with torch.no_grad():
        weight.zero_()
    assert first["a"].sum() == 15
    again = staging.copies({"a": weight, "tied": weight})
    assert again["a"].data_ptr() == first["a"].data_ptr()
    assert staging.copies({"a": torch.ones(3)})["a"].tolist() == [1, 1, 1]
