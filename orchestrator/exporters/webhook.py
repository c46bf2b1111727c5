"""Posts events as JSON."""

from __future__ import annotations

import time
import urllib.request
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urljoin, urlsplit

from isthmus.orchestrator.exporters.figures import ExportedEvent
from isthmus.orchestrator.exporters.tool import Update
from isthmus.orchestrator.run_folder.run_files import strict_json
from isthmus.protos.failure import text_of
from isthmus.topology.spec.exporters import WEBHOOK_TOKEN, WEBHOOK_URL, Webhook

POST_S = 5.0
"""Time for one attempt."""
PAUSES_S = (0.0, 1.0, 4.0)
"""Before each attempt."""


def place_of(url: str) -> str:
    """Return a URL without what may be a secret in it."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.hostname}" + (f":{parts.port}" if parts.port else "")


def redirects_to(location: str | None, url: str) -> str:
    """Return where an answer's Location leads from a URL, without its secrets; empty: nowhere."""
    if location is None:
        return ""
    to = place_of(urljoin(url, location))
    return f"another path of {to}" if to == place_of(url) else to


def is_line(text: str) -> bool:
    """Whether a text can stand in a request: one line, without blanks."""
    return text.isprintable() and " " not in text


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Has a redirect end as an error: what follows one leaves the body out, not the token."""

    def redirect_request(self, *_: Any) -> None:  # noqa: ANN401 - as the library has it
        """Return None: no request."""


class WebhookPost:
    """Posts each event that is asked for, one after the other."""

    def __init__(
        self,
        settings: Webhook,
        run_id: str,
        job: str,
        environ: Mapping[str, str],
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Post nothing yet; `environ` is the coordinator's environment."""
        self._on, self._run, self._job, self._sleep = settings.on, run_id, job, sleep
        self._url = settings.url or environ.get(WEBHOOK_URL, "")
        self._token = environ.get(WEBHOOK_TOKEN, "").strip()
        self._opener = urllib.request.build_opener(_NoRedirects)

    def open(self) -> str:
        """Check what the environment says; whether somebody answers is seen at the first event.

        Raises:
            ValueError: the URL or the token cannot be used.
        """
        if urlsplit(self._url).scheme not in {"http", "https"} or not is_line(self._url):
            raise ValueError(f"${WEBHOOK_URL}: want a URL, as https://host:port/path, in one line")
        if not is_line(self._token):
            raise ValueError(f"${WEBHOOK_TOKEN}: want one line without blanks")
        return f"posts {', '.join(self._on)} to {self._place}"

    @property
    def _place(self) -> str:
        return place_of(self._url)

    def send(self, update: Update) -> bool:
        """Post the events of an update; a later one is tried though an earlier one failed.

        Raises:
            ConnectionError: the last of the failures.
        """
        failed: ConnectionError | None = None
        events = [told for told in update.events if told.event in self._on]
        for told in events:
            try:
                self._post(told)
            except ConnectionError as error:
                failed = error
        if failed is not None:
            raise failed
        return bool(events)

    def close(self) -> None:
        """Do nothing: all was posted."""

    def _post(self, told: ExportedEvent) -> None:
        headers = {"Content-Type": "application/json", "User-Agent": "isthmus"}
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        request = urllib.request.Request(  # noqa: S310 - the model has checked the scheme
            self._url, data=strict_json(self._body(told)).encode(), headers=headers, method="POST"
        )
        why = ""
        for pause_s in PAUSES_S:
            self._sleep(pause_s)
            try:
                with self._opener.open(request, timeout=POST_S):
                    return
            except HTTPError as error:
                why = f"answers {error.code} {error.reason}"
                if to := redirects_to(error.headers.get("Location"), self._url):
                    why += f" and redirects to {to}: name the address that takes events itself"
                if error.code < 500 and error.code != 429:  # the same again would be no better
                    break
            except URLError as error:
                why = str(error.reason)
            except OSError as error:
                why = error.strerror or text_of(error)
            except HTTPException as error:
                why = f"answers what is no HTTP: {text_of(error)}"
        raise ConnectionError(f"{self._place}: {why}")

    def _body(self, told: ExportedEvent) -> dict[str, object]:
        return {
            "schema_version": 1,
            "event": told.event,
            "kind": told.kind,
            "sequence": told.sequence,
            "run": self._run,
            "job": self._job,
            "site": told.site or None,
            "step": told.step,
            "time": datetime.fromtimestamp(told.wall_s, UTC).isoformat(timespec="milliseconds"),
            "text": told.text,
            "detail": dict(told.detail),
        }
