"""Modelled compute: time passes layer by layer, gradients are real, and nothing adds up."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from isthmus.sites.trainer.gpt import Gpt
from isthmus.sites.trainer.learning import make_optimizer
from isthmus.sites.trainer.modelled import ComputeClock, ModelledGpt, real_pass, take_modelled_step
from isthmus.topology.spec.compute import LayerTime
from isthmus.topology.spec.job import Model, Trainer

MODEL = Model(layers=2, heads=2, width=8, context=16)
CONFIG = Trainer(model=MODEL, global_batch=5, micro_batch=2, seed=3)
TEXT = np.arange(4000, dtype=np.int64).astype(np.uint8)
TIMES = [LayerTime(forward_s, 2 * forward_s) for forward_s in (0.0, 1.0, 1.0, 0.5)]
"""How long the embedding, two blocks and the head take."""


class FakeTime:
    """A clock that sleeping moves, by a little more than was asked for."""

    def __init__(self, oversleep_s: float = 0.0) -> None:
        self.at_s = 100.0
        self.oversleep_s = oversleep_s
        self.clock = ComputeClock(lambda: self.at_s, self.sleep)

    def sleep(self, duration_s: float) -> None:
        assert duration_s > 0
        self.at_s += duration_s + self.oversleep_s


def modelled(time: FakeTime) -> tuple[ModelledGpt, list[torch.Tensor]]:
    """A model after its real pass, and copies of the gradients that it left."""
    gpt = Gpt(MODEL, seed=1)
    real_pass(gpt, TEXT, CONFIG, np.arange(5))
    gradients = [each.grad.clone() for each in gpt.parameters() if each.grad is not None]
    return ModelledGpt(gpt, TIMES, time.clock), gradients


def test_waking_late_does_not_add_up() -> None:
    time = FakeTime(oversleep_s=0.01)
    time.clock.begin()
    for _ in range(50):
        time.clock.compute(0.1)
    assert time.at_s == pytest.approx(105.0 + 0.01)
    time.at_s += 3.0  # work that takes longer than what was modelled
    time.clock.compute(0.1)
    assert time.at_s == pytest.approx(108.01), "no sleep"
    time.clock.begin()
    time.clock.compute(1.0)
    assert time.at_s == pytest.approx(109.02)


def test_gradients_come_layer_by_layer_at_the_right_times() -> None:
    time = FakeTime()
    model, gradients = modelled(time)
    ready_s: dict[str, float] = {}
    for name, parameter in model.named_parameters():

        def note(_: torch.Tensor, name: str = name) -> None:
            ready_s[name] = time.at_s - 100.0

        parameter.register_post_accumulate_grad_hook(note)  # type: ignore[no-untyped-call]
    passed = model(3)
    assert time.at_s == pytest.approx(100.0 + 3 * 2.5)
    torch.autograd.backward(passed)
    expected_s = {"norm": 10.5, "blocks.1": 16.5, "blocks.0": 22.5, "embedding": 22.5}
    for prefix, at_s in {**expected_s, "position": 22.5}.items():
        found = [each for name, each in ready_s.items() if name.startswith(f"model.{prefix}.")]
        assert found, prefix
        assert found == pytest.approx([at_s] * len(found)), prefix
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, gradient), "the real pass's, bit for bit"


def test_a_step_takes_its_sequences_time_and_moves_the_parameters() -> None:
    time = FakeTime(oversleep_s=0.001)
    model, gradients = modelled(time)
    before = [each.detach().clone() for each in model.parameters()]
    optimizer = make_optimizer(model, CONFIG.optimizer)
    for step in range(2):
        begun_s = time.at_s
        rate = take_modelled_step(model, optimizer, time.clock, CONFIG, step, np.arange(5))
        # 5 sequences in micro-batches of 2, 2 and 1.
        assert time.at_s - begun_s == pytest.approx(5 * 7.5 + 0.001)
        assert rate == pytest.approx(CONFIG.optimizer.learning_rate * (step + 1) / 20)
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            # Each micro-batch adds the same, and none changes what was captured.
            torch.testing.assert_close(parameter.grad, 3 * gradient)
    assert any(
        not torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True)
    )


def test_the_real_pass_is_the_first_micro_batch_of_a_step() -> None:
    gpt = Gpt(MODEL, seed=1)
    loss = real_pass(gpt, TEXT, CONFIG, np.arange(5))
    whole = [each.grad.clone() for each in gpt.parameters() if each.grad is not None]
    gpt.zero_grad()
    again = real_pass(gpt, TEXT, CONFIG, np.arange(2))
    assert loss == again
    for one, other in zip(whole, gpt.parameters(), strict=True):
        assert other.grad is not None
        # Divided by 5 sequences' tokens and by 2's.
        torch.testing.assert_close(one * 2.5, other.grad)
