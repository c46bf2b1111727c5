"""A page that a Prometheus server scrapes."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator
from http.server import HTTPServer
from typing import TYPE_CHECKING

from isthmus.orchestrator.exporters.families import FAMILIES, Family, Kind
from isthmus.orchestrator.exporters.figures import Sample
from isthmus.orchestrator.exporters.tool import Update
from isthmus.topology.spec.exporters import Prometheus

if TYPE_CHECKING:
    from prometheus_client.core import Metric


class PrometheusPage:
    """Serves a run's figures as they are now. The library's own threads answer."""

    def __init__(self, settings: Prometheus, run_id: str) -> None:
        """Listen nowhere yet."""
        self._settings, self._run = settings, run_id
        self._samples: tuple[Sample, ...] = ()
        self._server: HTTPServer | None = None
        self._thread: threading.Thread | None = None

    def open(self) -> str:
        """Listen.

        Raises:
            OSError: something else does, or there is no such address.
        """
        from prometheus_client import CollectorRegistry, start_http_server

        registry = CollectorRegistry()
        registry.register(self)
        host, port = self._settings.host, self._settings.port
        try:
            self._server, self._thread = start_http_server(port, host, registry)
        except OSError as error:
            raise OSError(f"{host}:{port}: {error.strerror or error}") from error
        return f"http://{host}:{self._server.server_port}/metrics"

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
