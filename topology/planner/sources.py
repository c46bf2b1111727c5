"""Lists the origins of a plan's figures, and contradictions between them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from isthmus.topology.cost.layer_time import CLUSTER_EFFICIENCY, DEVICES, NODE_EFFICIENCY
from isthmus.topology.planner.choice import Choice, Coding
from isthmus.topology.planner.connections import held_back
from isthmus.topology.planner.search import Search
from isthmus.topology.spec.compute import flops_per_sequence, num_parameters, peak_flops_per_s
from isthmus.topology.spec.job import Job
from isthmus.topology.spec.measured_links import drifts
from isthmus.topology.spec.model_shape import workload_described
from isthmus.topology.spec.units import format_duration, format_fraction, format_rate, format_size
from isthmus.topology.spec.world import Link, Site, Topology
from isthmus.topology.trees.codec_costs import GATEWAY_BYTES_PER_S, RATIOS, usual_ratio

_RTT_ORIGINS = {
    "measured": "measured",
    "rtt": "the topology's rtt",
    "distance": "the topology's distance, at the speed of light in fibre",
    "locations": "the sites' locations, at the speed of light in fibre",
}


Figure = tuple[str, str, str]
"""The name of a figure, its value, and where it came from."""


def inputs(search: Search, choice: Choice) -> list[dict[str, Any]]:
    """Return every input figure of the plan, with its origin."""
    job, topology = search.job, search.topology
    figures = [*_of_model(job), *_of_codecs(job, choice.coding)]
    for site in topology.sites:
        figures += _of_site(site, is_described=job.workload is not None)
    if job.workload is not None and search.wishes.gateways == "measured":
        rate = format_rate(GATEWAY_BYTES_PER_S)
        figures.append(
            ("a gateway", rate, "measured on loopback, docs/measurements/loopback.md; hosts differ")
        )
    elif job.workload is not None:
        figures.append(("gateways and codecs", "no time", "plan.gateways: unlimited"))
    for link in topology.links:
        figures += _of_link(link)
    return [{"what": what, "value": value, "origin": origin} for what, value, origin in figures]


def _of_codecs(job: Job, coding: Coding) -> Iterator[Figure]:
    """Yield the ratios and speeds of chosen and permitted codecs."""
    for each in dict.fromkeys((*coding.codecs, *(job.plan.codecs if job.plan else ()))):
        measured = "measured once, docs/measurements/codecs.md; gradients differ"
        origin = "exact" if each in RATIOS else measured
        yield f"{each}, of float32", format_fraction(usual_ratio(each)), origin


def _of_model(job: Job) -> Iterator[Figure]:
    if job.workload is None:
        model = job.trainer.model
        yield "parameters", f"{num_parameters(model):,}", "trainer.model"
        flops = flops_per_sequence(model)
        yield "a sequence", f"{flops / 1e9:.4g} GFLOP", "trainer.model: 6 N + 12 L W T a token"
        return
    workload = workload_described(job.workload)
    yield "parameters", f"{workload.parameters:,}", "workload; docs/cost-model.md"
    yield "a sequence", f"{workload.model_flops(1) / 1e12:.4g} TFLOP", "workload; SC'21, eq. 3"
    yield "gradients inside a site", f"{workload.gradient_bytes} bytes an element", "workload"


def _of_site(site: Site, *, is_described: bool) -> Iterator[Figure]:
    """Yield a site's compute figures; with a described model also memory and fabric."""
    chip, fabric = site.accelerator, site.fabric
    share, origin = f"MFU {chip.mfu:g}", f"the topology's accelerator {chip.name!r}"
    device = DEVICES.get(chip.name.lower()) if is_described else None
    if device is not None:
        share = f"{device.gemm_efficiency:g} of it in large multiplications"
        origin = f"docs/cost-model.md knows {chip.name!r}: its mfu is not used"
    value = f"{site.num_ranks} of {peak_flops_per_s(chip) / 1e12:.4g} TFLOP/s, {share}"
    yield site.name, value, origin
    if not is_described:
        return
    yield f"{site.name}, memory", format_size(chip.memory_bytes), "the topology's accelerator"
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


def _of_link(link: Link) -> Iterator[Figure]:
    name = f"{link.source} → {link.target}"
    at = "" if link.measured_at is None else f" at {link.measured_at}"
    is_measured = link.bandwidth_origin == "measured"
    origin = f"measured{at}" if is_measured else "the topology's bandwidth"
    if link.share < 1:
        origin += f", of which a run may use {format_fraction(link.share)}"
    yield f"{name}, bandwidth", format_rate(link.bytes_per_s), origin
    told = _RTT_ORIGINS.get(link.rtt_origin, link.rtt_origin)
    origin = f"{told}{at}" if link.rtt_origin == "measured" else told
    yield f"{name}, round trip", format_duration(link.rtt_s), origin


def warnings(job: Job, topology: Topology, choice: Choice) -> list[str]:
    """Return warnings on doubtful figures of the plan."""
    texts = [str(drift) for drift in drifts(topology)]
    if job.entrypoint is not None and job.workload is None:
        texts.append(
            "the model of a script of your own is not known: figures are those of trainer.model; "
            "describe yours as `workload`"
        )
    if job.plan is not None and job.plan.objective == "cost":
        chips = (site.accelerator for site in topology.sites)
        free = sorted({chip.name for chip in chips if chip.price_usd_per_h is None})
        if free:
            texts.append(
                f"plan.objective is cost, and {', '.join(free)} has no price: it counts as free"
            )
    texts += held_back(topology)
    scheduled = [f"{link.source} → {link.target}" for link in topology.links if link.schedule]
    if scheduled:
        texts.append(
            f"{', '.join(scheduled)}: the bandwidth is that outside of the periods in schedule"
        )
    cuts = [timing.cut for timing in choice.timings if timing.cut is not None]
    texts += _wide_groups(job, topology, choice)
    if any(cut.degrees.zero_stage == 3 for cut in cuts):
        texts.append(
            "ZeRO 3 is taken to be well made; measured ones were up to 3 times as slow "
            "(docs/cost-model.md). workload.at_most: {zero_stage: 1} plans without it"
        )
    free_sites = [
        site.name for site in topology.sites if site.fabric is None and site.num_ranks > 1
    ]
    if cuts and free_sites:
        texts.append(
            f"{', '.join(free_sites)}: without a fabric, nothing inside the site takes time to cross"
        )
    return texts


def _wide_groups(job: Job, topology: Topology, choice: Choice) -> Iterator[str]:
    """Yield warnings on written cuts whose tensor groups are wider than a node."""
    for name, timing in zip(choice.sites, choice.timings, strict=True):
        if job.workload is None or timing.cut is None:
            continue
        site, degrees = topology.site(name), timing.cut.degrees
        if degrees.tensor > site.accelerators_per_node:
            yield (
                f"{name}: a tensor group of {degrees.tensor} is more than the "
                f"{site.accelerators_per_node} accelerators of a node: what leaves a node goes at "
                "the pace of the fabric between nodes"
            )
