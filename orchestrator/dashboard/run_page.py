"""A run's page: what is wrong now comes first, then figures, what sites do, charts, and events.

The report's pieces, of a run that goes on. Whatever comes from a run is escaped where elements are
made: orchestrator/evidence/report/html.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlencode

from isthmus.orchestrator.core.event_kinds import seen_of
from isthmus.orchestrator.core.journaled_run import RecordedEvent
from isthmus.orchestrator.core.run_metrics import PARTS
from isthmus.orchestrator.dashboard.pages import UP, Parts, age, bars, clock, num_steps, state
from isthmus.orchestrator.dashboard.run_view import ELSEWHERE, ENDED, OUT, shown
from isthmus.orchestrator.dashboard.watched_run import WatchedRun, Window
from isthmus.orchestrator.evidence.record.run_timeline import SiteLane, Stall, StepEnd, pace
from isthmus.orchestrator.evidence.report import wording
from isthmus.orchestrator.evidence.report.charts import Mark, Series
from isthmus.orchestrator.evidence.report.html import (
    Markup,
    element,
    figure,
    join,
    key,
    missing,
    section,
    table,
    tiles,
)
from isthmus.orchestrator.evidence.report.html import facts as fact_list
from isthmus.orchestrator.evidence.report.run_charts import (
    SlowSpan,
    TimeAxis,
    step_chart,
    time_marks,
)
from isthmus.orchestrator.evidence.report.run_facts import EventFacts, TimeFacts
from isthmus.orchestrator.evidence.report.run_page import judgement, over_steps, over_time
from isthmus.orchestrator.evidence.report.sitemap import site_map
from isthmus.orchestrator.evidence.report.verdict import Verdict
from isthmus.orchestrator.evidence.view import formats
from isthmus.orchestrator.evidence.view.alike import and_others, is_alike
from isthmus.orchestrator.evidence.view.fitting_table import Column, columns_of
from isthmus.orchestrator.evidence.view.formats import show
from isthmus.orchestrator.evidence.view.live import link_columns, links_that_matter
from isthmus.orchestrator.evidence.view.plan_view import alternative_columns
from isthmus.orchestrator.runs.facts import DAY_S, LinkFacts, SiteFacts
from isthmus.protos import metrics

MAX_MAP_SITES = 40
MAX_CIRCLE_SITES = 12
"""On a circle, where sites have no location, the names of more cover each other."""
MAX_ROWS = 40
"""Rows of sites and of links; the API has all."""
MAX_EVENTS = 200
"""The newest events that the page has."""
MAX_UNFOLDED = 12
"""Events that are seen without unfolding the older ones."""
MAX_NAMED_SITES = 8
"""Sites whose events have a link of their own."""
ALL = "all"
"""The query value that shows every event."""


@dataclass(frozen=True, slots=True)
class Asked:
    """The steps and events of a run that a page shows."""

    window: Window = Window()  # noqa: RUF009 - it is frozen
    events: str = ""
    """Empty: those that matter; ALL; or a site's, by its name."""

    @property
    def query(self) -> str:
        """As an address has it."""
        events = urlencode({"events": self.events}) if self.events else ""
        return "&".join(filter(None, (self.window.query, events)))


@dataclass(frozen=True, slots=True, kw_only=True)
class RunShown:
    """All that a run's page is made from."""

    view: Mapping[str, Any]
    """As run_view.shown made it."""
    steps: Mapping[str, Any]
    """As WatchedRun.steps; empty: nothing is known of them."""
    events: Sequence[RecordedEvent]
    """The newest of its journal, in order."""
    num_events: int
    stalls: Sequence[Stall]
    lanes: Sequence[SiteLane]
    log: Sequence[str]
    """The last lines of the rank that broke first; empty: none did."""
    log_of: str

    @classmethod
    def of(cls, watched: WatchedRun, asked: Asked) -> RunShown:
        """Return it as it is now."""
        stalls, lanes = watched.over_time()
        log_of, log = watched.last_log_lines()
        return cls(
            view=shown(watched),
            steps=watched.steps(asked.window),
            events=watched.events(),
            num_events=watched.num_events,
            stalls=stalls,
            lanes=lanes,
            log=log,
            log_of=log_of,
        )


def run_parts(run: RunShown, asked: Asked, acting: Markup | None = None) -> Parts:
    """Return everything about a run.

    Args:
        run: What is known.
        asked: What of it is wanted.
        acting: What can be done to it; None: nothing, ever.
    """
    view = run.view
    parts = {"head": _head(view), **({} if acting is None else {"actions": acting})}
    if view["state"] == ELSEWHERE:
        return parts
    columns = run.steps or {"steps": {"step": []}, "losses": {"step": []}}
    happened = _happened(run, asked)
    axis = _axis(run, columns["steps"], asked.window)
    marks = time_marks(happened, axis)
    return {
        **parts,
        "sites": _places(view),
        "log": _log(run),
        "events": _events(run, happened, asked),
        "window": _windows(view, asked),
        "pace": _pace(run, columns["steps"], axis, marks),
        "steps": _time(view, columns["steps"], axis, marks),
        "loss": _losses(view, columns["losses"], axis, marks),
        "figures": _figures(view),
        "plan": _plan(view),
    }


# ---------------------------------------------------------------- the first screen


def _head(view: Mapping[str, Any]) -> Markup:
    name = formats.words(view["name"]) or view["run_id"]
    found = view.get("verdict")
    return join(
        element("h1", name),
        element(
            "p",
            state(view["outcome"]),
            f" · run {view['run_id']} · started {clock(view['created_wall_s'])}",
            *(f" · {words}" for words in _exchange(view)),
            *_leads(view),
            class_="meta",
        ),
        element("p", formats.words(view.get("reason")), class_="reason")
        if view["state"] == ELSEWHERE
        else None,
        bars(view),
        missing(f"Starting: {view['starting']}.") if view.get("starting") else None,
        judgement(Verdict(**found)) if found else None,
        _tiles(view),
        _reading(view),
    )


def _leads(view: Mapping[str, Any]) -> Iterator[Markup]:
    """Yield links to what else there is of a run, where its metrics are on this machine."""
    if not view.get("metrics"):
        return
    for name, words in (("report", "report"), ("trace", "trace")):
        yield Markup(" · ")
        yield element("a", words, href=f"{UP}{name}/{quote(view['run_id'])}")


def _reading(view: Mapping[str, Any]) -> Markup | None:
    """Return how far a history was read, until it was."""
    measured = view.get("metrics")
    if measured is None or measured["is_complete"]:
        return None
    share = measured["share_read"]
    return element(
        "p",
        element("progress", max=100, value=int(100 * share), aria_label="History read"),
        f" Reading history, {int(100 * share)} %: what is below is of the steps so far.",
        class_="reading",
    )


def _exchange(view: Mapping[str, Any]) -> Iterator[str]:
    """Yield in a word each how often sites exchange, and as what."""
    plan = view.get("plan") or {}
    if plan.get("regime"):
        yield plan["regime"].partition(":")[0]
    codecs = dict.fromkeys(plan.get("codecs") or filter(None, [plan.get("codec")]))
    if codecs:
        yield ", ".join(codecs)


def _tiles(view: Mapping[str, Any]) -> Markup | None:
    if view["state"] == ELSEWHERE:
        return None
    has_ended = view["state"] in ENDED
    active = f"in {formats.duration(view['active_s'])}" if view["active_s"] else ""
    saved, last_s = view["checkpoint"], view["last_step_wall_s"]
    found = [
        ("steps", num_steps(view), _left(view) or active),
        ("last step", "" if has_ended or not last_s else clock(last_s)[-8:], age(last_s)),
        ("training loss", show(view["loss"], formats.loss), ""),
        ("held-out loss", show(view["held_out_loss"], formats.loss), ""),
        ("step time", show(view["step_s_recent"], formats.duration), "newest, slowest site"),
        ("exposed WAN time", show(view["exposed_share"], formats.share), "of all steps' time"),
        ("MFU", formats.mfu(view), "of all accelerators' peak"),
        ("sent over the WAN", show(view["sent_bytes"] or None, formats.size), ""),
        ("egress", show(view["egress_usd"], formats.dollars), _costs(view)),
        (
            "last checkpoint",
            f"step {saved['step']}" if saved else "",
            age(saved and saved["wall_s"]),
        ),
        (
            "sites training",
            f"{view['num_training']} of {view['num_sites']}" if view["members"] else "",
            f"epoch {view['epoch']}",
        ),
    ]
    if view["counts_tokens"]:
        tokens = f"{formats.count(view['tokens'])} tokens" if view["tokens"] else ""
        found.insert(2, ("tokens per second", show(view["tokens_per_s"], formats.count), tokens))
    return tiles([each for each in found if each[1] not in {formats.UNKNOWN, ""}])


def _left(view: Mapping[str, Any]) -> str:
    """Return the time to the end at the present pace; empty: not known."""
    step_s, steps, last = view["step_s_recent"], view["steps"], view["num_steps"]
    if view["state"] in ENDED or not (step_s and steps and last):
        return ""
    return f"{formats.duration(max(0, last - steps) * step_s)} left"


def _costs(view: Mapping[str, Any]) -> str:
    """Return what the bytes are a step and a day, and what the codec saves."""
    return (view["egress"] or "").partition(", ")[2]


def _log(run: RunShown) -> Markup:
    if not run.log:
        return Markup()
    lines = (join(line, Markup("\n")) for line in run.log)
    text = element("pre", *lines, tabindex=0)
    return section("Last lines of the log", text, lead=f"Of {run.log_of}.")


# ---------------------------------------------------------------- sites and links


def _order(site: Mapping[str, Any]) -> tuple[bool, float]:
    """Put first who is out, then who is slowest."""
    return site["state"] not in OUT, -(site["step_s"] or 0.0)


def _places(view: Mapping[str, Any]) -> Markup:
    sites, links = view["sites"], view["links"]
    has_ended = view["state"] in ENDED
    out = _out(view)
    first = sorted(sites, key=_order)
    are_located = all(site["lat"] is not None for site in sites)
    most = MAX_MAP_SITES if are_located else MAX_CIRCLE_SITES
    drawn = first[:most] if len(sites) > most else sites
    names = {site["site"] for site in drawn}
    between = [link for link in links if link["source"] in names and link["target"] in names]
    lead = (
        "Each direction of a link, by its use: "
        + ("throughput while it was busy" if has_ended else "what it carries now")
        + ", over what is described."
    )
    if len(drawn) < len(sites):
        lead += f" {len(drawn)} of {len(sites)} sites: those that are out, then the slowest."
    return section(
        "Sites and links",
        element(
            "figure",
            site_map(
                [_site_facts(site) for site in drawn],
                [_link_facts(link, out, has_ended=has_ended) for link in between],
                {} if has_ended and not out else out,
            ),
        ),
        lead=lead,
    )


def _figures(view: Mapping[str, Any]) -> Markup:
    """Return the figures of sites and of links, as tables."""
    sites = view["sites"]
    return join(
        _site_table(sorted(sites, key=_order) if len(sites) > MAX_ROWS else sites),
        _link_table(view["links"], _out(view), has_ended=view["state"] in ENDED),
    )


def _out(view: Mapping[str, Any]) -> dict[str, str]:
    """Return what sites are that take no part, by name."""
    return {site["site"]: site["state"].lower() for site in view["sites"] if site["state"] in OUT}


def _site_table(sites: Sequence[Mapping[str, Any]]) -> Markup:
    rows = []
    for site in sites[:MAX_ROWS]:
        parts = site["parts_s"]
        rows.append(
            [
                formats.words(site["site"]),
                _site_state(site["state"]),
                str(site["step"] or formats.UNKNOWN),
                show(site["tokens_per_s"], formats.count),
                show(site["step_s"], formats.duration),
                *(show(parts.get(name), formats.duration) for name in PARTS),
                show(site["hidden_inter_s"], formats.duration),
            ]
        )
    headings = ["site", "state", "step", "tokens/s", "mean step", *PARTS.values(), "WAN, hidden"]
    left = len(sites) - len(rows)
    return join(
        table(columns_of(headings, rows, num_text=2), "Sites", as_cards=True),
        missing(f"And {left} more sites: the API has all.") if left else None,
    )


def _site_state(state: str) -> Markup:
    return element("span", state, class_=f"state {'bad' if state in OUT else ''}".strip())


def _link_table(
    links: Sequence[Mapping[str, Any]], out: Collection[str], *, has_ended: bool
) -> Markup | None:
    if not links:
        return None
    rows = links_that_matter(links, MAX_ROWS)
    way, *rest = link_columns(rows)
    columns = [way, *rest]
    if not has_ended:
        carried = [{} if _is_out(link, out) else link for link in rows]
        now = [show(link.get("now_bytes_per_s"), formats.rate) for link in carried]
        use = [show(link.get("now_use"), formats.share) for link in carried]
        columns = [way, Column("now", now), Column("use now", use), *rest]
    left = len(links) - len(rows)
    return join(
        table(
            columns,
            "Links, by direction: over the whole run, and what they carry now",
            as_cards=True,
        ),
        missing(f"And {left} more links: the API has all.") if left else None,
    )


def _site_facts(site: Mapping[str, Any]) -> SiteFacts:
    return SiteFacts(**{each.name: site[each.name] for each in dataclasses.fields(SiteFacts)})


def _is_out(link: Mapping[str, Any], out: Collection[str]) -> bool:
    """Whether a site at either end takes no part."""
    return link["source"] in out or link["target"] in out


def _link_facts(link: Mapping[str, Any], out: Mapping[str, str], *, has_ended: bool) -> LinkFacts:
    is_out = not has_ended and _is_out(link, out)
    use, rate = link["use"], link[metrics.THROUGHPUT_BYTES_PER_S]
    if not has_ended and link["now_bytes_per_s"] is not None:
        use, rate = link["now_use"], link["now_bytes_per_s"]
    facts = LinkFacts(**link)
    if is_out:
        return dataclasses.replace(facts, throughput_bytes_per_s=None, use=None, sent_bytes=None)
    return dataclasses.replace(facts, throughput_bytes_per_s=rate, use=use)


# ---------------------------------------------------------------- charts, all over one axis


def _axis(run: RunShown, columns: Mapping[str, Any], window: Window) -> TimeAxis:
    """Return the axis of all charts: the time of the steps that are wanted, or the whole run."""
    begun_s, walls_s = run.view["active_wall_s"] or 0.0, columns.get("wall_s")
    begin_s = end_s = 0.0
    if walls_s:
        begin_s, end_s = max(0.0, walls_s[0] - begun_s), walls_s[-1] - begun_s
    if window == Window():
        begin_s = 0.0
        end_s = max([end_s, *(part.end_s for lane in run.lanes for part in lane.phases)])
    return TimeAxis(max(end_s, begin_s + 1.0), begin_s)


def _windows(view: Mapping[str, Any], asked: Asked) -> Markup:
    """Return which steps can be shown, by links and by a form that needs no script."""
    window = asked.window
    choices = (("Whole run", Window()), ("Newest steps", Window(is_newest=True)))
    links = [
        _choice(view, words, dataclasses.replace(asked, window=choice), is_now=choice == window)
        for words, choice in choices
    ]
    ends = [
        element("label", words, _step_input(name, step))
        for words, name, step in (("Steps ", "first", window.first), ("to ", "last", window.last))
    ]
    form = element(
        "form",
        *ends,
        element("input", type="hidden", name="events", value=asked.events)
        if asked.events
        else None,
        element("button", "Show", type="submit"),
        action=f"{UP}runs/{quote(view['run_id'])}",
        method="get",
    )
    return element("nav", *links, form, aria_label="Steps shown", class_="windows")


def _choice(view: Mapping[str, Any], words: str, asked: Asked, *, is_now: bool) -> Markup:
    address = f"{UP}runs/{quote(view['run_id'])}"
    href = f"{address}?{asked.query}" if asked.query else address
    return element("a", words, href=href, aria_current="true" if is_now else None)


def _step_input(name: str, step: int | None) -> Markup:
    return element("input", type="number", name=name, min=0, value=step, inputmode="numeric")


def _pace(
    run: RunShown, columns: Mapping[str, Any], axis: TimeAxis, marks: Sequence[Mark]
) -> Markup:
    view = run.view
    ends = _ends(columns, view["active_wall_s"] or 0.0, counts_tokens=view["counts_tokens"])
    time = TimeFacts(
        pace=tuple(pace(ends)),
        stalls=tuple(run.stalls),
        lanes=tuple(run.lanes),
        slow=(),
        slow_times=(),
        happened=(),
        num_happened=0,
    )
    slow = []
    if (period := view["slow"]) is not None:
        begun = [end.at_s for end in ends if end.step >= period["since_step"]]
        if begun:
            slow = [SlowSpan(period["site"], period["cost_s"], begun[0], ends[-1].at_s)]
    unit = "tokens" if view["counts_tokens"] else "steps"
    return over_time(time, unit, slow, axis, marks)


def _ends(columns: Mapping[str, Any], begun_s: float, *, counts_tokens: bool) -> list[StepEnd]:
    """Return when the points of steps ended, and what they amount to."""
    tokens = columns.get(metrics.SITE_TOKENS, {}).get("mean") if counts_tokens else None
    return [
        StepEnd(
            wall_s - begun_s,
            step,
            steps if tokens is None else (tokens[at] or 0.0) * columns["records"][at],
        )
        for at, (step, wall_s, steps) in enumerate(
            zip(columns["step"], columns.get("wall_s", ()), columns.get("steps", ()), strict=False)
        )
    ]


def _time(
    view: Mapping[str, Any], columns: Mapping[str, Any], axis: TimeAxis, marks: Sequence[Mark]
) -> Markup:
    drawn = over_steps(columns, marks, axis, view["active_wall_s"] or 0.0)
    words = "No site has reported how long its steps take."
    return drawn or section("Step time over the run", missing(words))


def _losses(
    view: Mapping[str, Any], columns: Mapping[str, Any], axis: TimeAxis, marks: Sequence[Mark]
) -> Markup:
    series = []
    for name, words, colour in (
        (metrics.LOSS, "training", "c0"),
        (metrics.HELD_OUT_LOSS, "held-out", "c1"),
    ):
        if name in columns and any(each is not None for each in columns[name]["mean"]):
            series.append(_series(words, colour, columns, name, axis, view["active_wall_s"] or 0.0))
    if not series:
        words = "No loss was reported: a step counts once every site has reported its own."
        return section("Loss", missing(words))
    title = wording.loss_title(view["is_shipped_trainer"])
    chart = step_chart("Loss", title, series, marks, axis=axis)
    return section(
        "Loss",
        figure(
            element("div", chart, class_="whole"),
            table(_loss_columns(columns)),
            key=key({f"line {each.class_}": f"{each.name} {each.end}" for each in series}),
            note=f"Mean of {_width(columns)}; the shade is from the least to the most.",
        ),
    )


def _series(
    words: str,
    colour: str,
    columns: Mapping[str, Any],
    name: str,
    axis: TimeAxis,
    begun_s: float,
) -> Series:
    found = columns[name]
    known = [
        (axis.of(wall_s - begun_s), mean, low, high)
        for wall_s, mean, low, high in zip(
            columns["wall_s"], found["mean"], found["min"], found["max"], strict=True
        )
        if mean is not None
    ]
    return Series(
        words,
        colour,
        [(x, mean) for x, mean, _, _ in known],
        formats.loss(known[-1][1]),
        band=[(x, low, high) for x, _, low, high in known],
    )


def _loss_columns(columns: Mapping[str, Any]) -> list[Column]:
    """Return some dozens of the losses, by steps."""
    num = len(columns["step"])
    stride = max(1, -(-num // MAX_ROWS))
    rows = [
        [
            str(columns["step"][at]),
            *(
                show(columns[name]["mean"][at] if name in columns else None, formats.loss)
                for name in (metrics.LOSS, metrics.HELD_OUT_LOSS)
            ),
        ]
        for at in range((num - 1) % stride, num, stride)
    ]
    return columns_of(["step", "training", "held-out"], rows)


def _width(columns: Mapping[str, Any]) -> str:
    return "one step" if columns["width"] == 1 else f"{columns['width']} steps"


# ---------------------------------------------------------------- events


def _happened(run: RunShown, asked: Asked) -> list[EventFacts]:
    """Return the events that are wanted, each with its number if charts show it."""
    begun_s = run.view["active_wall_s"]
    found, num_marks = [], 0
    for event in run.events:
        is_mark = seen_of(event.kind).is_mark
        num_marks += is_mark
        if _is_wanted(event, asked.events):
            found.append(
                EventFacts(
                    wall_s=event.wall_s,
                    at_s=None if begun_s is None else event.wall_s - begun_s,
                    step=0,
                    where=event.site,
                    what=event.text,
                    mark=num_marks if is_mark else None,
                )
            )
    return found[-MAX_EVENTS:]


def _is_wanted(event: RecordedEvent, wanted: str) -> bool:
    if wanted == ALL:
        return True
    if wanted:
        return event.site == wanted
    seen = seen_of(event.kind)
    matters = seen.is_note or seen.is_mark or seen.cause or seen.exported
    return bool(matters) or event.kind.startswith("run.")


def _events(run: RunShown, happened: Sequence[EventFacts], asked: Asked) -> Markup:
    view = run.view
    sites = [site["site"] for site in view["sites"]]
    named = sites if len(sites) <= MAX_NAMED_SITES else []
    choices = [("What matters", ""), ("All", ALL), *((name, name) for name in named)]
    links = [
        _choice(view, words, dataclasses.replace(asked, events=each), is_now=asked.events == each)
        for words, each in choices
    ]
    filters = element("nav", *links, aria_label="Events shown", class_="windows")
    if not happened:
        return section("Events", filters, missing("There are none yet."))
    rows = [
        [
            element("strong", str(each.mark), class_="mark-number") if each.mark else Markup(),
            _time_of(each.wall_s, happened[-1].wall_s),
            and_others(formats.words(each.what), number),
        ]
        for each, number in _folded(happened, sites)
    ]
    newest, older = rows[:MAX_UNFOLDED], rows[MAX_UNFOLDED:]
    left = run.num_events - len(run.events)
    return section(
        "Events",
        filters,
        _event_table(newest),
        element("details", element("summary", f"{len(older)} earlier"), _event_table(older))
        if older
        else None,
        missing(f"And {left} more before: isthmus events, or the API.") if left > 0 else None,
        lead="Newest first. A number is that of a dotted line on the charts.",
    )


def _time_of(wall_s: float, newest_wall_s: float) -> str:
    """Return the time of a day; with the day where that may be another."""
    full = clock(wall_s)
    return full[11:] if newest_wall_s - wall_s < DAY_S / 2 else full[5:16]


def _event_table(rows: Sequence[Sequence[str]]) -> Markup:
    return element("div", table(columns_of(["", "time", "what"], rows, 3)), class_="events")


def _folded(happened: Sequence[EventFacts], sites: Sequence[str]) -> list[tuple[EventFacts, int]]:
    """Return events, the newest first; neighbours that say the same stand once."""
    found: list[tuple[EventFacts, int]] = []
    for event in reversed(happened):
        last, number = found[-1] if found else (None, 0)
        is_same = last is not None and last.mark is None and event.mark is None
        if last is not None and is_same and is_alike(last.what, event.what, sites):
            found[-1] = (last, number + 1)
        else:
            found.append((event, 0))
    return found


def _plan(view: Mapping[str, Any]) -> Markup:
    plan = view["plan"]
    codecs = list(dict.fromkeys(plan["codecs"]))
    sizes = (
        f"{formats.size(plan['bucket_bytes'])}, {formats.size(plan['chunk_bytes'])}"
        if plan["bucket_bytes"]
        else None
    )
    entries = [
        ("regime", plan["regime"]),
        ("reduction", plan["reduction"]),
        ("codec", ", ".join(codecs) or plan["codec"]),
        ("schedule", plan["schedule"]),
        ("bucket, chunk", sizes),
    ]
    if plan["predicted"]:
        entries.append(("a step, predicted", formats.duration(plan["predicted"]["step_s"])))
        entries.append(("a step, measured", show(view["step_s"], formats.duration)))
    known = [(name, words) for name, words in entries if words]
    if not known:
        return section("The plan", missing("The run's folder does not have it."))
    return section(
        "The plan",
        fact_list(known),
        *(element("p", sentence, class_="why") for sentence in plan["why"]),
        table(alternative_columns(plan), "Alternatives, as the planner predicted them")
        if plan["predicted"] and plan["alternatives"]
        else None,
        lead="As the run was submitted.",
    )
