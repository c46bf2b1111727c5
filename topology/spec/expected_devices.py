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
