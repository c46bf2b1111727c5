"""What each site is worth, and what one more Gbit/s on each link would buy."""

from __future__ import annotations

import dataclasses
from typing import Any

from topology.job import Job
from topology.model.step_model import StepModel
from topology.planner.choice import Choice
from topology.planner.connections import first_connections
from topology.planner.search import Search
from topology.planner.shares import busiest
from topology.trees.link_codecs import plan_codecs
from topology.trees.trees import ReductionPlan
from topology.world import Link, Topology

GBIT_BYTES_PER_S = 125e6
REPLANNED_SITES = 3
"""Up to so many sites, what a wider link buys is planned anew: of four, that takes as long as six
plans."""


def site_worths(search: Search, choice: Choice) -> list[dict[str, Any]]:
    """Return each site of the topology with the step without it; or with it, if it takes no part.

    The plan is made anew for these sites, with the same codecs and sizes.
    """
    taken = dict(zip(choice.sites, choice.sequences, strict=True))
    like = search.like(choice, search.topology)
    found = []
    for site in search.topology.sites:
        sequences = taken.get(site.name, 0)
        others = [name for name in choice.sites if name != site.name]
        wanted = others if sequences else [*others, site.name]
        otherwise = like.estimate(wanted) if wanted else None
        [most] = busiest((sequences,), [site.num_ranks])
        found.append(
            {
                "site": site.name,
                "sequences": sequences,
                "compute_s": most * search.sequence_s[site.name],
                "step_s_otherwise": None if otherwise is None else otherwise.step_s,
            }
        )
    return found


def link_worths(search: Search, choice: Choice, model: StepModel) -> list[dict[str, Any]]:
    """Return each link between sites that take part: how busy it is, and the step were it wider.

    For few sites the plan is made anew, by the same sites, with the wider link and the same codecs
    and sizes; for more, the same decisions are looked at.
    """
    topology = choice.topology(search.topology)
    index = {site.name: site.index for site in topology.sites}
    found, seen = [], set()
    for link in topology.links:
        pair = frozenset((link.source, link.target))
        if pair in seen:
            continue
        seen.add(pair)
        one, other = index[link.source], index[link.target]
        busy_s = max(model.link_s.get(hop, 0.0) for hop in ((one, other), (other, one)))
        wider = widened(search.topology, pair)
        found.append(
            {
                "between": [link.source, link.target],
                "busy": busy_s / choice.step_s,
                # What is wider can be used as if it were not.
                "step_s_with_one_more_gbit_s": min(choice.step_s, _step_s(search, choice, wider)),
                **crossing(choice.job(search.job), topology, choice.way.plan, link),
            }
        )
    return found


def crossing(
    job: Job, topology: Topology, plan: ReductionPlan, link: Link
) -> dict[str, list[str] | int | str]:
    """Return how gradients cross a link: the codecs of its chunks, and its connections.

    Args:
        job: With the exchange that was decided.
        topology: Of the sites that take part.
        plan: Over them.
        link: Stands for both directions.
    """
    index = {site.name: site.index for site in topology.sites}
    hop = {index[link.source], index[link.target]}
    codecs = plan_codecs(job, topology, plan)
    crossed = [
        codec
        for codec, tree in zip(codecs, plan.trees, strict=False)
        if any({*each} == hop for each in tree.parent.items())
    ]
    if plan.is_gather:
        crossed = [*codecs]
    count, why = first_connections(job, topology, link) if crossed else (0, "nothing crosses")
    return {
        "codecs": list(dict.fromkeys(crossed)),
        "connections": count,
        "connections_because": why,
    }


def widened(topology: Topology, pair: frozenset[str]) -> Topology:
    """Return a topology in which the links between two sites carry one Gbit/s more."""
    links = tuple(
        dataclasses.replace(link, bytes_per_s=link.bytes_per_s + GBIT_BYTES_PER_S)
        if {link.source, link.target} == pair
        else link
        for link in topology.links
    )
    return dataclasses.replace(topology, links=links)


def _step_s(search: Search, choice: Choice, topology: Topology) -> float:
    ranks = [site.num_ranks for site in choice.topology(topology).sites]
    same_s = choice.model(search.job, topology).step_s(busiest(choice.sequences, ranks))
    if len(ranks) > REPLANNED_SITES:
        return same_s
    anew = search.like(choice, topology).best_of(choice.sites)
    return same_s if anew is None else min(same_s, anew.step_s)
