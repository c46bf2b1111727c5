"""A run as it goes on: `LiveTable` for a terminal, `plain_line` for a log file.

A curve in one line of text.
"""

from __future__ import annotations

import math
import textwrap
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from isthmus.orchestrator.core.event_kinds import EventKind
from isthmus.orchestrator.evidence.view import formats
from isthmus.orchestrator.evidence.view.alike import and_others, told_once
from isthmus.orchestrator.evidence.view.egress import egress_of
from isthmus.orchestrator.evidence.view.fitting_table import Column, FittingTable
from isthmus.orchestrator.evidence.view.formats import show
from isthmus.orchestrator.runs.facts import known, ratio, to_json
from isthmus.orchestrator.runs.told_facts import told_links
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
_STARTING = frozenset({control_pb2.RUN_STATE_FORMING, control_pb2.RUN_STATE_ACTIVE})
_WAITING = _STARTING | {control_pb2.RUN_STATE_UNSPECIFIED, control_pb2.RUN_STATE_QUEUED}
"""States in which there is nothing in a table before the first step."""
_PHASES = (
    ("agents", control_pb2.SITE_STATE_JOINED),
    ("gateways", control_pb2.SITE_STATE_PREPARED),
    ("joined", control_pb2.SITE_STATE_RUNNING),
)
"""How a run starts: the state that a site has at least when it has passed the phase."""
_NAMED = 4
"""Sites that are named one by one."""
MOST_LINKS = 6
_BAR_WIDTH = 40
_LEAST_BAR = 10


class LiveTable:
    """Renders one state of a run; give rich's Live a new one for the next.

    Paths are whole: print it with `crop=False`.
    """

    def __init__(self, run: control_pb2.Run, *, all_links: bool = False) -> None:
        """With `all_links` every link is shown, else those that matter where there are many."""
        self._run = run
        self._num_links = len(run.links) if all_links else MOST_LINKS

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        run, width = self._run, options.max_width
        heading = Text(f"{formats.words(run.run_id)}  {formats.words(run.name)}  ")
        state = formats.outcome(run)
        heading.append(state, style=STYLES.get(state, ""))
        yield heading
        if members := _members(run):
            yield unbroken(members, width)
        if bar := progress_bar(run, width, is_ascii=options.ascii_only):
            yield Text(bar)
        if shown := _figures(run):
            yield unbroken("  ".join(shown), width)
        if curve := sparkline(run.loss_curve, width, ASCII if options.ascii_only else BLOCKS):
            yield Text(f"loss {curve}")
        links, step_s = _link_figures(run), _step_s(run)
        if cost := egress_of(links, active_s=run.active_s, step_s=step_s, codec=run.codec):
            yield unbroken(f"egress {cost.line()}", width)
        if phases := start_phases(run):
            yield unbroken(phases, width)
        ends_at_s = run.ended_wall_s or time.time()
        if certificates := formats.certificates(run.certificates, ends_at_s):
            yield unbroken(f"certificates {certificates}", width)
        for slow in slow_now(run):
            yield unbroken(slow_words(slow), width, style="yellow")
        if run.reason_code:
            yield unbroken(f"{formats.words(run.reason_code)}: {formats.words(run.reason)}", width)
        is_over = bool(run.reason_code)
        notes = [
            each for each in run.noted if not (is_over and each.kind == EventKind.RUN_STOPPING)
        ]
        for line in noted(notes, [site.site for site in run.sites]):
            yield unbroken(line, width, style="yellow")
        if run.state in _WAITING and _step(run) is None:
            return  # every table would be empty
        if run.sites:
            yield Text()
            yield _sites(run)
        if links:
            shown_links = links_that_matter(links, self._num_links)
            yield Text()
            yield FittingTable(link_columns(shown_links))
            if left := len(links) - len(shown_links):
                run_id = formats.words(run.run_id)
                yield Text(f"and {left} more links: isthmus status {run_id} --all", style="dim")


def _step_s(run: control_pb2.Run) -> float | None:
    return known(run.totals, metrics.STEP_S)


def _link_figures(run: control_pb2.Run) -> list[dict[str, Any]]:
    """Return the figures of each link that has some, as `link_columns` takes them."""
    links = zip(run.links, told_links(run), strict=True)
    return [to_json(facts) for link, facts in links if known(link.latest, metrics.SENT_BYTES)]


def unbroken(text: str, width: int, style: str = "") -> Text:
    """Return text in lines of whole words: a path may be longer than a line, and stays whole."""
    lines = textwrap.wrap(text, max(1, width), break_long_words=False, break_on_hyphens=False)
    return Text("\n".join(lines), style=style, no_wrap=True, overflow="ignore")


def noted(notes: Iterable[control_pb2.Note], sites: Sequence[str]) -> list[str]:
    """Return what is noted of a run, a line each; what several of its sites report alike, once."""
    once = told_once(notes, lambda note: f"{note.kind} {note.site} {note.text}", sites)
    return [formats.note(each.wall_s, and_others(each.text, more)) for each, more in once]


def start_phases(run: control_pb2.Run) -> str:
    """Return how far a run is that has begun with no step; empty once it has, or has ended.

    `agents 3 of 3, gateways 2 of 3 (waits for b)`: the phases that are done, and the present one.
    """
    if run.state not in _STARTING or any(site.latest for site in run.sites):
        return ""
    awaited = [site for site in run.sites if site.state not in _OUT]
    if not awaited:
        return ""
    told = []
    for name, least in _PHASES:
        missing = [formats.words(site.site) for site in awaited if not _is_past(site, least)]
        told.append(f"{name} {len(awaited) - len(missing)} of {len(awaited)}")
        if missing:
            fetched = [each for each in awaited if each.fetching]
            if fetched:
                lines = [
                    f"{formats.words(each.site)}: {formats.words(each.fetching)}"
                    for each in fetched
                ]
                return f"{', '.join(told)} ({'; '.join(lines[:_NAMED])})"
            more = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
            names = f"{', '.join(missing[:_NAMED])}{more}"
            is_script = least == control_pb2.SITE_STATE_RUNNING
            if is_script:
                return f"{', '.join(told[:-1])}, script starts (import torch) at {names}"
            return f"{', '.join(told)} (waits for {names})"
    return f"{', '.join(told)}, first step"


def slow_now(run: control_pb2.Run) -> list[control_pb2.SlowSite]:
    """Return which site the others wait for, and which ranks others of their site wait for."""
    return [*([run.slow] if run.HasField("slow") else []), *run.slow_ranks]


def slow_words(slow: control_pb2.SlowSite) -> str:
    """Return which site or rank others wait for, how long, since when, and why if that is known."""
    is_was, steps = "costs", f"since step {slow.since_step}"
    if slow.is_over:
        is_was, steps = "cost", f"from step {slow.since_step} to {slow.last_step}"
    who, others = f"site {formats.words(slow.site)}", "the others"
    if slow.HasField("rank"):
        node = f"node {formats.words(slow.node)}, host {formats.words(slow.host)}"
        who, others = f"rank {slow.rank} of {who} ({node})", "its site's others"
    why = f"; {formats.words(slow.why)}" if slow.why else ""
    return (
        f"slow, not hung: {who} {is_was} {others} {formats.duration(slow.cost_s)} a step "
        f"({formats.share(slow.share)}) {steps}, for {formats.duration(slow.for_s)}: "
        f"{formats.duration(slow.total_s)} in all{why}"
    )


def current_phase(run: control_pb2.Run) -> str:
    """Return the phase that a run is in which starts, by its first word; empty: it does not."""
    return start_phases(run).partition(" (")[0].rpartition(", ")[2].partition(" ")[0]


def _is_past(site: control_pb2.SiteStatus, least: int) -> bool:
    return least <= site.state <= control_pb2.SITE_STATE_ENDED


def progress_bar(run: control_pb2.Run, width: int, *, is_ascii: bool) -> str:
    """Return a bar over the job's steps, and the time that is left; empty where not known."""
    step = _step(run)
    if step is None or not run.num_steps or run.state not in _STARTING:
        return ""
    share = min(1.0, step / run.num_steps)
    left = f" {formats.share(share)}"
    if (left_s := _left_s(run)) is not None:
        left += f", {formats.duration(left_s)} left"
    room = min(_BAR_WIDTH, width - len(left))
    if room < _LEAST_BAR:
        return left.strip()
    full, empty = ("#", ".") if is_ascii else ("█", "░")
    done = round(share * room)
    return full * done + empty * (room - done) + left


def _left_s(run: control_pb2.Run) -> float | None:
    """Return the time to the end at the present pace."""
    step_s, step = _step_s(run), _step(run)
    if not step_s or step is None or not run.num_steps:
        return None
    return max(0, run.num_steps - step) * step_s


def _step(run: control_pb2.Run) -> int | None:
    """Return the last step; None before the first."""
    return max((site.step for site in run.sites if site.latest), default=None)


def links_that_matter(
    links: Sequence[Mapping[str, Any]], num_links: int
) -> list[Mapping[str, Any]]:
    """Return the slowest links and those that carry most, half of each; in their order."""
    if len(links) <= num_links:
        return list(links)
    places = range(len(links))
    slow = sorted(places, key=lambda at: _rate_of(links[at]))
    used = sorted(places, key=lambda at: -(known(links[at], metrics.SENT_BYTES) or 0.0))
    kept = dict.fromkeys(slow[: num_links // 2])
    for place in used:
        if len(kept) < num_links:
            kept[place] = None
    return [links[place] for place in sorted(kept)]


def _rate_of(link: Mapping[str, Any]) -> float:
    return known(link, metrics.THROUGHPUT_BYTES_PER_S) or math.inf


def plain_line(run: control_pb2.Run) -> str:
    """Return the run in one line: its state, its figures, and while it starts, how far it is."""
    parts = [formats.outcome(run), *_figures(run)]
    if phases := start_phases(run):
        parts.append(phases)
    parts += map(slow_words, slow_now(run))
    return "  ".join(parts)


def _members(run: control_pb2.Run) -> str:
    """Return who takes part, unless all sites do and count."""
    returning = control_pb2.SITE_STATE_RETURNING
    behind = [
        site.site for site in run.sites if site.site in run.members and site.state == returning
    ]
    if not run.members or (len(run.members) == len(run.sites) and not behind):
        return ""
    told = f"members since epoch {run.epoch}: {formats.words(', '.join(run.members))}"
    return f"{told} (catching up: {formats.words(', '.join(behind))})" if behind else told


def _figures(run: control_pb2.Run) -> list[str]:
    """Return the run's own figures, each with its name: those that are known."""
    latest = [site.latest for site in _counted(run)]
    loss = known(run.totals, metrics.LOSS)
    held_out_loss = known(run.totals, metrics.HELD_OUT_LOSS)
    counts_tokens = _counts_tokens(run)
    tokens_per_s = sum(_tokens_per_s(values) or 0.0 for values in latest)
    step_s = max((known(values, metrics.STEP_S) or 0.0 for values in latest), default=0.0)
    exposed_s = max((known(values, metrics.EXPOSED_INTER_S) or 0.0 for values in latest), default=0)
    parts = []
    if run.active_s:
        parts.append(formats.duration(run.active_s))
    if any(site.latest for site in run.sites):
        of_steps = f" of {run.num_steps}" if run.num_steps else ""
        parts.append(f"step {_step(run)}{of_steps}")
    if loss is not None:
        parts.append(f"loss {formats.loss(loss)}")
    if held_out_loss is not None:
        parts.append(f"held-out loss {formats.loss(held_out_loss)}")
    if step_s and not counts_tokens:
        parts.append(f"{formats.count(1 / step_s)} steps/s")
    elif tokens_per_s:
        parts.append(f"{formats.count(tokens_per_s)} tokens/s")
    if (mfu := formats.mfu(_joint_mfu(latest))) != formats.UNKNOWN:
        parts.append(f"MFU {mfu}")
    if (noise_scale := known(run.totals, metrics.NOISE_SCALE)) is not None:
        parts.append(f"noise scale {formats.count(noise_scale)} tokens")
    if step_s:
        percent = formats.share(exposed_s / step_s)
        parts.append(f"WAN {formats.duration(exposed_s)} a step ({percent})")
    return parts


def _counts_tokens(run: control_pb2.Run) -> bool:
    """Whether the script counts its tokens: else there is no rate of them."""
    return known(run.totals, metrics.COUNTS_TOKENS) != 0


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
    """Return a site's loss; None while it catches up: a mean over no tokens is none."""
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
    has_rates = counted if _counts_tokens(run) else set()
    rates = [_tokens_per_s(site.latest) if site.site in has_rates else None for site in run.sites]
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
        each("egress", formats.dollars, "egress_usd"),
        each("a day", formats.dollars, "egress_usd_per_day"),
        each("a step", formats.dollars, "egress_usd_per_step"),
        each("ratio", formats.factor, metrics.RAW_BYTES, metrics.SENT_BYTES),
        each("RTT", formats.duration, metrics.RTT_S),
        each("set to", formats.duration, "configured_rtt_s"),
        each("lost", formats.count, "lost_packets"),
        each("dropped", formats.count, "dropped_packets"),
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
