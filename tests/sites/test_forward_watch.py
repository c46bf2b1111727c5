"""What is told of a model's inputs and buffers, and what is each rank's own."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from isthmus.sites.worker.checks.forward_watch import HASHED_STEPS, ForwardWatch
from isthmus.sites.worker.exchange.tensor_hashes import ParameterHashes


class Buffered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        self.register_buffer("count", torch.zeros(2))
        self.register_buffer("cache", torch.zeros(2), persistent=False)
        self.register_buffer("mean", torch.zeros(2))

    def forward(self, inputs: torch.Tensor, *_: torch.Tensor, **__: torch.Tensor) -> torch.Tensor:
        return self.inner(inputs)  # type: ignore[no-any-return]


class Watched:
    def __init__(self, verify_every: int = 2) -> None:
        self.model = Buffered()
        self.steps = 0
        self.sent: dict[int, tuple[str, ...]] = {}
        self.watch = ForwardWatch(
            [self.model],
            lambda: self.steps,
            averaged=lambda: [self.model.mean],  # type: ignore[list-item]
            verify_every=verify_every,
            send_buffers=self.send,
        )

    def send(self, step: int, hashes: ParameterHashes) -> None:
        assert step not in self.sent
        self.sent[step] = hashes.names

    def inputs(self, *args: torch.Tensor, **kwargs: torch.Tensor) -> int:
        self.model(*args, **kwargs)
        found = self.watch.take_inputs()
        self.steps += 1
        return found


ROWS = torch.arange(6.0).reshape(2, 3)
OTHER = ROWS + 1


def test_other_inputs_have_another_hash_wherever_they_stand() -> None:
    watched = Watched()
    found = [
        watched.inputs(ROWS),
        watched.inputs(OTHER),
        watched.inputs(ROWS, OTHER),
        watched.inputs(ROWS, mask=ROWS),
        watched.inputs(ROWS.to(torch.int64).float(), mask=torch.ones(9)),
    ]
    assert found[0] == found[4], "a constant tells nothing"
    assert 0 < min(found) <= max(found) < 1 << 52
    assert len({*found}) == 4


def test_constants_evaluations_and_late_steps_tell_nothing() -> None:
    watched = Watched()
    assert watched.inputs(torch.ones(2, 3)) == 0
    with torch.no_grad():
        assert watched.inputs(ROWS) == 0
    watched.steps = HASHED_STEPS
    assert watched.inputs(ROWS) == 0


@pytest.mark.parametrize("other", [0, 1])
def test_all_passes_of_a_step_count(other: int) -> None:
    found = set()
    for second in (ROWS, OTHER if other else ROWS):
        watched = Watched()
        watched.model(ROWS)
        found.add(watched.inputs(second))
    assert len(found) == 1 + other


def test_buffers_are_told_once_after_verified_steps_but_for_those_of_each_rank() -> None:
    watched = Watched()
    for _ in range(5):
        watched.model(ROWS)  # a micro-batch
        watched.inputs(ROWS)
    assert watched.sent == {2: ("count",), 4: ("count",)}
    none = Watched(verify_every=0)
    for _ in range(3):
        none.inputs(ROWS)
    assert none.sent == {}
    for each in watched.watch.undo:
        each()
    assert watched.inputs(ROWS) == 0
