"""Where the figures of a plan come from, and which of them contradict each other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from topology.codec_costs import RATIOS, usual_ratio
from topology.cost.compute import flops_per_sequence, num_parameters, peak_flops_per_s
from topology.job import Job
from topology.measured.measured_links import drifts
from topology.planner.choice import Choice
from topology.planner.codings import Coding
from topology.planner.connections import held_back
from topology.planner.search import Search
from topology.units import format_duration, format_fraction, format_rate
from topology.world import Link, Topology

_RTT_ORIGINS = {
    "measured": "measured",
    "rtt": "the topology's rtt",
    "distance": "the topology's distance, at the speed of light in fibre",
    "locations": "the sites' locations, at the speed of light in fibre",
}


def inputs(search: Search, choice: Choice) -> list[dict[str, Any]]:
    """Return every figure that the plan rests on, with its origin."""
    found = [*_of_the_job(search.job, choice), *_of_the_sites(search.topology)]
    return listed([*found, *of_links(search.topology)])


Figure = tuple[str, str, str]
"""What, its value, and where it came from."""


def listed(figures: Iterable[Figure]) -> list[dict[str, Any]]:
    """Return figures as a plan has them."""
    return [{"what": what, "value": value, "origin": origin} for what, value, origin in figures]


def of_links(topology: Topology) -> Iterator[Figure]:
    """Return the figures of all links."""
    for link in topology.links:
        yield from _of_link(link)


def of_codecs(job: Job, coding: Coding) -> Iterator[Figure]:
    """Return what codecs make of gradients: the chosen ones, and those that were permitted."""
    for each in dict.fromkeys((*coding.codecs, *(job.plan.codecs if job.plan else ()))):
        measured = "measured once, docs/codecs.md; gradients differ"
        origin = "exact" if each in RATIOS else measured
        yield f"{each}, of float32", format_fraction(usual_ratio(each)), origin


def _of_the_job(job: Job, choice: Choice) -> Iterator[tuple[str, str, str]]:
    model = job.trainer.model
    yield "parameters", f"{num_parameters(model):,}", "trainer.model"
    flops = flops_per_sequence(model)
    yield "a sequence", f"{flops / 1e9:.4g} GFLOP", "trainer.model: 6 N + 12 L W T a token"
    yield from of_codecs(job, choice.coding)


def _of_the_sites(topology: Topology) -> Iterator[tuple[str, str, str]]:
    for site in topology.sites:
        accelerator = site.accelerator
        peak = peak_flops_per_s(accelerator)
        value = f"{site.num_ranks} of {peak / 1e12:.4g} TFLOP/s, MFU {accelerator.mfu:g}"
        yield site.name, value, f"the topology's accelerator {accelerator.name!r}"


def _of_link(link: Link) -> Iterator[tuple[str, str, str]]:
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


def warnings(job: Job, topology: Topology) -> list[str]:
    """Return what makes the plan's figures doubtful."""
    found = [str(drift) for drift in drifts(topology)]
    if job.entrypoint is not None and job.workload is None:
        found.append(
            "the model of a script of your own is not known: figures are those of trainer.model; "
            "describe yours as `workload`"
        )
    if job.plan is not None and job.plan.objective == "cost":
        chips = (site.accelerator for site in topology.sites)
        free = sorted({chip.name for chip in chips if chip.price_usd_per_h is None})
        if free:
            found.append(
                f"plan.objective is cost, and {', '.join(free)} has no price: it counts as free"
            )
    found += held_back(topology)
    scheduled = [f"{link.source} → {link.target}" for link in topology.links if link.schedule]
    if scheduled:
        found.append(
            f"{', '.join(scheduled)}: the bandwidth is that outside of the periods in schedule"
        )
    return found
