"""Pushes figures to an OpenTelemetry collector, by OTLP over HTTP."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from isthmus.orchestrator.exporters.families import FAMILIES, Family, Kind
from isthmus.orchestrator.exporters.figures import Sample
from isthmus.orchestrator.exporters.tool import Update
from isthmus.orchestrator.exporters.webhook import place_of, redirects_to
from isthmus.protos.failure import text_of
from isthmus.topology.spec.exporters import Otlp

if TYPE_CHECKING:
    from opentelemetry.metrics import CallbackOptions, Observation
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.resources import Resource
    from requests import Response, Session

PATH = "/v1/metrics"
SIGNALS = (PATH, "/v1/traces")
"""The paths of both signals."""
_PROVIDER = "_CREDENTIAL_PROVIDER"
"""End of the names of variables in which OpenTelemetry has what makes a session."""
PUSH_S = 5.0
"""Time for one push, with all attempts that the library makes."""


class OtlpPush:
    """Pushes a run's figures as they are: now and then, and at the end.

    The library's own thread is not used, so that a push that fails is seen. Certificates and
    headers, which may be secrets, it takes from its own OTEL_EXPORTER_OTLP_ variables.
    """

    def __init__(
        self, settings: Otlp, run_id: str, job: str, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        """Push nothing yet."""
        self._settings, self._run, self._job, self._now_s = settings, run_id, job, now_s
        self._samples: Sequence[Sample] = ()
        self._provider: MeterProvider | None = None
        self._failures: list[str] = []
        self._pushed_s = -math.inf

    def open(self) -> str:
        """Make the instruments; whether anybody answers is seen at the first push."""
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import (
            MetricExportResult,
            PeriodicExportingMetricReader,
        )

        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # `send` raises instead
        place = endpoint_of(self._settings.endpoint, PATH)
        push_session = session(self._failures)
        exporter = OTLPMetricExporter(endpoint=place, timeout=PUSH_S, session=push_session)
        push, failures = exporter.export, self._failures

        def export(*args: Any, **kwargs: Any) -> object:  # noqa: ANN401 - as the library has it
            """Push; note a failure, which the library only logs."""
            try:
                result = push(*args, **kwargs)
            except Exception as error:
                if not failures:
                    failures.append(text_of(error))
                raise
            if result is not MetricExportResult.SUCCESS and not failures:
                failures.append(f"{exporter._endpoint} does not take them")
            return result

        exporter.export = export
        reader = PeriodicExportingMetricReader(exporter, export_interval_millis=math.inf)
        resource = resource_of(self._run, self._job)
        self._provider = MeterProvider([reader], resource)
        meter = self._provider.get_meter("isthmus")
        for family in FAMILIES:
            make = (
                meter.create_observable_counter
                if family.kind is Kind.COUNTER
                else meter.create_observable_gauge
            )
            make(family.otel, [self._observing(family)], family.unit, family.help)
        return f"pushes to {exporter._endpoint}"

    def send(self, update: Update) -> bool:
        """Push these figures, if it is time.

        Raises:
            ConnectionError: the collector did not take them.
        """
        self._samples = update.samples
        now_s = self._now_s()
        if now_s - self._pushed_s < self._settings.every_s and not update.is_last:
            return False
        self._pushed_s = now_s
        assert self._provider is not None
        self._failures.clear()
        is_done = self._provider.force_flush(PUSH_S * 2e3)
        if self._failures or not is_done:
            raise ConnectionError(self._failures[-1] if self._failures else "no answer in time")
        return True

    def close(self) -> None:
        """Do nothing: the last update was pushed."""

    def _observing(self, family: Family) -> Callable[[CallbackOptions], Iterable[Observation]]:
        from opentelemetry.metrics import Observation

        names = [f"isthmus.{label}" for label in ("run", *family.labels)]

        def observe(_: CallbackOptions) -> Iterable[Observation]:
            for sample in self._samples:
                if sample.family is family:
                    values = (self._run, *sample.labels)
                    yield Observation(sample.value, dict(zip(names, values, strict=True)))

        return observe


def session(failures: list[str]) -> Session | None:
    """Return a session that takes no redirect for an answer, and notes it in `failures`.

    Libraries follow one with headers and without the body, or count it as delivered. None: the
    library gets its session from a credential provider.
    """
    import requests

    if any(name.endswith(_PROVIDER) for name in os.environ):
        return None

    def refuse(response: Response, **_: object) -> None:
        if to := redirects_to(response.headers.get("Location"), response.url):
            response.close()
            failures.append(f"{place_of(response.url)} redirects to {to}: name that as endpoint")
            raise requests.TooManyRedirects(failures[-1], response=response)

    made = requests.Session()
    made.hooks["response"].append(refuse)
    return made


def resource_of(run_id: str, job: str) -> Resource:
    """Return what all that is pushed of a run is of."""
    from opentelemetry.sdk.resources import Resource

    return Resource.create(
        {
            "service.name": "isthmus",
            "service.instance.id": run_id,
            "isthmus.run": run_id,
            "isthmus.job": job,
        }
    )


def endpoint_of(written: str | None, path: str) -> str | None:
    """Return the URL to post to; None: as the library's own variables say.

    Args:
        written: The collector's URL as the job has it: a base, or with the path of either signal.
        path: Of the signal.
    """
    if written is None:
        return None
    base = written.rstrip("/")
    for other in SIGNALS:
        base = base.removesuffix(other)
    is_base = base.count("/") == 2 or base != written.rstrip("/")
    return base + path if is_base else written
