"""Memory of an accelerator.

Reference: Korthikanti et al., MLSys'23 (as encoded in Calculon's validation), GiB a GPU;
Megatron-LM, docs/user-guide/features/dist_optimizer.md, bytes a parameter.
"""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.topology.cost.memory import (
    exchange_bytes,
    memory,
    outer_optimizer_bytes,
    stage_memories,
)
from isthmus.topology.spec.model_shape import Degrees, Workload
from isthmus.topology.spec.workload import RECOMPUTES
from tests.topology.cost_cases import gpt

GIB = 2**30


@pytest.mark.parametrize(
    ("shape", "cut", "batch", "micro_batch", "states", "kept_none", "kept_selective"),
    [
        ((48, 6144, 64), (1, 1), 4, 4, 45.5625, 59.25, 9.5625),
        ((96, 12288, 96), (8, 3), 64, 1, 45.5625, 66.84, 12.35),
        ((105, 20480, 128), (35, 3), 280, 1, 31.64, 114.02, 23.08),
        ((128, 25600, 160), (64, 1), 512, 1, 32.96, 131.25, 26.56),
    ],
)
def test_korthikanti(
    shape: tuple[int, int, int],
    cut: tuple[int, int],
    batch: int,
    micro_batch: int,
    states: float,
    kept_none: float,
    kept_selective: float,
) -> None:
    """States 11 %, for theirs leave out the embedding; activations 3 %."""
    workload = gpt(*shape, gradient_bytes=4)
    none = Degrees(tensor=8, pipeline=cut[0], virtual_stages=cut[1], micro_batch=micro_batch)
    found = memory(workload, none, batch)
    assert found.states / GIB == pytest.approx(states, rel=0.11)
    assert found.activations / GIB == pytest.approx(kept_none, rel=0.03)
    selective = dataclasses.replace(none, recompute="selective", sequence_parallel=True)
    kept = memory(workload, selective, batch).activations
    assert kept / GIB == pytest.approx(kept_selective, rel=0.03)


@pytest.mark.parametrize(
    ("widths", "zero_stage", "fixed", "divided"),
    [
        ((2, 4), 0, 18, 0),
        ((2, 4), 1, 6, 12),
        ((2, 4), 2, 2, 16),
        ((2, 4), 3, 0, 18),
        ((2, 2), 0, 20, 0),
        ((2, 2), 1, 4, 16),
        ((4, 4), 0, 16, 0),
        ((4, 4), 1, 8, 8),
    ],
)
def test_bytes_a_parameter(
    widths: tuple[int, int], zero_stage: int, fixed: int, divided: int
) -> None:
    workload = dataclasses.replace(
        gpt(12, 1024, 16), parameter_bytes=widths[0], gradient_bytes=widths[1]
    )
    degrees = Degrees(data=8, zero_stage=zero_stage)
    found = memory(workload, degrees, 8).states / workload.parameters
    assert found == pytest.approx(fixed + divided / 8)


def test_a_layer_by_hand() -> None:
    """s b h (10 + 24/t + 5 a s/(h t)), and 2 s b h with full recomputation."""
    workload = gpt(1, 1024, 16)
    sbh, attention = 2048 * 2 * 1024, 5 * 16 * 2048 / 1024
    degrees = Degrees(tensor=4, micro_batch=2)
    assert memory(workload, degrees, 2).activations == sbh * (10 + 24 / 4 + attention / 4)
    halved = dataclasses.replace(degrees, context=2, fused_attention=True)
    assert memory(workload, halved, 2).activations == sbh / 2 * (10 + 24 / 4)
    full = memory(workload, dataclasses.replace(degrees, recompute="full"), 2)
    assert full.activations == 2 * sbh
    assert full.activations + full.recomputed == sbh * (10 + 24 / 4 + attention / 4)
    assert full.logits == 4 * 2048 * 2 * 51200 / 4


def test_pipelines_keep_what_is_in_flight() -> None:
    workload = gpt(16, 1024, 16)
    one = memory(workload, Degrees(pipeline=4), 1).activations
    assert memory(workload, Degrees(pipeline=4), 3).activations == 3 * one
    assert memory(workload, Degrees(pipeline=4), 9).activations == 4 * one
    interleaved = memory(workload, Degrees(pipeline=4, virtual_stages=2), 9).activations
    assert interleaved == pytest.approx(4 * one * (1 + 3 / 8))


def test_the_fullest_stage_decides() -> None:
    """14 layers over four stages: 3, 4, 4, 3, and the second may need more than the first."""
    workload = dataclasses.replace(gpt(14, 1024, 16), tied=False)
    degrees = Degrees(pipeline=4)
    first, second, last = stage_memories(workload, degrees, 9).values()
    kept = second.activations / (3 * 4)
    assert first.activations == pytest.approx(4 * 3 * kept)
    assert last.activations == pytest.approx(3 * kept)
    assert (first.logits, second.logits) == (0.0, 0.0)
    assert last.logits > 0
    layer = workload.dense_parameters_per_layer + workload.expert_parameters_per_layer
    assert first.parameters == 2 * (3 * layer + workload.embedding_parameters)
    assert second.parameters == 2 * 4 * layer
    assert last.parameters == 2 * (3 * layer + workload.head_parameters)
    assert memory(workload, degrees, 9).total == max(each.total for each in (first, second, last))


def test_experts_are_spread_over_replicas() -> None:
    workload = Workload(
        layers=4, hidden=256, heads=4, sequence=128, vocabulary=512, experts=8, experts_per_token=2
    )
    alone = memory(workload, Degrees(data=8), 8)
    spread = memory(workload, Degrees(data=8, expert=8), 8)
    experts = workload.layers * workload.expert_parameters_per_layer
    assert alone.parameters - spread.parameters == pytest.approx(2 * experts * 7 / 8)
    # What ZeRO 1 cuts is shared by fewer replicas where experts are spread: 12 bytes each remain
    # once.
    cut = memory(workload, Degrees(data=8, expert=8, zero_stage=1), 8)
    dense = workload.parameters - experts
    assert cut.optimizer == pytest.approx(12 * dense / 8 + 12 * experts / 8)


@settings(max_examples=80)
@given(
    layers=st.integers(1, 24).map(lambda count: 2 * count),
    tensor=st.sampled_from((1, 2, 8)),
    pipeline=st.sampled_from((1, 2)),
    data=st.sampled_from((1, 4, 64)),
    micro_batch=st.integers(1, 4),
    fused=st.booleans(),
    sequence_parallel=st.booleans(),
)
def test_memory_falls_with_zero_and_with_recomputation(
    layers: int,
    tensor: int,
    pipeline: int,
    data: int,
    micro_batch: int,
    fused: bool,
    sequence_parallel: bool,
) -> None:
    workload = gpt(layers, 1024, 16, gradient_bytes=4)
    degrees = Degrees(
        tensor=tensor,
        pipeline=pipeline,
        data=data,
        micro_batch=micro_batch,
        fused_attention=fused,
        sequence_parallel=sequence_parallel,
    )
    batch = 4 * data * micro_batch
    by_zero = [
        memory(workload, dataclasses.replace(degrees, zero_stage=stage), batch).total
        for stage in range(4)
    ]
    by_recompute = [
        memory(workload, dataclasses.replace(degrees, recompute=recompute), batch).total
        for recompute in RECOMPUTES
    ]
    for totals in (by_zero, by_recompute):
        for more, less in itertools.pairwise(totals):
            assert less <= more * (1 + 1e-12), totals


def test_what_crossing_sites_adds() -> None:
    assert outer_optimizer_bytes(1000) == 8000
    assert outer_optimizer_bytes(1000, num_fragments=4) == 2000
    # A whole bucket and a shard of each element; with feedback a shard more; by itself, no shard
    # beside.
    assert exchange_bytes(1000, 4, is_sharded=False, has_residual=False) == 4 * (1000 + 250)
    assert exchange_bytes(1000, 4, is_sharded=False, has_residual=True) == 4 * (1000 + 250 + 250)
    assert exchange_bytes(1000, 4, is_sharded=True, has_residual=True) == 4 * (250 + 250 + 250)
    assert exchange_bytes(1000, 1, is_sharded=False, has_residual=True) == 4 * (1000 + 1000)
