"""The plan of a described model, as plain values: topology/planner/plan.py's counterpart."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

from topology.cost.model_shape import utilisation
from topology.job import Job
from topology.planner.alternatives import OWN_SIZES, Weighed, ordered, other_sites
from topology.planner.choice import Sizing, money
from topology.planner.cut_choice import CutChoice
from topology.planner.cuts import layers_together
from topology.planner.joint_step import JointModel
from topology.planner.parallel_search import ParallelSearch
from topology.planner.parallelism import in_words
from topology.planner.ways import ways
from topology.planner.worth import crossing, widened
from topology.world import Site, Topology

_FRONT = 8
"""Cuts of a site that are listed, the fastest of those that nothing beats in time and memory."""
_LACKING = 3
"""Cuts that would be faster if they fitted, that are listed."""


def decided_cuts(choice: CutChoice) -> list[dict[str, Any]]:
    """Return the placement with the cut of each site, in the words of a job."""
    return [
        {
            "site": each.site,
            "sequences": each.sequences,
            "parallel": None if each.parallel is None else dataclasses.asdict(each.parallel),
        }
        for each in choice.job(Job(name="", topology="")).placement
    ]


def predicted(search: ParallelSearch, choice: CutChoice, model: JointModel) -> dict[str, float]:
    """Return what a step comes to."""
    batch = search.model.global_batch
    return {
        "step_s": choice.step_s,
        "compute_s": max(each.alone_s for each in choice.timings),
        "exchange_s": model.exchange_s(choice.timings),
        "efficiency": search.balanced(choice.sites)[1] / choice.step_s,
        "tokens_per_s": batch * search.model.context / choice.step_s,
        "egress_bytes_per_step": math.fsum(model.link_bytes.values()),
        "usd_per_step": choice.usd_per_step,
    }


def inside(search: ParallelSearch, choice: CutChoice) -> list[dict[str, Any]]:
    """Return what happens inside each site that takes part, and which cuts it was chosen from."""
    return [
        _inside(search, search.topology.site(name), choice, index)
        for index, name in enumerate(choice.sites)
    ]


def _inside(search: ParallelSearch, site: Site, choice: CutChoice, index: int) -> dict[str, Any]:
    timing, count = choice.timings[index], choice.sequences[index]
    cuts, degrees = search.cuts[site.name], timing.cut.degrees
    step = cuts.step(degrees, count)
    flops, peak = search.workload.model_flops(count), max_peak(site)
    return {
        "site": site.name,
        "cut": in_words(degrees),
        "micro_batches": step.num_micro_batches,
        "alone_s": timing.alone_s,
        "busy_s": step.compute_s,
        "collectives_s": step.exchange_s,
        "transfers_s": step.transfers_s,
        "bubble_s": step.bubble_s,
        "exposed_s": step.gradients.exposed_s + step.parameters.exposed_s,
        "optimizer_s": step.optimizer_s,
        "window_s": timing.cut.window_s,
        "memory_bytes": timing.cut.memory_bytes(count),
        "memory_of_bytes": site.accelerator.memory_bytes,
        "fullest_node": timing.cut.node_share,
        "mfu": utilisation(flops, choice.step_s, site.num_ranks, peak),
        "front": [
            {"cut": in_words(each.cut.degrees), "alone_s": each.alone_s, "memory_bytes": needed}
            for each, needed in cuts.front(count)[:_FRONT]
        ],
        "too_large": cuts.lacking(count, timing.alone_s, _LACKING),
    }


def max_peak(site: Site) -> float:
    """Return the FLOP/s by which utilisation is counted: those the cost model computes with."""
    peaks = site.accelerator.peak_flops_per_s
    return peaks.get("bf16", max(peaks.values()))


def cut_alternatives(search: ParallelSearch, choice: CutChoice) -> list[dict[str, Any]]:
    """Return other plans than the choice with their step time and cost, the fastest first."""
    found = [*other_sites(search, choice), *_other_settings(search, choice)]
    return ordered(found, _other_forms(search, choice))


def _other_settings(search: ParallelSearch, choice: CutChoice) -> Iterator[Weighed]:
    """Other codecs; nothing hidden; the job's own sizes; each site with the cut fastest alone."""
    if len(choice.sites) == 1:
        return
    job = search.job
    for codec in search.codecs:
        if choice.coding.codecs != (codec,):
            wishes = dataclasses.replace(search.wishes, codecs=(codec,))
            again = dataclasses.replace(job, plan=wishes)
            anew = ParallelSearch(again, search.topology, search.cuts)
            yield from _estimated(anew, choice, f"codec {codec}")
    if job.exchange.schedule == "overlap":
        serial = dataclasses.replace(job.exchange, schedule="serial")
        anew = ParallelSearch(dataclasses.replace(job, exchange=serial), search.topology)
        yield from _estimated(anew, choice, "nothing hidden")
    own = Sizing(chunk_bytes=job.exchange.chunk_bytes, bucket_bytes=job.exchange.bucket_bytes)
    if choice.sizing != own:
        yield _in_size(search, choice, own)
    fastest = tuple(
        search.timings(name, count, choice.sizing)[0]
        for name, count in zip(choice.sites, choice.sequences, strict=True)
    )
    if fastest != choice.timings:
        topology, model = choice.topology(search.topology), choice.joint(job, search.topology)
        step_s = model.step_s(fastest)
        per_s, egress = money(choice.job(job), topology, choice.way)
        what = "the cuts that are fastest without an exchange"
        yield what, step_s, per_s * step_s + egress


def _in_size(search: ParallelSearch, choice: CutChoice, sizing: Sizing) -> Weighed:
    """The same in other chunks and buckets."""
    together = layers_together(search.workload, sizing.bucket_bytes)
    timings = tuple(
        each.cut.timing(count, together)
        for each, count in zip(choice.timings, choice.sequences, strict=True)
    )
    other = dataclasses.replace(choice, sizing=sizing, timings=timings)
    step_s = other.joint(search.job, search.topology).step_s(timings)
    per_s, egress = money(other.job(search.job), other.topology(search.topology), choice.way)
    return OWN_SIZES, step_s, per_s * step_s + egress


def _estimated(search: ParallelSearch, choice: CutChoice, what: str) -> Iterator[Weighed]:
    found = search.estimate(choice.sites)
    if found is not None:
        yield what, found.step_s, found.usd_per_step


def _other_forms(search: ParallelSearch, choice: CutChoice) -> Iterator[Weighed]:
    """The same spread, cuts and codec over other reductions."""
    topology, job = choice.topology(search.topology), choice.job(search.job)
    for way in ways(search.job, topology, with_packings=False):
        if way.plan.trees != choice.way.plan.trees:
            step_s = JointModel(job, topology, way.plan).step_s(choice.timings)
            per_s, egress = money(job, topology, way)
            yield way.form, step_s, per_s * step_s + egress


def cut_site_worths(search: ParallelSearch, choice: CutChoice) -> list[dict[str, Any]]:
    """Return each site with the step without it; or with it, if it takes no part."""
    taken = dict(zip(choice.sites, zip(choice.sequences, choice.timings, strict=True), strict=True))
    found = []
    for site in search.topology.sites:
        mine = taken.get(site.name)
        others = [name for name in choice.sites if name != site.name]
        wanted = others if mine is not None else [*others, site.name]
        otherwise = search.estimate(wanted) if wanted else None
        found.append(
            {
                "site": site.name,
                "sequences": 0 if mine is None else mine[0],
                "compute_s": 0.0 if mine is None else mine[1].alone_s,
                "step_s_otherwise": None if otherwise is None else otherwise.step_s,
            }
        )
    return found


def cut_link_worths(
    search: ParallelSearch, choice: CutChoice, model: JointModel
) -> list[dict[str, Any]]:
    """Return each link between sites that take part: how busy it is, and the step were it wider."""
    topology = choice.topology(search.topology)
    index = {site.name: site.index for site in topology.sites}
    found: dict[frozenset[str], dict[str, Any]] = {}
    for link in topology.links:
        pair = frozenset((link.source, link.target))
        if pair in found:
            continue
        one, other = index[link.source], index[link.target]
        busy_s = max(model.link_s.get(hop, 0.0) for hop in ((one, other), (other, one)))
        wider_s = choice.joint(search.job, widened(search.topology, pair)).step_s(choice.timings)
        found[pair] = {
            "between": [link.source, link.target],
            "busy": busy_s / choice.step_s,
            "step_s_with_one_more_gbit_s": min(choice.step_s, wider_s),
            **crossing(choice.job(search.job), topology, choice.way.plan, link),
        }
    return list(found.values())


def all_widened(topology: Topology, factor: float) -> Topology:
    """Return a topology whose links all carry `factor` times as much."""
    links = tuple(
        dataclasses.replace(link, bytes_per_s=link.bytes_per_s * factor) for link in topology.links
    )
    return dataclasses.replace(topology, links=links)
