"""Training without DistributedDataParallel: as one process does, and bit-identical at all sites."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from isthmus.protos import metrics
from isthmus.sites.worker.exchange.bucket_pipeline import MAX_BUCKETS
from tests.fakes.gateways import FakeGateways
from tests.fakes.ranks import Program
from tests.fakes.two_sites import check_digests, check_equal, run
from tests.sites import training_programs as programs
from tests.sites.worker_programs import build, loss_of, tokens_of

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]


def reference(
    model: nn.Module,
    loss_of_rank: Callable[[int, int], torch.Tensor],
    num_ranks: int,
    *,
    weight_decay: float,
    clip_norm: float | None,
) -> tuple[list[float], list[float]]:
    """Train in one process on the batches of all ranks; return losses and norms."""
    optimizer = torch.optim.SGD(
        model.parameters(), lr=programs.LEARNING_RATE, momentum=0.9, weight_decay=weight_decay
    )
    losses, norms = [], []
    for step in range(programs.NUM_STEPS):
        optimizer.zero_grad()
        tokens = [tokens_of(step, rank) for rank in range(num_ranks)]
        parts = [
            weight / sum(tokens) * loss_of_rank(step, rank)
            for rank, weight in enumerate(tokens)
            if weight
        ]
        loss = torch.stack(parts).sum()
        torch.autograd.backward(loss)
        losses.append(float(loss.detach()))
        if clip_norm is not None:
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), clip_norm)))
        optimizer.step()
    return losses, norms


def check_steps(gateways: FakeGateways) -> None:
    """All ranks had the same parameters in every step, and each step's parts fill it."""
    digests = [each[2] for each in gateways.digests]
    check_digests(digests, programs.NUM_STEPS, sum(gateways.ranks_per_site))
    steps = [each[2] for each in gateways.metrics if each[2]["kind"] == metrics.STEP]
    assert len(steps) == len(gateways.ranks_per_site) * programs.NUM_STEPS
    for message in steps:
        values = message["values"]
        parts = [metrics.COMPUTE_S, metrics.INTRA_S, metrics.EXPOSED_INTER_S, metrics.WAIT_S]
        assert sum(values[part] for part in parts) == pytest.approx(values[metrics.STEP_S])


@pytest.mark.parametrize("codec", ["split", "int4"])
def test_a_plain_loop_trains_as_one_process(tmp_path: Path, codec: str) -> None:
    saved, gateways = run(tmp_path, programs.train_plain, (1, 2), job=[f"exchange.codec={codec}"])
    model = programs.Odd(seed=0)

    def loss_of_rank(step: int, rank: int) -> torch.Tensor:
        return torch.stack([model.loss(step, rank, 2, micro) / 2 for micro in (0, 1)]).sum()

    losses, _ = reference(model, loss_of_rank, 3, weight_decay=0.1, clip_norm=None)
    for found in saved.values():
        assert found["losses"] == pytest.approx(losses, rel=1e-5)
        for key, value in model.state_dict().items():
            torch.testing.assert_close(
                found["final"][key], value, rtol=1e-4, atol=1e-5, equal_nan=True
            )
    assert torch.equal(found["final"]["never"], torch.ones(2)), "weight decay has left it alone"
    check_equal(saved)
    check_steps(gateways)
    first = [each[2] for each in gateways.metrics if each[2]["step"] == 1]
    (tokens,) = {each["values"]["tokens"] for each in first if each["kind"] == metrics.STEP}
    assert tokens == 2 * sum(tokens_of(0, rank) for rank in range(3)), "of both micro-batches"
    lists = [each for each in gateways.reduced if each["bucket"] >= MAX_BUCKETS]
    assert {each["exact"] for each in lists if each["numel"] > 1} == (
        {False} if codec == "split" else {False, True}
    )


@pytest.mark.parametrize(
    ("ranks_per_site", "codec"),
    [
        ((2, 2), "split"),
        pytest.param((1, 3), "int8", marks=pytest.mark.exhaustive),
        pytest.param((3, 2), "split", marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_sharded_models_train_as_one_process(
    tmp_path: Path, ranks_per_site: tuple[int, ...], codec: str
) -> None:
    job = [f"exchange.codec={codec}", "exchange.bucket=64KiB"]
    saved, gateways = run(tmp_path, programs.train_sharded, ranks_per_site, job=job)
    net = build(seed=0)

    def loss_of_rank(step: int, rank: int) -> torch.Tensor:
        num_micro = 1 if step < 2 else 2
        parts = [loss_of(net, step, rank, micro, torch.float32) for micro in range(num_micro)]
        return torch.stack(parts).mean()

    losses, norms = reference(
        net, loss_of_rank, sum(ranks_per_site), weight_decay=0.0, clip_norm=programs.CLIP_NORM
    )
    for found in saved.values():
        assert found["losses"] == pytest.approx(losses, rel=1e-5)
        assert found["norms"] == pytest.approx(norms, rel=1e-5)
        for key, value in net.state_dict().items():
            if key.startswith("layers"):
                torch.testing.assert_close(found["final"][key], value, rtol=1e-4, atol=1e-5)
    check_equal(saved)
    check_steps(gateways)
    num_flags = len([*net.parameters()])  # which say what was used, and always cross exactly
    in_steps = [
        each
        for each in gateways.reduced
        if each["bucket"] < 100 and each["round"] > 4 and each["numel"] != num_flags
    ]
    assert {each["exact"] for each in in_steps} == ({False} if codec == "split" else {False, True})


@pytest.mark.parametrize(
    ("program", "text"),
    [
        (programs.train_sharded_wrongly, "parameter bias: it is not sharded by fully_shard"),
        (programs.train_with_an_early_optimizer, "parameter weight has a hook that runs when"),
    ],
    ids=["unsharded", "optimizer"],
)
def test_what_would_not_be_averaged_is_refused(tmp_path: Path, program: Program, text: str) -> None:
    saved, _ = run(tmp_path, program, (1, 1))
    assert len(saved) == 2
    assert all(text in each["text"] for each in saved.values())
