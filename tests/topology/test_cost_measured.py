"""Predicted against measured steps, all with the same constants (topology/cost/layer_time.py).

Sources: vTrain (tests/reference/README.md); Narayanan et al., "Efficient Large-Scale Language Model
Training on GPU Clusters Using Megatron-LM", SC'21, tables 1 and 2; Korthikanti et al., "Reducing
Activation Recomputation in Large Transformer Models", MLSys'23, table 5; Jiang et al., "MegaScale",
NSDI'24, table 2; Parmar et al., "Nemotron-4 340B"; Megatron-LM's README (2024); Strati et al.,
"Sailor", SOSP'25, simulations/validation.
"""

from __future__ import annotations

import dataclasses

import pytest

from isthmus.topology.cost.layer_time import A100, H100, PassTimes, interior, layer_times
from isthmus.topology.cost.memory import memory
from isthmus.topology.cost.parallel import step_from_times, step_time
from isthmus.topology.spec.model_shape import Degrees, Workload, utilisation
from tests.topology.cost_cases import (
    EOS,
    SELENE,
    Case,
    Errors,
    errors,
    fitted,
    gpt,
    hardware_flops,
    vtrain_cases,
)

GPT_175B = gpt(96, 12288, 96)
FULL = Degrees(recompute="full")


def test_55_measured_steps() -> None:
    found = errors(vtrain_cases())
    assert found.median <= 0.035, found  # wanted: 7 %
    assert found.mean <= 0.065, found  # wanted: 12 %


def test_small_models_on_one_node_wait_for_the_host() -> None:
    """A pass takes 0.9 ms however little it computes; going backward counts as two."""
    small = dataclasses.replace(gpt(24, 1024, 16), sequence=1024)
    layer = layer_times(small, dataclasses.replace(FULL, tensor=8), A100, SELENE)
    assert layer.forward_s == pytest.approx(0.9e-3)
    assert layer.total_s == pytest.approx(4 * 0.9e-3)


@pytest.mark.slow
def test_constants_of_one_half_predict_the_other() -> None:
    cases = vtrain_cases()
    for fitted_to, tried_on in ((cases[::2], cases[1::2]), (cases[1::2], cases[::2])):
        found = errors(tried_on, fitted(fitted_to))
        assert found.median <= 0.05, found
        assert found.mean <= 0.08, found


def test_constants_of_small_models_predict_large_ones() -> None:
    cases = vtrain_cases()
    small = [case for case in cases if case.workload.parameters < 30e9]
    large = [case for case in cases if case.workload.parameters > 100e9]
    found = errors(large, fitted(small))
    assert found.mean <= 0.06, found


_QUOTED = [  # billions, micro-batch, tensor, data, pipeline, ms: of the same data, not in the file
    (18, 2, 8, 16, 2, 10434.8),
    (18, 8, 8, 4, 8, 11026.1),
    (39, 2, 8, 32, 2, 14614.0),
    (39, 2, 8, 16, 4, 14713.4),
    (175, 2, 8, 8, 8, 55109.6),
    (175, 4, 8, 4, 16, 57504.3),
]
_SHAPES = {18: (40, 6144, 48, 1024), 39: (48, 8192, 64, 1536), 175: (96, 12288, 96, 1536)}


@pytest.mark.parametrize("quoted", _QUOTED)
def test_steps_that_constants_have_not_seen(
    quoted: tuple[int, int, int, int, int, float],
) -> None:
    size, micro_batch, tensor, data, pipeline, measured_ms = quoted
    *shape, batch = _SHAPES[size]
    degrees = dataclasses.replace(
        FULL, micro_batch=micro_batch, tensor=tensor, data=data, pipeline=pipeline
    )
    case = Case(gpt(*shape), degrees, batch, measured_ms / 1e3)
    assert abs(case.error()) <= 0.06


_SC21 = [  # layers, hidden, heads, tensor, pipeline, GPUs, batch, seconds by eq. 3
    (24, 2304, 24, 1, 1, 32, 512, 3.53),
    (30, 3072, 32, 2, 1, 64, 512, 3.70),
    (36, 4096, 32, 4, 1, 128, 512, 3.70),
    (40, 6144, 48, 8, 1, 256, 1024, 9.40),
    (48, 8192, 64, 8, 2, 512, 1536, 14.45),
    (60, 10240, 80, 8, 4, 1024, 1792, 16.06),
    (80, 12288, 96, 8, 8, 1536, 2304, 24.82),
    (96, 16384, 128, 8, 16, 1920, 2160, 37.61),
    (105, 20480, 128, 8, 35, 2520, 2520, 54.08),
    (128, 25600, 160, 8, 64, 3072, 3072, 102.63),
]


@pytest.mark.parametrize("row", _SC21)
def test_megatron_weak_scaling(row: tuple[int, int, int, int, int, int, int, float]) -> None:
    """10 %. The table leaves out the micro-batch: the paper takes the fastest, and so do we."""
    layers, hidden, heads, tensor, pipeline, gpus, batch, measured_s = row
    workload = gpt(layers, hidden, heads)
    best_s = min(
        step_time(workload, degrees, A100, SELENE, batch).step_s
        for micro_batch in (1, 2, 4, 8, 16)
        if memory(
            workload,
            degrees := dataclasses.replace(
                FULL,
                tensor=tensor,
                pipeline=pipeline,
                data=gpus // tensor // pipeline,
                micro_batch=micro_batch,
            ),
            batch,
        ).total
        <= 80 * 2**30
    )
    assert best_s == pytest.approx(measured_s, rel=0.10)


@pytest.mark.parametrize(("gpus", "measured"), [(384, 153), (768, 149), (1536, 141)])
def test_megatron_strong_scaling(gpus: int, measured: int) -> None:
    """Table 2, PTD: TFLOP/s a GPU, 175 B, batch 1536; 10 %."""
    degrees = dataclasses.replace(FULL, tensor=8, pipeline=12, data=gpus // 96)
    step_s = step_time(GPT_175B, degrees, A100, SELENE, 1536).step_s
    rate = hardware_flops(GPT_175B, 1536, "full") / step_s / gpus / 1e12
    assert rate == pytest.approx(measured, rel=0.10)


# layers, hidden, heads, pipeline, virtual, batch, micro-batch, full s, selective s
_KORTHIKANTI = [
    (48, 6144, 64, 1, 1, 4, 4, 1.42, 1.10),
    (96, 12288, 96, 8, 3, 64, 1, 18.13, 13.75),
    (105, 20480, 128, 35, 3, 280, 1, 49.05, 37.83),
    (128, 25600, 160, 64, 1, 512, 1, 94.42, 71.49),
]


@pytest.mark.parametrize("row", _KORTHIKANTI)
def test_recomputation(row: tuple[int, int, int, int, int, int, int, float, float]) -> None:
    """9 %; here within 5 %."""
    layers, hidden, heads, pipeline, virtual, batch, micro_batch, full_s, selective_s = row
    workload = gpt(layers, hidden, heads, gradient_bytes=4)
    full = Degrees(
        tensor=8,
        pipeline=pipeline,
        virtual_stages=virtual,
        micro_batch=micro_batch,
        recompute="full",
    )
    selective = dataclasses.replace(full, recompute="selective", sequence_parallel=True)
    for degrees, measured_s in ((full, full_s), (selective, selective_s)):
        predicted_s = step_time(workload, degrees, A100, SELENE, batch).step_s
        assert predicted_s == pytest.approx(measured_s, rel=0.05)


GPT_MEGASCALE = gpt(96, 12288, 128, vocabulary=64000, gradient_bytes=4)


@pytest.mark.parametrize(
    ("batch", "gpus", "measured_s"),
    [
        (6144, 3072, 29.02),
        (6144, 6144, 14.78),
        (6144, 8192, 12.24),
        (6144, 12288, 8.57),
        (768, 256, 40.0),
        (768, 512, 21.2),
        (768, 768, 15.2),
        (768, 1024, 11.9),
    ],
)
def test_megascale_baseline(batch: int, gpus: int, measured_s: float) -> None:
    """Table 2, rows of Megatron-LM: 10 %. Tensor 8, pipeline 8; six virtual stages,
    as known second hand."""
    degrees = Degrees(
        tensor=8,
        pipeline=8,
        virtual_stages=6,
        data=gpus // 64,
        recompute="selective",
        sequence_parallel=True,
        zero_stage=1,
    )
    predicted_s = step_time(GPT_MEGASCALE, degrees, A100, SELENE, batch).step_s
    assert predicted_s == pytest.approx(measured_s, rel=0.10)


@pytest.mark.parametrize(
    ("batch", "gpus", "step_s", "mfu"),
    [
        (6144, 3072, 23.66, 59.1),
        (6144, 6144, 12.21, 57.3),
        (6144, 8192, 9.56, 54.9),
        (6144, 12288, 6.34, 55.2),
        (6144, 3072, 29.02, 48.7),
        (6144, 12288, 8.57, 41.2),
        (768, 256, 32.0, 65.3),
        (768, 1024, 8.9, 59.0),
    ],
)
def test_megascale_mfu(batch: int, gpus: int, step_s: float, mfu: float) -> None:
    """From seconds to MFU: one point, of which rounding the seconds takes some."""
    found = utilisation(GPT_MEGASCALE.model_flops(batch), step_s, gpus, 312e12)
    assert 100 * found == pytest.approx(mfu, abs=1.01)


NEMOTRON_340B = Workload(
    layers=96,
    hidden=18432,
    heads=96,
    kv_heads=8,
    ffn=73728,
    sequence=4096,
    vocabulary=256000,
    tied=False,
)
MEGATRON_CORE = Degrees(
    tensor=8,
    pipeline=12,
    virtual_stages=8,
    sequence_parallel=True,
    fused_attention=True,
    zero_stage=1,
    overlap_data=True,
)


@pytest.mark.parametrize(("gpus", "batch", "measured_s"), [(1536, 768, 10.3), (6144, 2304, 8.0)])
def test_nemotron(gpus: int, batch: int, measured_s: float) -> None:
    """Another accelerator, from its data sheet, and another model: 5 %.

    Cut and times second hand.
    """
    degrees = dataclasses.replace(MEGATRON_CORE, data=gpus // 96)
    predicted_s = step_time(NEMOTRON_340B, degrees, H100, EOS, batch).step_s
    assert predicted_s == pytest.approx(measured_s, rel=0.05)


def test_strong_scaling_of_megatron_core() -> None:
    """175 B, batch 1152, from 96 to 4,608 H100: MFU falls from 47 to 42 %. 3 points on the drop.

    The README does not say how it was cut: tensor 8, pipeline 12, eight virtual stages are assumed.
    """
    workload = dataclasses.replace(
        gpt(96, 12288, 96, vocabulary=131072, gradient_bytes=4), sequence=4096
    )

    def mfu(gpus: int, overlap_tensor: bool) -> float:
        degrees = dataclasses.replace(MEGATRON_CORE, data=gpus // 96, overlap_tensor=overlap_tensor)
        step_s = step_time(workload, degrees, H100, EOS, 1152).step_s
        flops = workload.model_flops(1152)
        return 100 * utilisation(flops, step_s, gpus, H100.peak_flops_per_s)

    for overlap_tensor in (False, True):
        drop = mfu(96, overlap_tensor) - mfu(4608, overlap_tensor)
        assert drop == pytest.approx(5, abs=3)
    # How much of its tensor groups' collectives the README's runs hid is not said: all or nothing
    # are on either side of what was measured.
    assert mfu(96, overlap_tensor=False) < 47 < mfu(96, overlap_tensor=True)
    assert mfu(4608, overlap_tensor=False) < 42 < mfu(4608, overlap_tensor=True)


GH200_NODES = interior(node_ranks=4, node_bytes_per_s=450e9, cluster_bytes_per_s=92.6e9 / 0.85)
"""Sailor's measured 92.6 GB/s between nodes."""
_PROFILES = {  # model, micro-batch: forward and backward seconds of all layers, tensor 4
    ("opt", 8): (0.06967, 0.16122),
    ("opt", 1): (0.03937, 0.04314),
    ("neo", 4): (0.10429, 0.23272),
}
_SAILOR = [  # model, pipeline, data, micro-batch, batch, measured s
    ("opt", 1, 1, 1, 32, 2.28123),
    ("opt", 2, 1, 8, 32, 0.65705),
    ("opt", 2, 2, 1, 64, 1.44523),
    ("opt", 4, 2, 8, 512, 2.69795),
    ("opt", 2, 4, 8, 512, 2.2988),
    ("opt", 4, 4, 8, 1024, 2.72578),
    ("opt", 2, 8, 8, 1024, 2.31116),
    ("opt", 1, 16, 8, 1024, 1.92557),
    ("opt", 4, 8, 8, 1024, 1.47485),
    ("opt", 2, 16, 8, 1024, 1.22476),
    ("opt", 1, 32, 8, 1024, 1.02594),
    ("neo", 4, 2, 4, 1024, 13.86466),
    ("neo", 2, 4, 4, 1024, 12.66101),
    ("neo", 4, 4, 4, 1024, 7.03897),
    ("neo", 2, 8, 4, 1024, 6.4286),
    ("neo", 4, 8, 4, 1024, 3.69588),
    ("neo", 2, 16, 4, 1024, 3.42667),
    ("neo", 8, 8, 4, 1024, 2.25506),
    ("neo", 4, 16, 4, 1024, 2.00042),
]


def test_steps_from_a_measured_profile() -> None:
    """Sailor's GH200 runs from its own profiles.

    10 % in the mean, 16 % at most (its own figures).
    """
    found = []
    for name, pipeline, data, micro_batch, batch, measured_s in _SAILOR:
        layers, hidden, heads = (24, 1024, 16) if name == "opt" else (32, 2560, 20)
        workload = dataclasses.replace(
            gpt(layers, hidden, heads), parameter_bytes=4, gradient_bytes=4
        )
        forward_s, backward_s = _PROFILES[name, micro_batch]
        # The sums hold the logits too, which only the last stage computes: by their FLOPs.
        logits = workload.head_flops(1) * 3 / workload.model_flops(1)
        whole = PassTimes(forward_s, backward_s)
        layer, head = whole.times((1 - logits) / layers), whole.times(logits)
        degrees = Degrees(tensor=4, pipeline=pipeline, data=data, micro_batch=micro_batch)
        predicted = step_from_times(workload, degrees, H100, GH200_NODES, batch, layer, head)
        found.append(abs(predicted.step_s / measured_s - 1))
    seen = Errors(sorted(found)[len(found) // 2], sum(found) / len(found), max(found))
    assert seen.mean <= 0.10, seen
    assert seen.largest <= 0.16, (seen, found)
