"""What backward hides; and what that asks of a WAN."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.topology.cost_cases import bytes_per_s_needed
from topology.cost.collectives import (
    Channel,
    Level,
    all_reduce_s,
    fifo_ends_s,
    overlap,
    ready_times_s,
)


def test_one_resource_serves_in_order() -> None:
    assert fifo_ends_s([1.0, 2.0, 9.0], [3.0, 1.0, 1.0]) == [4.0, 5.0, 10.0]
    with pytest.raises(ValueError, match="shorter"):
        fifo_ends_s([1.0, 2.0], [3.0])


def test_three_stages_by_hand() -> None:
    # Buckets at 1 and 2; 0.5 inside, 2 across, 0.25 inside: the WAN is busy from 1.5 to 5.5.
    found = overlap([1.0, 2.0], [[0.5, 0.5], [2.0, 2.0], [0.25, 0.25]], 2.0, delay_s=0.1)
    assert found.busy_s == 4.0
    assert found.exposed_s == pytest.approx(5.5 + 0.25 + 0.1 - 2.0)
    assert found.hidden_s == pytest.approx(4.0 - 3.85)
    nothing = overlap([], [[]], 2.0)
    assert (nothing.busy_s, nothing.exposed_s, nothing.hidden_s) == (0.0, 0.0, 0.0)


def test_buckets_become_ready_evenly() -> None:
    assert ready_times_s([4, 4, 2], 1.0, 5.0) == pytest.approx([4.4, 4.8, 5.0])


def test_accumulation_leaves_only_the_last_micro_batch() -> None:
    """A step of 7 s of backward in 48 micro-batches hides 0.15 s, not 7."""
    buckets, wan_s = [1] * 50, 1.0
    durations_s = [wan_s / 50] * 50
    whole = overlap(ready_times_s(buckets, 7.0, 7.0), [durations_s], 7.0)
    last = overlap(ready_times_s(buckets, 7.0 / 48, 7.0), [durations_s], 7.0)
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
    # Bucket by bucket, it is so.
    buckets = [1] * 1000
    ready = ready_times_s(buckets, window_s, NEMOTRON_STEP_S)
    crossing = [exchanged / 1000 / needed] * 1000
    found = overlap(ready, [crossing], NEMOTRON_STEP_S, delay_s=0.0105)
    efficiency = NEMOTRON_STEP_S / (NEMOTRON_STEP_S + found.exposed_s)
    assert efficiency == pytest.approx(0.96, abs=0.001)


def test_latency_alone_costs_little() -> None:
    assert 0.021 / NEMOTRON_STEP_S < 0.005
    assert bytes_per_s_needed(1.0, 10.0, 0.0, 0.999, delay_s=0.021) == math.inf


@settings(max_examples=80, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 1000), min_size=1, max_size=30),
    window_s=st.floats(0, 10),
    rate=st.floats(1, 1e6),
    faster=st.floats(1, 1000),
)
def test_faster_links_expose_no_more(
    sizes: list[int], window_s: float, rate: float, faster: float
) -> None:
    ready = ready_times_s(sizes, window_s, 10.0)
    slow = overlap(ready, [[size / rate for size in sizes]], 10.0)
    fast = overlap(ready, [[size / rate / faster for size in sizes]], 10.0)
    assert fast.exposed_s <= slow.exposed_s + 1e-9
    assert slow.exposed_s <= slow.busy_s + 1e-9
    free = overlap(ready, [[0.0] * len(sizes)], 10.0)
    assert free.exposed_s == pytest.approx(0.0, abs=1e-12)
