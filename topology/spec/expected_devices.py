"""Which device a site's ranks should find, by the name of its accelerator. Pure, and without YAML.

Only names of the catalogue tell. `cpu`, and whatever a topology defines by another name, may be any
machine. Where nothing is to be computed for real, nothing is expected: in an emulated WAN, whose
sites are all on one machine, and where the shipped trainer's compute is modelled.
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
"""Words in what a device calls itself, by the accelerator's name in the catalogue."""


def expected_device(site: Site, topology: Topology, job: Job | None) -> str | None:
    """Return a word in the name of each device of a site; None: nothing is expected.

    Without a job it is one that computes.
    """
    is_modelled = job is not None and (
        job.probe is not None or (job.entrypoint is None and job.trainer.compute == "modelled")
    )
    return None if topology.emulate or is_modelled else DEVICES.get(site.accelerator.name)


def unlike(expected: str, names: Sequence[str]) -> list[str]:
    """Return the devices that are of another kind."""
    return [name for name in names if expected.casefold() not in name.casefold()]
