"""Addresses and what they answer: pages, the parts that pages ask for again, and the API.

Nothing here is async: answers read files, so each has a thread of its own.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from pydantic_core import to_json
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from isthmus.orchestrator.client.run_reader import TERMINAL
from isthmus.orchestrator.coordinator.journal import JournalError
from isthmus.orchestrator.dashboard import pages
from isthmus.orchestrator.dashboard.access import Access
from isthmus.orchestrator.dashboard.actions import ACTIONS, Attempt, RunActions
from isthmus.orchestrator.dashboard.pages import Parts
from isthmus.orchestrator.dashboard.prepared import Answer, PreparedAnswers
from isthmus.orchestrator.dashboard.run_library import RunLibrary
from isthmus.orchestrator.dashboard.run_page import Asked, RunShown, run_parts
from isthmus.orchestrator.dashboard.run_view import ENDED, listed, shown
from isthmus.orchestrator.dashboard.watched_run import WatchedRun, Window
from isthmus.orchestrator.evidence import report
from isthmus.orchestrator.evidence.record.run_record import RunRecording, read_record
from isthmus.orchestrator.evidence.report.page import page, policy
from isthmus.orchestrator.evidence.report.run_facts import run_facts
from isthmus.orchestrator.evidence.trace_events import trace
from isthmus.protos.versions import build

_HERE, _REPORT = Path(__file__).resolve().parent, Path(report.__file__).resolve().parent
_ASSETS = {
    "page.css": (_REPORT, "text/css"),
    "page.js": (_REPORT, "text/javascript"),
    "dashboard.css": (_HERE, "text/css"),
    "dashboard.js": (_HERE, "text/javascript"),
}
ACCEPTED, NOT_FOUND, CONFLICT = 202, 404, 409
MAX_DIGITS = 15
"""Longest number of a step that may be asked for."""
MAX_NAME = 64
"""Longest name of a site that may be asked for."""
REPORT_POLICY = f"{policy()}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
"""The report brings its style and its script along."""


class _Missing(Exception):  # noqa: N818 - it is an answer
    """There is no such run."""


class _Json(JSONResponse):
    """JSON that every parser reads: NaN is null."""

    def render(self, content: object) -> bytes:
        """Return its text."""
        return to_json(content, inf_nan_mode="null")


@dataclass(frozen=True)
class _Page:
    """A page that changes."""

    title: str
    icon: str
    parts: Parts
    has_ended: bool
    """It stays as it is."""

    @cached_property
    def tag(self) -> str:
        """The ETag of what it shows."""
        shown = [self.title, self.icon, *(f"{name}\0{part}" for name, part in self.parts.items())]
        digest = hashlib.sha256("\0".join(shown).encode()).hexdigest()
        return f'"{digest[:32]}"'


def make_application(
    library: RunLibrary, prepared: PreparedAnswers, actions: RunActions | None, access: Access
) -> Starlette:
    """Return the application, which reads what `library` has.

    Args:
        library: The runs.
        prepared: Keeps what was made of them.
        actions: Does what pages ask for; None: nothing.
        access: What pages show to have it done, and whether anybody sees them.
    """
    answers = _Answers(library, prepared, actions, access)
    return Starlette(
        routes=[
            Route("/", answers.list_page),
            Route("/live", answers.list_live),
            Route("/runs/{run_id}", answers.run_page),
            Route("/live/{run_id}", answers.run_live),
            Route("/report/{run_id}", answers.report),
            Route("/trace/{run_id}", answers.trace),
            Route("/api/runs", answers.api_runs),
            Route("/api/runs/{run_id}", answers.api_run),
            Route("/api/runs/{run_id}/steps", answers.api_steps),
            Route("/api/runs/{run_id}/events", answers.api_events),
            Route("/actions/{run_id}/{action}", answers.act, methods=["POST"]),
            Route("/assets/{name}", _asset),
        ],
        exception_handlers={_Missing: _missing, JournalError: _unreadable},
    )


class _Answers:
    def __init__(
        self,
        library: RunLibrary,
        prepared: PreparedAnswers,
        actions: RunActions | None,
        access: Access,
    ) -> None:
        self._library, self._prepared = library, prepared
        self._actions, self._access = actions, access

    # ------------------------------------------------------------ pages

    def list_page(self, _: Request) -> Response:
        return self._html(self._list(), "", "live")

    def list_live(self, request: Request) -> Response:
        return _live(request, self._list())

    def _list(self) -> _Page:
        views = [listed(each) for each in self._library.runs()]
        parts = pages.list_parts(views, str(self._library.source))
        live = [view for view in views if view["state"] not in ENDED]
        return _Page(pages.list_title(views), pages.icon(live), parts, has_ended=False)

    def run_page(self, request: Request) -> Response:
        asked = _asked(request)
        live = f"live/{request.path_params['run_id']}?{asked.query}"
        return self._html(self._page(request, asked), pages.UP, live)

    def _html(self, made: _Page, up: str, live: str) -> Response:
        text = pages.page(
            made.title,
            up,
            live,
            made.tag,
            made.parts,
            self._access.action_token,
            icon=made.icon,
            is_open=not self._access.token,
        )
        return HTMLResponse(text)

    def run_live(self, request: Request) -> Response:
        return _live(request, self._page(request, _asked(request)))

    def _page(self, request: Request, asked: Asked) -> _Page:
        watched = self._run(request)
        return self._answer(watched, ("page", asked), lambda: self._made_page(watched, asked))

    def _made_page(self, watched: WatchedRun, asked: Asked) -> _Page:
        view = shown(watched)
        acting = None if self._actions is None else pages.actions(view, self._attempt(watched))
        parts = run_parts(RunShown.of(watched, asked), asked, acting)
        is_read = view.get("metrics", {"is_complete": True})["is_complete"]
        has_ended = view["state"] in ENDED and is_read
        return _Page(pages.run_title(view), pages.icon([view]), parts, has_ended)

    def report(self, request: Request) -> Response:
        """Answer with a run's report, as `isthmus report` writes it."""
        text = page([run_facts(self._recorded(request))], [], build())
        return HTMLResponse(text, headers={"Content-Security-Policy": REPORT_POLICY})

    def trace(self, request: Request) -> Response:
        """Answer with a run's trace, as `isthmus trace` writes it."""
        name = f"{request.path_params['run_id']}-trace.json"
        headers = {"Content-Disposition": f'attachment; filename="{name}"'}
        return _Json(trace(self._recorded(request)), headers=headers)

    def _recorded(self, request: Request) -> RunRecording:
        watched = self._run(request)
        if watched.is_elsewhere:
            raise _Missing
        self._library.open(watched)
        return read_record(watched.run(), watched.all_events())

    def _answer(
        self, watched: WatchedRun, key: tuple[object, ...], make: Callable[[], Answer]
    ) -> Answer:
        """Return what `make` makes of a run; what was made last, if nothing has changed since."""
        self._library.open(watched)

        def made() -> Answer:
            with self._library.answering():
                return make()

        versions = watched.version, self._attempt(watched)
        return self._prepared.get((watched.place, *key), versions, made)

    def _run(self, request: Request) -> WatchedRun:
        watched = self._library.run(request.path_params["run_id"])
        if watched is None:
            raise _Missing
        return watched

    # ------------------------------------------------------------ actions

    def act(self, request: Request) -> Response:
        """Begin an action; what becomes of it stands on the run's page."""
        watched, action = self._run(request), request.path_params["action"]
        if self._actions is None or action not in ACTIONS:
            return _Json({"error": "there is no such action"}, NOT_FOUND)
        if watched.is_elsewhere or watched.run().state in TERMINAL:
            return _Json({"error": "the run does not go on"}, CONFLICT)
        if not self._actions.begin(watched.place, action):
            return _Json({"error": "another action goes on"}, CONFLICT)
        return _Json({"action": action}, ACCEPTED)

    def _attempt(self, watched: WatchedRun) -> Attempt | None:
        return None if self._actions is None else self._actions.attempt(watched.place.run_id)

    # ------------------------------------------------------------ API

    def api_runs(self, _: Request) -> Response:
        return _Json({"runs": [listed(each) for each in self._library.runs()]})

    def api_run(self, request: Request) -> Response:
        watched = self._run(request)
        body = self._answer(
            watched, ("json",), lambda: to_json(shown(watched), inf_nan_mode="null")
        )
        return Response(body, media_type="application/json")

    def api_steps(self, request: Request) -> Response:
        watched, window = self._run(request), _window(request)
        body = self._answer(watched, ("steps", window), lambda: _steps_json(watched, window))
        return Response(body, media_type="application/json")

    def api_events(self, request: Request) -> Response:
        watched = self._run(request)
        after = _whole(request.query_params.get("after", "0"))
        if after is None:
            return _Json({"error": "after: want the sequence of an event"}, 400)
        return _Json({"events": [each.to_json() for each in watched.events(after)]})


def _steps_json(watched: WatchedRun, window: Window) -> bytes:
    marks = [{"step": each.step, **each.event.to_json()} for each in watched.marks()]
    found = {"window": window.query or "all", **watched.steps(window), "marks": marks}
    return to_json(found, inf_nan_mode="null")


def _asked(request: Request) -> Asked:
    return Asked(_window(request), request.query_params.get("events", "")[:MAX_NAME])


def _window(request: Request) -> Window:
    given = request.query_params
    if given.get("window") == "newest":
        return Window(is_newest=True)
    return Window(_whole(given.get("first", "")), _whole(given.get("last", "")))


def _whole(text: str) -> int | None:
    """Return a whole number that somebody has sent; None: it is none, or none of ours."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= MAX_DIGITS else None


def _live(request: Request, made: _Page) -> Response:
    """Answer with the parts, unless the page has just these."""
    headers = {"ETag": made.tag, "X-Now": f"{time.time():.3f}"}
    if made.has_ended:
        headers["X-Run-Ended"] = "1"
    if request.headers.get("if-none-match") == made.tag:
        return Response(status_code=304, headers=headers)
    found = {"title": made.title, "icon": made.icon, "parts": made.parts}
    return _Json(found, headers=headers)


def _asset(request: Request) -> Response:
    name = request.path_params["name"]
    if name not in _ASSETS:
        return _Json({"error": "there is no such file"}, NOT_FOUND)
    folder, kind = _ASSETS[name]
    return Response((folder / name).read_bytes(), media_type=f"{kind}; charset=utf-8")


def _missing(request: Request, _: Exception) -> Response:
    return _refused(request, "there is no such run", NOT_FOUND)


def _unreadable(request: Request, error: Exception) -> Response:
    return _refused(request, str(error), 503)


def _refused(request: Request, words: str, status: int) -> Response:
    if not request.url.path.startswith("/runs/") and request.url.path != "/":
        return _Json({"error": words}, status)
    up = pages.UP if request.url.path.startswith("/runs/") else ""
    parts = {"error": pages.refused(words, up)}
    return HTMLResponse(pages.page("isthmus", up, "live", "", parts), status)
