"""A page that a Prometheus server scrapes."""

from __future__ import annotations

import hmac
import secrets
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator
from http.server import HTTPServer
from pathlib import Path
from typing import TYPE_CHECKING
from wsgiref.simple_server import WSGIServer

from isthmus.orchestrator.exporters.families import FAMILIES, Family, Kind
from isthmus.orchestrator.exporters.figures import Sample
from isthmus.orchestrator.exporters.tool import Update
from isthmus.protos.private_files import make_secret, read_secret
from isthmus.protos.security import token_path
from isthmus.topology.spec.exporters import Prometheus

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

    from prometheus_client.core import Metric

TOKEN_BYTES = 24


def page_token_path() -> Path:
    """Return where this user's pages have the token that they ask for: beside the user's secret.

    Raises:
        FileNotFoundError: this user has no home folder.
    """
    return token_path().with_name("prometheus.token")


class PrometheusPage:
    """Serves a run's figures as they are now. The library's own threads answer.

    Other users of the machine reach it, too: who has not the token gets nothing.
    """

    def __init__(self, settings: Prometheus, run_id: str) -> None:
        """Listen nowhere yet."""
        self._settings, self._run = settings, run_id
        self._samples: tuple[Sample, ...] = ()
        self._server: HTTPServer | None = None
        self._thread: threading.Thread | None = None

    def open(self) -> str:
        """Listen.

        Raises:
            OSError: something else does, there is no such address, or no place for the token.
            UnsafeFileError: others may read the token.
        """
        from prometheus_client import CollectorRegistry, start_http_server

        registry = CollectorRegistry()
        registry.register(self)
        host, port = self._settings.host, self._settings.port
        token = "" if self._settings.is_open else kept_token(page_token_path())
        try:
            self._server, self._thread = start_http_server(port, host, registry)
        except OSError as error:
            raise OSError(f"{host}:{port}: {error.strerror or error}") from error
        if token:
            assert isinstance(self._server, WSGIServer)
            application = self._server.get_app()
            assert application is not None, "the library has set it"
            self._server.set_app(guarded(application, token))
        url = f"http://{host}:{self._server.server_port}/metrics"
        return f"{url} (bearer token: {page_token_path()})" if token else f"{url} (open: no token)"

    def send(self, update: Update) -> bool:
        """Show these figures from now on."""
        self._samples = update.samples
        return True

    def close(self) -> None:
        """Listen no more."""
        if self._server is not None and self._thread is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()

    def collect(self) -> Iterator[Metric]:
        """Yield all figures, as the library wants them."""
        by_family: dict[Family, list[Sample]] = defaultdict(list)
        for sample in self._samples:
            by_family[sample.family].append(sample)
        for family in FAMILIES:
            if family in by_family:
                yield self._metric(family, by_family[family])

    def _metric(self, family: Family, samples: list[Sample]) -> Metric:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        kind = CounterMetricFamily if family.kind is Kind.COUNTER else GaugeMetricFamily
        metric = kind(family.prometheus, family.help, labels=["run", *family.labels])
        for sample in samples:
            metric.add_metric([self._run, *sample.labels], sample.value)
        return metric


def kept_token(path: Path) -> str:
    """Return a token that is kept in a file, made where there is none.

    Raises:
        OSError: the file cannot be made.
        UnsafeFileError: others may read it.
    """
    if not path.exists():
        make_secret(path, secrets.token_urlsafe(TOKEN_BYTES).encode("ascii"))
    return read_secret(path).decode("ascii").strip()


def guarded(application: WSGIApplication, token: str) -> WSGIApplication:
    """Return an application that answers only who shows the token."""
    expected = f"Bearer {token}".encode()

    def answer(environ: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        if hmac.compare_digest(environ.get("HTTP_AUTHORIZATION", "").encode(), expected):
            return application(environ, start)
        start("401 Unauthorized", [("WWW-Authenticate", "Bearer"), ("Content-Type", "text/plain")])
        return [b"Show the token: authorization: {credentials_file: ...} in prometheus.yml\n"]

    return answer
