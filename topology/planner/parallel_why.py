"""A plan with cuts in sentences: what binds, why these, how wide links have to be, which regime."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from topology.planner.cut_choice import CutChoice, fastest_cuts
from topology.planner.joint_step import JointModel
from topology.planner.parallel_plan import all_widened
from topology.planner.parallel_search import ParallelSearch
from topology.planner.parallelism import in_words
from topology.planner.regime import regime
from topology.planner.why import compute_at, own_sizes, summary
from topology.units import format_duration, format_fraction, format_rate, format_size, significant

_BINDS = 0.97
"""Share of a step from which on what takes it is all that counts."""
WANTED = 0.96
"""Of what the sites commit by themselves: the efficiency whose bandwidth is told."""
_WIDEST = 1e6
"""Times its bandwidth: a link that is no cost any more."""


def cut_binding(choice: CutChoice, search: ParallelSearch, model: JointModel) -> str:
    """Return what keeps a step from being shorter."""
    sites = choice.topology(search.topology).sites
    slowest = max(sites, key=lambda site: choice.timings[site.index].alone_s)
    alone_s = choice.timings[slowest.index].alone_s
    if alone_s >= _BINDS * choice.step_s:
        return compute_at(slowest.name, search.balanced(choice.sites)[1] / choice.step_s)
    exposed = _share(1 - alone_s / choice.step_s)
    hop, link_s = max(model.link_s.items(), key=lambda each: each[1])
    candidates = [(link_s, f"the link {sites[hop[0]].name} → {sites[hop[1]].name}")]
    for what, busy_s in (
        ("gateway", model.gateway_s(choice.timings)),
        ("network card", model.card_s(choice.timings)),
    ):
        index = max(range(len(sites)), key=busy_s.__getitem__)
        candidates.append((busy_s[index], f"the {what} of the fullest node of {sites[index].name}"))
    most_s, what = max(candidates)
    return (
        f"{what}, busy for {_share(most_s / choice.step_s)} of a step; {exposed} of a step is not "
        "the slowest site's own"
    )


def cut_sentences(
    search: ParallelSearch,
    choice: CutChoice,
    model: JointModel,
    bound: str,
    weighed: Sequence[dict[str, Any]],
    inside: Sequence[dict[str, Any]],
    sites: Sequence[dict[str, Any]],
) -> list[str]:
    """Return the explanation, a sentence or two an entry."""
    told = [summary(choice, len(search.topology.sites)), f"What binds: {bound}."]
    told += [_left_out(search, each, choice) for each in sites if not each["sequences"]]
    told += _cuts(search, choice, inside)
    told += own_sizes(choice, weighed)
    if len(choice.sites) > 1:
        told += [_hidden(choice, model), _needed(search, choice)]
        told += _regime(search, choice, model)
    return told


def _left_out(search: ParallelSearch, site: dict[str, Any], choice: CutChoice) -> str:
    name, with_s = site["site"], site["step_s_otherwise"]
    if not search.cuts[name].cuts:
        return f"{name} is left out: no cut fits. The closest: {search.cuts[name].closest()}."
    if with_s is None:
        return (
            f"{name} is left out: no links both ways join it to the others, or of the "
            f"{search.model.global_batch} sequences of a step none would be left for it."
        )
    if with_s > choice.step_s:
        return (
            f"{name} is left out: with it, a step takes {with_s / choice.step_s:.2f} times as long."
        )
    gains = "a token costs more" if search.wishes.objective == "cost" else "a step is no shorter"
    return f"{name} is left out: with it, {gains}."


def _cuts(
    search: ParallelSearch, choice: CutChoice, inside: Sequence[dict[str, Any]]
) -> Iterator[str]:
    """Tell of each cut once, however many sites have it."""
    by_cut: dict[tuple[str, float], list[str]] = {}
    for each in inside:
        by_cut.setdefault((each["cut"], each["alone_s"]), []).append(each["site"])
    first = {each["site"]: (index, each) for index, each in enumerate(inside)}
    for (cut, alone_s), names in by_cut.items():
        index, each = first[names[0]]
        who = ", ".join(names)
        yield (
            f"{who}: {cut}. By itself a step takes {format_duration(alone_s)}, "
            f"{_share(each['bubble_s'] / alone_s)} of it the pipeline's bubble; "
            f"{format_size(each['memory_bytes'])} of {format_size(each['memory_of_bytes'])} of memory."
        )
        fastest = search.timings(names[0], choice.sequences[index], choice.sizing)[0]
        if fastest.alone_s < alone_s:
            yield (
                f"{in_words(fastest.cut.degrees)} would take {format_duration(fastest.alone_s)} by "
                f"itself, and leave {format_duration(fastest.cut.window_s)} instead of "
                f"{format_duration(each['window_s'])} for gradients to cross unseen."
            )
        for lacking in each["too_large"][:1]:
            yield f"Faster by itself, but {lacking}."


def _hidden(choice: CutChoice, model: JointModel) -> str:
    window_s = max(each.cut.window_s for each in choice.timings)
    return (
        f"An exchange that nothing hides takes {format_duration(model.exchange_s(choice.timings))}; "
        f"the last micro-batch's backward pass, {format_duration(window_s)}, is all that can hide it: gradients "
        "of earlier micro-batches are summed first."
    )


def _needed(search: ParallelSearch, choice: CutChoice) -> str:
    """Say how much wider all links would have to be for an efficiency that is worth having."""
    factor = wider_for(search, choice, WANTED)
    wanted = f"{_share(WANTED)} of what the sites commit by themselves"
    if math.isinf(factor):
        return f"No bandwidth gives {wanted}: gateways, cards or round trips take too long."
    links = choice.topology(search.topology).links
    rates = {link.bytes_per_s for link in links}
    if len(rates) == 1:
        return f"For {wanted}, links of {format_rate(significant(factor * rates.pop(), 3))} are enough."
    return f"For {wanted}, links of {factor:.3g} times their bandwidth are enough."


def wider_for(search: ParallelSearch, choice: CutChoice, efficiency: float) -> float:
    """Return by which factor links have to be wider, or may be narrower; infinite: none is enough.

    Sites, reduction, codec and sizes stay; the spread is the one that is fastest if nothing
    crosses, and cuts are chosen anew for each bandwidth.
    """
    split, alone_s = search.balanced(choice.sites)
    fronts = [
        search.timings(name, count, choice.sizing)
        for name, count in zip(choice.sites, split, strict=True)
    ]
    enough_s = alone_s / efficiency

    def is_enough(factor: float) -> bool:
        model = choice.joint(search.job, all_widened(search.topology, factor))
        return fastest_cuts(model, fronts)[1] <= enough_s

    low, high = 1 / _WIDEST, _WIDEST
    if not is_enough(high):
        return math.inf
    while high / low > 1.001:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if is_enough(middle) else (middle, high)
    return high


def _regime(search: ParallelSearch, choice: CutChoice, model: JointModel) -> list[str]:
    """Say what exchanging less often would bring."""
    ranks = min(search.topology.site(name).num_ranks for name in choice.sites)
    return regime(
        search.wishes.max_sync_period,
        search.balanced(choice.sites)[1],
        model.exchange_s(choice.timings),
        choice.step_s,
        search.workload.parameters / ranks,
    )


def _share(value: float) -> str:
    return format_fraction(round(value, 3))
