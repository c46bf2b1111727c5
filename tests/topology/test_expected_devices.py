"""Which device a site's ranks should find: by the catalogue's names, where something computes."""

from __future__ import annotations

import pytest

from isthmus.topology.catalogue.accelerators import catalogue
from isthmus.topology.documents.load import load_job, load_topology
from isthmus.topology.spec.expected_devices import DEVICES, expected_device, unlike

TOPOLOGY = """\
version: 1
name: t
accelerators: {{own: {{peak: {{bf16: 1TFLOP/s}}, memory: 1GiB}}}}
sites:
  - {{name: a, nodes: 1, accelerators_per_node: 1, accelerator: {accelerator}}}
  - {{name: b, like: a}}
links: [{{between: [a, b], bandwidth: 1Gbit/s, rtt: 1ms}}]
emulate: {emulate}
"""
JOB = "version: 1\nname: j\ntopology: t.yaml\n"


def test_each_accelerator_of_the_catalogue_has_its_word() -> None:
    assert set(DEVICES) == set(catalogue()) - {"cpu"}


@pytest.mark.parametrize(
    ("accelerator", "emulate", "job", "expected"),
    [
        ("h100-sxm", "false", JOB, "H100"),
        ("h100-sxm", "false", None, "H100"),
        ("h100-sxm", "false", JOB + "entrypoint: t.py\ntrainer: {compute: modelled}\n", "H100"),
        ("h100-sxm", "true", JOB, None),
        ("h100-sxm", "false", JOB + "trainer: {compute: modelled}\n", None),
        ("h100-sxm", "false", JOB + "probe: {}\n", None),
        ("cpu", "false", JOB, None),
        ("own", "false", JOB, None),
    ],
)
def test_what_is_expected(
    accelerator: str, emulate: str, job: str | None, expected: str | None
) -> None:
    world = load_topology(TOPOLOGY.format(accelerator=accelerator, emulate=emulate), "t.yaml")
    written = None if job is None else load_job(job, "job.yaml")
    assert expected_device(world.sites[0], world, written) == expected


@pytest.mark.parametrize(
    ("accelerator", "device", "is_unlike"),
    [
        ("h100-sxm", "NVIDIA H100 80GB HBM3", False),
        ("h100-pcie", "NVIDIA H100 PCIe", False),
        ("a100-80", "NVIDIA A100-SXM4-80GB MIG 1g.10gb", False),
        ("mi300x", "AMD Instinct MI300X", False),
        ("v100-16", "Tesla V100-SXM2-16GB", False),
        ("h200", "NVIDIA H100 80GB HBM3", True),
        ("a100-40", "a CPU", True),
        ("tpu-v4", "NVIDIA L40S", True),
    ],
)
def test_devices_are_known_by_their_names(accelerator: str, device: str, is_unlike: bool) -> None:
    assert unlike(DEVICES[accelerator], [device]) == ([device] if is_unlike else [])
