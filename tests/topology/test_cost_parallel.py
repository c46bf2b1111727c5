"""Steps of one site: what cutting a model does to their time."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.topology.catalogue.accelerators import catalogue
from isthmus.topology.cost.collectives import Channel
from isthmus.topology.cost.layer_time import (
    A100,
    DEVICES,
    H100,
    Device,
    Interior,
    device_of,
    flat_device,
    interior,
    interior_of,
)
from isthmus.topology.cost.parallel import step_time
from isthmus.topology.spec.compute import layers
from isthmus.topology.spec.job import Model
from isthmus.topology.spec.model_shape import (
    Degrees,
    Workload,
    layers_of_stages,
    misfit,
    part_layers,
    workload_of,
)
from isthmus.topology.spec.units import parse_rate
from isthmus.topology.spec.world import Fabric
from tests.fakes.worlds import topology
from tests.topology.cost_cases import EOS, SELENE, gpt

FREE = Interior(node_ranks=8, node=Channel(math.inf), cluster=Channel(math.inf))
IDEAL = Device(peak_flops_per_s=100e12, gemm_efficiency=0.5)
SMALL = gpt(24, 2048, 16, gradient_bytes=4)
MOE = Workload(
    layers=8, hidden=1024, heads=16, sequence=2048, vocabulary=32000, experts=8, experts_per_token=2
)


@given(
    tensor=st.sampled_from((1, 2, 8)),
    context=st.sampled_from((1, 2)),
    data=st.sampled_from((1, 4, 16)),
    zero_stage=st.integers(0, 3),
)
def test_free_networks_and_ideal_kernels_lose_nothing(
    tensor: int, context: int, data: int, zero_stage: int
) -> None:
    degrees = Degrees(tensor=tensor, context=context, data=data, zero_stage=zero_stage)
    step_s = step_time(SMALL, degrees, IDEAL, FREE, 64).step_s
    ideal_s = SMALL.model_flops(64) / (50e12 * degrees.num_ranks)
    assert step_s == pytest.approx(ideal_s)


def test_experts_of_ideal_kernels_cost_what_a_token_meets() -> None:
    for expert in (1, 4):
        step_s = step_time(MOE, Degrees(data=4, expert=expert), IDEAL, FREE, 64).step_s
        assert step_s == pytest.approx(MOE.model_flops(64) / (50e12 * 4), rel=1e-3)


def test_a_pipeline_by_hand() -> None:
    """(m + (p-1)/v) t where the head costs nothing."""
    workload = dataclasses.replace(SMALL, vocabulary=1)
    whole_s = step_time(workload, Degrees(), IDEAL, FREE, 12).step_s / 12
    for virtual in (1, 3):
        degrees = Degrees(pipeline=4, virtual_stages=virtual)
        found = step_time(workload, degrees, IDEAL, FREE, 12)
        assert found.step_s == pytest.approx((12 + 3 / virtual) * whole_s / 4, rel=1e-3)
        assert found.window_s == pytest.approx(whole_s / 4 * 2 / 3, rel=1e-3)


@pytest.mark.parametrize("zero_stage", [1, 3])
def test_copies_by_hand(zero_stage: int) -> None:
    """ZeRO stays inside a node; a shard's gradients are all-reduced over the nodes once a step."""
    inside = Interior(node_ranks=4, node=Channel(math.inf), cluster=Channel(1e9))
    degrees = Degrees(data=12, zero_stage=zero_stage, replicate=3)
    free = step_time(SMALL, degrees, IDEAL, FREE, 24)
    found = step_time(SMALL, degrees, IDEAL, inside, 24)
    shard_bytes = 4 * SMALL.parameters / 4
    assert found.gradients.busy_s == pytest.approx(2 * shard_bytes * 2 / 3 / 1e9, rel=1e-3)
    assert found.parameters.busy_s == 0.0
    assert found.compute_s == pytest.approx(free.compute_s)
    whole = dataclasses.replace(degrees, replicate=1)
    assert step_time(SMALL, whole, IDEAL, inside, 24).step_s != pytest.approx(found.step_s)


def test_uneven_stages_by_hand() -> None:
    """Llama 3 405B: 126 layers, 16 stages; the first and the last have seven, all others eight.

    "We reduce one Transformer layer each from the first and the last stages" (The Llama 3 Herd of
    Models, section 3.3.2): with eight virtual stages the first is the embedding alone.
    """
    workload = dataclasses.replace(SMALL, layers=126)
    layer_s = step_time(workload, Degrees(), IDEAL, FREE, 1).stages_s[0] / 126
    head_s = 3 * workload.head_flops(1) / 50e12
    layer_s -= head_s / 126
    for virtual in (1, 8):
        degrees = Degrees(pipeline=16, virtual_stages=virtual)
        assert misfit(workload, degrees) is None
        assert layers_of_stages(workload, degrees) == (7, *[8] * 14, 7)
        found = step_time(workload, degrees, IDEAL, FREE, 32)
        assert found.compute_s == pytest.approx(32 * max(8 * layer_s, 7 * layer_s + head_s))
        others_s = 126 * layer_s + head_s - found.compute_s / 32
        assert found.bubble_s == pytest.approx(others_s / virtual)
        assert found.window_s == pytest.approx(126 / 16 * layer_s * 2 / 3)
    parts = part_layers(126, 128)
    assert (parts[0], parts[-1], set(parts[1:-1])) == (0, 0, {1})
    assert misfit(workload, Degrees(pipeline=43, virtual_stages=3)) is not None


@settings(max_examples=80)
@given(layers=st.integers(1, 200), pipeline=st.integers(1, 64), virtual=st.integers(1, 8))
def test_stages_have_all_layers_and_differ_by_one(layers: int, pipeline: int, virtual: int) -> None:
    workload = dataclasses.replace(SMALL, layers=layers)
    degrees = Degrees(pipeline=pipeline, virtual_stages=virtual)
    if misfit(workload, degrees) is None:
        found = layers_of_stages(workload, degrees)
        assert sum(found) == sum(part_layers(layers, pipeline * virtual)) == layers
        assert set(found) <= {layers // pipeline, -(-layers // pipeline)}
        assert found[-1] == min(found)


@pytest.mark.slow
@settings(max_examples=80)
@given(
    tensor=st.sampled_from((1, 2, 8, 16)),
    pipeline=st.sampled_from((1, 2, 4)),
    data=st.sampled_from((1, 2, 8)),
    zero_stage=st.integers(0, 3),
    overlap=st.booleans(),
    node_rate=st.floats(1e9, 1e12),
    cluster_rate=st.floats(1e8, 1e12),
    faster=st.floats(1.0, 100.0),
)
def test_faster_networks_are_never_slower(
    tensor: int,
    pipeline: int,
    data: int,
    zero_stage: int,
    overlap: bool,
    node_rate: float,
    cluster_rate: float,
    faster: float,
) -> None:
    degrees = Degrees(
        tensor=tensor,
        pipeline=pipeline,
        data=data,
        zero_stage=zero_stage,
        overlap_data=overlap,
        overlap_tensor=overlap,
    )
    slow = step_time(SMALL, degrees, A100, interior(8, node_rate, cluster_rate), 64).step_s
    for faster_node, faster_cluster in ((faster, 1.0), (1.0, faster), (faster, faster)):
        inside = interior(8, node_rate * faster_node, cluster_rate * faster_cluster)
        assert step_time(SMALL, degrees, A100, inside, 64).step_s <= slow * (1 + 1e-9)


def test_what_goes_on_beside_compute_delays_it() -> None:
    device = dataclasses.replace(IDEAL, contention=0.4)
    assert device.beside_s(1.0, 3.0) == pytest.approx(0.4)
    assert device.beside_s(3.0, 1.0) == pytest.approx(2.4)
    assert IDEAL.beside_s(1.0, 3.0) == 0.0
    degrees = Degrees(data=64, zero_stage=3, overlap_data=True)
    free, taken = (
        step_time(SMALL, degrees, dataclasses.replace(A100, contention=share), SELENE, 64)
        for share in (0.0, 0.4)
    )
    assert taken.step_s > free.step_s


def test_fused_attention_skips_what_the_mask_hides() -> None:
    device = dataclasses.replace(IDEAL, fused_efficiency=0.25)
    whole_s = 4 * 4096 * 4096 * 128 / 25e12
    assert device.fused_attention_s(4096, 4096, 128) == pytest.approx(whole_s * (1 + 1 / 32) / 2)
    assert device.fused_attention_s(64, 64, 128) == pytest.approx(4 * 64 * 64 * 128 / 25e12)
    assert IDEAL.fused_attention_s(4096, 4096, 128) == pytest.approx(whole_s / 2)


def test_stages_send_all_of_it_without_scatter_and_gather() -> None:
    degrees = Degrees(tensor=8, pipeline=4)
    whole = dataclasses.replace(degrees, scatter_gather=False)
    parts_s, whole_s = (
        step_time(SMALL, each, A100, interior(8, 300e9, 200e9, 0.0), 8).transfers_s
        for each in (degrees, whole)
    )
    assert 3 * parts_s < whole_s < 8 * parts_s  # half-bandwidth messages weigh more with parts


def test_overlap_hides_where_the_passes_are_long_enough() -> None:
    for zero_stage in range(4):
        degrees = Degrees(data=64, tensor=8, micro_batch=8, zero_stage=zero_stage)
        overlapped = dataclasses.replace(degrees, overlap_data=True)
        plain = step_time(SMALL, degrees, A100, SELENE, 512)
        hidden = step_time(SMALL, overlapped, A100, SELENE, 512)
        assert hidden.step_s < plain.step_s
        # Only the last micro-batch's backward pass hides anything.
        assert hidden.gradients.hidden_s <= hidden.window_s


def test_a_faster_accelerator_has_less_time_to_hide_in() -> None:
    degrees = Degrees(tensor=8, data=8, overlap_data=True)
    a100 = step_time(SMALL, degrees, A100, SELENE, 64)
    h100 = step_time(SMALL, degrees, H100, SELENE, 64)
    assert h100.step_s < a100.step_s
    assert h100.window_s < a100.window_s


def test_sequence_parallelism_and_fused_attention_help() -> None:
    workload = gpt(96, 12288, 96)
    degrees = Degrees(tensor=8, pipeline=8, recompute="selective")
    plain_s = step_time(workload, degrees, A100, SELENE, 64).step_s
    cut = dataclasses.replace(degrees, sequence_parallel=True)
    assert step_time(workload, cut, A100, SELENE, 64).step_s < plain_s
    fused = dataclasses.replace(degrees, fused_attention=True)
    assert step_time(workload, fused, A100, SELENE, 64).step_s < plain_s


def test_the_ring_of_keys_and_values_hides_behind_long_sequences() -> None:
    """Ring attention: compute grows with s², traffic with s."""
    shares = []
    for sequence in (4096, 131072):
        workload = dataclasses.replace(gpt(32, 4096, 32), sequence=sequence)
        degrees = Degrees(context=8, tensor=8, fused_attention=True, sequence_parallel=True)
        found = step_time(workload, degrees, H100, EOS, 1)
        shares.append(found.exchange_s / found.compute_s)
    assert shares[1] < shares[0]


def test_experts_far_apart_exchange_longer() -> None:
    near = step_time(MOE, Degrees(data=8, expert=8), A100, SELENE, 64)
    far = step_time(MOE, Degrees(data=8, expert=8, tensor=8), A100, SELENE, 64)
    assert near.exchange_s > 0
    assert far.exchange_s / far.compute_s > near.exchange_s / near.compute_s


def test_flat_devices_agree_with_modelled_compute() -> None:
    """topology/spec/compute.py counts norms as if they multiplied, so within 0.5 %."""
    accelerator = topology().sites[0].accelerator
    model = Model(layers=4, heads=4, width=128, context=128)
    device = flat_device(accelerator)
    assert device_of(accelerator) == device
    workload = workload_of(model)
    expected_s = 8 * 3 * 128 * sum(each.flops_per_token for each in layers(model)) / (50e9 * 0.3)
    found = step_time(workload, Degrees(micro_batch=8), device, FREE, 8)
    assert found.step_s == pytest.approx(expected_s, rel=0.005)


def test_devices_are_those_of_the_catalogue() -> None:
    entries = catalogue()
    for name, device in DEVICES.items():
        found = device_of(entries[name].accelerator)
        assert found == device


def test_the_network_of_a_topology_site() -> None:
    site = topology(ranks=8).sites[0]
    free = interior_of(site)
    assert math.isinf(free.node.bytes_per_s)
    fabric = Fabric(node_bytes_per_s=450e9, cluster_bytes_per_s=400e9, latency_s=8e-6)
    found = interior_of(dataclasses.replace(site, fabric=fabric))
    assert found == interior(8, 450e9, 400e9, cluster_latency_s=8e-6)


def test_units_survive() -> None:
    """The same site in Mbit/s, Gbit/s and bytes."""
    times = set()
    for node, cluster in (
        ("3600Gbit/s", "400Gbit/s"),
        ("3600000Mbit/s", "400000Mbit/s"),
        ("450GB/s", "50GB/s"),
    ):
        fabric = Fabric(
            node_bytes_per_s=parse_rate(node),
            cluster_bytes_per_s=parse_rate(cluster),
            latency_s=8e-6,
        )
        site = dataclasses.replace(topology(ranks=8).sites[0], fabric=fabric)
        degrees = Degrees(tensor=4, pipeline=2, data=8)
        times.add(step_time(SMALL, degrees, A100, interior_of(site), 64).step_s)
    assert len(times) == 1


@pytest.mark.parametrize(
    ("degrees", "why"),
    [
        (Degrees(tensor=3), "tensor: 3 does not divide the 16 heads"),
        (Degrees(tensor=32), "tensor: 32 does not divide the 16 heads"),
        (Degrees(pipeline=8, virtual_stages=4), "pipeline: 32 stages are more than the 24 layers"),
        (Degrees(context=3), "context: 3 does not divide the sequence of 2048 tokens"),
        (Degrees(data=2, expert=2), "expert: 2 does not divide the 1 experts"),
    ],
)
def test_cuts_that_do_not_fit_are_named(degrees: Degrees, why: str) -> None:
    assert misfit(SMALL, degrees) == why
    with pytest.raises(ValueError, match=f"Degrees.{why}"):
        step_time(SMALL, degrees, A100, SELENE, 64)


def test_a_site_without_a_sequence_is_refused() -> None:
    with pytest.raises(ValueError, match=r"num_sequences: want >= 1, got 0"):
        step_time(SMALL, Degrees(), A100, SELENE, 0)
