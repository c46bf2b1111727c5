"""What is exported of a run are the figures that its journal and metrics.jsonl have."""

from __future__ import annotations

import math
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from isthmus.orchestrator.core.journaled_run import RecordedEvent
from isthmus.orchestrator.core.run_record import Measurement
from isthmus.orchestrator.exporters.families import FAMILIES, Kind
from isthmus.orchestrator.exporters.figures import PARTS, ExportedEvent, RunFigures
from isthmus.topology.spec.exporters import EVENTS
from tests.fakes.exported_runs import exported_run, figures_of, records_of, spec_with
from tests.fakes.recorded_runs import BEGAN_S, metric

SITES = ("oregon", "virginia", "montreal")


def event(kind: str, sequence: int = 9, site: str = "", **detail: object) -> RecordedEvent:
    return RecordedEvent(
        sequence=sequence,
        wall_s=BEGAN_S,
        run_id="r1",
        generation=1,
        kind=kind,
        site=site,
        detail=detail,
    )


def measured(
    site: str, kind: str, step: int, wall_s: float, values: dict[str, float], **labels: str
) -> Measurement:
    return Measurement.of(metric(site, kind, step, wall_s, values, **labels))


def begun() -> RunFigures:
    """Return the figures of a run that is active."""
    figures = RunFigures("r1", spec_with())
    figures.add_event(event("run.submitted", 1, name="hello-wan", sites=list(SITES)))
    figures.add_event(event("run.active", 2))
    return figures


def by_name(figures: RunFigures) -> dict[tuple[str, ...], float]:
    return {(each.family.prometheus, *each.labels): each.value for each in figures.samples()}


def test_samples_are_the_sums_and_the_last_of_the_metrics(tmp_path: Path) -> None:
    folder = exported_run(tmp_path)
    figures, _, _ = figures_of(folder, spec_with())
    found, records = by_name(figures), records_of(folder)
    steps: dict[str, list[dict[str, Any]]] = defaultdict(list)
    links: dict[tuple[str, str], dict[str, float]] = {}
    for each in records:
        if each["kind"] == "step":
            steps[each["site"]].append(each["values"])
        if each["kind"] == "link":
            links[each["labels"]["source"], each["labels"]["target"]] = each["values"]
    assert set(steps) == set(SITES)
    for site, values in steps.items():
        assert found["isthmus_steps_total", site] == len(values) == 40
        tokens = math.fsum(each["site_tokens"] for each in values)
        assert found["isthmus_tokens_total", site] == pytest.approx(tokens)
        assert found["isthmus_step_seconds", site] == values[-1]["step_s"]
        assert found["isthmus_site_loss", site] == values[-1]["loss"]
        assert found["isthmus_hidden_wan_seconds", site] == values[-1]["hidden_inter_s"]
        for key, part in PARTS.items():
            assert found["isthmus_step_part_seconds", site, part] == values[-1][key]
            total = math.fsum(each[key] for each in values)
            assert found["isthmus_step_parts_seconds_total", site, part] == pytest.approx(total)
    last = [steps[site][-1] for site in SITES]
    rate = math.fsum(each["site_tokens"] / each["step_s"] for each in last)
    assert found["isthmus_tokens_per_second",] == pytest.approx(rate)
    weights = [each["site_tokens"] for each in last]
    loss = sum(each["loss"] * weight for each, weight in zip(last, weights, strict=True))
    assert found["isthmus_loss",] == pytest.approx(loss / sum(weights))
    assert found["isthmus_step",] == 40
    assert links
    for pair, totals in links.items():
        assert found[("isthmus_link_sent_bytes_total", *pair)] == totals["sent_bytes"]
        assert found[("isthmus_link_raw_bytes_total", *pair)] == totals["raw_bytes"]
        assert found[("isthmus_link_rtt_seconds", *pair)] == totals["rtt_s"]


def test_links_have_what_is_described_beside_what_is_measured(tmp_path: Path) -> None:
    folder, spec = exported_run(tmp_path), spec_with()
    found = by_name(figures_of(folder, spec)[0])
    for link in spec.topology.links:
        pair = (link.source, link.target)
        assert found[("isthmus_link_described_bytes_per_second", *pair)] == link.bytes_per_s
        assert found[("isthmus_link_described_rtt_seconds", *pair)] == link.rtt_s
        egress = found.get(("isthmus_link_egress_dollars_total", *pair))
        sent_bytes = found.get(("isthmus_link_sent_bytes_total", *pair))
        assert (egress is None) == (link.egress_usd_per_byte == 0 or sent_bytes is None)
        if egress is not None:
            assert egress == pytest.approx(sent_bytes * 0.02e-9)  # type: ignore[operator]
    assert any("egress" in name[0] for name in found)


def test_a_links_use_is_of_the_last_seconds() -> None:
    figures, link = begun(), spec_with().topology.links[0]
    pair = (link.source, link.target)
    ends = {"source": link.source, "target": link.target, "gateway": "0"}
    for tick in range(9):
        sent_bytes = 0.25 * link.bytes_per_s * tick / 2 + (1e9 if tick < 1 else 0)
        values = {"sent_bytes": sent_bytes, "limited_bytes": 50.0 * tick, "limited_s": 2.0 * tick}
        figures.add_metric(measured(link.source, "link", 0, BEGAN_S + tick / 2, values, **ends))
    found = by_name(figures)
    assert found[("isthmus_link_utilisation_ratio", *pair)] == pytest.approx(0.25)
    assert found[("isthmus_link_measured_bytes_per_second", *pair)] == 25


def test_every_whole_step_has_the_loss_of_its_batch_once(tmp_path: Path) -> None:
    folder = exported_run(tmp_path)
    _, points, _ = figures_of(folder, spec_with())
    losses = [(each.step, each.values["loss"]) for each in points if "loss" in each.values]
    expected = defaultdict[int, list[float]](list)
    for each in records_of(folder):
        if each["kind"] == "step":
            expected[each["step"]].append(each["values"]["loss"])
    assert [step for step, _ in losses] == sorted(expected)
    for step, loss in losses:  # all sites have as many tokens
        assert loss == pytest.approx(math.fsum(expected[step]) / 3)
    rates = [each for each in points if "tokens_per_second" in each.values]
    assert [each.step for each in rates] == sorted(expected)
    assert rates[0].values["tokens_per_second"] == pytest.approx(6144 / 0.4)
    parts = [each.values for each in points if "compute_seconds/oregon" in each.values]
    assert len(parts) == 40
    whole = math.fsum(parts[3][f"{part}_seconds/oregon"] for part in PARTS.values())
    assert whole == pytest.approx(parts[3]["step_seconds/oregon"])


def test_a_site_that_catches_up_has_no_loss() -> None:
    figures = begun()
    figures.add_metric(
        measured("oregon", "step", 1, BEGAN_S, {"loss": 0.0, "site_tokens": 0.0, "step_s": 1.0})
    )
    assert ("isthmus_site_loss", "oregon") not in by_name(figures)
    assert ("isthmus_tokens_per_second",) not in by_name(figures)


def test_events_are_told_by_kind_with_a_line_for_people(tmp_path: Path) -> None:
    figures = begun()
    for kind, site, detail in (
        ("failure.reported", "virginia", {"code": "SITE_LOST", "message": "it was silent"}),
        (
            "site.lost",
            "virginia",
            {"note": "the run continues without site virginia", "state": "LOST"},
        ),
        ("site.returning", "virginia", {"note": "it is started again"}),
        ("site.returned", "virginia", {"note": "site virginia takes part again"}),
        ("checkpoint.written", "oregon", {"note": "checkpoint of step 20", "step": 20}),
        ("rank.stalled", "oregon", {"note": "rank 1 hangs"}),
    ):
        _, told = figures.add_event(event(kind, site=site, **detail))
        assert len(told) == (kind != "site.returning")
    _, (end,) = figures.add_event(event("run.ended", state="FAILED", reason="it broke"))
    assert (end.event, end.text) == ("end", "run r1 FAILED: it broke")
    assert figures.has_ended
    found = by_name(figures)
    assert found["isthmus_events_total", "failure"] == 2
    assert found["isthmus_events_total", "lost"] == 1
    assert found["isthmus_run_state", "FAILED"] == 1
    assert found["isthmus_checkpoint_step",] == 20
    recorded: list[ExportedEvent] = figures_of(exported_run(tmp_path), spec_with())[2]
    assert [(each.event, each.text) for each in recorded] == [("end", "run r1 SUCCEEDED")]
    assert {each.event for each in recorded} <= set(EVENTS)


def test_what_a_site_sends_again_counts_once() -> None:
    figures = begun()
    values = {"loss": 2.0, "site_tokens": 8.0, "step_s": 1.0}
    for step in (1, 2, 2, 1, 3):
        figures.add_metric(measured("oregon", "step", step, BEGAN_S, values))
    found = by_name(figures)
    assert found["isthmus_steps_total", "oregon"] == 3
    assert found["isthmus_tokens_total", "oregon"] == 24
    points = [
        figures.add_metric(measured("oregon", "evaluation", step, BEGAN_S, {"held_out_loss": 1.0}))
        for step in (10, 10, 20)
    ]
    assert [len(each) for each in points] == [1, 0, 1]


def test_metrics_of_nobody_or_of_another_build_change_nothing() -> None:
    figures = begun()
    assert figures.add_metric(measured("nobody", "step", 1, BEGAN_S, {"loss": 1.0})) == []
    assert figures.add_metric(measured("oregon", "new_kind", 1, BEGAN_S, {"x": 1.0})) == []


def test_names_keep_to_the_tools_conventions() -> None:
    assert len({each.prometheus for each in FAMILIES}) == len(FAMILIES) >= 20
    assert len({each.otel for each in FAMILIES}) == len(FAMILIES)
    for each in FAMILIES:
        assert each.prometheus.startswith("isthmus_")
        assert each.prometheus.endswith("_total") == (each.kind is Kind.COUNTER), each.prometheus
        assert each.otel.startswith("isthmus.")
        if each.unit == "s":
            assert "_seconds" in each.prometheus
        if each.unit.startswith("By"):
            assert "_bytes" in each.prometheus
        assert "job" not in each.labels, "Prometheus has a label of that name"
        assert "instance" not in each.labels
