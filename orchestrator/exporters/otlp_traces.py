"""Pushes a run as one trace to an OpenTelemetry collector, by OTLP over HTTP.

The trace has a span for each step of each site, one for each time that a site is out, one of no
length for each other event, and, once the run has ended, the span `run` around them. Its ids come
from the run's name, so what is pushed twice, or after the coordinator was started again, is the
same trace.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING

from isthmus.orchestrator.exporters.figures import PARTS, ExportedEvent, Point
from isthmus.orchestrator.exporters.otlp import PUSH_S, endpoint_of, resource_of, session
from isthmus.orchestrator.exporters.tool import Update
from isthmus.topology.spec.exporters import Otlp

if TYPE_CHECKING:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.trace import SpanContext

PATH = "/v1/traces"
SPANS_MAX = 4096
"""Spans that are kept for a collector that takes none; the oldest go."""
_SPANS_A_PUSH = 512
_STEP = "step_seconds/"
_NS_PER_S = 1e9


class OtlpTraces:
    """Pushes spans now and then, and at the end.

    Certificates and headers, which may be secrets, the library takes from its own
    OTEL_EXPORTER_OTLP_ variables.
    """

    def __init__(
        self, settings: Otlp, run_id: str, job: str, now_s: Callable[[], float] = time.monotonic
    ) -> None:
        """Push nothing yet."""
        self._settings, self._run, self._job, self._now_s = settings, run_id, job, now_s
        self._exporter: OTLPSpanExporter | None = None
        self._resource: Resource | None = None
        self._failures: list[str] = []
        self._waiting: list[ReadableSpan] = []
        self._lost_s: dict[str, float] = {}
        """Since when sites are out."""
        self._latest_s = 0.0
        """When the latest of all that came happened."""
        self._pushed_s = -float("inf")

    def open(self) -> str:
        """Get ready; whether anybody answers is seen at the first push."""
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # `send` raises instead
        place = endpoint_of(self._settings.endpoint, PATH)
        self._exporter = OTLPSpanExporter(
            endpoint=place, timeout=PUSH_S, session=session(self._failures)
        )
        self._resource = resource_of(self._run, self._job)
        return f"pushes to {self._exporter._endpoint}"

    def send(self, update: Update) -> bool:
        """Push what is new, if it is time.

        Raises:
            ConnectionError: the collector did not take it; it is pushed again next time.
        """
        from opentelemetry.sdk.trace.export import SpanExportResult

        assert self._exporter is not None
        self._waiting += self._spans_of(update)
        del self._waiting[:-SPANS_MAX]
        now_s = self._now_s()
        is_time = update.is_last or now_s - self._pushed_s >= self._settings.every_s
        if not self._waiting or not is_time:
            return False
        self._pushed_s = now_s
        self._failures.clear()
        while self._waiting:
            result = self._exporter.export(self._waiting[:_SPANS_A_PUSH])
            if result is not SpanExportResult.SUCCESS:
                why = self._failures or [f"{self._exporter._endpoint} does not take them"]
                raise ConnectionError(why[0])
            del self._waiting[:_SPANS_A_PUSH]
        return True

    def close(self) -> None:
        """Do nothing: the last update was pushed."""

    # ------------------------------------------------------------ spans

    def _spans_of(self, update: Update) -> Iterator[ReadableSpan]:
        for point in update.points:
            yield from self._steps_of(point)
            self._latest_s = max(self._latest_s, point.wall_s)
        for told in update.events:
            yield self._event_of(told)
            self._latest_s = max(self._latest_s, told.wall_s)
        if update.is_last and update.submitted_s:
            for site in sorted(self._lost_s):
                yield self._out_of(site, self._latest_s)
            is_ok = {"SUCCEEDED": True, "FAILED": False}.get(update.state)
            values = {"isthmus.state": update.state}
            end_s = max(update.submitted_s, self._latest_s)
            yield self._span("run", "", update.submitted_s, end_s, values, is_ok)

    def _steps_of(self, point: Point) -> Iterator[ReadableSpan]:
        """Yield the step of each site that a point has."""
        for name, step_s in point.values.items():
            if not name.startswith(_STEP):
                continue
            site = name.removeprefix(_STEP)
            values: dict[str, str | float] = {"isthmus.site": site, "isthmus.step": point.step}
            for label in (*PARTS.values(), "hidden_wan"):
                part_s = point.values.get(f"{label}_seconds/{site}")
                if part_s is not None:
                    values[f"isthmus.{label}"] = part_s
            loss = point.values.get(f"site_loss/{site}")
            if loss is not None:
                values["isthmus.loss"] = loss
            begin_s = point.wall_s - step_s
            yield self._span("step", f"{site} {point.step}", begin_s, point.wall_s, values)

    def _event_of(self, told: ExportedEvent) -> ReadableSpan:
        """Return an event's span: where a site takes part again, of the time that it was out."""
        if told.event == "lost" and told.site:
            self._lost_s.setdefault(told.site, told.wall_s)
        if told.event == "returned" and told.site in self._lost_s:
            return self._out_of(told.site, told.wall_s)
        values: dict[str, str | float] = {
            "isthmus.step": told.step,
            "isthmus.kind": told.kind,
            "isthmus.text": told.text,
        }
        if told.site:
            values["isthmus.site"] = told.site
        return self._span(told.event, str(told.sequence), told.wall_s, told.wall_s, values)

    def _out_of(self, site: str, end_s: float) -> ReadableSpan:
        since_s = self._lost_s.pop(site)
        return self._span("out", f"{site} {since_s}", since_s, end_s, {"isthmus.site": site})

    def _span(
        self,
        name: str,
        which: str,
        begin_s: float,
        end_s: float,
        values: Mapping[str, str | float],
        is_ok: bool | None = None,
    ) -> ReadableSpan:
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.trace import Status, StatusCode

        status = {None: StatusCode.UNSET, True: StatusCode.OK, False: StatusCode.ERROR}[is_ok]
        return ReadableSpan(
            name=name,
            context=self._context(name, which),
            parent=None if name == "run" else self._context("run", ""),
            resource=self._resource,
            attributes=values,
            status=Status(status),
            start_time=int(begin_s * _NS_PER_S),
            end_time=int(end_s * _NS_PER_S),
        )

    def _context(self, name: str, which: str) -> SpanContext:
        from opentelemetry.trace import SpanContext, TraceFlags

        return SpanContext(
            trace_id=_hashed(self._run, 16),
            span_id=_hashed(f"{self._run} {name} {which}", 8),
            is_remote=False,
            trace_flags=TraceFlags(TraceFlags.SAMPLED),
        )


def _hashed(text: str, num_bytes: int) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:num_bytes], "big")
