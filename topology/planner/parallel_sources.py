"""Where the figures of a plan with cuts come from, and what makes them doubtful."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from topology.codec_costs import GATEWAY_BYTES_PER_S
from topology.cost.compute import peak_flops_per_s
from topology.cost.layer_time import CLUSTER_EFFICIENCY, DEVICES, NODE_EFFICIENCY
from topology.job import Job
from topology.planner.cut_choice import CutChoice
from topology.planner.parallel_search import ParallelSearch
from topology.planner.sources import Figure, listed, of_codecs, of_links, warnings
from topology.units import format_fraction, format_rate, format_size
from topology.world import Site, Topology


def cut_inputs(search: ParallelSearch, choice: CutChoice) -> list[dict[str, Any]]:
    """Return every figure that the plan rests on, with its origin."""
    workload = search.workload
    found: list[Figure] = [
        ("parameters", f"{workload.parameters:,}", "workload; docs/cost-model.md"),
        ("a sequence", f"{workload.model_flops(1) / 1e12:.4g} TFLOP", "workload; SC'21, eq. 3"),
        ("gradients inside a site", f"{workload.gradient_bytes} bytes an element", "workload"),
        *of_codecs(search.job, choice.coding),
    ]
    for site in search.topology.sites:
        found += _of_site(site)
    if search.wishes.gateways == "measured":
        rate = format_rate(GATEWAY_BYTES_PER_S)
        found.append(("a gateway", rate, "measured on loopback, docs/benchmarks.md; hosts differ"))
    else:
        found.append(("gateways and codecs", "no time", "plan.gateways: unlimited"))
    return listed([*found, *of_links(search.topology)])


def _of_site(site: Site) -> Iterator[Figure]:
    chip = site.accelerator
    device = DEVICES.get(chip.name.lower())
    if device is None:
        share = f"MFU {chip.mfu:g}, whatever the shapes"
        origin = f"the topology's accelerator {chip.name!r}"
    else:
        share = f"{device.gemm_efficiency:g} of it in large multiplications"
        origin = f"docs/cost-model.md knows {chip.name!r}: its mfu is not used"
    peak = peak_flops_per_s(chip)
    yield site.name, f"{site.num_ranks} of {peak / 1e12:.4g} TFLOP/s, {share}", origin
    yield f"{site.name}, memory", format_size(chip.memory_bytes), "the topology's accelerator"
    fabric = site.fabric
    if fabric is None:
        yield f"{site.name}, fabric", "no cost", "the topology has none"
        return
    rates = (
        f"{format_rate(fabric.node_bytes_per_s)}, {format_rate(fabric.cluster_bytes_per_s)} a node"
    )
    used = (
        f"{format_fraction(NODE_EFFICIENCY)} and {format_fraction(CLUSTER_EFFICIENCY)} of them used"
    )
    yield f"{site.name}, fabric", rates, f"the topology; {used}"


def cut_warnings(job: Job, topology: Topology, choice: CutChoice) -> list[str]:
    """Return what makes the plan's figures doubtful."""
    found = warnings(job, topology)
    if any(timing.cut.degrees.zero_stage == 3 for timing in choice.timings):
        found.append(
            "ZeRO 3 is taken to be well made; measured ones were up to 3 times as slow "
            "(docs/cost-model.md). workload.at_most: {zero_stage: 1} plans without it"
        )
    free = [site.name for site in topology.sites if site.fabric is None and site.num_ranks > 1]
    if free:
        found.append(
            f"{', '.join(free)}: without a fabric, nothing inside the site takes time to cross"
        )
    return found
