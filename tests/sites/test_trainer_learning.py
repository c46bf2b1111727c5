"""Model, optimizer step and evaluation, in one process."""

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import functional

from isthmus.sites.trainer import sampler
from isthmus.sites.trainer.gpt import Gpt
from isthmus.sites.trainer.learning import (
    DivergedError,
    clip_gradients,
    evaluate,
    make_optimizer,
    take_step,
)
from isthmus.topology.spec.job import Model, Optimizer, Trainer

MODEL = Model(layers=2, heads=2, width=32, context=24)
CONFIG = Trainer(steps=10, global_batch=7, micro_batch=3, evaluation_batches=3, model=MODEL, seed=5)
TEXT = np.random.default_rng(1).integers(32, 127, 2000, dtype=np.uint8)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """As ranks have it: on a busy machine a second thread costs more than it brings."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def test_a_position_sees_only_what_is_before_it() -> None:
    model = Gpt(MODEL, 1)
    window = torch.from_numpy(sampler.windows(TEXT, np.array([0, 9]), MODEL.context))[:, :-1]
    logits = model(window)
    assert logits.shape == (2, MODEL.context, 256)
    for position in (0, 11, MODEL.context - 1):
        changed = window.clone()
        changed[:, position] ^= 1
        differs = (model(changed) != logits).any(dim=2).any(dim=0)
        assert not differs[:position].any()
        assert differs[position]


def test_the_seed_alone_makes_the_initial_weights() -> None:
    torch.manual_seed(1)
    first = Gpt(MODEL, 1)
    torch.manual_seed(2)
    state = torch.get_rng_state()
    for (name, one), other in zip(
        first.named_parameters(), Gpt(MODEL, 1).parameters(), strict=True
    ):
        assert torch.equal(one, other), name
    assert not torch.equal(first.embedding.weight, Gpt(MODEL, 2).embedding.weight)
    assert state.shape == torch.get_rng_state().shape


def test_the_default_model_starts_near_ignorance() -> None:
    model = Gpt(Model(), 1337)
    assert sum(parameter.numel() for parameter in model.parameters()) == 837_888
    starts = sampler.even_starts(4, len(TEXT) - 128)
    window = torch.from_numpy(sampler.windows(TEXT, starts, 128))
    loss = functional.cross_entropy(model(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten())
    assert float(loss.detach()) == pytest.approx(math.log(256), abs=1.0)


def test_only_matrices_decay_and_each_parameter_is_learnt_once() -> None:
    model = Gpt(MODEL, 1)
    optimizer = make_optimizer(model, Optimizer(weight_decay=0.3))
    decayed, kept = optimizer.param_groups
    assert decayed["weight_decay"] == 0.3
    assert kept["weight_decay"] == 0.0
    assert all(parameter.dim() == 2 for parameter in decayed["params"])
    assert all(parameter.dim() == 1 for parameter in kept["params"])
    learnt = [id(each) for group in optimizer.param_groups for each in group["params"]]
    assert sorted(learnt) == sorted(id(each) for each in model.parameters())


@pytest.mark.parametrize("micro_batch", [1, 2, 3, 7, 50])
def test_ragged_micro_batches_weigh_every_token_alike(micro_batch: int) -> None:
    config = replace(
        CONFIG, micro_batch=micro_batch, optimizer=Optimizer(clip_norm=1e9, warmup_steps=0)
    )
    model = Gpt(MODEL, 1)
    expected = Gpt(MODEL, 1)
    samples = np.arange(14, 21)
    starts = sampler.random_starts(config.seed, samples, len(TEXT) - MODEL.context)
    window = torch.from_numpy(sampler.windows(TEXT, starts, MODEL.context))
    loss = functional.cross_entropy(expected(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten())
    loss.backward()  # type: ignore[no-untyped-call]

    result = take_step(model, make_optimizer(model, config.optimizer), TEXT, config, 2, samples)

    assert result.tokens == 7 * MODEL.context
    assert result.loss_sum / result.tokens == pytest.approx(float(loss.detach()), rel=1e-6)
    for (name, ours), theirs in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert ours.grad is not None, name
        assert theirs.grad is not None
        # Sums of at most 168 float32 terms in another order.
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-7)
        assert not torch.equal(ours, theirs), name


def test_gradients_longer_than_the_limit_are_scaled_to_it() -> None:
    generator = torch.Generator().manual_seed(3)
    parameters = [torch.zeros(shape) for shape in ((5, 3), (7,), (2,))]
    for parameter in parameters[:2]:
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    before = [parameter.grad.clone() for parameter in parameters[:2] if parameter.grad is not None]
    norm = float(torch.cat([each.flatten() for each in before]).norm())
    assert clip_gradients(parameters, 2 * norm) == pytest.approx(norm, rel=1e-6)
    after = [parameter.grad for parameter in parameters[:2] if parameter.grad is not None]
    assert all(torch.equal(now, was) for now, was in zip(after, before, strict=True))
    assert clip_gradients(parameters, norm / 4) == pytest.approx(norm, rel=1e-6)
    for now, was in zip(after, before, strict=True):  # scaled in place
        torch.testing.assert_close(now, was / 4)


@pytest.mark.parametrize("ranks", [1, 2, 5, 13])
def test_evaluation_is_the_same_however_many_ranks_share_it(ranks: int) -> None:
    model = Gpt(MODEL, 1)
    parts = [evaluate(model, TEXT, CONFIG, ranks=ranks, rank=rank) for rank in range(ranks)]
    sequences = CONFIG.evaluation_batches * CONFIG.micro_batch
    assert sum(tokens for _, tokens in parts) == sequences * MODEL.context
    whole, _ = evaluate(model, TEXT, CONFIG, ranks=1, rank=0)
    assert sum(loss for loss, _ in parts) == pytest.approx(whole, rel=1e-6)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_gradient_that_is_not_finite_ends_the_training_and_changes_nothing() -> None:
    model = Gpt(MODEL, 1)
    optimizer = make_optimizer(model, CONFIG.optimizer)
    model.embedding.weight.register_hook(  # type: ignore[no-untyped-call]
        lambda gradient: gradient * math.nan
    )
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with pytest.raises(DivergedError, match="step 1: the gradient's norm is nan"):
        take_step(model, optimizer, TEXT, CONFIG, 0, np.arange(7))
    for parameter, old in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter, old)
