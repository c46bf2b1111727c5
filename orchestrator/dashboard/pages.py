"""The dashboard's pages: the frame of each, the list of runs, and what is wrong with a run.

A page is whole when it arrives, without any script. Each of its parts has an id; the script asks
for the parts again and replaces those that have changed. Whatever comes from a run is escaped where
elements are made: orchestrator/evidence/report/html.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote

from isthmus.orchestrator.dashboard.actions import ACTIONS, Attempt
from isthmus.orchestrator.dashboard.run_view import ELSEWHERE, ENDED
from isthmus.orchestrator.evidence.report.html import (
    Markup,
    element,
    join,
    missing,
    table,
    with_code,
)
from isthmus.orchestrator.evidence.report.wording import STATE_CLASSES
from isthmus.orchestrator.evidence.view import formats
from isthmus.orchestrator.evidence.view.condition import BAD, FAIR
from isthmus.orchestrator.evidence.view.fitting_table import Column
from isthmus.orchestrator.evidence.view.formats import show

Parts = dict[str, Markup]
"""A page's parts, by their names."""

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
    icon: str = "data:,",
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
        icon: The address of its icon.
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
            *_laid_out(parts),
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
        element("link", rel="icon", href=icon),
        element("link", rel="stylesheet", href=f"{up}assets/page.css"),
        element("link", rel="stylesheet", href=f"{up}assets/dashboard.css"),
    )
    return f"<!doctype html>\n{element('html', head, element('body', body), lang='en')}\n"


_COLUMNS = (
    ("beside", ("sites", "log", "events", "plan")),
    ("charts", ("window", "pace", "steps", "loss")),
)
"""Parts that stand beside each other where there is room, in two columns."""


def _laid_out(parts: Parts) -> Iterator[Markup]:
    """Yield the parts; two columns of them stand where the first of those parts does."""
    drawn = {name: element("div", part, id=f"part-{name}") for name, part in parts.items()}
    in_columns = [name for _, names in _COLUMNS for name in names if name in drawn]
    for name, part in drawn.items():
        if name not in in_columns:
            yield part
        elif name == in_columns[0]:
            yield element(
                "div",
                *(
                    element("div", *(drawn[each] for each in names if each in drawn), class_=column)
                    for column, names in _COLUMNS
                ),
                class_="board",
            )


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


GOOD, QUIET = "good", "quiet"
_COLOURS = {BAD: "b3261e", FAIR: "c27400", GOOD: "1f7a4d", QUIET: "59626b"}
_SIGNS = {BAD: "\N{HEAVY MULTIPLICATION X}", FAIR: "\N{BLACK UP-POINTING TRIANGLE}"}


def icon(views: Iterable[Mapping[str, Any]]) -> str:
    """Return the address of a dot that is as red as the worst of these runs."""
    grades = [_grade(view) for view in views]
    worst = next((grade for grade in _COLOURS if grade in grades), QUIET)
    drawn = (
        "<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 16 16'>"
        f"<circle cx='8' cy='8' r='7' fill='%23{_COLOURS[worst]}'/></svg>"
    )
    return f"data:image/svg+xml,{drawn}"


def _grade(view: Mapping[str, Any]) -> str:
    if found := view.get("troubles"):
        return str(found[0]["grade"])
    return GOOD if view["outcome"] in {"ACTIVE", "SUCCEEDED"} else QUIET


def list_title(views: Sequence[Mapping[str, Any]]) -> str:
    """Return the title of the list of runs."""
    live = [view for view in views if view["state"] not in ENDED and view.get("troubles")]
    if not live:
        return "Runs · isthmus"
    what = _told(live[0]) if len(live) == 1 else f"{len(live)} runs are in trouble"
    return f"{_SIGNS.get(min(map(_grade, live)), '')} {what} · isthmus"


def run_title(view: Mapping[str, Any]) -> str:
    """Return the title of a run's page: what is wrong with it, if anything is."""
    name = formats.words(view["name"]) or view["run_id"]
    if view.get("troubles") and view["state"] not in ENDED:
        return f"{_SIGNS[_grade(view)]} {_told(view)} · {name}"
    return f"{name}: {view['outcome']} · isthmus"


def _told(view: Mapping[str, Any]) -> str:
    return formats.words(view["troubles"][0]["what"])


def bars(view: Mapping[str, Any]) -> Markup:
    """Return what is wrong with a run now: since when, why, and what happens next."""
    when = " at " if view["state"] in ENDED else " since "
    return join(*(_bar(each, when) for each in view.get("troubles") or ()))


def _bar(trouble: Mapping[str, Any], when: str) -> Markup:
    since_s, why, then = (trouble[name] for name in ("since_wall_s", "why", "next"))
    since = [when, clock(since_s), age(since_s)] if since_s else []
    return element(
        "section",
        element("p", element("strong", formats.words(trouble["what"])), *since),
        element("p", element("strong", "Why: "), formats.words(why)) if why else None,
        element("p", element("strong", "Next: "), with_code(formats.words(then))) if then else None,
        class_=f"bar {trouble['grade']}",
    )


def age(wall_s: float | None) -> Markup:
    """Return how long ago something was, which the script counts on."""
    return element("span", "", class_="age", data_since=f"{wall_s:.3f}") if wall_s else Markup()


def list_parts(views: Sequence[Mapping[str, Any]], source: str) -> Parts:
    """Return the list of runs."""
    if not views:
        content: Markup = missing(f"There is no run in {source}.")
    else:
        content = table(
            [
                Column("run", [_run_link(view) for view in views], is_text=True),
                Column("state", [state(view["outcome"]) for view in views], is_text=True),
                Column("sites", [_num_sites(view) for view in views]),
                Column("steps", [num_steps(view) for view in views]),
                Column("loss", [show(view.get("loss"), formats.loss) for view in views]),
                Column("started", [clock(view["created_wall_s"]) for view in views], is_text=True),
                Column("now", [_now(view) for view in views], is_text=True),
            ],
            "Newest first",
            as_cards=True,
        )
    return {"runs": join(element("h1", "Runs"), content)}


def _now(view: Mapping[str, Any]) -> Markup | str:
    """Return what is wrong with a run, or why it ended so."""
    if view.get("troubles") and view["state"] not in ENDED:
        return element("span", _told(view), class_=f"state {_grade(view)}")
    return formats.words(view.get("reason"))


def _run_link(view: Mapping[str, Any]) -> Markup:
    words = formats.words(view["name"]) or view["run_id"]
    more = f" {view['run_id']}" if words != view["run_id"] else ""
    return join(
        element("a", words, href=f"runs/{quote(view['run_id'])}"),
        element("small", more) if more else None,
    )


def state(outcome: str) -> Markup:
    """Return a run's state in its colour."""
    return element("span", outcome, class_=f"state {_STATES.get(outcome, '')}".strip())


def _num_sites(view: Mapping[str, Any]) -> str:
    if view["state"] == ELSEWHERE:
        return formats.UNKNOWN
    out = f", {view['num_out']} out" if view["num_out"] and view["state"] not in ENDED else ""
    return f"{view['num_sites']}{out}"


def num_steps(view: Mapping[str, Any]) -> str:
    """Return how many steps a run has taken, and of how many."""
    if view.get("steps") is None:
        return formats.UNKNOWN
    return f"{view['steps']}" + (f" of {view['num_steps']}" if view.get("num_steps") else "")


def clock(wall_s: float | None) -> str:
    """Return a time, where it is known."""
    return show(wall_s, formats.clock)


def refused(words: str, up: str) -> Markup:
    """Return what stands in place of a page that there is not; `up`: the way to the list."""
    return join(
        element("h1", "Nothing to show"),
        element("p", words, class_="reason"),
        element("p", element("a", "All runs", href=up or "./")),
    )
