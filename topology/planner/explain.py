"""The explanation of a plan in sentences: its limits, what was left out, what else is possible."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from isthmus.topology.documents.placement import restricted, unreached
from isthmus.topology.documents.run_decisions import rungs_of
from isthmus.topology.model.site_timing import SiteTiming
from isthmus.topology.model.step_model import StepModel
from isthmus.topology.planner.alternatives import Alternatives, widened
from isthmus.topology.planner.choice import Choice, usd_per_s
from isthmus.topology.planner.cuts import in_words
from isthmus.topology.planner.memory_fit import largest_micro_batch
from isthmus.topology.planner.regime import Timed
from isthmus.topology.planner.search import Search, fastest_cuts
from isthmus.topology.planner.spreads import busiest
from isthmus.topology.spec.compute import num_parameters
from isthmus.topology.spec.job import Job, Reduction
from isthmus.topology.spec.model_shape import workload_described
from isthmus.topology.spec.units import (
    format_duration,
    format_fraction,
    format_rate,
    format_size,
    significant,
)
from isthmus.topology.spec.world import Site, Topology

_BINDS = 0.97
"""Share of a step above which a cause is named as the only limit."""
_LONGER = 1.0005
"""Ratio to a step below which another counts as no longer, to people."""
_MOST_LOSSES = 4
"""Sites of which a plan says what the others would take without them."""
_EQUAL = 1.001
"""Ratio of sites' compute up to which none computes longest, to people."""
_PACED = 0.5
"""Share of an exchange from which on the bytes of a link or a gateway are what takes it, not round
trips."""
WANTED = 0.96
"""Efficiency for which the needed bandwidth is reported."""
_WIDEST = 1e6
"""Factor on a link's bandwidth that makes its time negligible."""


def by_themselves(search: Search, choice: Choice) -> tuple[list[tuple[SiteTiming, ...]], float]:
    """Return sites' timings without any exchange, and the slowest one's seconds.

    The spread of the batch is the one that is fastest then.
    """
    job, here = choice.job(search.job), choice.topology(search.topology)
    splits = []
    for split in (*search.options.splits(here), choice.sequences):
        fronts = [
            search.options.timings(job, site, count)
            for site, count in zip(here.sites, split, strict=True)
        ]
        if all(fronts):
            splits.append((fronts, max(front[0].alone_s for front in fronts)))
    return min(splits, key=lambda each: each[1])


def efficiency(search: Search, choice: Choice) -> float:
    """Return the tokens per second of the step over the sum of the sites alone."""
    if search.job.workload is not None:
        return by_themselves(search, choice)[1] / choice.step_s
    alone = math.fsum(
        count / timing.alone_s
        for count, timing in zip(choice.sequences, choice.timings, strict=True)
    )
    return search.job.global_batch / choice.step_s / alone


def binding(search: Search, choice: Choice, model: StepModel) -> str:
    """Return the cause that limits the step."""
    sites = choice.topology(search.topology).sites
    slowest = max(sites, key=lambda site: choice.timings[site.index].alone_s)
    alone_s = choice.timings[slowest.index].alone_s
    is_equal = alone_s <= _EQUAL * min(each.alone_s for each in choice.timings)
    if alone_s >= _BINDS * choice.step_s:
        where = "all sites" if is_equal and len(sites) > 1 else slowest.name
        if by_themselves(search, choice)[1] >= _BINDS * choice.step_s:
            return f"compute at {where}"
        return (
            f"compute at {where}, which would be done sooner if nothing had to cross: what is "
            "computed beyond that hides the exchange"
        )
    busy_s, what = _busiest(choice, model, sites)
    left = _share(1 - alone_s / choice.step_s)
    if busy_s < _PACED * model.exchange_s(choice.timings):
        cause = f"round trips: {what}, busiest of all, works for {_seconds(busy_s)}"
        is_longest = alone_s >= choice.step_s / 2
    else:
        cause = f"{what}, busy for {_share(busy_s / choice.step_s)} of a step"
        is_longest = alone_s >= busy_s
    if is_longest:
        where, waits = ("all sites", "they wait") if is_equal else (slowest.name, "it waits")
        share = _share(alone_s / choice.step_s)
        return f"compute at {where}, {share} of a step; for the other {left} {waits} for {cause}"
    waiting = f"{slowest.name} computes longest, and for {left} of a step it waits"
    if is_equal:
        waiting = f"all sites compute equally long, and for {left} of a step they wait"
    return f"{cause}; {waiting}"


def _busiest(choice: Choice, model: StepModel, sites: Sequence[Site]) -> tuple[float, str]:
    """Return the busiest link, gateway or network card, and its busy seconds of a step."""
    hop, link_s = max(model.link_s.items(), key=lambda each: each[1])
    busy = [(link_s, f"the link {sites[hop[0]].name} → {sites[hop[1]].name}")]
    for what, each_s in (
        ("gateway", model.gateway_s(choice.timings)),
        ("network card", model.card_s(choice.timings)),
    ):
        index = max(range(len(sites)), key=each_s.__getitem__)
        node = "the fullest node of " if sites[index].nodes > 1 else ""
        busy.append((each_s[index], f"the {what} of {node}{sites[index].name}"))
    return max(busy)


def sentences(
    others: Alternatives, model: StepModel, inside: Sequence[Mapping[str, Any]]
) -> list[str]:
    """Return the explanation, a sentence or two an entry.

    Args:
        others: The choice, and what it was compared with.
        model: Of its steps.
        inside: What happens inside sites, where a job describes its model.
    """
    search, choice = others.search, others.choice
    texts = [summary(choice, len(search.topology.sites))]
    if search.wishes.objective == "cost":
        texts.append(_money(search, choice))
    texts += [f"What limits a step: {binding(search, choice, model)}."]
    texts += [_left_out(others, each) for each in others.sites() if not each["sequences"]]
    texts += _cuts(search, choice, inside)
    if len(choice.coding.codecs) > 1 and not search.job.exchange.codecs:
        texts.append(
            "A link's own codec is that of every tree that crosses it; trees that do not cross one stay "
            f"{choice.coding.codec}, for that is as fast."
        )
    texts += _micro_batch(search, choice)
    if len(choice.sites) > 1:
        texts += _hidden(choice, model)
        texts += _divided_later(others)
        texts += _regime_later(others)
        if search.job.workload is not None:
            texts.append(_needed(search, choice))
    return texts


def _divided_later(others: Alternatives) -> list[str]:
    """Tell what becomes of the sites' parts while the run goes on, where they may change."""
    job = others.search.job
    replan = None if job.plan is None or job.reduction != Reduction() else job.plan.replan
    if replan is None or replan.shares != "follow" or job.exchange.schedule == "off":
        return []
    where = "" if job.entrypoint is None else ", if the script takes them from site.sampler"
    text = f"While the run goes on, sequences go with the speeds that sites have{where}"
    for name in others.choice.sites[:_MOST_LOSSES]:
        left = None if job.placement else others.otherwise(name)
        if left is not None and len(left.sites) > 1:
            parts = zip(left.sites, left.sequences, strict=True)
            text += f"; without {name}: " + ", ".join(f"{site} {part}" for site, part in parts)
    return [f"{text}."]


def _regime_later(others: Alternatives) -> list[str]:
    """Tell to which regimes a run may change while it goes on."""
    job = others.search.job
    if job.plan is None or job.reduction != Reduction():
        return []
    rungs = rungs_of(job, len(others.choice.sites))
    replan = job.plan.replan
    if not rungs and replan is not None and replan.regime == "follow":
        return ["The regime stays sync: plan.max_loss_gap permits no other."]
    names = " or ".join(regime.in_words() for regime in rungs)
    return [f"The run may go over to {names} while its links are slow."] if rungs else []


def summary(choice: Choice, num_sites: int) -> str:
    """Return what was decided in a sentence or two; `num_sites` could have taken part."""
    who = ", ".join(
        f"{site} {count}" for site, count in zip(choice.sites, choice.sequences, strict=True)
    )
    crossing = (
        "nothing crosses"
        if len(choice.sites) == 1
        else f"gradients cross as {choice.coding}, by {choice.candidate.form}"
    )
    return (
        f"{len(choice.sites)} of {num_sites} sites take part, with sequences of a step each: {who}; "
        f"{crossing}. A step takes {format_duration(choice.step_s)}."
    )


def _money(search: Search, choice: Choice) -> str:
    """Return a sentence on what a step and a token cost."""
    usd, tokens = choice.usd_per_step, num_tokens(search.job)
    accelerators = usd_per_s(choice.topology(search.topology)) * choice.step_s
    return (
        f"A step costs {_usd(usd)}: {_usd(accelerators)} for accelerators, and "
        f"{_usd(max(0.0, usd - accelerators))} for what crosses. A million tokens cost "
        f"{_usd(1e6 * usd / tokens)}."
    )


def num_tokens(job: Job) -> int:
    """Return the tokens of a step."""
    context = job.trainer.model.context if job.workload is None else job.workload.context
    return job.global_batch * context


def _left_out(others: Alternatives, site: Mapping[str, Any]) -> str:
    search, choice, name = others.search, others.choice, site["site"]
    if search.job.placement:
        return f"{name} is left out: the job's placement does not list it."
    if not search.options.is_able(name):
        closest = search.options.cuts[name].closest()
        return f"{name} is left out: no cut fits. The closest: {closest}."
    with_it = others.otherwise(name)
    if with_it is None:
        return f"{name} is left out: {_why_impossible(search, choice, name)}."
    if search.wishes.objective == "cost":
        if with_it.usd_per_step > choice.usd_per_step * _LONGER:
            times = with_it.usd_per_step / choice.usd_per_step
            return f"{name} is left out: with it, a token costs {times:.2f} times as much."
        return f"{name} is left out: with it, a token costs no less."
    if with_it.step_s > choice.step_s * _LONGER:
        times = with_it.step_s / choice.step_s
        return f"{name} is left out: with it, a step takes {times:.2f} times as long."
    return f"{name} is left out: with it, a step is no shorter."


def _why_impossible(search: Search, choice: Choice, name: str) -> str:
    """Return why a site cannot join the sites that take part."""
    job, topology = search.job, search.topology
    together = [*choice.sites, name]
    if unreached(restricted(topology, together)):
        between = _way_in(topology, choice.sites, name)
        if not between:
            return "no links both ways join it to the sites that take part"
        them = "which is" if len(between) == 1 else "which are"
        return (
            f"links both ways join it to the sites that take part only through "
            f"{' and '.join(between)}, {them} left out"
        )
    mine = search.options.least(topology.site(name))
    ranks = sum(search.options.least(topology.site(each)) for each in together)
    if ranks > job.global_batch:
        who, section = ("rank", "trainer") if job.workload is None else ("site", "workload")
        return (
            f"each {who} takes a sequence at least, and with its {mine} they would be {ranks} for "
            f"the {job.global_batch} of a step ({section}.global_batch)"
        )
    if job.reduction != Reduction():
        return "the reduction that the job names does not fit with it"
    return "no cuts fit with it that give all replicas a sequence"


def _way_in(topology: Topology, inside: Sequence[str], name: str) -> list[str]:
    """Return the fewest sites through which links both ways join a site to others; empty: none."""
    ways = [[name]]
    reached = {name}
    for way in ways:
        for site in topology.sites:
            if site.name in reached or not _are_joined(topology, way[-1], site.name):
                continue
            if site.name in inside:
                return way[1:]
            reached.add(site.name)
            ways.append([*way, site.name])
    return []


def _are_joined(topology: Topology, one: str, other: str) -> bool:
    return topology.link(one, other) is not None and topology.link(other, one) is not None


def _cuts(search: Search, choice: Choice, inside: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a sentence per cut, however many sites use it."""
    by_cut: dict[tuple[str, float], list[str]] = {}
    for each in inside:
        by_cut.setdefault((each["cut"], each["alone_s"]), []).append(each["site"])
    first = {each["site"]: (index, each) for index, each in enumerate(inside)}
    for (cut, alone_s), names in by_cut.items():
        index, each = first[names[0]]
        yield (
            f"{', '.join(names)}: {cut}. By itself a step takes {format_duration(alone_s)}, "
            f"{_share(each['bubble_s'] / alone_s)} of it the pipeline's bubble; "
            f"{format_size(each['memory_bytes'])} of {format_size(each['memory_of_bytes'])} of memory."
        )
        site = search.topology.site(names[0])
        fastest = search.options.timings(choice.job(search.job), site, choice.sequences[index])[0]
        if fastest.cut is not None and fastest.alone_s < alone_s:
            yield (
                f"{in_words(fastest.cut.degrees)} would take {format_duration(fastest.alone_s)} by "
                f"itself, and leave {format_duration(fastest.cut.window_s)} instead of "
                f"{format_duration(each['window_s'])} for gradients to cross unseen."
            )
        for lacking in each["too_large"][:1]:
            yield f"Faster by itself, but {lacking}."


def _micro_batch(search: Search, choice: Choice) -> list[str]:
    """Return a sentence on the micro-batch size, if the plan decided it."""
    if search.wishes.micro_batch == "given" or search.job.workload is not None:
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
    exchange_s = model.exchange_s(choice.timings)
    if exchange_s <= 0:
        return []
    windows_s = [each.cut.window_s for each in choice.timings if each.cut is not None]
    long = f", {format_duration(max(windows_s))}," if windows_s else ""
    return [
        f"An exchange that nothing hides takes {_seconds(exchange_s)}. It can hide behind the last "
        f"micro-batch's backward pass{long} and behind nothing else: gradients of earlier "
        "micro-batches are summed first."
    ]


def _needed(search: Search, choice: Choice) -> str:
    """Return a sentence on the bandwidth needed for the efficiency WANTED."""
    factor = wider_for(search, choice, WANTED)
    wanted = f"{_share(WANTED)} of what the sites commit by themselves"
    if math.isinf(factor):
        return f"No bandwidth gives {wanted}: gateways, cards or round trips take too long."
    links = choice.topology(search.topology).links
    rates = {link.bytes_per_s for link in links}
    if len(rates) == 1:
        return f"For {wanted}, links of {format_rate(significant(factor * rates.pop(), 3))} are enough."
    return f"For {wanted}, links of {factor:.3g} times their bandwidth are enough."


def wider_for(search: Search, choice: Choice, wanted: float) -> float:
    """Return by which factor links have to be wider, or may be narrower; infinite: none is enough.

    Sites, reduction, codec and sizes stay; the spread is the one that is fastest if nothing
    crosses, and cuts are chosen anew for each bandwidth.

    Args:
        search: That found the choice.
        choice: Of a job that describes its model.
        wanted: Efficiency.
    """
    job, here = choice.job(search.job), choice.topology(search.topology)
    fronts, alone_s = by_themselves(search, choice)

    def is_enough(factor: float) -> bool:
        model = StepModel(job, widened(here, None, factor), choice.candidate.plan)
        return fastest_cuts(model, fronts)[1] <= alone_s / wanted

    low, high = 1 / _WIDEST, _WIDEST
    if not is_enough(high):
        return math.inf
    while high / low > 1.001:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return high


def timed_sets(others: Alternatives) -> list[Timed]:
    """Return the sets of sites that may run another regime: the choice's, and all sites."""
    search, choice = others.search, others.choice
    job = search.job
    found: list[Timed] = []
    parameters = (
        num_parameters(job.trainer.model)
        if job.workload is None
        else workload_described(job.workload).parameters
    )
    everybody = others.everybody if others.is_free and job.regime.is_sync else None
    for each in (choice, everybody):
        if each is None or len(each.sites) == 1 or each.sites in [of.choice.sites for of in found]:
            continue
        here = each.topology(search.topology)
        found.append(
            Timed(
                choice=each,
                alone_s=by_themselves(search, each)[1],
                exchange_s=each.model(job, search.topology).exchange_s(each.timings),
                parameters=parameters,
                parameters_of_rank=parameters / min(site.num_ranks for site in here.sites),
                usd_per_s=usd_per_s(here),
            )
        )
    return found


def _share(value: float) -> str:
    return format_fraction(round(value, 3))


def _usd(value: float) -> str:
    return f"{significant(value, 4):.10g} USD"


def _seconds(value: float) -> str:
    return format_duration(significant(value, 4))
