"""What an OpenTelemetry collector gets, parsed by OTLP's own messages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from isthmus.orchestrator.exporters import families, otlp
from isthmus.orchestrator.exporters.families import Kind
from isthmus.orchestrator.exporters.figures import Sample
from isthmus.orchestrator.exporters.otlp import OtlpPush
from isthmus.orchestrator.exporters.otlp_traces import OtlpTraces
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


@pytest.fixture(autouse=True)
def _library(monkeypatch: pytest.MonkeyPatch) -> None:
    needs_library("otlp")
    monkeypatch.setattr(otlp, "PUSH_S", 1.0)


def pushed(received: Received, index: int = -1) -> dict[str, Any]:
    """Return the metrics of a push by name, with the resource's attributes as ''."""
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
        ExportMetricsServiceRequest,
    )

    _, _, body = [post for post in received.posts if post[0] == "/v1/metrics"][index]
    (resource,) = ExportMetricsServiceRequest.FromString(body).resource_metrics
    (scope,) = resource.scope_metrics
    attributes = {each.key: each.value.string_value for each in resource.resource.attributes}
    return {"": attributes, **{metric.name: metric for metric in scope.metrics}}


def test_a_push_has_every_sample_with_its_attributes_and_unit(tmp_path: Path) -> None:
    from opentelemetry.proto.metrics.v1.metrics_pb2 import AGGREGATION_TEMPORALITY_CUMULATIVE

    update = update_of(exported_run(tmp_path), spec_with())
    with receiving() as received:
        push = OtlpPush(Otlp(endpoint=received.url), "r1", "hello-wan")
        assert push.open() == f"pushes to {received.url}/v1/metrics"
        push.send(update)
        push.close()
        found = pushed(received)
    assert found[""]["service.name"] == "isthmus"
    assert found[""]["isthmus.job"] == "hello-wan"
    expected: dict[str, dict[frozenset[tuple[str, str]], float]] = {}
    for each in update.samples:
        values = dict(
            zip((f"isthmus.{label}" for label in each.family.labels), each.labels, strict=True)
        )
        key = frozenset({"isthmus.run": "r1", **values}.items())
        expected.setdefault(each.family.otel, {})[key] = each.value
    units = {each.otel: each for each in families.FAMILIES}
    assert found.keys() - {""} == expected.keys()
    for name, points in expected.items():
        metric, family = found[name], units[name]
        assert (metric.unit, metric.description) == (family.unit, family.help)
        if family.kind is Kind.COUNTER:
            assert metric.sum.is_monotonic
            assert metric.sum.aggregation_temporality == AGGREGATION_TEMPORALITY_CUMULATIVE
        data = (metric.sum if family.kind is Kind.COUNTER else metric.gauge).data_points
        got = {
            frozenset((each.key, each.value.string_value) for each in point.attributes): (
                point.as_double if point.HasField("as_double") else point.as_int
            )
            for point in data
        }
        assert got == pytest.approx(points), name


def test_it_pushes_when_it_is_time_and_at_the_end() -> None:
    now_s = [0.0]
    update = Update(samples=(Sample(families.LOSS, (), 2.0),))
    with receiving() as received:
        push = OtlpPush(Otlp(endpoint=received.url), "r1", "job", now_s=lambda: now_s[0])
        push.open()
        for is_time in (True, False, False, True, False):
            assert push.send(update) is is_time, "one that is not tried has not worked"
            now_s[0] += 4.0
        assert len(received.posts) == 2
        push.send(Update(samples=(Sample(families.LOSS, (), 1.5),), is_last=True))
        assert len(received.posts) == 3
        (point,) = pushed(received)["isthmus.loss"].gauge.data_points
        assert point.as_double == 1.5


def test_headers_come_from_the_librarys_own_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    with receiving() as received:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", received.url)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-key=5ecret")
        push = OtlpPush(Otlp(), "r1", "job")
        assert "5ecret" not in push.open()
        push.send(Update(samples=(Sample(families.LOSS, (), 2.0),)))
        (_, headers, _) = received.posts[0]
        assert {name.lower(): value for name, value in headers.items()}["x-key"] == "5ecret"


def test_a_collector_that_is_gone_or_refuses_is_an_error_and_later_taken_again() -> None:
    update = Update(samples=(Sample(families.LOSS, (), 2.0),), is_last=True)
    with receiving() as received:
        push = OtlpPush(Otlp(endpoint=received.url), "r1", "job")
        push.open()
        received.statuses = [400]
        with pytest.raises(ConnectionError, match="v1/metrics does not take them"):
            push.send(update)
        push.send(update)
        assert len(received.posts) == 2
    with pytest.raises(ConnectionError):
        push.send(update)


@pytest.mark.parametrize("status", [302, 307])
def test_a_redirect_is_no_delivery(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "api-key=5ecret")
    update = update_of(exported_run(tmp_path), spec_with(), is_last=True)
    with receiving() as elsewhere, receiving() as received:
        received.location = f"{elsewhere.url}/x"
        for push in (
            OtlpPush(Otlp(endpoint=received.url), "r1", "j"),
            OtlpTraces(Otlp(endpoint=received.url), "r1", "j"),
        ):
            received.statuses = [status]
            push.open()
            with pytest.raises(ConnectionError, match=f"redirects to {elsewhere.url}: name"):
                push.send(update)
            push.close()
        assert elsewhere.posts == []
