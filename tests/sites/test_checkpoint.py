"""One rank's checkpoints: what is saved is what comes back, into folders and to URLs."""

from __future__ import annotations

import errno
import math
import random
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import nn
from torch.optim import lr_scheduler as rates

from isthmus.protos.checkpoint.manifest import Manifest, StoredFile
from isthmus.protos.checkpoint.store import StoredCheckpoint, checkpoints_in, opened
from isthmus.protos.errors import BadCheckpointError, ConfigMismatchError
from isthmus.sites.checkpoint import export, writer
from isthmus.sites.checkpoint.checkpoints import Checkpoints
from isthmus.sites.checkpoint.exchange_state import ExchangeState
from isthmus.sites.checkpoint.interval import FIRST_STEPS, Interval
from isthmus.sites.checkpoint.place import Place
from isthmus.sites.checkpoint.run_objects import RunObjects
from isthmus.sites.checkpoint.training_state import TrainingState
from isthmus.sites.checkpoint.writer import agree_on_step
from isthmus.sites.worker.data.learning_rates import scale_learning_rates
from isthmus.sites.worker.exchange.collectives import ensure_process_group
from isthmus.sites.worker.exchange.gateway_link import AloneLink
from isthmus.sites.worker.exchange.missing_sites import MissingSites
from isthmus.topology.spec.job import Checkpoint
from tests.fakes.s3 import S3

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
        store: str | tuple[str, ...],
        folder: Path,
        *,
        resume: str | None = None,
        width: int = 5,
        later: int = 0,
        site: str = "a",
        sync_every: int = 1,
    ) -> None:
        """With `later`, there is a second site of so many ranks: `b`, which is late for `a`."""
        stores = (store,) if isinstance(store, str) else store
        self.model = nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, gamma=0.5)
        self.written: list[int] = []
        self.step = 0
        self.failed: list[tuple[int, str]] = []
        self.store_failed: list[tuple[int, str]] = []
        self.stay: list[tuple[int, str]] = []
        state, self.exchange = TrainingState(self.model, self.optimizer), Owing()
        self.missing_sites = MissingSites()
        self.missing_sites.begin_without([1] if later and site == "a" else [])
        self.checkpoints = Checkpoints(
            settings=Checkpoint(every_steps=2, keep=2, to=stores, resume=resume),
            places=[
                Place(
                    store=store, local=folder / "local", run="run", job="job", generation=1,
                    site=site, rank=0, local_rank=0,
                    ranks={"a": 1, "b": later} if later else {"a": 1}, keep=2,
                )
                for store in stores
            ],
            device=CPU,
            objects=RunObjects(state, {"scheduler": self.scheduler}, self.exchange),
            data=lambda: {"next": 7, "holes": []},
            missing_sites=self.missing_sites,
            make_common=lambda **_: self.step % sync_every == 0,
            landing=lambda: None,
            sync_every=lambda: sync_every,
            on_written=self.note_written,
            on_failed=lambda *told: self.failed.append(told),
            on_store_failed=lambda *told: self.store_failed.append(told),
            on_stays=lambda *told: self.stay.append(told),
            on_waiting=self.note_waiting,
        )  # fmt: skip
        self.checkpoints.watch([self.optimizer])

    def note_written(self, step: int, *_: float) -> None:
        self.written.append(step)

    def note_waiting(self) -> None:
        pass

    def take(self, steps: range) -> None:
        for step in steps:
            self.step = step
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


class LosingTraining(Training):
    """Its second site is lost while the first waits for its part of a checkpoint."""

    def __init__(self, store: str, folder: Path) -> None:
        super().__init__(store, folder, later=1)
        self.missing_sites.rejoin(1)

    def note_waiting(self) -> None:
        self.missing_sites.begin_without([1])


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


def test_the_part_of_a_site_that_is_lost_meanwhile_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "PARTS_S", math.inf)
    store = str(tmp_path / "store")
    training = LosingTraining(store, tmp_path)
    training.checkpoints.start(lambda value: value, 0)
    training.take(range(1, 3))
    training.checkpoints.finish(2)
    (saved,) = checkpoints_in(store)
    assert saved.manifest().missing == ("b",)


def test_who_waits_for_a_slow_store_says_so(tmp_path: Path) -> None:
    training = SlowTraining(str(tmp_path / "store"), tmp_path)
    training.checkpoints.start(lambda value: value, 0)
    training.take(range(1, 4))
    assert not training.waited.is_set()
    assert training.written == []
    training.take(range(4, 6))
    assert training.waited.is_set()
    training.checkpoints.finish(5)
    assert training.written == [2, 4, 5]


@pytest.mark.parametrize("asked", [None, 9])
def test_where_rounds_have_several_steps_it_is_saved_with_the_next_that_ends(
    tmp_path: Path, asked: int | None
) -> None:
    """Every second step is wanted, and maybe one that somebody has asked for."""
    training = Training(str(tmp_path / "store"), tmp_path, sync_every=5)
    training.checkpoints.start(lambda value: value, 0)
    training.take(range(1, 5))
    assert training.written == []
    schedule = training.checkpoints._schedule
    assert schedule is not None
    schedule._interval = Interval(Checkpoint(every_steps=15), 0, lambda value: value)
    schedule._requests.step = asked
    training.take(range(5, 18))
    training.checkpoints.finish(17)
    assert training.written == ([15] if asked is None else [10, 15])


@pytest.mark.parametrize("where", ["folder", "url"])
def test_what_was_saved_comes_back(tmp_path: Path, where: str, s3: S3) -> None:
    store = str(tmp_path / "store") if where == "folder" else s3.url()
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
    assert not (tmp_path / "local").exists(), "nothing passes over a disk of the site"


def test_what_is_owed_comes_back_where_chunks_are_cut_for_the_same_ranks(tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    training = Training(store, tmp_path, later=2)
    training.checkpoints.start(lambda value: value, 0)
    training.take(range(1, 3))
    training.checkpoints.finish(2)
    (stored,) = checkpoints_in(store)
    for later, has_residual in ((2, True), (3, False), (0, False)):
        resumed = Training(store, tmp_path, resume=stored.place, later=later)
        manifest = resumed.checkpoints.resume()
        assert manifest is not None
        assert manifest.ranks == {"a": 1}, "b takes no part"
        assert bool(resumed.exchange.resumed) is has_residual


@pytest.mark.parametrize("steps", [[(4,), (4,)], [(3, 4), (4,)], [(4,), (2, 3, 4), (3, 4)]])
def test_ranks_that_heard_of_a_checkpoint_too_late_hold_nobody_up(
    steps: list[tuple[int, ...]],
) -> None:
    """Those that have begun one give it up by name, and the next one is of one step everywhere."""
    everybody = threading.Barrier(len(steps), timeout=30)
    slots = [(0, "")] * len(steps)
    written: list[list[int]] = [[] for _ in steps]
    problems: list[list[str]] = [[] for _ in steps]

    def save(rank: int) -> None:
        def tell_all(told_here: tuple[int, str]) -> list[tuple[int, str]]:
            slots[rank] = told_here
            everybody.wait()
            told = list(slots)
            everybody.wait()
            return told

        for step in steps[rank]:
            try:
                agree_on_step(step, "", tell_all)
                written[rank].append(step)
            except OSError as error:
                problems[rank].append(str(error))

    threads = [threading.Thread(target=save, args=(rank,)) for rank in range(len(steps))]
    for each in threads:
        each.start()
    for each in threads:
        each.join(30)
    assert written == [[4]] * len(steps)
    assert [len(each) for each in problems] == [len(each) - 1 for each in steps]
    assert all("had passed step" in each for found in problems for each in found)


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
    assert [step for step, _ in training.failed] == [2, 3]
    assert "rank 0: " in training.failed[0][1]


class FullStderr:
    """Its file is on the disk that is full."""

    def write(self, _: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_failure_is_told_where_the_log_is_on_the_same_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "store").write_text("a file, not a folder")
    training = Training(str(tmp_path / "store"), tmp_path)
    monkeypatch.setattr(sys, "stderr", FullStderr())
    training.checkpoints.start(lambda value: value, 0)
    training.take(range(1, 3))
    training.checkpoints.finish(2)
    assert [step for step, _ in training.failed] == [2]


def test_what_failed_leaves_no_room_taken_in_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(stored: StoredCheckpoint, file: StoredFile) -> None:
        assert Path(stored.place, file.path).exists()
        raise OSError(errno.ENOSPC, "No space left on device", file.path)

    training = Training(str(tmp_path / "store"), tmp_path)
    with monkeypatch.context() as disk:
        disk.setattr(StoredCheckpoint, "verify", full)
        training.checkpoints.start(lambda value: value, 0)
        training.take(range(1, 3))
        training.checkpoints._save()
        training.checkpoints._writer.wait()
        assert [step for step, _ in training.failed] == [2]
        assert list((tmp_path / "store").iterdir()) == []
    training.take(range(3, 5))
    training.checkpoints.finish(4)
    assert training.written == [4]


class Keeping(ExchangeState):
    """Has a gateway that was asked twice, and has written."""

    def save(self, residuals: Path) -> dict[str, object]:
        residuals.parent.mkdir(parents=True, exist_ok=True)
        residuals.write_text(residuals.name)
        return super().save(residuals)

    @property
    def has_residuals(self) -> bool:
        return True


def test_each_store_has_all_and_the_gateways_last_file_counts(tmp_path: Path, s3: S3) -> None:
    stores = (str(tmp_path / "store"), s3.url("europe"), s3.url("america"))
    training = Training(stores, tmp_path)
    training.checkpoints._objects.exchange = Keeping(None, None, None)
    training.checkpoints.start(lambda value: value, 0)
    training.take(range(1, 3))
    assert training.checkpoints._due is not None
    for _ in range(2):
        training.checkpoints._copy(training.checkpoints._due)
    training.checkpoints.finish(2)
    assert (training.written, training.failed, training.store_failed) == ([2], [], [])
    held = [
        {
            stored.path: stored.digest
            for stored in checkpoints_in(store)[0].verified().files
            if not stored.path.endswith(".metadata")  # torch writes an id of its own into each
        }
        for store in stores
    ]
    assert held[0] == held[1] == held[2]
    with opened(checkpoints_in(stores[2])[0].place) as (files, root):
        assert files.cat_file(f"{root}/own/a/0.residuals.npz") == b"0.residuals-1.npz"
    assert list((tmp_path / "local").iterdir()) == []


def test_a_store_that_fails_is_named_and_the_other_holds_the_checkpoint(
    tmp_path: Path, s3: S3, capfd: pytest.CaptureFixture[str]
) -> None:
    stores = s3.url("europe"), s3.url("america")
    training = Training(stores, tmp_path)
    training.checkpoints.start(lambda value: value, 0)
    training.take(range(1, 3))
    training.checkpoints._save()
    training.checkpoints._writer.wait()
    with s3.without("europe"):
        training.take(range(3, 5))
        training.checkpoints._save()
        training.checkpoints._writer.wait()
        [(step, why)] = training.store_failed
        assert step == 4
        assert why.startswith(f"{stores[0]}: rank 0: [Errno 13] the region is gone: ")
        assert f"the checkpoint of step 4 is not in {stores[0]}: " in capfd.readouterr().err
    with s3.without("europe"), s3.without("america"):
        training.take(range(5, 7))
        training.checkpoints._save()
        training.checkpoints._writer.wait()
    assert [step for step, _ in training.failed] == [6]
    training.take(range(7, 9))
    training.checkpoints.finish(8)
    assert training.written == [2, 4, 8]
    assert [step for step, _ in training.store_failed] == [4]
    steps = [[each.step for each in checkpoints_in(store)] for store in stores]
    assert steps == [[8, 2], [8, 4]], "what is left of 4 and 6 goes"


def test_one_that_cannot_be_removed_is_named_and_the_new_one_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def refuse(stored: StoredCheckpoint) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", stored.name)

    monkeypatch.setattr(StoredCheckpoint, "remove", refuse)
    training = Training(str(tmp_path / "store"), tmp_path)
    training.checkpoints.start(lambda value: value, 0)
    training.take(range(1, 7))
    training.checkpoints.finish(6)
    assert (training.written, training.failed) == ([2, 4, 6], [])
    why = "[Errno 13] Permission denied: 'step-00000002'"
    assert training.stay == [(2, why)]
    assert f"isthmus: the checkpoint of step 2 cannot be removed: {why}" in capfd.readouterr().err


def test_a_rank_that_cannot_copy_its_tensors_is_named_and_holds_nobody_up() -> None:
    told = [(4, ""), (4, "rank 1 of site a: out of memory")]
    for rank in range(2):
        with pytest.raises(OSError, match="rank 1 of site a: out of memory"):
            agree_on_step(*told[rank], lambda _: told)


def test_ranks_may_wait_for_the_next_checkpoint_for_days(tmp_path: Path) -> None:
    """A group of gloo's in which a collective was not in time is of no use for the next either."""
    group = Training(str(tmp_path / "store"), tmp_path).checkpoints._writer.group
    assert group.gloo.options._timeout >= timedelta(days=30)


@pytest.mark.parametrize("last", [3, 4])
def test_the_last_checkpoint_needs_no_process_group_of_the_script(
    tmp_path: Path, last: int
) -> None:
    """A script may destroy its groups after its last step, be that saved already or not."""
    training = Training(str(tmp_path / "store"), tmp_path)
    training.checkpoints.start(lambda value: value, 0)
    training.take(range(1, last + 1))
    dist.destroy_process_group()
    training.checkpoints.finish(last)
    ensure_process_group(CPU, 30.0)  # what the fixture ends
    assert (training.written, training.failed) == ([2, last], [])


def test_where_residuals_cannot_be_written_training_does_not_hear_of_it(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("a file, not a folder")
    exchange = ExchangeState(AloneLink(), None, None)
    exchange.save(tmp_path / "store" / "own" / "0.residuals.npz")
    assert exchange.has_residuals


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda each: rates.LambdaLR(each, lambda step: 1 / (1 + step)), id="lambda"),
        pytest.param(
            lambda each: rates.SequentialLR(
                each,
                [rates.LinearLR(each, 0.1, total_iters=4), rates.CosineAnnealingLR(each, 20)],
                [4],
            ),
            id="warm-up, then cosine",
        ),
        pytest.param(
            lambda each: rates.ChainedScheduler(
                [
                    rates.LambdaLR(each, lambda step: 1 / (1 + step)),
                    rates.ExponentialLR(each, 0.9),
                ]
            ),
            id="chained",
        ),
        pytest.param(lambda each: rates.OneCycleLR(each, 0.8, total_steps=20), id="one cycle"),
        pytest.param(lambda each: rates.CyclicLR(each, 0.1, 0.8, step_size_up=4), id="cycles"),
        pytest.param(lambda each: rates.CosineAnnealingLR(each, 20, 0.1), id="cosine to a floor"),
        pytest.param(
            lambda each: rates.CosineAnnealingWarmRestarts(each, 5, eta_min=0.1), id="restarts"
        ),
    ],
)
@pytest.mark.parametrize("at", [2, 6])
def test_a_scheduler_goes_on_from_scaled_learning_rates(
    make: Callable[[torch.optim.Optimizer], rates.LRScheduler], at: int
) -> None:
    found = []
    for scale in (1.0, 0.5):
        optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.8, momentum=0.9)
        scheduler = make(optimizer)
        for step in range(12):
            if step == at:
                scale_learning_rates([optimizer], [scheduler], scale)
            optimizer.step()
            scheduler.step()
            found.append(optimizer.param_groups[0]["lr"])
    whole, halved = found[:12], found[12:]
    assert halved[: at - 1] == whole[: at - 1]
    assert halved[at:] == pytest.approx([0.5 * each for each in whole[at:]])


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


@pytest.mark.parametrize("every", [2, 5, 7, 9])
def test_an_interval_is_due_at_the_same_steps_wherever_a_run_goes_on(every: int) -> None:
    """Where steps can be saved in every fourth alone."""
    steps = range(4, 100, 4)
    whole = due(Interval(Checkpoint(every_steps=every), 0, never), steps)
    for place, start in enumerate(whole):
        resumed = Interval(Checkpoint(every_steps=every), start, never)
        assert due(resumed, range(start + 4, 100, 4)) == whole[place + 1 :]


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


def test_an_export_that_cannot_be_written_says_so_in_one_line_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "step-00000001"
    place.mkdir()
    manifest = Manifest(run="run", job="job", step=1, written_s=0.0, ranks={})
    (place / "manifest.json").write_bytes(manifest.to_bytes())
    assert export.main([str(place), str(tmp_path / "absent" / "x")]) == 1
    assert "No such file or directory" in capsys.readouterr().err

    def full(tensors: object, file: Path, metadata: object) -> None:
        file.write_bytes(b"some")
        raise SafetensorError("No space left on device")

    monkeypatch.setattr(export, "model_tensors", lambda _: {})
    monkeypatch.setattr(export, "save_file", full)
    assert export.main([str(place), str(tmp_path / "x")]) == 1
    assert capsys.readouterr().err == "No space left on device\n"
    assert list(tmp_path.iterdir()) == [place]
