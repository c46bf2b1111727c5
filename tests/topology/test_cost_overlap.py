"""What backward hides; and what that asks of a WAN."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.topology.cost.collectives import Channel, Level, all_reduce_s, overlap
from isthmus.topology.cost.parallel import gradients_ready_s
from isthmus.topology.spec.model_shape import Degrees
from tests.topology.cost_cases import bytes_per_s_needed


def test_buckets_by_hand() -> None:
    # Ready at 1, 2 and 9, 3 each: sent by 4, 7 and 12.
    found = overlap([1.0, 2.0, 9.0], 3.0)
    assert (found.busy_s, found.exposed_s, found.hidden_s) == (9.0, 3.0, 6.0)


def test_accumulation_leaves_only_the_last_micro_batch() -> None:
    """A step of 7 s of backward in 48 micro-batches hides 0.15 s, not 7."""
    wan_s = 1.0
    whole = overlap(gradients_ready_s(Degrees(), 50, 7.0), wan_s / 50)
    last = overlap(gradients_ready_s(Degrees(), 50, 7.0 / 48), wan_s / 50)
    assert whole.exposed_s == pytest.approx(wan_s / 50)
    assert last.exposed_s == pytest.approx(wan_s - 7.0 / 48 * 49 / 50)


@pytest.mark.parametrize(
    ("bytes_per_s", "expected_s"), [(4e9, 203.0), (64e9, 12.6875), (1024e9, 0.79296875)]
)
def test_crosspipe(bytes_per_s: float, expected_s: float) -> None:
    """Two sites, 406e9 parameters in bf16: 2 alpha + 2 N / rate, exactly (Chen et al., ATC'25)."""
    alpha_s = 0.064
    link = [Level(2, Channel(bytes_per_s, alpha_s))]
    assert all_reduce_s(link, 2 * 406e9) == pytest.approx(2 * alpha_s + expected_s, rel=1e-12)


NEMOTRON_STEP_S, NEMOTRON_BACKWARD_S = 10.3, 6.87
"""3,072 H100, 340e9 parameters, 21 ms of round trip between two sites, 96 % efficiency (NVIDIA,
NeMo 2025, which states no bandwidth)."""


@pytest.mark.parametrize(
    ("gradient_bytes", "window_s", "low", "high"),
    [
        (2, NEMOTRON_BACKWARD_S, 0.7e12, 0.8e12),
        (4, NEMOTRON_BACKWARD_S, 1.4e12, 1.6e12),
        (2, 0.0, 12e12, 13.5e12),
        (4, 0.0, 24.5e12, 27e12),
    ],
)
def test_nemo_needs(gradient_bytes: int, window_s: float, low: float, high: float) -> None:
    """The bandwidth, in bit/s, that 96 % needs with and without overlap."""
    exchanged = 340e9 * gradient_bytes
    needed = bytes_per_s_needed(exchanged, NEMOTRON_STEP_S, window_s, 0.96, delay_s=0.0105)
    assert low <= 8 * needed <= high


def test_latency_alone_costs_little() -> None:
    assert 0.021 / NEMOTRON_STEP_S < 0.005
    assert bytes_per_s_needed(1.0, 10.0, 0.0, 0.999, delay_s=0.021) == math.inf


@given(
    num_buckets=st.integers(1, 30),
    window_s=st.floats(0, 10),
    bucket_s=st.floats(0, 10),
    faster=st.floats(1, 1000),
)
def test_faster_links_expose_no_more(
    num_buckets: int, window_s: float, bucket_s: float, faster: float
) -> None:
    ready = gradients_ready_s(Degrees(), num_buckets, window_s)
    slow, fast = overlap(ready, bucket_s), overlap(ready, bucket_s / faster)
    assert fast.exposed_s <= slow.exposed_s + 1e-9
    assert slow.exposed_s <= slow.busy_s + 1e-9
    assert overlap(ready, 0.0).exposed_s == pytest.approx(0.0, abs=1e-12)
