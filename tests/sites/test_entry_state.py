"""A site that rejoins takes over the very bits that the others have."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from isthmus.protos.errors import ConfigMismatchError
from isthmus.sites.checkpoint import entry_state
from isthmus.sites.checkpoint.entry_state import EntryState
from isthmus.sites.checkpoint.exchange_state import ExchangeState
from isthmus.sites.checkpoint.run_objects import RunObjects
from isthmus.sites.checkpoint.training_state import TrainingState
from isthmus.sites.worker.exchange.member_history import CatchingUp
from tests.fakes.waiting import wait_for

pytestmark = pytest.mark.usefixtures("process_group")


class Training:
    """A model with buffers, an optimizer and its schedule."""

    def __init__(self, *, seed: int, width: int = 5) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, gamma=0.5)
        state = TrainingState(self.model, self.optimizer)
        objects = RunObjects(state, {"scheduler": self.scheduler}, ExchangeState(None, None, None))
        self.waited = 0
        self.entry = EntryState(objects, lambda: {"next": 7}, lambda: (), self)
        self.optimizer.register_step_pre_hook(lambda *_: self.entry.publish())

    def progress(self, epoch: int, done_bytes: int, problem: str = "") -> None:
        assert (epoch, problem) == (9, "")

    def failed(self, step: int, reason: str) -> None:
        raise AssertionError(step, reason)

    def waiting(self) -> None:
        self.waited += 1

    def step(self) -> None:
        self.optimizer.zero_grad()
        torch.autograd.backward(self.model(torch.randn(4, 3)).square().sum())
        self.optimizer.step()

    def tensors(self) -> list[torch.Tensor]:
        held = [*self.model.state_dict().values()]
        for each in (self.optimizer.state[parameter] for parameter in self.model.parameters()):
            held += [each[key] for key in sorted(each)]
        return [each.clone() for each in held]


def wait_written(folder: Path) -> None:
    wait_for((folder / "index.json").exists, "the state, written")


def test_what_one_site_has_another_takes_over(tmp_path: Path) -> None:
    member = Training(seed=1)
    member.step()
    member.entry.write(CatchingUp(("b",), 9, tmp_path / "entry"), 1)
    for each in member.model.parameters():
        each.data.clamp_(-0.1, 0.1)  # a script may do that after the step
    expected = member.tensors()
    member.scheduler.step()
    member.model(torch.randn(4, 3))  # the next forward pass changes buffers
    member.entry.publish()
    wait_written(tmp_path / "entry")
    member.step()  # it is not the state any more that was written

    joiner = Training(seed=2)
    entered = joiner.entry.take(tmp_path / "entry")
    assert (entered.step, entered.data) == (1, {"next": 7})
    assert all(map(torch.equal, joiner.tensors(), expected))
    assert joiner.scheduler.state_dict() == member.scheduler.state_dict()
    assert joiner.optimizer.param_groups[0]["lr"] == 0.05
    assert not (tmp_path / "entry").exists()


def test_equal_sites_write_equal_bytes_and_discard_them(tmp_path: Path) -> None:
    found = []
    for site in "ab":
        training = Training(seed=1)
        training.step()
        training.entry.write(CatchingUp(("c",), 9, tmp_path / site), 1)
        folder = tmp_path / site
        training.entry.publish()
        wait_written(folder)
        found.append((folder / "tensors").read_bytes())
        training.entry.close()
        assert not folder.exists()
    assert found[0] == found[1]


def test_the_state_of_another_model_is_refused(tmp_path: Path) -> None:
    member = Training(seed=1)
    member.step()
    member.entry.write(CatchingUp(("b",), 9, tmp_path / "entry"), 1)
    member.entry.publish()
    wait_written(tmp_path / "entry")
    with pytest.raises(ConfigMismatchError, match=r"0.weight has shape \[6, 3\] here, \[5, 3\]"):
        Training(seed=2, width=6).entry.take(tmp_path / "entry")


def test_whoever_brings_tensors_together_is_not_taken_for_one_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(entry_state, "TELL_EVERY_S", 0.0)
    member = Training(seed=1)
    member.step()
    member.entry.write(CatchingUp(("b",), 9, tmp_path / "entry"), 1)
    member.entry.publish()
    # Four parameters, each with three tensors of the optimizer's.
    assert member.waited >= 16
    member.entry.close()


def test_a_state_that_is_still_being_written_gives_way_to_the_next(tmp_path: Path) -> None:
    member = Training(seed=1)
    member.step()
    for at in "ab":
        member.entry.write(CatchingUp((at,), 9, tmp_path / at), 1)
    member.entry.publish()
    wait_written(tmp_path / "b")
    member.entry.close()
    assert not (tmp_path / "a").exists()
