"""The accelerators that ship, and in which order a name is looked up."""

import pytest

from isthmus.topology.catalogue.accelerators import catalogue
from isthmus.topology.documents.load import load_topology
from isthmus.topology.spec.world import MFU
from tests.topology.documents import TOPOLOGY, changed, told

WANTED = [
    "cpu",
    "v100-16",
    "v100-32",
    "a100-40",
    "a100-80",
    "l40s",
    "h100-pcie",
    "h100-sxm",
    "h200",
    "b200",
    "mi300x",
    "tpu-v4",
    "tpu-v5e",
    "tpu-v5p",
]


def test_every_entry_says_what_it_can_and_who_says_so() -> None:
    assert list(catalogue()) == WANTED
    for name, entry in catalogue().items():
        accelerator = entry.accelerator
        assert accelerator.name == name
        assert accelerator.price_usd_per_h is None
        assert accelerator.mfu == (0.3 if name == "cpu" else MFU)
        assert 4 << 30 <= accelerator.memory_bytes <= 192 << 30
        assert name == "cpu" or "https://" in entry.source
        peaks = accelerator.peak_flops_per_s
        # A narrower dtype is never slower than a wider one.
        widths = [("fp64", "fp32"), ("fp32", "tf32"), ("tf32", "bf16"), ("bf16", "fp8")]
        for wide, narrow in widths:
            assert peaks.get(wide, 0) <= peaks.get(narrow, float("inf")), name


@pytest.mark.parametrize(
    ("name", "dtype", "tflops", "gib"),
    [
        ("a100-80", "bf16", 312, 80),
        ("h100-sxm", "bf16", 989.4, 80),
        ("h100-pcie", "fp8", 1513, 80),
        ("h200", "fp8", 1978.9, 141),
        ("mi300x", "bf16", 1307.4, 192),
        ("tpu-v5p", "bf16", 459, 95),
        ("v100-32", "fp16", 125, 32),
    ],
)
def test_public_figures(name: str, dtype: str, tflops: float, gib: int) -> None:
    found = catalogue()[name].accelerator
    assert found.peak_flops_per_s[dtype] == pytest.approx(tflops * 1e12)
    assert found.memory_bytes == gib << 30


def test_a_topology_names_one_without_defining_it() -> None:
    text = changed(TOPOLOGY, "    accelerator: h100\n", "    accelerator: h100-sxm\n")
    found = load_topology(text, "topology.yaml").site("oregon").accelerator
    assert found == catalogue()["h100-sxm"].accelerator


def test_the_files_own_definition_comes_first() -> None:
    text = changed(TOPOLOGY, "    accelerator: h100\n", "    accelerator: h100-sxm\n")
    text = changed(text, "  h100: {peak", "  h100-sxm: {peak")
    found = load_topology(text, "topology.yaml").site("oregon").accelerator
    assert (found.mfu, found.price_usd_per_h) == (0.42, 2.5)


def test_a_definition_without_mfu_has_the_default() -> None:
    text = changed(TOPOLOGY, "mfu: 0.42, ", "")
    assert load_topology(text, "topology.yaml").site("oregon").accelerator.mfu == MFU == 0.4


def test_an_unknown_name_is_told_with_a_suggestion_or_a_cure() -> None:
    close = changed(TOPOLOGY, "    accelerator: h100\n", "    accelerator: mi300\n")
    assert told("topology", close) == [
        "10:18 unknown accelerator 'mi300' (did you mean 'mi300x'?) [sites.0.accelerator]"
    ]
    far = changed(TOPOLOGY, "    accelerator: h100\n", "    accelerator: zx81\n")
    assert told("topology", far) == [
        "10:18 unknown accelerator 'zx81': define it under accelerators, or take one that ships "
        "[sites.0.accelerator]"
    ]


def test_a_name_without_its_variant_is_told_the_variants() -> None:
    text = changed(TOPOLOGY, "  h100: {peak", "  mine: {peak")
    assert told("topology", text) == [
        "10:18 unknown accelerator 'h100' (did you mean 'h100-pcie' or 'h100-sxm'?) "
        "[sites.0.accelerator]"
    ]
