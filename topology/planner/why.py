"""A plan in sentences: what binds, what was left out, and what else would be possible."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from topology.cost.compute import num_parameters
from topology.model.step_model import StepModel
from topology.planner.alternatives import OWN_SIZES
from topology.planner.choice import Choice
from topology.planner.micro_batch import largest_micro_batch
from topology.planner.regime import regime
from topology.planner.search import Search
from topology.planner.shares import balanced, busiest
from topology.units import format_duration, format_fraction, format_size, significant
from topology.world import Topology

_BINDS = 0.97
"""Share of a step from which on what takes it is all that counts."""
_LONGER = 1.0005
"""Times a step: what is less is no longer, to people."""
_PACED = 0.5
"""Share of an exchange from which on the bytes of a link or a gateway are what takes it, not round
trips."""


def binding(choice: Choice, topology: Topology, model: StepModel) -> str:
    """Return what keeps a step from being shorter."""
    sites = choice.topology(topology).sites
    compute_s = model.compute_s(busiest(choice.sequences, [site.num_ranks for site in sites]))
    slowest = max(sites, key=lambda site: compute_s[site.index])
    if compute_s[slowest.index] >= _BINDS * choice.step_s:
        ranks, times_s = [site.num_ranks for site in sites], model.compute_s([1] * len(sites))
        evenly = balanced(ranks, times_s, sum(choice.sequences))
        assert evenly is not None, "this batch is spread over these sites"
        even_s = max(model.compute_s(busiest(evenly, ranks)))
        return compute_at(slowest.name, even_s / choice.step_s)
    hop, link_s = max(model.link_s.items(), key=lambda each: each[1])
    gateway = max(sites, key=lambda site: model.gateway_s[site.index])
    busy_s, what = max(
        (link_s, f"the link {sites[hop[0]].name} → {sites[hop[1]].name}"),
        (model.gateway_s[gateway.index], f"the gateway of {gateway.name}"),
    )
    exposed = format_fraction(round(1 - compute_s[slowest.index] / choice.step_s, 2))
    rest = f"{exposed} of a step is not compute at {slowest.name}, which computes longest"
    if busy_s < _PACED * model.exchange_s:
        return (
            f"round trips: an exchange by itself takes {format_duration(significant(model.exchange_s, 4))}, of "
            f"which {what}, busiest of all, works for {format_duration(significant(busy_s, 4))}; {rest}"
        )
    part = format_fraction(round(busy_s / choice.step_s, 2))
    return f"{what}, busy for {part} of a step; {rest}"


def compute_at(name: str, even_share: float) -> str:
    """Return that a site's compute binds, and whether that is for the links' sake.

    Args:
        name: Of the site.
        even_share: Of a step: what the slowest site would compute if links cost nothing.
    """
    if even_share >= _BINDS:
        return f"compute at {name}"
    return (
        f"compute at {name}, which takes more of the batch than over links that cost nothing, so that "
        "others send meanwhile"
    )


def sentences(
    search: Search,
    choice: Choice,
    model: StepModel,
    bound: str,
    weighed: list[dict[str, Any]],
    sites: list[dict[str, Any]],
) -> list[str]:
    """Return the explanation, a sentence or two an entry."""
    told = [summary(choice, len(search.topology.sites)), f"What binds: {bound}."]
    told += [_left_out(search, each, choice) for each in sites if not each["sequences"]]
    told += _uneven(search, choice)
    told += _codecs(search, choice, weighed)
    told += own_sizes(choice, weighed)
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


def summary(choice: Choice, num_sites: int) -> str:
    """Return what was decided in a sentence or two; `num_sites` could have taken part."""
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
        f"{per_rank[least]:.3g}: so a step is shortest. Gradients are weighted by tokens."
    ]


def _codecs(search: Search, choice: Choice, weighed: list[dict[str, Any]]) -> list[str]:
    """Say what other codecs would come to, where there is a choice."""
    others = [
        f"all {each['what'].removeprefix('codec ')} {_times(each['step_s'] / choice.step_s)}"
        for each in weighed
        if each["what"].startswith("codec ")
    ]
    told = [f"Other codecs: {'; '.join(others)}."] if others else []
    if len(choice.coding.codecs) > 1 and not search.job.exchange.codecs:
        told.append(
            "A link's own codec is that of every tree that crosses it; trees that do not cross one stay "
            f"{choice.coding.codec}, for that is as fast."
        )
    return told


def _times(factor: float) -> str:
    return "is as fast, and loses more" if factor < _LONGER else f"takes {factor:.3g} times as long"


def own_sizes(choice: Choice, weighed: Sequence[dict[str, Any]]) -> list[str]:
    """Say what the job's own chunks and buckets come to, where others were decided for a reason."""
    own = next((each for each in weighed if each["what"] == OWN_SIZES), None)
    if own is None or own["step_s"] < _LONGER * choice.step_s:
        return []
    longer = format_fraction(round(own["step_s"] / choice.step_s - 1, 3))
    chunk, bucket = choice.sizing.chunk_bytes, choice.sizing.bucket_bytes
    return [
        f"Chunks of {format_size(chunk)}, buckets of {format_size(bucket)}: with the job's own a step takes "
        f"{longer} longer."
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
        f"An exchange that nothing hides takes {format_duration(significant(model.exchange_s, 4))}; the last "
        "micro-batch's backward pass is all that can hide it: gradients of earlier micro-batches are "
        "summed first."
    ]


def _regime(search: Search, choice: Choice, model: StepModel) -> list[str]:
    """Say what exchanging less often would bring."""
    if len(choice.sites) == 1:
        return []
    ranks = [site.num_ranks for site in choice.topology(search.topology).sites]
    return regime(
        search.wishes.max_sync_period,
        max(model.compute_s(busiest(choice.sequences, ranks))),
        model.exchange_s,
        choice.step_s,
        num_parameters(search.job.trainer.model) / min(ranks),
    )
