"""One rank's checkpoints: what is saved is what comes back, into folders and to URLs."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from pathlib import Path

import fsspec
import numpy as np
import pytest
import torch
from torch import nn

from protos.checkpoint.manifest import Manifest
from protos.checkpoint.store import checkpoints_in
from protos.errors import BadCheckpointError, ConfigMismatchError
from sites.checkpoint.checkpoints import Checkpoints
from sites.checkpoint.exchange_state import ExchangeState
from sites.checkpoint.interval import FIRST_STEPS, Interval
from sites.checkpoint.run_objects import RunObjects
from sites.checkpoint.training_state import TrainingState
from sites.checkpoint.writer import Place
from sites.worker.attendance import Attendance
from sites.worker.site import scale_learning_rates
from topology.job import Checkpoint

pytestmark = pytest.mark.usefixtures("process_group")
CPU = torch.device("cpu")


class Owing(ExchangeState):
    """Notes what a resumed run goes on with."""

    def __init__(self) -> None:
        super().__init__(None, None, None)
        self.resumed: list[dict[str, object]] = []

    def resume(self, saved: dict[str, object], residuals: Path | None) -> None:
        self.resumed.append(saved)


class Training:
    """A model with a buffer, an optimizer with a schedule, and their checkpoints."""

    def __init__(
        self,
        store: str,
        folder: Path,
        *,
        resume: str | None = None,
        width: int = 5,
        later: int = 0,
    ) -> None:
        """With `later`, there is a second site of so many ranks, which takes no part."""
        self.model = nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, gamma=0.5)
        self.written: list[int] = []
        state, self.exchange = TrainingState(self.model, self.optimizer), Owing()
        attendance = Attendance()
        attendance.begin_without([1] if later else [])
        self.checkpoints = Checkpoints(
            settings=Checkpoint(every_steps=2, keep=2, to=store, resume=resume),
            place=Place(
                store=store, local=folder / "local", run="run", job="job", generation=1,
                site="a", rank=0, ranks={"a": 1, "b": later} if later else {"a": 1}, keep=2,
            ),
            device=CPU,
            state=state,
            objects=RunObjects(state, {"scheduler": self.scheduler}, self.exchange),
            exchange=self.exchange,
            data=lambda: {"next": 7, "holes": []},
            attendance=attendance,
            on_written=self.note_written,
            on_waiting=self.note_waiting,
        )  # fmt: skip
        self.optimizer.register_step_pre_hook(lambda *_: self.checkpoints.complete())

    def note_written(self, step: int, *_: float) -> None:
        self.written.append(step)

    def note_waiting(self) -> None:
        pass

    def take(self, steps: range) -> None:
        for step in steps:
            self.optimizer.zero_grad()
            torch.autograd.backward(self.model(torch.randn(4, 3)).square().sum())
            self.optimizer.step()
            self.checkpoints.after_step(step)
            self.scheduler.step()

    def state(self) -> list[torch.Tensor]:
        held = [*self.model.state_dict().values()]
        for each in self.optimizer.state.values():
            held += each.values()
        return [each.clone() for each in held]


class SlowTraining(Training):
    """Its checkpoints are not written before training has said that it waits for one."""

    def __init__(self, store: str, folder: Path) -> None:
        self.waited = threading.Event()
        super().__init__(store, folder)

    def note_written(self, step: int, *_: float) -> None:
        assert self.waited.wait(30)
        super().note_written(step)

    def note_waiting(self) -> None:
        self.waited.set()


def test_who_waits_for_a_slow_store_says_so(tmp_path: Path) -> None:
    training = SlowTraining(str(tmp_path / "store"), tmp_path)
    training.checkpoints.start(lambda value: value, 0)
    training.take(range(1, 4))
    assert not training.waited.is_set()
    assert training.written == []
    training.take(range(4, 5))
    assert training.waited.is_set()
    training.checkpoints.finish(4)
    assert training.written == [2, 4]


@pytest.mark.parametrize("where", ["folder", "url"])
def test_what_was_saved_comes_back(tmp_path: Path, where: str) -> None:
    store = str(tmp_path / "store") if where == "folder" else f"memory://{tmp_path.name}/store"
    training = Training(store, tmp_path)
    assert training.checkpoints.resume() is None
    training.checkpoints.start(lambda value: value, 0)
    training.take(range(1, 6))
    training.checkpoints.finish(5)
    assert training.written == [2, 4, 5]
    stored = checkpoints_in(store)
    assert [each.name for each in stored] == ["step-00000005", "step-00000004"], "two are kept"
    expected = training.state()
    draws = (torch.rand(1).item(), random.random(), np.random.default_rng, np.random.rand())

    resumed = Training(store, tmp_path, resume=stored[0].place)
    manifest = resumed.checkpoints.resume()
    assert isinstance(manifest, Manifest)
    assert (manifest.step, manifest.data) == (5, {"next": 7, "holes": []})
    assert all(map(torch.equal, resumed.state(), expected))
    assert resumed.scheduler.state_dict() == training.scheduler.state_dict()
    assert resumed.optimizer.param_groups[0]["lr"] == training.optimizer.param_groups[0]["lr"]
    again = (torch.rand(1).item(), random.random(), np.random.default_rng, np.random.rand())
    assert again == draws
    resumed.checkpoints.finish(5)
    assert resumed.written == [], "nothing new"
    if where == "url":
        fsspec.filesystem("memory").rm(store, recursive=True)


def test_what_is_owed_comes_back_where_chunks_are_cut_for_the_same_ranks(tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    training = Training(store, tmp_path, later=2)
    training.checkpoints.start(lambda value: value, 0)
    training.take(range(1, 3))
    training.checkpoints.finish(2)
    (stored,) = checkpoints_in(store)
    for later, is_owed in ((2, True), (3, False), (0, False)):
        resumed = Training(store, tmp_path, resume=stored.place, later=later)
        manifest = resumed.checkpoints.resume()
        assert manifest is not None
        assert manifest.ranks == {"a": 1}, "b takes no part"
        assert bool(resumed.exchange.resumed) is is_owed


def test_another_model_is_refused(tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    training = Training(store, tmp_path)
    training.checkpoints.start(lambda value: value, 0)
    training.take(range(1, 3))
    training.checkpoints.finish(2)
    (stored,) = checkpoints_in(store)
    other = Training(store, tmp_path, resume=stored.place, width=6)
    with pytest.raises(ConfigMismatchError, match=r"0.weight has shape \[6, 3\] here, \[5, 3\]"):
        other.checkpoints.resume()
    (Path(stored.place) / "shared" / "objects.pt").unlink()
    with pytest.raises(BadCheckpointError, match=r"objects\.pt is missing"):
        Training(store, tmp_path, resume=stored.place).checkpoints.resume()


def test_training_goes_on_where_nothing_can_be_written(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "store").write_text("a file, not a folder")
    training = Training(str(tmp_path / "store"), tmp_path)
    training.checkpoints.start(lambda value: value, 0)
    training.take(range(1, 4))
    training.checkpoints.finish(3)
    assert training.written == []
    assert "isthmus: the checkpoint of step 2 failed: " in capfd.readouterr().err


def test_a_scheduler_goes_on_from_scaled_learning_rates() -> None:
    rates = []
    for scale in (1.0, 0.5):
        optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.8)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        optimizer.step()
        scheduler.step()
        scale_learning_rates(optimizer, scheduler, scale)
        optimizer.step()
        scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates == pytest.approx([0.8 / 3, 0.4 / 3])


def never(value: float) -> float:
    raise AssertionError(f"ranks need not agree on {value}")


def due(
    interval: Interval, steps: range, pass_step: Callable[[], None] = lambda: None
) -> list[int]:
    found = []
    for step in steps:
        pass_step()
        if interval.is_due(step):
            found.append(step)
    return found


@pytest.mark.parametrize(("start", "expected"), [(0, [3, 6, 9]), (4, [6, 9]), (6, [9])])
def test_an_interval_of_steps_is_counted_from_the_runs_first(
    start: int, expected: list[int]
) -> None:
    interval = Interval(Checkpoint(every_steps=3), start, never)
    assert due(interval, range(start + 1, 12)) == expected


def test_an_interval_of_time_becomes_as_many_steps_at_every_rank() -> None:
    clocks = {"slow": [0.0, 0.15], "fast": [0.0, 0.05]}
    found = {}
    for name, clock in clocks.items():

        def pass_step(clock: list[float] = clock) -> None:
            clock[0] += clock[1]

        def now_s(clock: list[float] = clock) -> float:
            return clock[0]

        interval = Interval(Checkpoint(every_s=2.0), 0, lambda _: 0.1, now_s)  # the agreed mean
        found[name] = due(interval, range(1, 70), pass_step)
    assert found["slow"] == found["fast"] == [20, 40, 60]
    assert FIRST_STEPS < 20
