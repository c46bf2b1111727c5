"""The dashboard's pages, by the report's charts, tables and words.

A page is whole when it arrives, without any script. Each of its parts has an id; the script asks
for the parts again and replaces those that have changed. Whatever comes from a run is escaped where
elements are made: orchestrator/evidence/report/html.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote

from isthmus.orchestrator.core.journaled_run import RecordedEvent
from isthmus.orchestrator.core.run_metrics import PARTS
from isthmus.orchestrator.core.run_record import StepMark
from isthmus.orchestrator.dashboard.actions import ACTIONS, Attempt
from isthmus.orchestrator.dashboard.run_view import ELSEWHERE, ENDED, OUT
from isthmus.orchestrator.dashboard.watched_run import Window
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
from isthmus.orchestrator.evidence.report.run_charts import step_chart, step_parts
from isthmus.orchestrator.evidence.report.sitemap import site_map
from isthmus.orchestrator.evidence.report.wording import PART_CLASSES, STATE_CLASSES, loss_title
from isthmus.orchestrator.evidence.view import formats
from isthmus.orchestrator.evidence.view.fitting_table import Column, columns_of
from isthmus.orchestrator.evidence.view.formats import show
from isthmus.orchestrator.evidence.view.live import link_columns, links_that_matter
from isthmus.orchestrator.evidence.view.plan_view import alternative_columns
from isthmus.orchestrator.runs.facts import LinkFacts, SiteFacts
from isthmus.protos import metrics

Parts = dict[str, Markup]
"""A page's parts, by their names."""

MAX_MAP_SITES = 40
MAX_CIRCLE_SITES = 12
"""On a circle, where sites have no location, the names of more cover each other."""
MAX_ROWS = 40
"""Rows of sites and of links; the API has all."""
MAX_EVENTS = 40
MAX_MARKS = 12
_STATES = {"ACTIVE": "good", **STATE_CLASSES}


UP = "../"
"""From a run's page to the list of runs. All links are relative: the path before them varies."""


def page(
    title: str,
    up: str,
    live: str,
    tag: str,
    parts: Parts,
    action_token: str = "",
    *,
    is_open: bool = False,
) -> str:
    """Return a page.

    Args:
        title: What it is called.
        up: The way to the list of runs: UP, or nothing.
        live: The address of its parts, from there.
        tag: The ETag of these parts.
        parts: What stands on it, in order.
        action_token: What it shows to have something done; empty: it is read-only.
        is_open: Whether it is shown to whoever reaches it, without a token.
    """
    body = join(
        element("a", "To the figures", href="#figures", class_="skip"),
        element(
            "header",
            element("p", element("a", "isthmus dashboard", href=up or "./")),
            element("p", "", id="connection", role="status"),
            element("button", "Dark", id="theme", type="button", hidden=True),
            class_="top",
        ),
        element(
            "main",
            *(element("div", part, id=f"part-{name}") for name, part in parts.items()),
            id="figures",
            tabindex="-1",
            data_live=up + live,
            data_tag=tag,
            data_action_token=action_token or None,
        ),
        _confirmation() if action_token else None,
        element(
            "footer",
            "" if action_token else "Read-only. ",
            "Without a token: every user of this machine can read it. " if is_open else "",
            "Figures as JSON: ",
            element("a", "/api/runs", href=f"{up}api/runs"),
        ),
        element("script", src=f"{up}assets/page.js"),
        element("script", src=f"{up}assets/dashboard.js"),
    )
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("title", title),
        element("link", rel="icon", href="data:,"),
        element("link", rel="stylesheet", href=f"{up}assets/page.css"),
        element("link", rel="stylesheet", href=f"{up}assets/dashboard.css"),
    )
    return f"<!doctype html>\n{element('html', head, element('body', body), lang='en')}\n"


def _confirmation() -> Markup:
    """Return what asks before anything is done; the script fills it in and shows it."""
    return element(
        "dialog",
        element("h2", "", id="confirm-title"),
        element("p", "", id="confirm-words"),
        element(
            "form",
            element("button", "", value="no", id="confirm-no", autofocus=True),
            element("button", "", value="yes", id="confirm-yes", class_="danger"),
            method="dialog",
        ),
        id="confirm",
        aria_labelledby="confirm-title",
    )


def actions(view: Mapping[str, Any], attempt: Attempt | None) -> Markup:
    """Return what can be done to a run, by buttons that the script makes work."""
    if view["state"] in {ELSEWHERE, *ENDED}:
        return Markup()
    is_busy = attempt is not None and not attempt.is_over
    keeps = view["keeps_checkpoints"] is not False
    buttons = [
        element(
            "button",
            action.label,
            type="button",
            disabled=is_busy,
            data_action=f"{UP}actions/{quote(view['run_id'])}/{name}",
            data_title=action.title,
            data_words=action.words if keeps else "It keeps no checkpoints: its training is lost.",
        )
        for name, action in ACTIONS.items()
        if keeps or not action.options
    ]
    return join(element("p", *buttons, class_="actions"), _outcome(attempt))


def _outcome(attempt: Attempt | None) -> Markup | None:
    if attempt is None:
        return None
    if not attempt.is_over:
        return element("p", f"{attempt.action.doing}…", class_="missing", role="status")
    if attempt.trouble:
        words = f"{attempt.action.doing}: refused. {attempt.trouble}"
        return element("p", words, class_="reason", role="status")
    return element("p", attempt.note, class_="missing", role="status") if attempt.note else None


def list_title() -> str:
    """Return the title of the list of runs."""
    return "Runs · isthmus"


def list_parts(views: Sequence[Mapping[str, Any]], source: str) -> Parts:
    """Return the list of runs."""
    if not views:
        content: Markup = missing(f"There is no run in {source}.")
    else:
        content = table(
            [
                Column("run", [_run_link(view) for view in views], is_text=True),
                Column("state", [_state(view) for view in views], is_text=True),
                Column("sites", [_num_sites(view) for view in views]),
                Column("steps", [_steps(view) for view in views]),
                Column("loss", [show(view.get("loss"), formats.loss) for view in views]),
                Column("started", [_clock(view["created_wall_s"]) for view in views], is_text=True),
                Column("why", [formats.words(view.get("reason")) for view in views], is_text=True),
            ],
            "Newest first",
        )
    return {"runs": join(element("h1", "Runs"), content)}


def _run_link(view: Mapping[str, Any]) -> Markup:
    words = formats.words(view["name"]) or view["run_id"]
    more = f" {view['run_id']}" if words != view["run_id"] else ""
    return join(
        element("a", words, href=f"runs/{quote(view['run_id'])}"),
        element("small", more) if more else None,
    )


def _state(view: Mapping[str, Any]) -> Markup:
    return element(
        "span", view["outcome"], class_=f"state {_STATES.get(view['outcome'], '')}".strip()
    )


def _num_sites(view: Mapping[str, Any]) -> str:
    if view["state"] == ELSEWHERE:
        return formats.UNKNOWN
    out = f", {view['num_out']} out" if view["num_out"] and view["state"] not in ENDED else ""
    return f"{view['num_sites']}{out}"


def _steps(view: Mapping[str, Any]) -> str:
    if view.get("steps") is None:
        return formats.UNKNOWN
    return f"{view['steps']}" + (f" of {view['num_steps']}" if view.get("num_steps") else "")


def _clock(wall_s: float | None) -> str:
    return show(wall_s, formats.clock)


def run_title(view: Mapping[str, Any]) -> str:
    """Return the title of a run's page."""
    name = formats.words(view["name"]) or view["run_id"]
    return f"{name}: {view['outcome']} · isthmus"


def run_parts(
    view: Mapping[str, Any],
    steps: Mapping[str, Any],
    marks: Sequence[StepMark],
    events: Sequence[RecordedEvent],
    num_events: int,
    window: Window,
    acting: Markup | None = None,
) -> Parts:
    """Return everything about a run.

    Args:
        view: As run_view.shown made it.
        steps: As WatchedRun.steps; empty: nothing is known of them.
        marks: What happened, by steps.
        events: The newest of its journal, in order.
        num_events: How many there are.
        window: The steps that are shown.
        acting: What can be done to it; None: nothing, ever.
    """
    parts = {"head": _head(view), **({} if acting is None else {"actions": acting})}
    if view["state"] == ELSEWHERE:
        return parts
    columns = steps or {"steps": {"step": []}, "losses": {"step": []}}
    recent = list(marks)[-MAX_MARKS:]
    drawn = [Mark(each.step, _words(each), str(at)) for at, each in enumerate(recent, 1)]
    return {
        **parts,
        "sites": _places(view),
        "window": _windows(view, window),
        "steps": _time(columns["steps"], drawn),
        "loss": _losses(columns["losses"], drawn, loss_title(view["is_shipped_trainer"])),
        "tokens": _tokens(columns["steps"], drawn) if view["counts_tokens"] else Markup(),
        "marks": _marks(recent),
        "events": _events(events, num_events),
        "plan": _plan(view),
    }


def _head(view: Mapping[str, Any]) -> Markup:
    name = formats.words(view["name"]) or view["run_id"]
    reason = " ".join(filter(None, (view.get("reason_code"), formats.words(view.get("reason")))))
    return join(
        element("h1", name),
        element(
            "p",
            _state(view),
            f" · run {view['run_id']} · started {_clock(view['created_wall_s'])}",
            *(f" · {words}" for words in _exchange(view)),
            class_="meta",
        ),
        element("p", reason, class_="reason") if reason else None,
        _tiles(view),
        _reading(view),
    )


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
    active = f"in {formats.duration(view['active_s'])}" if view["active_s"] else ""
    found = [
        ("steps", _steps(view), active),
        ("training loss", show(view["loss"], formats.loss), ""),
        ("held-out loss", show(view["held_out_loss"], formats.loss), ""),
        (
            "a step",
            show(view["step_s_recent"], formats.duration),
            "the newest, of the slowest site",
        ),
        ("WAN, exposed", show(view["exposed_share"], formats.share), "of the steps' time"),
        ("MFU", formats.mfu(view), "of all accelerators' peak"),
        ("sent over the WAN", show(view["sent_bytes"] or None, formats.size), ""),
        ("egress", show(view["egress_usd"], formats.dollars), _costs(view)),
        (
            "take part",
            f"{len(view['members'])} of {view['num_sites']}" if view["members"] else "-",
            f"sites, epoch {view['epoch']}",
        ),
    ]
    if view["counts_tokens"]:
        pace = show(view["tokens_per_s"], formats.count)
        tokens = f"{formats.count(view['tokens'])} tokens" if view["tokens"] else ""
        found.insert(1, ("tokens a second", pace, tokens))
    return tiles([each for each in found if each[1] != formats.UNKNOWN])


def _costs(view: Mapping[str, Any]) -> str:
    """Return what the bytes are a step and a day, and what the codec saves."""
    return (view["egress"] or "").partition(", ")[2]


def _order(site: Mapping[str, Any]) -> tuple[bool, float]:
    """Put first who is out, then who is slowest."""
    return site["state"] not in OUT, -(site["step_s"] or 0.0)


def _places(view: Mapping[str, Any]) -> Markup:
    sites, links = view["sites"], view["links"]
    has_ended = view["state"] in ENDED
    out = {site["site"]: site["state"].lower() for site in sites if site["state"] in OUT}
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
        _site_table(first if len(sites) > MAX_ROWS else sites),
        _link_table(links, out, has_ended=has_ended),
        lead=lead,
    )


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
        table(columns_of(headings, rows, num_text=2), "Sites"),
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
        table(columns, "Directed links, over the whole run but for what is now"),
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


def _windows(view: Mapping[str, Any], window: Window) -> Markup:
    """Return which steps can be shown, by links and by a form that needs no script."""
    choices = (("Whole run", Window()), ("Newest steps", Window(is_newest=True)))
    address = f"{UP}runs/{quote(view['run_id'])}"
    links = [
        element(
            "a",
            words,
            href=f"{address}?{choice.query}" if choice.query else address,
            aria_current="true" if choice == window else None,
        )
        for words, choice in choices
    ]
    ends = [
        element("label", words, _step_input(name, step))
        for words, name, step in (("Steps ", "first", window.first), ("to ", "last", window.last))
    ]
    form = element(
        "form",
        *ends,
        element("button", "Show", type="submit"),
        action=address,
        method="get",
    )
    return element("nav", *links, form, aria_label="Steps shown", class_="windows")


def _step_input(name: str, step: int | None) -> Markup:
    return element("input", type="number", name=name, min=0, value=step, inputmode="numeric")


def _time(columns: Mapping[str, Any], marks: Sequence[Mark]) -> Markup:
    title = "Where the time of a step went"
    steps = columns["step"]
    if metrics.STEP_S not in columns:
        return section(title, missing("No site has told the time of a step."))
    slowest = columns[metrics.STEP_S]["max"]
    rows = [
        [
            str(steps[at]),
            *(
                show(columns[name]["mean"][at] if name in columns else None, formats.duration)
                for name in PARTS
            ),
            show(slowest[at], formats.duration),
        ]
        for at in _few(len(steps))
    ]
    chart = element(
        "div",
        step_chart(
            "Parts of a step over steps", "a step, seconds", step_parts(columns), marks, low=0.0
        ),
        class_="stacked",
    )
    note = (
        f"The mean over sites; a point is {_width(columns)}. The table has the longest step, too."
    )
    return section(
        title,
        figure(
            chart,
            table(columns_of(["step", *PARTS.values(), "longest"], rows)),
            key=key({PART_CLASSES[name]: words for name, words in PARTS.items()}),
            note=note,
        ),
    )


def _losses(columns: Mapping[str, Any], marks: Sequence[Mark], title: str) -> Markup:
    series = []
    for name, words, colour in (
        (metrics.LOSS, "training", "c0"),
        (metrics.HELD_OUT_LOSS, "held-out", "c1"),
    ):
        if name in columns:
            series.append(_series(words, colour, columns, columns[name], formats.loss))
    series = [each for each in series if each.points]
    if not series:
        words = "No loss was told: a step is counted once all sites have told theirs."
        return section("Loss", missing(words))
    rows = [[each.name, f"{x:g}", formats.loss(y)] for each in series for x, y in _thin(each)]
    return section(
        "Loss",
        figure(
            step_chart("Loss over steps", title, series, marks),
            table(columns_of(["curve", "step", "loss"], rows)),
            note=f"Mean of {_width(columns)}; the shade is from the least to the most.",
        ),
    )


def _tokens(columns: Mapping[str, Any], marks: Sequence[Mark]) -> Markup:
    title = "Tokens a second"
    tokens, step_s = columns.get(metrics.SITE_TOKENS), columns.get(metrics.STEP_S)
    if tokens is None or step_s is None:
        return section(title, missing("No site has told its tokens."))
    points = [
        (step, mean * records / steps / spent_s)
        for step, mean, records, steps, spent_s in zip(
            columns["step"],
            tokens["mean"],
            columns["records"],
            columns["steps"],
            step_s["mean"],
            strict=True,
        )
        if mean is not None and spent_s
    ]
    if not points:
        return section(title, missing("No site has told its tokens."))
    series = Series("all sites", "c2", points, formats.count(points[-1][1]))
    rows = [[f"{x:g}", formats.count(y)] for x, y in _thin(series)]
    return section(
        title,
        figure(
            step_chart("Tokens a second over steps", "tokens/s", [series], marks, low=0.0),
            table(columns_of(["step", "tokens/s"], rows)),
            note="Tokens of a step of all sites, over the mean of their times.",
        ),
    )


def _series(
    words: str,
    colour: str,
    columns: Mapping[str, Any],
    found: Mapping[str, Any],
    style: Any,  # noqa: ANN401
) -> Series:
    known = [
        (step, mean, low, high)
        for step, mean, low, high in zip(
            columns["step"], found["mean"], found["min"], found["max"], strict=True
        )
        if mean is not None
    ]
    return Series(
        words,
        colour,
        [(step, mean) for step, mean, _, _ in known],
        style(known[-1][1]) if known else "",
        band=[(step, low, high) for step, _, low, high in known],
    )


def _width(columns: Mapping[str, Any]) -> str:
    return "one step" if columns["width"] == 1 else f"{columns['width']} steps"


def _few(num: int) -> Iterator[int]:
    """Yield at most some dozens of places, the last among them."""
    stride = max(1, -(-num // MAX_ROWS))
    yield from range((num - 1) % stride, num, stride)


def _thin(series: Series) -> Iterator[tuple[float, float]]:
    for at in _few(len(series.points)):
        yield series.points[at]


def _words(mark: StepMark) -> str:
    return formats.words(mark.event.text)


def _marks(marks: Sequence[StepMark]) -> Markup:
    if not marks:
        return Markup()
    rows = [[str(number), _words(each), str(each.step)] for number, each in enumerate(marks, 1)]
    columns = columns_of(["mark", "what", "after step"], rows, num_text=2)
    return section("Marks on the charts", table(columns, "Sites that went and came, newest last"))


def _events(events: Sequence[RecordedEvent], num_events: int) -> Markup:
    if not events:
        return section("Events", missing("The journal has none as yet."))
    newest = list(reversed(events))[:MAX_EVENTS]
    rows = [
        [
            formats.clock(each.wall_s),
            each.kind,
            formats.words(each.site),
            formats.words(each.text),
        ]
        for each in newest
    ]
    left = num_events - len(rows)
    return section(
        "Events",
        element(
            "div",
            table(columns_of(["time", "event", "site", "what"], rows, 4), "Newest first"),
            class_="events",
        ),
        missing(f"And {left} before: isthmus events, or the API.") if left > 0 else None,
    )


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
        return section("The plan", missing("The run's folder does not say."))
    return section(
        "The plan",
        fact_list(known),
        *(element("p", sentence, class_="why") for sentence in plan["why"]),
        table(alternative_columns(plan), "Alternatives, by what they were predicted to take")
        if plan["predicted"] and plan["alternatives"]
        else None,
        lead="As the run was submitted.",
    )


def refused(words: str, up: str) -> Markup:
    """Return what stands in place of a page that there is not; `up`: the way to the list."""
    return join(
        element("h1", "Nothing to show"),
        element("p", words, class_="reason"),
        element("p", element("a", "All runs", href=up or "./")),
    )
