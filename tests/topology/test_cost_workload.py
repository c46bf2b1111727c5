"""Parameters and FLOPs of a model."""

from __future__ import annotations

import dataclasses

import pytest

from isthmus.topology.spec.compute import flops_per_sequence, num_parameters
from isthmus.topology.spec.job import Model
from isthmus.topology.spec.model_shape import Workload, workload_of
from tests.topology.cost_cases import gpt, hardware_flops


@pytest.mark.parametrize(
    ("layers", "hidden", "heads", "billions"),
    [(36, 4096, 32, 7.5), (60, 10240, 80, 76.1), (96, 12288, 96, 174.6), (128, 25600, 160, 1008.0)],
)
def test_parameters_of_gpts(layers: int, hidden: int, heads: int, billions: float) -> None:
    """SC'21, table 1 and eq. 2."""
    workload = gpt(layers, hidden, heads)
    h, positions = hidden, 51200 + 2048
    eq2 = 12 * layers * h**2 * (1 + 13 / (12 * h) + positions / (12 * layers * h))
    assert workload.parameters == round(eq2) + 2 * h  # and the last norm
    assert workload.parameters / 1e9 == pytest.approx(billions, rel=0.005)


@pytest.mark.parametrize(("recompute", "factor"), [("none", 72), ("full", 96)])
def test_flops_of_a_step(recompute: str, factor: int) -> None:
    """SC'21, eq. 3, and the same without recomputation."""
    workload, batch, s, h, v, layers = gpt(80, 12288, 96), 2304, 2048, 12288, 51200, 80
    logits = v / (factor // 6 * layers * h)
    eq3 = factor * batch * s * layers * h**2 * (1 + s / (6 * h) + logits)
    assert hardware_flops(workload, batch, recompute) == pytest.approx(eq3)


def test_selective_recomputation_repeats_the_attention() -> None:
    """Korthikanti et al., eq. 9: hardware over model FLOPs is 1 + s/(6h), about."""
    workload = dataclasses.replace(gpt(96, 12288, 96), vocabulary=1)
    ratio = hardware_flops(workload, 1, "selective") / workload.model_flops(1)
    exact = 1 + (2048 / (18 * 12288)) / (1 + 2048 / (6 * 12288))
    assert ratio == pytest.approx(exact, rel=1e-4)


def test_the_model_that_ships() -> None:
    model = Model()
    workload = workload_of(model)
    assert workload.parameters == num_parameters(model)
    # topology/spec/compute.py counts norms as if they multiplied: 0.2 % more.
    assert workload.model_flops(1) == pytest.approx(flops_per_sequence(model), rel=0.005)


def test_llama_and_mixtral() -> None:
    """Llama-3 70B: 70.6 B. Mixtral 8x7B: 46.7 B, of which a token meets 12.9 B (model cards)."""
    llama = Workload(
        layers=80, hidden=8192, heads=64, kv_heads=8, ffn=28672, gated=True, tied=False,
        sequence=8192, vocabulary=128256,
    )  # fmt: skip
    assert llama.parameters / 1e9 == pytest.approx(70.6, rel=0.005)
    mixtral = Workload(
        layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, gated=True, tied=False,
        experts=8, experts_per_token=2, sequence=4096, vocabulary=32000,
    )  # fmt: skip
    assert mixtral.parameters / 1e9 == pytest.approx(46.7, rel=0.005)
    active = mixtral.parameters - 32 * (8 - 2) * mixtral.mlp_parameters
    assert active / 1e9 == pytest.approx(12.9, rel=0.005)
    # Six FLOPs for each parameter that a token meets in a matrix, and the attention.
    tokens, matrices = mixtral.sequence, active - 32000 * 4096
    attention = 12 * 32 * 4096 * tokens
    assert mixtral.model_flops(1) == pytest.approx(tokens * (6 * matrices + attention), rel=0.001)
