"""The simulator against published figures: source and tolerance stand with each."""

from __future__ import annotations

import pytest

from tests.topology.streaming_diloco import LocalSgd, utilisation
from topology.cost.model_shape import Degrees
from topology.cost.parallel import passages
from topology.simulator.engine import SimulationError
from topology.simulator.pipeline import (
    Stage,
    StageLink,
    one_f_one_b,
    simulate_pipeline,
)

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


# Chen et al., "CrossPipe", USENIX ATC 2025, table 5: Llama-70B, 8 stages in two data centers, 16
# micro-batches, forward 0.038 s; seconds a micro-batch with 1F1B, by latency and bandwidth delay of
# the link between, each in forwards. What the paper measured has stalls of NCCL's rendezvous in it:
# the simulation may be faster, by 12 %.
@pytest.mark.parametrize(
    ("latency", "transfer", "measured_s"),
    [(0, 0, 0.151), (0.25, 0.25, 0.168), (0.25, 2, 0.241), (2, 0.25, 0.242), (2, 2, 0.321)],
)
def test_1f1b_over_a_wan_takes_what_crosspipe_measured(
    latency: float, transfer: float, measured_s: float
) -> None:
    forward_s, backward_s = 0.038, 0.067  # the latter from the row without delays
    links = [StageLink() for _ in range(7)]
    links[3] = StageLink(message_s=transfer * forward_s, delay_s=latency * forward_s)
    stages = [Stage(forward_s=forward_s, backward_s=backward_s)] * 8
    simulated_s = simulate_pipeline(stages, links, 16).step_s / 16
    assert -0.12 <= simulated_s / measured_s - 1 <= 0.02


@pytest.mark.parametrize("num_micro_batches", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("num_parts", [1, 3])
def test_fewer_micro_batches_than_stages_leave_them_idle(
    num_parts: int, num_micro_batches: int
) -> None:
    """The cost model's passages.

    Interleaving does not help a micro-batch that has nobody to alternate with.
    """
    degrees = Degrees(pipeline=4, virtual_stages=num_parts)
    links = [StageLink()] * (4 if num_parts > 1 else 3)
    found = simulate_pipeline(
        [Stage(forward_s=0.3, backward_s=0.6)] * 4, links, num_micro_batches, num_parts
    )
    expected = num_micro_batches + passages(degrees, num_micro_batches)
    assert found.step_s == pytest.approx(0.9 * expected)


@pytest.mark.parametrize(
    ("num_stages", "num_parts", "num_micro_batches"),
    [(4, 1, 8), (4, 2, 8), (8, 4, 16), (2, 3, 4), (1, 1, 5)],
)
def test_bubbles_are_those_of_the_formula(
    num_stages: int, num_parts: int, num_micro_batches: int
) -> None:
    """Narayanan et al., SC'21, section 2.2: the bubble is (p - 1) / (v m) of the ideal time.

    Exact.
    """
    stages = [Stage(forward_s=1.0, backward_s=2.0)] * num_stages
    links = [StageLink()] * (num_stages if num_parts > 1 else num_stages - 1)
    found = simulate_pipeline(stages, links, num_micro_batches, num_parts)
    ideal_s = 3.0 * num_micro_batches
    bubble = (num_stages - 1) / (num_parts * num_micro_batches)
    assert found.step_s == pytest.approx(ideal_s * (1 + bubble))
    assert found.bubble == pytest.approx(bubble / (1 + bubble))


def test_a_schedule_does_every_block_once_and_each_after_what_it_needs() -> None:
    blocks = one_f_one_b(4, 1, 8, 2)
    assert len(set(blocks)) == len(blocks) == 2 * 8 * 2
    for block in blocks:
        if not block.is_forward:
            forward = next(
                each
                for each in blocks
                if each.is_forward
                and (each.micro_batch, each.part) == (block.micro_batch, block.part)
            )
            assert blocks.index(forward) < blocks.index(block)


def test_pipelines_that_cannot_be_are_refused() -> None:
    stages = [Stage(forward_s=1.0, backward_s=2.0)] * 4
    with pytest.raises(SimulationError, match="want 3 for 4 stages, got 1"):
        simulate_pipeline(stages, [StageLink()], 8)
