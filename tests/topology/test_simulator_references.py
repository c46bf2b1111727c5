"""A graph of Streaming DiLoCo against the figures of its paper; the simulator takes no part."""

from __future__ import annotations

import pytest

from isthmus.topology.simulator.engine import SimulationError
from tests.topology.streaming_diloco import LocalSgd, utilisation

# Douillard et al., "Streaming DiLoCo with overlapping communication", arXiv 2501.18512, table 4:
# Gbit/s with which two replicas compute 50, 80, 90, 95 and 99 % of the time. bf16 but for the last
# row, rounds of 100 steps, fragments of 3 layers. The paper tries the bandwidths of logspace(-1, 3,
# 50), and prints the last one below the share.
SHARES = (0.5, 0.8, 0.9, 0.95, 0.99)
GRID_STEP = 10 ** (4 / 49)
MODELS = {"1B": (24, 0.1, 1e9), "10B": (48, 0.8, 1e10), "100B": (108, 4.9, 1e11)}
"""Layers, seconds a step, parameters."""
WAYS: dict[str, dict[str, int]] = {
    "data parallel": {},
    "diloco": {"every": 100},
    "streaming": {"every": 100, "fragment_layers": 3},
    "overlapped": {"every": 100, "fragment_layers": 3, "overlap_steps": 1},
    "fp4": {"every": 100, "fragment_layers": 3, "overlap_steps": 1, "bits": 4},
}
TABLE_4 = {
    ("1B", "data parallel"): (86.8, 152.6, 184.2, 222.3, 569.0),
    ("1B", "diloco"): (1.4, 6.2, 13.3, 23.3, 86.8),
    ("1B", "streaming"): (1.4, 5.2, 9.1, 16.0, 28.1),
    ("1B", "overlapped"): (1.4, 4.3, 6.2, 9.1, 11.0),
    ("1B", "fp4"): (0.4, 0.9, 1.7, 2.0, 3.0),
    ("10B", "data parallel"): (104.8, 222.3, 222.3, 268.3, 471.5),
    ("10B", "diloco"): (1.7, 7.5, 16.0, 33.9, 104.8),
    ("10B", "streaming"): (1.7, 5.2, 9.1, 13.3, 19.3),
    ("10B", "overlapped"): (1.7, 3.6, 5.2, 6.2, 7.5),
    ("10B", "fp4"): (0.4, 0.9, 1.4, 1.4, 1.7),
    ("100B", "data parallel"): (184.2, 323.8, 390.7, 390.7, 471.5),
    ("100B", "diloco"): (3.0, 11.0, 23.3, 49.4, 184.2),
    ("100B", "streaming"): (2.4, 6.2, 9.1, 11.0, 19.3),
    ("100B", "overlapped"): (1.7, 3.6, 4.3, 5.2, 5.2),
    ("100B", "fp4"): (0.5, 0.9, 1.1, 1.1, 1.4),
}


@pytest.mark.slow
@pytest.mark.parametrize(("model", "way"), TABLE_4)
def test_streaming_diloco_needs_the_bandwidth_of_table_4(model: str, way: str) -> None:
    """All 75 within one step of the paper's grid, a factor of 1.21."""
    num_layers, step_s, num_parameters = MODELS[model]
    replicas = LocalSgd(
        num_layers=num_layers, step_s=step_s, num_parameters=num_parameters, **WAYS[way]
    )
    for share, printed in zip(SHARES, TABLE_4[model, way], strict=True):
        on_grid = _nearest(printed * 1e9)
        # The paper's value is below the share and the next one is not; one step either way is
        # granted.
        assert utilisation(replicas, on_grid / GRID_STEP, rounds=1) < share, (share, printed)
        assert utilisation(replicas, on_grid * GRID_STEP**2, rounds=1) >= share, (share, printed)


def _nearest(bits_per_s: float) -> float:
    grid = [10 ** (8 + 4 * index / 49) for index in range(50)]
    return min(grid, key=lambda each: abs(each - bits_per_s))


def test_local_sgd_says_what_it_wants() -> None:
    with pytest.raises(ValueError, match="less than a round, 10"):
        LocalSgd(num_layers=2, step_s=1.0, num_parameters=1.0, every=10, overlap_steps=10)
    with pytest.raises(ValueError, match="two replicas at least"):
        LocalSgd(num_layers=2, step_s=1.0, num_parameters=1.0, num_replicas=1)
    with pytest.raises(SimulationError, match="more than 0"):
        utilisation(LocalSgd(num_layers=2, step_s=1.0, num_parameters=1.0), 0.0)


def test_rounds_far_apart_hide_delays_and_a_free_link_costs_nothing() -> None:
    near = LocalSgd(num_layers=8, step_s=0.1, num_parameters=1e8, every=50)
    assert utilisation(near, 1e18) == pytest.approx(1.0)
    assert utilisation(near, 1e9, rtt_s=1.0) < utilisation(near, 1e9)
    # Of one round, 50 steps of 0.1 s and an exchange of 1.6 s, of which a part is behind backward.
    assert 5 / 6.6 < utilisation(near, 1e9) < 5 / 6.5
