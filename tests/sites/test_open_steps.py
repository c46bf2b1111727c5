"""Rounds that wait for nobody: as one process does it that takes the same steps."""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.autograd import backward

from isthmus.protos import metrics
from isthmus.protos.errors import ScriptError
from isthmus.sites.local.rank_messages import FromRank, Moved, RoundEnds
from isthmus.sites.worker.regimes import round_clock
from isthmus.sites.worker.regimes.open_steps import OpenSteps
from isthmus.sites.worker.regimes.round_clock import RoundClock
from isthmus.topology.spec.regime import OuterOptimizer, regime_of
from tests.fakes.lone_exchanges import RecordingLink
from tests.fakes.lone_sites import lone_site
from tests.fakes.ranks import wait_for_all_ranks
from tests.fakes.two_sites import run
from tests.sites import layout_programs as programs
from tests.sites.test_worker_layouts import write_plan
from tests.sites.worker_programs import join_site

SYNC_EVERY = 4
SCHEDULE = [(4, 4), (4, 2), (1, 4), (0, 4), (4, 3), (4, 0), (3, 3)]
"""Steps of each site in each round; 0: it is passed over."""


class Scheduled(RoundClock):
    """Goes by a schedule, and not by the time."""

    schedule: list[int]

    def __init__(self, sync_every: int, min_steps: int) -> None:
        super().__init__(sync_every, min_steps)
        self._rest = [0, *self.schedule]

    def begin_round(self, now_s: float) -> None:
        self._rest = self._rest[1:]
        super().begin_round(now_s)

    def is_over(self, now_s: float) -> bool:
        del now_s
        return self._rest != [] and self.num_steps == self._rest[0]

    @property
    def overdue_s(self) -> float:
        return float("inf")

    @property
    def passed_over_s(self) -> float:
        return 0.0 if self._rest[:1] == [0] else float("inf")


def train(folder: Path, name: str) -> None:
    """Take as many steps in each round as the schedule has."""
    plan = json.loads((folder / "layouts.json").read_text())
    layouts, num_steps = plan["layouts"], plan["num_steps"]
    site = join_site()
    Scheduled.schedule = [each[site.index] for each in SCHEDULE]
    setattr(importlib.import_module(OpenSteps.__module__), RoundClock.__name__, Scheduled)
    layout = layouts[site.index]
    laid = programs.lay_out(layout, programs.net(seed=site.index, is_tied=plan["is_tied"]))
    optimizer = torch.optim.SGD(laid.parameters(), lr=programs.LEARNING_RATE, momentum=0.9)
    site.attach(laid.models, optimizer, beside_shards=True)
    first = sum(programs.DATA_RANKS[each] for each in layouts[: site.index])
    losses = {}
    for step in site.steps(num_steps):
        optimizer.zero_grad()
        site.count_tokens(programs.tokens_of(layout, step, laid.place))
        losses[step] = float(laid.step(*programs.data(step, first + laid.place), 1.0))
        site.clip_grad_norm_(programs.CLIP_NORM)
        optimizer.step()
    assert site.num_steps == num_steps
    final = {str(at): each.detach() for at, each in enumerate(laid.parameters())}
    saved = {"losses": losses, "place": first + laid.place, "final": final, "layout": layout}
    wait_for_all_ranks()
    site.leave()
    torch.save(saved, folder / f"{name}.pt")


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("layouts", "kind"),
    [
        (("lone", "ddp"), "diloco"),
        pytest.param(("ddp", "lone"), "local_sgd", marks=pytest.mark.exhaustive),
        pytest.param(("fsdp2", "fsdp3"), "diloco", marks=pytest.mark.exhaustive),
        pytest.param(("tp", "pp"), "diloco", marks=pytest.mark.exhaustive),
    ],
)
def test_sites_that_take_unlike_steps_train_as_one_process_does(
    tmp_path: Path, layouts: tuple[str, str], kind: str
) -> None:
    """Also in rounds that a site is passed over in: of these only its optimizer knows."""
    num_steps = SYNC_EVERY * len(SCHEDULE)
    write_plan(tmp_path, layouts, num_steps)
    ranks = [programs.RANKS[each] for each in layouts]
    job = ["exchange.bucket=64KiB", f"regime.kind={kind}", f"regime.sync_every={SYNC_EVERY}"]
    job += ["regime.min_steps=1"]
    outer = OuterOptimizer(lr=0.7, momentum=0.9, ramp_steps=5)
    if kind == "diloco":
        job += [f"regime.outer.{key}={value}" for key, value in dataclasses.asdict(outer).items()]
    saved, gateways = run(tmp_path, train, ranks, job=job)
    regime = regime_of(kind, sync_every=SYNC_EVERY, outer=outer)
    wanted, _ = programs.reference_local_steps([*layouts], num_steps, regime, schedule=SCHEDULE)
    for each in saved.values():
        site = layouts.index(each["layout"])
        taken = [
            start * SYNC_EVERY + at
            for start, of in enumerate(SCHEDULE)
            for at in range(max(1, of[site]))
        ]
        copies = 2 if each["layout"].startswith(("tp", "lone-")) else 1
        ranks_of_loss = [
            other["losses"] for other in saved.values() if other["place"] == each["place"]
        ]
        found = [sum(of.get(step, 0.0) for of in ranks_of_loss) for step in taken]
        expected = [wanted[step][each["place"]] * copies for step in taken]
        assert found == pytest.approx(expected, rel=1e-4)
    for digest_step in {each[2]["step"] for each in gateways.digests}:
        same = {each[2]["combined"] for each in gateways.digests if each[2]["step"] == digest_step}
        assert len(same) == 1, f"after step {digest_step}"


class EndsLink(RecordingLink):
    """Keeps which rounds this site has ended."""

    def __init__(self) -> None:
        super().__init__()
        self.ended: list[RoundEnds] = []
        self.num_moved = 0
        """How often it has said that it does not hang."""

    def send(self, message: FromRank, descriptor: int | None = None) -> None:
        if isinstance(message, RoundEnds):
            self.ended.append(message)
        self.num_moved += isinstance(message, Moved)
        super().send(message, descriptor)

    @property
    def records(self) -> list[tuple[int, float | None]]:
        """The steps that were recorded, and how many count in the rounds that have ended."""
        return [
            (step, values.get(metrics.ROUND_STEPS))
            for kind, step, values in self.metrics
            if kind == metrics.STEP
        ]


class OpenSite:
    """A site of one rank, and what it trains."""

    def __init__(self, link: EndsLink, min_steps: int = 1) -> None:
        regime = regime_of("local_sgd", sync_every=3, min_steps=min_steps)
        self.site = lone_site(link, regime=regime)
        self.model = nn.Linear(4, 4)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.site.attach(self.model, self.optimizer)

    def step(self) -> None:
        self.optimizer.zero_grad()
        backward(self.model(torch.ones(2, 4)).square().mean())
        self.optimizer.step()


@pytest.mark.usefixtures("process_group")
def test_the_fastest_site_says_when_a_round_ends() -> None:
    link = EndsLink()
    open_site = OpenSite(link)
    numbers = []
    for number in open_site.site.steps(6):
        numbers.append(number)
        open_site.step()
    first = open_site.site._parts.averaging.pipeline.num_rounds - 2
    assert numbers == [0, 1, 2, 3, 4, 5]
    assert [each.round for each in link.ended] == [first, first + 1]
    assert link.num_moved == 4, "once a step without a round: a gateway sees no other sign of it"
    open_site.site.leave()
    assert link.records == [(1, None), (2, None), (3, 3.0), (4, None), (5, None), (6, 3.0)]


@pytest.mark.usefixtures("process_group")
def test_steps_go_on_behind_a_round_that_has_ended_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(round_clock, "_GRACE", math.inf)  # no step is late on a busy machine
    link = EndsLink()
    open_site = OpenSite(link)
    numbers = []
    for number in open_site.site.steps(3):
        numbers.append(number)
        if number == 1:
            link.on_round_ends(RoundEnds(round=open_site.site._parts.averaging.pipeline.num_rounds))
        open_site.step()
    assert numbers == [0, 1]
    assert open_site.site.num_steps == 3
    assert not link.ended
    open_site.site.leave()
    assert link.records == [(1, None), (3, 2.0)]


@pytest.mark.usefixtures("process_group")
def test_a_script_that_counts_its_own_steps_is_refused() -> None:
    open_site = OpenSite(EndsLink())
    with pytest.raises(ScriptError, match=r"site\.steps\(num_steps\)"):
        open_site.step()
    open_site.site.leave()


@pytest.mark.usefixtures("process_group")
def test_what_a_script_averages_amid_a_round_is_refused() -> None:
    open_site = OpenSite(EndsLink())
    with pytest.raises(RuntimeError, match="not in the same step"):
        open_site.site.all_reduce([torch.ones(2)], exact=True)
    open_site.site.leave()
