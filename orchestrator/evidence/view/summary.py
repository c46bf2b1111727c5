"""Renders the figures of summary.json: what a run came to, at its end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from isthmus.orchestrator.core.event_kinds import EventKind
from isthmus.orchestrator.core.run_metrics import PARTS
from isthmus.orchestrator.evidence.view import formats
from isthmus.orchestrator.evidence.view.egress import egress_of
from isthmus.orchestrator.evidence.view.fitting_table import Column, FittingTable
from isthmus.orchestrator.evidence.view.formats import show
from isthmus.orchestrator.evidence.view.live import (
    ASCII,
    BLOCKS,
    MOST_LINKS,
    STYLES,
    link_columns,
    links_that_matter,
    noted,
    slow_words,
    sparkline,
    unbroken,
)
from isthmus.orchestrator.runs.facts import known, ratio
from isthmus.protos.control.v1 import control_pb2

_CURVE_WIDTH = 40
_MAX_SLOW = 20


class RunSummary:
    """Renders a summary: print it to a Console. What it does not have is left out."""

    def __init__(self, summary: Mapping[str, Any]) -> None:
        self._summary = summary

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        summary = self._summary
        yield _heading(summary)
        if reason := formats.words(summary.get("reason")):
            code = formats.words(summary.get("reason_code"))
            yield unbroken(f"{code}: {reason}", options.max_width)
        for line in _notes(summary):
            yield unbroken(line, options.max_width, style="yellow")
        periods = [*(summary.get("slow_sites") or []), *(summary.get("slow_ranks") or [])]
        for period in periods[:_MAX_SLOW]:
            words = slow_words(control_pb2.SlowSite(**period))
            yield unbroken(words, options.max_width, style="yellow")
        facts = Table.grid(padding=(0, 2))
        width = max(8, min(_CURVE_WIDTH, options.max_width - 32))
        curve = _curve(summary.get("losses") or [], width, ASCII if options.ascii_only else BLOCKS)
        for name, fact in {"loss": curve, **_facts(summary)}.items():
            if fact:
                facts.add_row(Text(name, style="bold"), Text(fact))
        if facts.rows:
            yield facts
        has_rates = summary.get("counts_tokens") is not False
        if (table := _sites(summary.get("sites") or [], has_rates=has_rates)).says_something:
            yield Text()
            yield table
        links = [each for each in summary.get("links") or [] if known(each, "sent_bytes")]
        if links:
            shown = links_that_matter(links, MOST_LINKS)
            yield Text()
            yield FittingTable(link_columns(shown))
            if left := len(links) - len(shown):
                run_id = formats.words(summary.get("run_id"))
                yield Text(f"and {left} more links: isthmus status {run_id} --all", style="dim")


def _heading(summary: Mapping[str, Any]) -> Text:
    run_id, reason_code = (
        formats.words(summary.get("run_id")),
        formats.words(summary.get("reason_code")),
    )
    state = formats.in_words(formats.words(summary.get("state")), reason_code)
    steps, active_s = known(summary, "steps"), known(summary, "active_s")
    parts = [
        Text(f"run {run_id}".rstrip()),
        Text(state, style=STYLES.get(state, "")),
        Text("" if steps is None else f"after {steps:.0f} steps"),
        Text(f"in {formats.duration(active_s)}" if active_s else ""),
    ]
    return Text(" ").join(part for part in parts if part)


def _egress(summary: Mapping[str, Any]) -> str:
    cost = egress_of(
        summary.get("links") or [],
        active_s=known(summary, "active_s"),
        step_s=known(summary, "step_s"),
        codec=str(summary.get("codec") or ""),
    )
    return "" if cost is None else "\n".join(filter(None, (cost.in_words(), cost.comparison())))


def _notes(summary: Mapping[str, Any]) -> list[str]:
    """Return what was noted, a line each; why it was stopped is the reason of its end."""
    notes = [
        control_pb2.Note(
            wall_s=known(each, "wall_s") or 0.0,
            kind=str(each.get("kind")),
            site=str(each.get("site")),
            text=formats.words(each.get("text")),
        )
        for each in summary.get("noted") or []
        if each.get("kind") != EventKind.RUN_STOPPING
    ]
    sites = [str(site.get("site")) for site in summary.get("sites") or []]
    return noted(notes, sites)


def _curve(losses: Sequence[Sequence[float | None]], width: int, levels: str) -> str:
    """Return the first loss, the curve, and the last one."""
    values = [loss for _, loss in losses]
    ends = [known({"loss": loss}, "loss") for loss in values[:1] + values[-1:]]
    if not ends:
        return ""
    first, last = (show(end, formats.loss) for end in ends)
    drawn = sparkline(values, width, levels)
    return f"{first} {drawn} {last}"


def _facts(summary: Mapping[str, Any]) -> dict[str, str]:
    """Return the run's figures by name; empty where not known."""
    held_out_loss, entropy = known(summary, "held_out_loss"), known(summary, "unigram_entropy")
    tokens, rate = known(summary, "tokens"), known(summary, "tokens_per_s")
    held_out = show(held_out_loss, formats.loss)
    if entropy is not None:
        held_out += f"  (unigram entropy {formats.loss(entropy)})"
    speed = f"{show(rate, formats.count)} tokens/s"
    if tokens is not None:
        speed += f", {formats.count(tokens)} tokens"
    if summary.get("counts_tokens") is False:
        steps_per_s = ratio((rate or 0.0) * (known(summary, "steps") or 0.0), tokens)
        speed = f"{show(steps_per_s, formats.count)} steps/s"
    if (mfu := formats.mfu(summary)) != formats.UNKNOWN:
        speed += f", MFU {mfu}"
    sent = [known(link, "sent_bytes") for link in summary.get("links") or []]
    compression, verified = known(summary, "compression_ratio"), known(summary, "verified_steps")
    noise_scale = known(summary, "noise_scale")
    return {
        "held-out loss": "" if held_out_loss is None else held_out,
        "speed": "" if rate is None else speed,
        "noise scale": "" if noise_scale is None else f"{formats.count(noise_scale)} tokens",
        "a step": _time_split(summary.get("time_split") or {}),
        "sent": formats.size(sum(each or 0.0 for each in sent)) if any(sent) else "",
        "egress": _egress(summary),
        "compression": "" if compression is None else formats.factor(compression),
        "parameters": f"equal at all sites, checked after {verified:.0f} steps" if verified else "",
    }


def _time_split(split: Mapping[str, Any]) -> str:
    """Return one line a part: seconds a step, and the share of the step."""
    parts = {name: known(split, key) for key, name in PARTS.items()}
    total_s = sum(part or 0.0 for part in parts.values())
    if not total_s:
        return ""
    width = max(len(name) for name in parts)
    lines = [f"{'all':<{width}}  {formats.duration(total_s):>7}"]
    lines += [
        f"{name:<{width}}  {formats.duration(part_s):>7}  {formats.share(part_s / total_s):>5}"
        for name, part_s in parts.items()
        if part_s is not None
    ]
    return "\n".join(lines)


def _sites(sites: Sequence[Mapping[str, Any]], *, has_rates: bool) -> FittingTable:
    rates = [known(site, "tokens_per_s") if has_rates else None for site in sites]
    return FittingTable(
        [
            Column("site", [formats.words(site.get("site")) for site in sites], is_text=True),
            Column("tokens/s", [show(rate, formats.count) for rate in rates]),
            Column("MFU", [formats.mfu(site) for site in sites]),
        ]
    )
