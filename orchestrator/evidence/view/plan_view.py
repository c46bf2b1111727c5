"""A plan for people: tables of sites, links and alternatives, and the reasons in sentences."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console

from isthmus.orchestrator.evidence.view import formats
from isthmus.orchestrator.evidence.view.egress import Egress
from isthmus.orchestrator.evidence.view.fitting_table import Column, FittingTable
from isthmus.orchestrator.runs.facts import DAY_S
from isthmus.topology.spec.lanes import Lanes
from isthmus.topology.spec.plan_decisions import NUM_TOLD_ALTERNATIVES
from isthmus.topology.spec.world import Topology

WIDTH = 110
_TREES = 6
_LISTED = 3
_LONGEST = 72
"""Terminal cells of an alternative's name."""


def shown(plan: Mapping[str, Any]) -> str:
    """Return a plan, as its file has it, as text."""
    predicted = plan["predicted"]
    parts = [
        "\n".join(textwrap.fill(each, WIDTH) for each in plan["why"]),
        _table(_sites(plan)),
        *([_table(_inside(plan))] if plan.get("inside") else []),
        f"{_exchange(plan['decisions'])}\n"
        f"predicted: {formats.duration(predicted['step_s'])} a step, "
        f"{formats.count(predicted['tokens_per_s'])} tokens/s, efficiency "
        f"{predicted['efficiency']:.3f}"
        + (f", {predicted['usd_per_step']:.4g} USD a step" if predicted["usd_per_step"] else ""),
    ]
    if cost := _egress(plan):
        parts[-1] += f"\negress: {cost}"
    if plan["links"]:
        parts.append(_table(_links(plan)))
    if plan["alternatives"]:
        parts.append(_table(alternative_columns(plan)))
    parts.append(_inputs(plan))
    parts += [textwrap.fill(f"warning: {each}", WIDTH) for each in plan["warnings"]]
    return "\n\n".join(parts)


def _exchange(decisions: Mapping[str, Any]) -> str:
    """Return how gradients cross, in a few lines."""
    exchange = decisions["exchange"]
    own = [
        f", {each['codec']} between {' and '.join(each['between'])}"
        for each in exchange.get("codecs", ())
    ]
    listed = [
        f"exchange: {exchange['codec']}{''.join(own)}, chunks of {exchange['chunk']}, buckets of "
        f"{exchange['bucket']}, connections a link: {exchange['channels_per_link']}"
    ]
    if decisions.get("micro_batch") is not None:
        listed.append(f"micro-batch: {decisions['micro_batch']} sequences a rank at once, at most")
    trees = decisions["reduction"].get("trees", ())
    total = sum(tree["weight"] for tree in trees)
    listed += [
        f"tree at {tree['root']}, of {formats.share(tree['weight'] / total)} of the chunks: "
        + ", ".join(f"{child} → {parent}" for child, parent in tree["parents"].items())
        + "".join(
            f"{', ' if index else '; back '}{giver} → {site}"
            for index, (site, giver) in enumerate(tree.get("down", {}).items())
        )
        for tree in trees[:_TREES]
    ]
    if len(trees) > _TREES:
        listed.append(f"and {len(trees) - _TREES} more trees: --json or --out lists them")
    return "\n".join(textwrap.fill(each, WIDTH, subsequent_indent="    ") for each in listed)


def shown_lanes(topology: Topology, lanes: Mapping[str, Lanes]) -> str:
    """Return how many gateways nodes get, where cores allow it, in a few lines.

    Args:
        topology: The sites that take part.
        lanes: Of those that leave it to isthmus.
    """
    told: dict[str, list[str]] = {}
    for site in topology.sites:
        each = lanes.get(site.name)
        if each is None:
            reason = f"{site.gateways_per_node}, as the topology says"
        else:
            allowed = ", if its cores allow it" if each.num_gateways > 1 else ""
            reason = f"{each.num_gateways}{allowed}; {each.why}"
        told.setdefault(reason, []).append(site.name)
    return "\n".join(
        textwrap.fill(
            f"gateways a node of {', '.join(names)}: {reason}", WIDTH, subsequent_indent="    "
        )
        for reason, names in told.items()
    )


def difference(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return what two plans decide and predict differently, by dotted path."""
    parts = ("decisions", "predicted", "binding")
    old = {path: value for part in parts for path, value in _leaves(part, before[part])}
    new = {path: value for part in parts for path, value in _leaves(part, after[part])}
    return [
        {
            "path": path,
            "before": str(old.get(path, formats.UNKNOWN)),
            "after": str(new.get(path, formats.UNKNOWN)),
        }
        for path in dict.fromkeys((*old, *new))
        if old.get(path) != new.get(path)
    ]


def _leaves(path: str, value: object) -> Iterator[tuple[str, object]]:
    """Yield single values by path.

    Of a placement, each site's sequences and degrees by its name.
    """
    if isinstance(value, dict):
        for key, each in value.items():
            yield from _leaves(f"{path}.{key}", each)
    elif isinstance(value, list):
        for index, each in enumerate(value):
            if isinstance(each, dict) and {"site", "sequences"} <= set(each):
                yield f"{path}.{each['site']}", each["sequences"]
                yield from _leaves(f"{path}.{each['site']}", each.get("parallel") or {})
            else:
                yield from _leaves(f"{path}.{index}", each)
    else:
        yield path, value


def _egress(plan: Mapping[str, Any]) -> str:
    """Return what crosses costs; empty where links have no price."""
    predicted, exchange = plan["predicted"], plan["decisions"]["exchange"]
    usd, of_run = predicted.get("egress_usd_per_step"), predicted.get("egress_usd_per_run")
    if not usd:
        return ""
    a_day = DAY_S / predicted["step_s"]
    cost = Egress(
        usd=None,
        usd_per_step=usd,
        usd_per_day=usd * a_day,
        fp32_usd_per_day=predicted["fp32_egress_usd_per_step"] * a_day,
        codec="" if exchange.get("codecs") else exchange["codec"],
    )
    whole = "" if of_run is None else f", {formats.dollars(of_run)} for all of the job's steps"
    return f"{cost.in_words()}{whole}" + (f"; {said}" if (said := cost.comparison()) else "")


def _sites(plan: Mapping[str, Any]) -> list[Column]:
    step_s, sites = plan["predicted"]["step_s"], plan["sites"]
    return [
        Column("site", [each["site"] for each in sites], is_text=True),
        Column("sequences", [str(each["sequences"] or formats.UNKNOWN) for each in sites]),
        Column("compute", [_computed(each) for each in sites]),
        Column("without it", [_otherwise(each, step_s, is_taken=True) for each in sites]),
        Column("with it", [_otherwise(each, step_s, is_taken=False) for each in sites]),
    ]


def _computed(site: Mapping[str, Any]) -> str:
    return formats.duration(site["compute_s"]) if site["sequences"] else formats.UNKNOWN


def _inside(plan: Mapping[str, Any]) -> list[Column]:
    sites = plan["inside"]
    return [
        Column("site", [each["site"] for each in sites], is_text=True),
        Column("by itself", [f"{each['alone_s']:.4g}s" for each in sites]),
        *(
            Column(name, [formats.share(each[key] / each["alone_s"]) for each in sites])
            for name, key in (
                ("collectives", "collectives_s"),
                ("bubble", "bubble_s"),
                ("optimizer", "optimizer_s"),
            )
        ),
        Column("window", [formats.duration(each["window_s"]) for each in sites]),
        Column("memory", [_of_memory(each) for each in sites]),
        Column("MFU", [formats.share(each["mfu"]) for each in sites]),
    ]


def _of_memory(site: Mapping[str, Any]) -> str:
    return formats.share(site["memory_bytes"] / site["memory_of_bytes"])


def _otherwise(site: Mapping[str, Any], step_s: float, *, is_taken: bool) -> str:
    other_s = site["step_s_otherwise"]
    if other_s is None or bool(site["sequences"]) is not is_taken:
        return formats.UNKNOWN
    return _gained(other_s, step_s)


def _links(plan: Mapping[str, Any]) -> list[Column]:
    step_s, links = plan["predicted"]["step_s"], plan["links"]
    return [
        Column("link", [" - ".join(each["between"]) for each in links], is_text=True),
        Column(
            "codec", [", ".join(each["codecs"]) or formats.UNKNOWN for each in links], is_text=True
        ),
        Column("connections", [str(each["connections"] or formats.UNKNOWN) for each in links]),
        Column("busy", [formats.share(each["busy"]) for each in links]),
        Column("egress a step", [_dollars(each, 1.0) for each in links]),
        Column("a day", [_dollars(each, DAY_S / step_s) for each in links]),
        Column(
            "step with 1 Gbit/s more",
            [_gained(each["step_s_with_one_more_gbit_s"], step_s) for each in links],
        ),
    ]


def _dollars(link: Mapping[str, Any], num_steps: float) -> str:
    """Return what a link costs in so many steps; a dash where it has no price."""
    usd = link.get("egress_usd_per_step")
    return formats.dollars(usd * num_steps) if usd else formats.UNKNOWN


def _gained(other_s: float, step_s: float) -> str:
    return f"{formats.duration(other_s)} ({formats.factor(other_s / step_s)})"


def alternative_columns(plan: Mapping[str, Any]) -> list[Column]:
    """Return a plan's best alternatives, each beside the plan itself."""
    step_s = plan["predicted"]["step_s"]
    listed = plan["alternatives"][:NUM_TOLD_ALTERNATIVES]
    return [
        Column("instead", [each["what"] for each in listed], is_text=True, longest=_LONGEST),
        Column("step", [_gained(each["step_s"], step_s) for each in listed]),
        Column(
            "USD a step",
            [f"{each['usd_per_step']:.4g}" if each["usd_per_step"] else "-" for each in listed],
        ),
    ]


def _inputs(plan: Mapping[str, Any]) -> str:
    """Return what the plan rests on; figures of links that come from the same place in one line."""
    of_links: dict[tuple[str, str], list[str]] = {}
    others: dict[tuple[str, str], list[str]] = {}
    for each in plan["inputs"]:
        name, is_link, figure = each["what"].partition(" → ")
        if is_link:
            key = (f"links, {figure.rpartition(', ')[2]}", each["origin"])
            of_links.setdefault(key, []).append(each["value"])
        else:
            others.setdefault((each["value"], each["origin"]), []).append(name)
    lines = [
        *(f"{_first(names)}: {value} ({origin})" for (value, origin), names in others.items()),
        *(f"{what}: {_first(values)} ({origin})" for (what, origin), values in of_links.items()),
    ]
    wrapped = (textwrap.fill(each, WIDTH - 2, subsequent_indent="  ") for each in lines)
    return "\n".join(["rests on", *(textwrap.indent(each, "  ") for each in wrapped)])


def _first(words: list[str]) -> str:
    """Return different words once each, the first few of them."""
    unique = list(dict.fromkeys(words))
    more = f" and {len(unique) - _LISTED} more" if len(unique) > _LISTED else ""
    return ", ".join(unique[:_LISTED]) + more


def _table(columns: list[Column]) -> str:
    console = Console(file=io.StringIO(), width=WIDTH, color_system=None)
    with console.capture() as capture:
        console.print(FittingTable(columns))
    return "\n".join(line.rstrip() for line in capture.get().splitlines())
