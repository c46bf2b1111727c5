"""The trace that an OpenTelemetry collector gets of a run, parsed by OTLP's own messages."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from isthmus.orchestrator.exporters import otlp_traces
from isthmus.orchestrator.exporters.figures import ExportedEvent, Point
from isthmus.orchestrator.exporters.otlp import endpoint_of
from isthmus.orchestrator.exporters.otlp_traces import PATH, OtlpTraces
from isthmus.orchestrator.exporters.tool import Update
from isthmus.topology.spec.exporters import Otlp
from tests.fakes.exported_runs import (
    Received,
    exported_run,
    needs_library,
    receiving,
    spec_with,
    update_of,
)

if TYPE_CHECKING:
    from opentelemetry.proto.trace.v1.trace_pb2 import Span


@pytest.fixture(autouse=True)
def _library(monkeypatch: pytest.MonkeyPatch) -> None:
    needs_library("otlp")
    monkeypatch.setattr(otlp_traces, "PUSH_S", 1.0)


def spans_of(received: Received, run_id: str = "r1") -> list[Span]:
    """Return all spans of a run that were posted, in order."""
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    found: list[Span] = []
    for path, _, body in received.posts:
        if path != PATH:
            continue
        (resource,) = ExportTraceServiceRequest.FromString(body).resource_spans
        attributes = {each.key: each.value.string_value for each in resource.resource.attributes}
        assert attributes["isthmus.run"] == run_id
        for scope in resource.scope_spans:
            found += scope.spans
    return found


def values_of(span: Span) -> dict[str, str | float]:
    """Return a span's attributes."""
    return {
        each.key: getattr(each.value, each.value.WhichOneof("value") or "string_value")
        for each in span.attributes
    }


def told(event: str, wall_s: float, site: str = "", sequence: int = 1) -> ExportedEvent:
    return ExportedEvent(
        event=event,
        kind=f"site.{event}",
        sequence=sequence,
        wall_s=wall_s,
        site=site,
        step=3,
        text=f"{site} {event}",
        detail={},
    )


def push(*updates: Update) -> list[Span]:
    """Return what a collector gets of some updates."""
    with receiving() as received:
        traces = OtlpTraces(Otlp(endpoint=received.url), "r1", "job")
        assert traces.open() == f"pushes to {received.url}{PATH}"
        for update in updates:
            traces.send(update)
        traces.close()
        return spans_of(received)


def named(spans: Iterable[Span], name: str) -> list[Span]:
    return [each for each in spans if each.name == name]


def test_a_run_is_one_trace_with_a_span_for_each_step_of_each_site(tmp_path: Path) -> None:
    update = update_of(exported_run(tmp_path), spec_with(), is_last=True)
    spans = push(update)
    steps = {
        (name.removeprefix("step_seconds/"), point.step): (point.wall_s, value)
        for point in update.points
        for name, value in point.values.items()
        if name.startswith("step_seconds/")
    }
    found = {}
    for each in named(spans, "step"):
        values = values_of(each)
        took_s = (each.end_time_unix_nano - each.start_time_unix_nano) / 1e9
        place = values["isthmus.site"], values["isthmus.step"]
        found[place] = (each.end_time_unix_nano / 1e9, took_s)
        assert {"isthmus.compute", "isthmus.exposed_wan"} <= values.keys()
    assert found.keys() == steps.keys()
    for place, figures in steps.items():
        assert found[place] == pytest.approx(figures, abs=1e-5)
    (run,) = named(spans, "run")
    assert not run.parent_span_id
    assert values_of(run)["isthmus.state"] == update.state
    assert run.start_time_unix_nano == pytest.approx(update.submitted_s * 1e9)
    assert len({each.trace_id for each in spans}) == 1
    assert len({each.span_id for each in spans}) == len(spans)
    assert {each.parent_span_id for each in spans if each is not run} == {run.span_id}
    assert run.end_time_unix_nano == max(each.end_time_unix_nano for each in spans)


def test_the_time_that_a_site_is_out_is_a_span() -> None:
    spans = push(
        Update(samples=(), events=(told("lost", 100.0, "a"), told("epoch", 101.0, sequence=2))),
        Update(
            samples=(),
            events=(told("returned", 160.0, "a", 3), told("lost", 170.0, "b", 4)),
            submitted_s=90.0,
        ),
        Update(
            samples=(),
            points=(Point(9, 180.0, {"step_seconds/a": 2.0}),),
            state="FAILED",
            submitted_s=90.0,
            is_last=True,
        ),
    )
    out = [
        (values_of(each)["isthmus.site"], each.start_time_unix_nano, each.end_time_unix_nano)
        for each in named(spans, "out")
    ]
    assert out == [("a", 100 * 10**9, 160 * 10**9), ("b", 170 * 10**9, 180 * 10**9)]
    (epoch,) = named(spans, "epoch")
    assert epoch.start_time_unix_nano == epoch.end_time_unix_nano == 101 * 10**9
    (run,) = named(spans, "run")
    assert run.status.code == run.status.STATUS_CODE_ERROR


def test_what_a_collector_does_not_take_is_pushed_again_with_the_same_ids() -> None:
    point = Point(1, 10.0, {"step_seconds/a": 2.0})
    with receiving() as received:
        now_s = [0.0]
        settings = Otlp(endpoint=received.url, every_s=5.0)
        traces = OtlpTraces(settings, "r1", "job", now_s=lambda: now_s[0])
        traces.open()
        received.statuses = [400]
        with pytest.raises(ConnectionError, match="v1/traces does not take them"):
            traces.send(Update(samples=(), points=(point,)))
        assert not traces.send(Update(samples=())), "it is not time"
        now_s[0] = 5.0
        assert traces.send(Update(samples=()))
        assert not traces.send(Update(samples=(), is_last=True)), "nothing is left"
        first, again = spans_of(received)
    assert first == again


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (None, None),
        ("http://c:4318", "http://c:4318/v1/traces"),
        ("http://c:4318/", "http://c:4318/v1/traces"),
        ("http://c:4318/v1/metrics", "http://c:4318/v1/traces"),
        ("https://c/otlp/v1/traces", "https://c/otlp/v1/traces"),
        ("https://c/own/path", "https://c/own/path"),
    ],
)
def test_the_path_is_that_of_the_signal(written: str | None, expected: str | None) -> None:
    assert endpoint_of(written, PATH) == expected
