import math
from typing import Any

from isthmus.orchestrator.core.epoch_record import detail_of
from isthmus.orchestrator.core.journaled_run import RecordedEvent
from isthmus.orchestrator.core.run_metrics import (
    CURVE_POINTS,
    MAX_LOSSES,
    OPEN_STEPS,
    RECENT_STEPS,
    RunMetrics,
)
from isthmus.orchestrator.core.run_record import Measurement, RunRecord
from isthmus.orchestrator.core.slow_sites import WINDOW
from isthmus.orchestrator.runs.facts import summarise
from isthmus.topology.spec.epoch import Epoch
from tests.fakes.run_worlds import GATHER


def step(loss: float, tokens: float, **more: float) -> dict[str, float]:
    return {"loss": loss, "site_tokens": tokens, **more}


def link(sent: float, busy_s: float, rtt_s: float) -> dict[str, float]:
    return {"sent_bytes": sent, "raw_bytes": 2 * sent, "busy_s": busy_s, "rtt_s": rtt_s}


def test_a_steps_loss_is_weighted_by_tokens_and_waits_for_all_sites() -> None:
    measured = RunMetrics(("a", "b"))
    measured.add("a", "step", 1, step(2.0, 30), {})
    assert measured.losses == []
    measured.add("b", "step", 1, step(4.0, 10), {})
    assert measured.losses == [(1, 2.5)]
    assert measured.totals()["tokens"] == 40
    assert measured.totals()["loss"] == 2.5


def test_compared_gradients_cost_what_they_took_at_the_slowest_site() -> None:
    measured = RunMetrics(("a", "b"))
    assert "compared_s" not in measured.totals()
    for at, length_s in ((500, 0.5), (1000, 1.0)):
        for site, more_s in (("a", 0.0), ("b", 0.25)):
            values = {"compared_ranks": 4.0, "compared_s": length_s + more_s}
            measured.add(site, "gradients", at, values, {})
    found = measured.totals()
    assert (found["compared_steps"], found["compared_ranks"], found["compared_s"]) == (2, 4, 2.0)


def test_memory_is_bounded_over_a_long_run() -> None:
    measured = RunMetrics(("a",))
    for number in range(3 * MAX_LOSSES):
        measured.add("a", "step", number, step(float(number), 1), {})
    assert len(measured.losses) <= MAX_LOSSES
    assert measured.losses[0] == (0, 0.0)
    assert measured.losses[-1] == (3 * MAX_LOSSES - 1, 3.0 * MAX_LOSSES - 1)
    steps = [number for number, _ in measured.losses]
    assert steps == sorted(set(steps))

    alone = RunMetrics(("a", "b"))
    for number in range(2 * OPEN_STEPS):
        alone.add("a", "step", number, step(1.0, 1), {})
    assert [number for number, _ in alone.losses] == [*range(OPEN_STEPS)]
    alone.add("b", "step", 0, step(2.0, 1), {})
    assert alone.losses[0] == (0, 1.0), "too late to count"
    alone.add("b", "step", 2 * OPEN_STEPS - 1, step(2.0, 1), {})
    assert alone.losses[-1] == (2 * OPEN_STEPS - 1, 1.5)


def test_the_curve_of_a_status_is_short_and_of_what_is_finite() -> None:
    measured = RunMetrics(("a",))
    assert measured.progress()["loss_curve"] == []
    for number in range(100 * CURVE_POINTS):
        loss = math.nan if number == 5 else float(number)
        measured.add("a", "step", number, step(loss, 1), {})
        if number == 2:
            assert measured.curve() == [0.0, 1.0, 2.0]
    assert len(measured.curve()) == CURVE_POINTS
    assert measured.curve() == sorted(measured.curve())


def test_the_present_time_of_a_step_is_the_slowest_sites() -> None:
    measured = RunMetrics(("a", "b", "c"))
    assert "step_s" not in measured.totals()
    measured.count(frozenset("ab"))
    for number in range(3 * RECENT_STEPS):
        is_warm = number >= RECENT_STEPS
        measured.add("a", "step", number, step(1.0, 1, step_s=1.0 if is_warm else 9.0), {})
        measured.add("b", "step", number, step(1.0, 1, step_s=2.0 if is_warm else 9.0), {})
    measured.add("c", "step", 1, step(1.0, 1, step_s=50.0), {})
    assert measured.totals()["step_s"] == 2.0


def test_tokens_that_no_script_counts_are_said_to_be_none() -> None:
    measured = RunMetrics(("a", "b"))
    assert measured.counts_tokens is None
    assert "counts_tokens" not in measured.totals()
    measured.add("a", "model", 0, {"counts_tokens": 1.0}, {})
    assert measured.totals()["counts_tokens"] == 1.0
    measured.add("b", "model", 0, {"counts_tokens": 0.0}, {})
    assert measured.totals()["counts_tokens"] == 0.0


def test_a_site_that_others_wait_for_is_among_the_figures() -> None:
    record = RunRecord("r", ("a", "b"))
    measured = record.measured
    for number in range(WINDOW - 1 + 60):
        assert measured.progress()["slow"] is None
        measured.add("a", "step", number, step(1.0, 1, step_s=1.0, wait_s=0.5), {})
        measured.add("b", "step", number, step(1.0, 1, step_s=1.0, wait_s=0.0), {})
    found = measured.progress()["slow"]
    assert (found["site"], found["since_step"]) == ("b", 0)
    assert (found["cost_s"], found["share"], found["total_s"]) == (0.5, 0.5, 30.0)
    summary = summarise(record, active_s=1.0, verified_steps=0)
    assert summary["slow_sites"] == [found]


def test_a_loss_is_known_once_all_have_sent_it_that_take_part() -> None:
    measured = RunMetrics(("a", "b", "c"))
    measured.count(frozenset("ab"))
    measured.add("a", "step", 1, step(1.0, 1), {})
    assert measured.losses == []
    measured.add("b", "step", 1, step(2.0, 1), {})
    assert measured.losses == [(1, 1.5)]


def recorded(wall_s: float, kind: str, **detail: object) -> RecordedEvent:
    return RecordedEvent(
        sequence=0, wall_s=wall_s, run_id="run", generation=1, kind=kind, site="", detail=detail
    )


def epoch(number: int, follows: tuple[str, ...] = ()) -> dict[str, object]:
    return detail_of(Epoch(number, ("a", "b"), GATHER, 0, follows), "")


def test_what_was_measured_counts_for_the_sites_that_took_part_then() -> None:
    journal = [
        recorded(
            0.0, "run.submitted", name="", folder="", sites=["a", "b"], begin_with=["a"], links=[]
        ),
        recorded(1.0, "run.active"),
        recorded(4.0, "epoch.begun", **epoch(1, follows=("b",))),
        recorded(7.0, "epoch.begun", **epoch(2)),
    ]
    losses = [
        *((2.0, "a", 1, 1.0), (3.0, "a", 2, 2.0)),
        *((5.0, "b", 3, 9.0), (6.0, "a", 3, 3.0)),
        *((8.0, "a", 4, 4.0), (9.0, "b", 4, 5.0)),
    ]
    lines: list[dict[str, Any]] = [
        {
            "wall_s": wall_s, "site": site, "kind": "step", "step": number,
            "values": step(loss, 1), "labels": {},
        }
        for wall_s, site, number, loss in losses
    ]  # fmt: skip
    for order in (journal, []), (journal[:2], journal[2:]):
        record = RunRecord("run", ("a", "b"))
        for event in order[0]:
            record.apply(event)
        left = list(order[1])
        for line in lines:  # those that are not read before come when they were written
            while left and left[0].wall_s <= line["wall_s"]:
                record.apply(left.pop(0))
            record.measure(Measurement.of(line))
        assert record.measured.losses == [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.5)]


def test_marks_stand_after_the_step_that_was_done_by_then() -> None:
    record = RunRecord("run", ("a", "b"))
    for event in (
        recorded(0.0, "run.submitted", name="", folder="", sites=["a", "b"], links=[]),
        recorded(1.0, "run.active"),
        recorded(3.5, "run.replanned", note="other trees"),
    ):
        record.apply(event)
    for number in (1, 2, 3, 4):
        line = {"wall_s": number + 0.0, "site": "a", "kind": "step", "step": number}
        record.measure(Measurement.of({**line, "values": step(1.0, 1), "labels": {}}))
    record.apply(recorded(9.0, "run.replanned", note="again others"))
    assert [(mark.step, mark.event.text) for mark in record.marks] == [
        (3, "other trees"),
        (4, "again others"),
    ]


def test_a_step_is_complete_without_a_site_that_counts_no_more() -> None:
    measured = RunMetrics(("a", "b"))
    for number in (1, 2):
        measured.add("a", "step", number, step(1.0, 1), {})
    measured.add("b", "step", 1, step(3.0, 1), {})
    assert measured.losses == [(1, 2.0)]
    measured.add("a", "step", 3, step(5.0, 1), {})
    measured.count(frozenset("a"))
    assert measured.losses == [(1, 2.0), (2, 1.0), (3, 5.0)]
    measured.add("b", "step", 3, step(100.0, 1), {})
    measured.add("a", "step", 4, step(6.0, 1), {})
    assert measured.losses[-1] == (4, 6.0)


def test_a_loss_that_was_lost_on_the_way_changes_no_later_one() -> None:
    measured = RunMetrics(("a", "b"))
    for number in range(1, OPEN_STEPS + 3):
        measured.add("a", "step", number, step(1.0, 1), {})
        if number != 2:
            measured.add("b", "step", number, step(3.0, 1), {})
    steps = [number for number, _ in measured.losses]
    assert steps == [1, *range(3, OPEN_STEPS + 3)]


def test_a_loss_that_is_not_finite_is_the_steps() -> None:
    record = RunRecord("run", ("a", "b"))
    lines: list[dict[str, Any]] = [
        {"wall_s": 1.0, "site": "a", "kind": "step", "step": 1, "labels": {},
         "values": {"loss": None, "site_tokens": 1.0}},
        {"wall_s": 1.0, "site": "b", "kind": "step", "step": 1, "labels": {},
         "values": {"loss": 1.0, "site_tokens": 1.0}},
    ]  # fmt: skip
    for each in lines:
        record.measure(Measurement.of(each))
    measured = record.measured
    assert [number for number, _ in measured.losses] == [1]
    assert math.isnan(measured.losses[0][1])
    assert math.isnan(measured.sites["a"].latest["loss"])


def test_gateways_of_one_link_count_together() -> None:
    measured = RunMetrics(("a", "b"))
    labels = {"source": "a", "target": "b"}
    measured.add("a", "link", 1, link(100, 2.0, 0.05), {**labels, "gateway": "0"})
    measured.add("a", "link", 1, link(50, 1.0, 0.04), {**labels, "gateway": "1"})
    measured.add("a", "link", 2, link(200, 4.0, 0.06), {**labels, "gateway": "0"})
    measured.add("b", "link", 2, link(999, 4.0, 0.06), labels)
    together = measured.links["a", "b"]
    assert together["sent_bytes"] == 250
    assert together["throughput_bytes_per_s"] == 62.5
    assert together["rtt_s"] == 0.04


def test_what_a_link_carried_is_what_all_processes_of_its_gateways_have_sent() -> None:
    """One that starts again counts from 0; and what an agent sends again counts once."""
    measured = RunMetrics(("a", "b"))

    def add(gateway: str, process: str, sent: float, busy_s: float, rtt_s: float) -> None:
        labels = {"source": "a", "target": "b", "gateway": gateway, "process": process}
        values = {**link(sent, busy_s, rtt_s), "limited_s": busy_s / 2, "idle_rtt_s": rtt_s}
        measured.add("a", "link", 1, values, labels)

    add("0", "x", 100, 2.0, 0.01)
    add("1", "y", 50, 1.0, 0.04)
    add("0", "z", 10, 1.0, 0.05)
    carried = measured.links["a", "b"]
    assert (carried["sent_bytes"], carried["raw_bytes"], carried["busy_s"]) == (160, 320, 3.0)
    assert (carried["limited_s"], carried["rtt_s"], carried["idle_rtt_s"]) == (1.5, 0.01, 0.04)
    add("0", "z", 500, 4.0, 0.05)
    assert measured.links["a", "b"]["sent_bytes"] == 650
    add("0", "x", 100, 2.0, 0.01)
    add("0", "z", 500, 4.0, 0.05)
    assert measured.links["a", "b"]["sent_bytes"] == 650
    assert measured.totals()["wire_bytes"] == 650


def test_the_summary_has_every_figure_or_null() -> None:
    links = (
        {"source": "a", "target": "b", "bytes_per_s": 10.0, "rtt_s": 0.1},
        {"source": "b", "target": "a", "bytes_per_s": 10.0, "rtt_s": 0.1},
    )
    record = RunRecord("run", ("a", "b"))
    record.view.about, measured = {"links": links}, record.measured
    parts = {"step_s": 4.0, "compute_s": 0.4, "intra_s": 0.1, "exposed_inter_s": 0.2, "wait_s": 0.0}
    measured.add("a", "step", 1, step(2.0, 10, **parts), {})
    measured.add("b", "step", 1, step(2.0, 30, **{**parts, "step_s": 5.0, "wait_s": 0.1}), {})
    evaluation = {"held_out_loss": 1.5, "unigram_entropy": 3.0}
    measured.add("a", "evaluation", 1, evaluation, {})
    measured.add("a", "evaluation", 0, {"held_out_loss": 9.0}, {})
    measured.add("a", "link", 1, link(100, 2.0, 0.05), {"source": "a", "target": "b"})
    summary = summarise(record, active_s=60.0, verified_steps=1)
    assert summary["steps"] == 1
    assert summary["losses"] == [[1, 2.0]]
    assert summary["held_out_loss"] == 1.5
    assert summary["tokens_per_s"] == 8.0
    assert math.isclose(summary["time_split"]["wait_s"], 0.05)
    assert [site["tokens_per_s"] for site in summary["sites"]] == [2.5, 6.0]
    assert summary["compression_ratio"] == 2.0
    sent, unsent = summary["links"]
    assert (sent["sent_bytes"], sent["rtt_s"], sent["configured_rtt_s"]) == (100, 0.05, 0.1)
    assert unsent["sent_bytes"] is None


def test_a_run_that_never_was_active_has_a_summary_too() -> None:
    summary = summarise(RunRecord("run", ("a",)), active_s=0.0, verified_steps=0)
    assert summary["tokens_per_s"] is None
    assert summary["time_split"]["compute_s"] is None
    assert summary["compression_ratio"] is None
