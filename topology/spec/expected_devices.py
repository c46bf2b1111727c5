"""The device expected on a site's ranks, by the name of its accelerator. Pure, without YAML.

Only names in the catalogue imply a device; `cpu`, and a topology's own names, may be any machine.
No device is expected in an emulated WAN, whose sites are all on one machine, or if the built-in
trainer's compute is modelled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from isthmus.topology.spec.job import Job
from isthmus.topology.spec.world import Site, Topology

DEVICES: Mapping[str, str] = {
    "v100-16": "V100",
    "v100-32": "V100",
    "a100-40": "A100",
    "a100-80": "A100",
    "l40s": "L40S",
    "h100-pcie": "H100",
    "h100-sxm": "H100",
    "h200": "H200",
    "b200": "B200",
    "mi300x": "MI300X",
    "tpu-v4": "TPU",
    "tpu-v5e": "TPU",
    "tpu-v5p": "TPU",
}
"""Word in a device's own name, by the accelerator's name in the catalogue."""
NO_DEVICE = "a CPU"
"""The name of a device that is no accelerator."""
OWN_NAMES: Mapping[str, str] = {
    "Tesla V100-SXM2-16GB": "v100-16",
    "Tesla V100-SXM2-32GB": "v100-32",
    "Tesla V100-SXM3-32GB": "v100-32",
    "NVIDIA A100-SXM4-40GB": "a100-40",
    "NVIDIA A100-PCIE-40GB": "a100-40",
    "NVIDIA A100-SXM4-80GB": "a100-80",
    "NVIDIA A100 80GB PCIe": "a100-80",
    "NVIDIA L40S": "l40s",
    "NVIDIA H100 PCIe": "h100-pcie",
    "NVIDIA H100 80GB HBM3": "h100-sxm",
    "NVIDIA H200": "h200",
    "NVIDIA B200": "b200",
    "AMD Instinct MI300X": "mi300x",
}
"""The accelerator's name in the catalogue, by what `torch.cuda.get_device_name` says. Other cards
of the same family (H100 NVL, H200 NVL) have other peaks."""


def expected_device(site: Site, topology: Topology, job: Job | None) -> str | None:
    """Return the word expected in the names of a site's devices; None: any device.

    Without a job, real compute is assumed.
    """
    is_modelled = job is not None and (
        job.probe is not None or (job.entrypoint is None and job.trainer.compute == "modelled")
    )
    return None if topology.emulate or is_modelled else DEVICES.get(site.accelerator.name)


def unlike(expected: str, names: Sequence[str]) -> list[str]:
    """Return the names that do not contain the expected word."""
    return [name for name in names if expected.casefold() not in name.casefold()]
