"""Addresses and what they answer: pages, the parts that pages ask for again, and the API.

Nothing here is async: answers read files, so each has a thread of its own.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from isthmus.orchestrator.coordinator.journal import JournalError
from isthmus.orchestrator.dashboard import pages
from isthmus.orchestrator.dashboard.pages import Parts
from isthmus.orchestrator.dashboard.run_library import RunLibrary, WatchedRun
from isthmus.orchestrator.dashboard.run_view import ENDED, event_view, listed, shown
from isthmus.orchestrator.evidence import report
from isthmus.orchestrator.run_folder.run_files import strict_json

_HERE, _REPORT = Path(__file__).resolve().parent, Path(report.__file__).resolve().parent
_ASSETS = {
    "page.css": (_REPORT, "text/css"),
    "page.js": (_REPORT, "text/javascript"),
    "dashboard.css": (_HERE, "text/css"),
    "dashboard.js": (_HERE, "text/javascript"),
}
NOT_FOUND = 404


class _Missing(Exception):  # noqa: N818 - it is an answer
    """There is no such run."""


class _Json(JSONResponse):
    """JSON that every parser reads: NaN is null."""

    def render(self, content: object) -> bytes:
        """Return its text; looking for NaN takes longer than writing, and is seldom needed."""
        try:
            return json.dumps(content, allow_nan=False).encode()
        except ValueError:
            return strict_json(content).encode()


def make_application(library: RunLibrary) -> Starlette:
    """Return the application, which reads what `library` has."""
    answers = _Answers(library)
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
            Route("/assets/{name}", _asset),
        ],
        exception_handlers={_Missing: _missing, JournalError: _unreadable},
    )


class _Answers:
    def __init__(self, library: RunLibrary) -> None:
        self._library = library

    # ------------------------------------------------------------ pages

    def list_page(self, _: Request) -> Response:
        parts = self._list_parts()
        return HTMLResponse(pages.page(pages.list_title(), "/live", _tag(parts), parts))

    def list_live(self, request: Request) -> Response:
        return _live(request, pages.list_title(), self._list_parts(), has_ended=False)

    def _list_parts(self) -> Parts:
        views = [listed(each) for each in self._library.runs()]
        return pages.list_parts(views, str(self._library.source))

    def run_page(self, request: Request) -> Response:
        view, parts = self._run_parts(request)
        live = f"/live/{view['run_id']}?window={_window(request)}"
        return HTMLResponse(pages.page(pages.run_title(view), live, _tag(parts), parts))

    def run_live(self, request: Request) -> Response:
        view, parts = self._run_parts(request)
        return _live(request, pages.run_title(view), parts, has_ended=view["state"] in ENDED)

    def _run_parts(self, request: Request) -> tuple[Mapping[str, Any], Parts]:
        watched, window = self._run(request), _window(request)
        index = self._library.open(watched)
        journal = watched.journal
        with self._library.answering():
            view = shown(watched, index)
            parts = pages.run_parts(
                view,
                None if index is None else index.steps(newest_only=window == "newest"),
                [] if index is None else index.marks(),
                [] if journal is None else journal.events(),
                0 if journal is None else journal.num_events,
                window,
            )
        return view, parts

    def _run(self, request: Request) -> WatchedRun:
        watched = self._library.run(request.path_params["run_id"])
        if watched is None:
            raise _Missing
        return watched

    # ------------------------------------------------------------ API

    def api_runs(self, _: Request) -> Response:
        return _Json({"runs": [listed(each) for each in self._library.runs()]})

    def api_run(self, request: Request) -> Response:
        watched = self._run(request)
        index = self._library.open(watched)
        with self._library.answering():
            return _Json(shown(watched, index))

    def api_steps(self, request: Request) -> Response:
        index = self._library.open(self._run(request))
        window = _window(request)
        found = {} if index is None else index.steps(newest_only=window == "newest")
        marks = [] if index is None else index.marks()
        return _Json(
            {
                "window": window,
                **found,
                "marks": [{"step": each.step, "words": each.words} for each in marks],
            }
        )

    def api_events(self, request: Request) -> Response:
        journal = self._run(request).journal
        after = request.query_params.get("after", "0")
        if not (after.isascii() and after.isdecimal()):
            return _Json({"error": "after: want the sequence of an event"}, 400)
        events = [] if journal is None else journal.events(int(after))
        return _Json({"events": [event_view(each) for each in events]})


def _window(request: Request) -> str:
    given = request.query_params.get("window", "")
    return given if given in pages.WINDOWS else "all"


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
    parts = {"error": pages.refused(words)}
    return HTMLResponse(pages.page("isthmus", "/live", "", parts), status)
