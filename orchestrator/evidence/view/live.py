"""A run as it goes on: `LiveTable` for a terminal, `plain_line` for a log file.

A curve in one line of text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from isthmus.orchestrator.evidence.view import formats
from isthmus.orchestrator.evidence.view.fitting_table import Column, FittingTable
from isthmus.orchestrator.evidence.view.formats import known, ratio, show
from isthmus.protos import metrics
from isthmus.protos.control.v1 import control_pb2

STYLES = {
    "ACTIVE": "green",
    "SUCCEEDED": "bold green",
    "SUCCEEDED WITH LOSSES": "bold yellow",
    "FAILED": "bold red",
    "CANCELLED": "bold yellow",
}
"""How a run's state is shown."""
_OUT = frozenset({control_pb2.SITE_STATE_LOST, control_pb2.SITE_STATE_DROPPED})
_UNFINISHED = frozenset({control_pb2.RUN_STATE_UNSPECIFIED, control_pb2.RUN_STATE_FORMING})


class LiveTable:
    """Renders one state of a run; give rich's Live a new one for the next."""

    def __init__(self, run: control_pb2.Run) -> None:
        self._run = run

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        run = self._run
        heading = Text(f"{formats.words(run.run_id)}  {formats.words(run.name)}  ")
        state = formats.outcome(run)
        heading.append(state, style=STYLES.get(state, ""))
        yield heading
        if members := _members(run):
            yield Text(members)
        if shown := _figures(run):
            yield Text("  ".join(shown))
        if run.reason_code:
            yield Text(f"{formats.words(run.reason_code)}: {formats.words(run.reason)}")
        for note in run.noted:
            yield Text(formats.note(note.wall_s, note.text), style="yellow")
        if run.sites:
            yield Text()
            yield _sites(run)
        if run.links:
            yield Text()
            links = [
                {
                    **link.latest,
                    "source": link.source,
                    "target": link.target,
                    "configured_bytes_per_s": link.bytes_per_s or None,
                }
                for link in run.links
            ]
            yield FittingTable(link_columns(links))


def plain_line(run: control_pb2.Run) -> str:
    """Return the run in one line: its state, its figures, and while it starts or ended, why."""
    parts = [formats.outcome(run), *_figures(run)]
    if run.state in _UNFINISHED:
        parts += [
            f"{formats.words(site.site)} {formats.site_state(site).lower()}" for site in run.sites
        ]
    if run.reason_code:
        parts.append(f"{formats.words(run.reason_code)}: {formats.words(run.reason)}")
    return "  ".join(parts)


def _members(run: control_pb2.Run) -> str:
    """Return who takes part, unless all sites do and count."""
    returning = control_pb2.SITE_STATE_RETURNING
    follows = [
        site.site for site in run.sites if site.site in run.members and site.state == returning
    ]
    if not run.members or (len(run.members) == len(run.sites) and not follows):
        return ""
    told = f"members since epoch {run.epoch}: {formats.words(', '.join(run.members))}"
    return f"{told} ({formats.words(', '.join(follows))} follows)" if follows else told


def _figures(run: control_pb2.Run) -> list[str]:
    """Return the run's own figures, each with its name: those that are known."""
    latest = [site.latest for site in _counted(run)]
    loss = known(run.totals, metrics.LOSS)
    held_out_loss = known(run.totals, metrics.HELD_OUT_LOSS)
    tokens_per_s = sum(_tokens_per_s(values) or 0.0 for values in latest)
    step_s = max((known(values, metrics.STEP_S) or 0.0 for values in latest), default=0.0)
    exposed_s = max((known(values, metrics.EXPOSED_INTER_S) or 0.0 for values in latest), default=0)
    parts = []
    if run.active_s:
        parts.append(formats.duration(run.active_s))
    if any(site.latest for site in run.sites):
        parts.append(f"step {max(site.step for site in run.sites)}")
    if loss is not None:
        parts.append(f"loss {formats.loss(loss)}")
    if held_out_loss is not None:
        parts.append(f"held-out loss {formats.loss(held_out_loss)}")
    if tokens_per_s:
        parts.append(f"{formats.count(tokens_per_s)} tokens/s")
    if (mfu := formats.mfu(_joint_mfu(latest))) != formats.UNKNOWN:
        parts.append(f"MFU {mfu}")
    if (noise_scale := known(run.totals, metrics.NOISE_SCALE)) is not None:
        parts.append(f"noise scale {formats.count(noise_scale)} tokens")
    if step_s:
        percent = formats.share(exposed_s / step_s)
        parts.append(f"WAN {formats.duration(exposed_s)} a step ({percent})")
    return parts


def _counted(run: control_pb2.Run) -> list[control_pb2.SiteStatus]:
    """Return the sites whose figures are the run's: of one that is lost they are its last."""
    returning = control_pb2.SITE_STATE_RETURNING
    return [
        site
        for site in run.sites
        if site.latest
        and (site.site in run.members or not run.members)
        and site.state not in {returning, *_OUT}
    ]


def _loss(values: Mapping[str, float]) -> float | None:
    """Return a site's loss; None while it follows: a mean over no tokens is none."""
    return None if known(values, metrics.SITE_TOKENS) == 0 else known(values, metrics.LOSS)


def _joint_mfu(latest: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the MFU of sites together, by its name; empty where that of one is not known.

    A site's peak is as its tokens a second over its MFU.
    """
    rates = [_tokens_per_s(values) or 0.0 for values in latest]
    for name in (metrics.MFU, metrics.MFU_ESTIMATE):
        shares = [known(values, name) or 0.0 for values in latest]
        if shares and min(shares) > 0:
            peaks = [rate / share for rate, share in zip(rates, shares, strict=True)]
            return {name: sum(rates) / sum(peaks)}
    return {}


def _tokens_per_s(values: Mapping[str, float]) -> float | None:
    return ratio(known(values, metrics.SITE_TOKENS) or None, known(values, metrics.STEP_S))


def _sites(run: control_pb2.Run) -> FittingTable:
    latest = [site.latest for site in run.sites]
    step_s = [known(values, metrics.STEP_S) for values in latest]
    exposed_s = [known(values, metrics.EXPOSED_INTER_S) for values in latest]
    shares = [ratio(part, whole) for part, whole in zip(exposed_s, step_s, strict=True)]
    waits_s = [known(values, metrics.WAIT_S) for values in latest]
    counted = {site.site for site in _counted(run)}
    rates = [_tokens_per_s(site.latest) if site.site in counted else None for site in run.sites]
    return FittingTable(
        [
            Column("site", [formats.words(site.site) for site in run.sites], is_text=True),
            Column(
                "state",
                [formats.site_state(site).lower() for site in run.sites],
                is_text=True,
            ),
            Column(
                "step", [str(site.step) if site.latest else formats.UNKNOWN for site in run.sites]
            ),
            Column("loss", [show(_loss(each), formats.loss) for each in latest]),
            Column("tokens/s", [show(each, formats.count) for each in rates]),
            Column(
                "MFU",
                [
                    formats.mfu(site.latest) if site.site in counted else formats.UNKNOWN
                    for site in run.sites
                ],
            ),
            Column("WAN", [show(each, formats.duration) for each in exposed_s]),
            Column("share", [show(each, formats.share) for each in shares]),
            Column("wait", [show(each, formats.duration) for each in waits_s]),
            Column("step time", [show(each, formats.duration) for each in step_s]),
        ]
    )


def link_columns(links: Sequence[Mapping[str, Any]]) -> list[Column]:
    """Return a row a directed link, of figures by their names in a run's summary or its report."""

    def each(heading: str, style: Callable[[float], str], key: str, over: str = "") -> Column:
        values = [known(link, key) for link in links]
        if over:
            values = [
                ratio(value, known(link, over)) for value, link in zip(values, links, strict=True)
            ]
        return Column(heading, [show(value, style) for value in values])

    names = [formats.way(link.get("source"), link.get("target")) for link in links]
    return [
        Column("link", names, is_text=True),
        each("throughput", formats.rate, metrics.THROUGHPUT_BYTES_PER_S),
        each("configured", formats.rate, "configured_bytes_per_s"),
        each("use", formats.share, metrics.THROUGHPUT_BYTES_PER_S, "configured_bytes_per_s"),
        each("busy", formats.share, "busy"),
        each("sent", formats.size, metrics.SENT_BYTES),
        each("ratio", formats.factor, metrics.RAW_BYTES, metrics.SENT_BYTES),
        each("RTT", formats.duration, metrics.RTT_S),
        each("set to", formats.duration, "configured_rtt_s"),
        each("lost", formats.count, "lost_packets"),
        each("dropped", formats.count, "dropped_packets"),
        each("egress", formats.dollars, "egress_usd"),
    ]


BLOCKS = "▁▂▃▄▅▆▇█"
ASCII = "_.,-=+*#"
"""The same eight levels where the stream cannot carry blocks."""


def sparkline(values: Sequence[float | None], width: int, levels: str = BLOCKS) -> str:
    """Draw `values` from left to right in at most `width` characters.

    More values than characters are averaged in equal parts. The smallest of what is then drawn has
    the lowest level, the largest the highest; a part without a finite value is a space.
    """
    parts = _averages(values, min(width, len(values)))
    finite = [part for part in parts if part is not None]
    if not finite:
        return " " * len(parts)
    low, high = min(finite), max(finite)
    scale = (len(levels) - 1) / (high - low) if high > low else 0.0
    return "".join(" " if part is None else levels[round((part - low) * scale)] for part in parts)


def _averages(values: Sequence[float | None], num_parts: int) -> list[float | None]:
    parts: list[float | None] = []
    for index in range(num_parts):
        begin = index * len(values) // num_parts
        end = (index + 1) * len(values) // num_parts
        finite = [
            value for value in values[begin:end] if value is not None and math.isfinite(value)
        ]
        parts.append(math.fsum(finite) / len(finite) if finite else None)
    return parts
