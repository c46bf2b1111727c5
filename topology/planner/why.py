"""A plan in sentences: what binds, what was left out, and what else would be possible."""

from __future__ import annotations

import math
from typing import Any

from topology.planner.choice import Choice
from topology.planner.micro_batch import largest_micro_batch
from topology.planner.search import Search
from topology.planner.shares import busiest
from topology.step_time import StepModel
from topology.units import format_duration, format_fraction, format_size
from topology.world import Topology

_BINDS = 0.97
"""Share of a step from which on what takes it is all that counts."""
_EXPOSED = 0.05
"""Of a step: what a longer period between exchanges is to bring the rest below."""


def binding(choice: Choice, topology: Topology, model: StepModel) -> str:
    """Return what keeps a step from being shorter."""
    sites = choice.topology(topology).sites
    compute_s = model.compute_s(busiest(choice.sequences, [site.num_ranks for site in sites]))
    slowest = max(sites, key=lambda site: compute_s[site.index])
    if compute_s[slowest.index] >= _BINDS * choice.step_s:
        return f"compute at {slowest.name}"
    hop, link_s = max(model.link_s.items(), key=lambda each: each[1])
    name = f"{sites[hop[0]].name} → {sites[hop[1]].name}"
    gateway = max(sites, key=lambda site: model.gateway_s[site.index])
    gateway_s = model.gateway_s[gateway.index]
    if gateway_s > link_s:
        part = format_fraction(round(gateway_s / choice.step_s, 2))
        return f"the gateway of {gateway.name}, busy for {part} of a step"
    exposed = format_fraction(round(1 - compute_s[slowest.index] / choice.step_s, 2))
    part = format_fraction(round(link_s / choice.step_s, 2))
    return f"the link {name}, busy for {part} of a step; {exposed} of a step is not compute"


def sentences(
    search: Search,
    choice: Choice,
    model: StepModel,
    bound: str,
    weighed: list[dict[str, Any]],
    sites: list[dict[str, Any]],
) -> list[str]:
    """Return the explanation, a sentence or two an entry."""
    told = [_summary(search, choice), f"What binds: {bound}."]
    told += [_left_out(search, each, choice) for each in sites if not each["sequences"]]
    told += _uneven(search, choice)
    told += _micro_batch(search, choice)
    ring = next((each for each in weighed if each["what"] == "equal replicas, ring"), None)
    if ring is not None:
        times = ring["step_s"] / choice.step_s
        told.append(
            f"Equal replicas at all sites round a ring would take {times:.2f} times as long."
        )
    told += _hidden(choice, model)
    told += _regime(search, choice, model)
    return told


def _summary(search: Search, choice: Choice) -> str:
    num_sites = len(search.topology.sites)
    who = ", ".join(
        f"{site} {count}" for site, count in zip(choice.sites, choice.sequences, strict=True)
    )
    crossing = (
        "nothing crosses"
        if len(choice.sites) == 1
        else f"gradients cross as {choice.coding}, by {choice.way.form}"
    )
    return (
        f"{len(choice.sites)} of {num_sites} sites take part, with sequences of a step each: {who}; "
        f"{crossing}. A step takes {format_duration(choice.step_s)}."
    )


def _left_out(search: Search, site: dict[str, Any], choice: Choice) -> str:
    name, with_s = site["site"], site["step_s_otherwise"]
    if with_s is None:
        mine = search.topology.site(name).num_ranks
        ranks = mine + sum(search.topology.site(each).num_ranks for each in choice.sites)
        batch = search.job.trainer.global_batch
        if ranks > batch:
            return (
                f"{name} is left out: each rank takes a sequence at least, and with its {mine} they "
                f"would be {ranks} for the {batch} of a step (trainer.global_batch)."
            )
        return f"{name} is left out: no links both ways join it to the sites that take part."
    if with_s > choice.step_s:
        times = with_s / choice.step_s
        return f"{name} is left out: with it, a step takes {times:.2f} times as long."
    gains = "a token costs more" if search.wishes.objective == "cost" else "a step is no shorter"
    return f"{name} is left out: with it, {gains}."


def _uneven(search: Search, choice: Choice) -> list[str]:
    per_rank = {
        name: count / search.topology.site(name).num_ranks
        for name, count in zip(choice.sites, choice.sequences, strict=True)
    }
    if max(per_rank.values()) < 1.25 * min(per_rank.values()):
        return []
    most, least = max(per_rank, key=per_rank.__getitem__), min(per_rank, key=per_rank.__getitem__)
    return [
        f"A rank of {most} takes {per_rank[most]:.3g} sequences and one of {least} "
        f"{per_rank[least]:.3g}, so that they are done together; gradients are weighted by tokens."
    ]


def _micro_batch(search: Search, choice: Choice) -> list[str]:
    """Say why micro-batches are as large as they are, where that was decided here."""
    if search.wishes.micro_batch == "given":
        return []
    topology = choice.topology(search.topology)
    most, site = largest_micro_batch(search.job, topology)
    counts = busiest(choice.sequences, [each.num_ranks for each in topology.sites])
    has = format_size(site.accelerator.memory_bytes)
    if max(counts) <= most:
        why = "each rank has room for its whole share at once"
    else:
        why = f"the {has} of {site.name} have room for no more"
    return [
        f"A rank takes {min(choice.micro_batch, max(counts))} sequences at once: {why}. The trainer "
        "takes one number for all sites."
    ]


def _hidden(choice: Choice, model: StepModel) -> list[str]:
    if len(choice.sites) == 1:
        return []
    exposed_s = choice.step_s - max(model.compute_s([1] * len(choice.sites)))
    if model.exchange_s <= 0 or exposed_s <= 0:
        return []
    return [
        f"An exchange that nothing hides takes {format_duration(model.exchange_s)}; only the last "
        "micro-batch's backward pass can hide it, for gradients of those before are summed first."
    ]


def _regime(search: Search, choice: Choice, model: StepModel) -> list[str]:
    """Say what fewer exchanges would bring, as far as they are permitted: nothing executes them yet."""
    most = search.wishes.max_sync_period
    if most == 1 or len(choice.sites) == 1:
        return []
    ranks = [site.num_ranks for site in choice.topology(search.topology).sites]
    compute_s = max(model.compute_s(busiest(choice.sequences, ranks)))
    # H steps of compute, then one exchange that is not hidden: T = H c + x.
    enough = math.ceil(model.exchange_s / (_EXPOSED / (1 - _EXPOSED) * compute_s))
    period = max(1, min(most, enough))
    step_s = compute_s + model.exchange_s / period
    if step_s >= choice.step_s:
        return [
            f"max_sync_period permits {most} steps between exchanges; that would gain nothing here."
        ]
    return [
        f"With an exchange every {period} steps (local SGD; {most} are permitted) a step would take "
        f"{format_duration(step_s)} on average. This version exchanges every step all the same: "
        "nothing in it executes another period, and the plan's figures are those of every step."
    ]
