"""Small topologies and jobs, as documents and as the objects that they describe."""

from __future__ import annotations

from isthmus.topology.documents.load import load_topology
from isthmus.topology.spec.world import Topology

NAMES = "abcdefgh"


def topology_text(
    num_sites: int = 2,
    *,
    ranks: int = 1,
    emulate: bool = False,
    emulator: str = "auto",
    detect_within: str = "5s",
    start_within: str = "30s",
    min_sites: int | None = None,
    max_restarts: int = 3,
    coordinator_within: str = "1h",
) -> str:
    """Return a full mesh of sites named a, b, c, ...; a run needs all, unless `min_sites` says."""
    names = NAMES[:num_sites]
    sites = [
        f"  - {{name: {name}, nodes: 1, accelerators_per_node: {ranks}, accelerator: core}}"
        for name in names
    ]
    links = [
        f"  - {{between: [{one}, {other}], bandwidth: 100Mbit/s, rtt: 10ms}}"
        for place, one in enumerate(names)
        for other in names[place + 1 :]
    ]
    return "\n".join(
        [
            "version: 1",
            "name: small",
            "accelerators:",
            "  core: {peak: {fp32: 50GFLOP/s}, memory: 2GiB, mfu: 0.3}",
            "sites:",
            *sites,
            "links:",
            *links,
            f"failure: {{detect_within: {detect_within}, ride_out: {detect_within}, "
            f"min_sites: {num_sites if min_sites is None else min_sites}, max_restarts: {max_restarts}, "
            f"start_within: {start_within}, coordinator_within: {coordinator_within}}}",
            "security: {mode: insecure}",
            f"emulate: {'true' if emulate else 'false'}",
            f"emulator: {emulator}",
            "",
        ]
    )


def topology(
    num_sites: int = 2, *, ranks: int = 1, emulate: bool = False, emulator: str = "auto"
) -> Topology:
    """Return what `topology_text` describes."""
    text = topology_text(num_sites, ranks=ranks, emulate=emulate, emulator=emulator)
    return load_topology(text, "topology.yaml")


JOB = "version: 1\nname: small\ntopology: topology.yaml\nverify: {parameters_every: 1}\n"
