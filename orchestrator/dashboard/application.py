"""Addresses and what they answer: pages, the parts that pages ask for again, and the API.

Nothing here is async: answers read files, so each has a thread of its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
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
from isthmus.orchestrator.dashboard.run_view import ENDED, listed, shown
from isthmus.orchestrator.dashboard.watched_run import WatchedRun, Window
from isthmus.orchestrator.evidence import report

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


class _Missing(Exception):  # noqa: N818 - it is an answer
    """There is no such run."""


class _Json(JSONResponse):
    """JSON that every parser reads: NaN is null."""

    def render(self, content: object) -> bytes:
        """Return its text."""
        return to_json(content, inf_nan_mode="null")


@dataclass(frozen=True, slots=True)
class _Page:
    """A run's page."""

    title: str
    parts: Parts
    tag: str
    has_ended: bool
    """It stays as it is."""


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
        parts = self._list_parts()
        return self._html(pages.list_title(), "", "live", _tag(parts), parts)

    def list_live(self, request: Request) -> Response:
        return _live(request, pages.list_title(), self._list_parts(), has_ended=False)

    def _list_parts(self) -> Parts:
        views = [listed(each) for each in self._library.runs()]
        return pages.list_parts(views, str(self._library.source))

    def run_page(self, request: Request) -> Response:
        window = _window(request)
        made = self._page(request, window)
        live = f"live/{request.path_params['run_id']}?{window.query}"
        return self._html(made.title, pages.UP, live, made.tag, made.parts)

    def _html(self, title: str, up: str, live: str, tag: str, parts: Parts) -> Response:
        token, is_open = self._access.action_token, not self._access.token
        return HTMLResponse(pages.page(title, up, live, tag, parts, token, is_open=is_open))

    def run_live(self, request: Request) -> Response:
        made = self._page(request, _window(request))
        return _live(request, made.title, made.parts, has_ended=made.has_ended)

    def _page(self, request: Request, window: Window) -> _Page:
        watched = self._run(request)
        return self._answer(watched, ("page", window), lambda: self._made_page(watched, window))

    def _made_page(self, watched: WatchedRun, window: Window) -> _Page:
        view = shown(watched)
        parts = pages.run_parts(
            view,
            watched.steps(window),
            watched.marks(),
            watched.events(),
            watched.num_events,
            window,
            None if self._actions is None else pages.actions(view, self._attempt(watched)),
        )
        is_read = view.get("metrics", {"is_complete": True})["is_complete"]
        has_ended = view["state"] in ENDED and is_read
        return _Page(pages.run_title(view), parts, _tag(parts), has_ended)

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


def _window(request: Request) -> Window:
    given = request.query_params
    if given.get("window") == "newest":
        return Window(is_newest=True)
    return Window(_whole(given.get("first", "")), _whole(given.get("last", "")))


def _whole(text: str) -> int | None:
    """Return a whole number that somebody has sent; None: it is none, or none of ours."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= MAX_DIGITS else None


def _tag(parts: Parts) -> str:
    digest = hashlib.sha256("\0".join(f"{name}\0{part}" for name, part in parts.items()).encode())
    return f'"{digest.hexdigest()[:32]}"'


def _live(request: Request, title: str, parts: Parts, *, has_ended: bool) -> Response:
    """Answer with the parts, unless the page has just these."""
    tag = _tag(parts)
    headers = {"ETag": tag, **({"X-Run-Ended": "1"} if has_ended else {})}
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    return _Json({"title": title, "parts": parts}, headers=headers)


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
