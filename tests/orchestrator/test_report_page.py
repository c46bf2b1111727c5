"""The page, Markdown and figures of runs and benchmarks.

Complete, escaped, and honest about gaps.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from isthmus.orchestrator.client.recorded_run import RecordedRun
from isthmus.orchestrator.coordinator.control_messages import run_message
from isthmus.orchestrator.coordinator.journal import Journal
from isthmus.orchestrator.core.epoch_record import detail_of
from isthmus.orchestrator.core.journaled_run import RecordedEvent
from isthmus.orchestrator.core.run_record import Measurement, RunRecord
from isthmus.orchestrator.core.slow_sites import SlowPeriod
from isthmus.orchestrator.evidence.record.bench_record import BENCH, Bench, read_bench
from isthmus.orchestrator.evidence.record.run_record import MAX_SAMPLES, RunRecording, read_record
from isthmus.orchestrator.evidence.record.step_timelines import (
    MAX_READ_STEPS,
    TimelineReader,
    choose,
)
from isthmus.orchestrator.evidence.report.markdown import markdown
from isthmus.orchestrator.evidence.report.page import page
from isthmus.orchestrator.evidence.report.run_facts import RunFacts, run_facts
from isthmus.orchestrator.evidence.trace_events import rates
from isthmus.orchestrator.evidence.view.live import plain_line
from isthmus.orchestrator.run_folder.home import JOB, TOPOLOGY, RunFolder
from isthmus.orchestrator.run_folder.run_files import METRICS, RunFiles
from isthmus.orchestrator.runs.facts import summarise
from isthmus.topology.presets.templates import topology_yaml
from isthmus.topology.spec.epoch import Epoch
from isthmus.topology.spec.lanes import AgentMachine, decide_lanes, with_lanes
from tests.fakes.recorded_benches import record_bench
from tests.fakes.recorded_runs import ACTIVE_S, append_line, metric, record_run
from tests.fakes.run_specs import spec_of_texts
from tests.fakes.run_worlds import GATHER

HOSTILE = ('"><script>alert(1)</script>', "</title><img src=x onerror=alert(2)>", "a|b`*\u202e\n")
VOID = {"br", "hr", "input", "link", "meta"}
FAULTS = (
    {"what": "shape", "source": "oregon", "target": "virginia"},
    {"what": "cut", "source": "virginia", "target": "oregon"},
    {"what": "pause", "site": "montreal"},
    {"what": "heal"},
)


def record_of(folder: RunFolder) -> RunRecording:
    recorded = RecordedRun(folder)
    return read_record(recorded.run(), recorded.events(0))


def facts_of(folder: RunFolder) -> RunFacts:
    return run_facts(record_of(folder))


class Balance(HTMLParser):
    """Holds that every tag ends where it should, and keeps what a page consists of."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def checked(text: str) -> Balance:
    """Parse a page; hold that it is well-formed and asks for nothing from elsewhere."""
    parsed = Balance()
    parsed.feed(text)
    parsed.close()
    assert not parsed.open
    for drawing in re.findall(r"<svg class.*?</svg>|<svg role.*?</svg>", text, re.DOTALL):
        if drawing.count("<svg") == drawing.count("</svg>"):
            ET.fromstring(drawing)
    assert {value for name, value in parsed.attributes if name in {"href", "src"}} <= {
        "data:,",
        "#figures",
    }
    assert "url(" not in text
    assert "@import" not in text
    identifiers = [value for name, value in parsed.attributes if name == "id"]
    assert len(identifiers) == len(set(identifiers))
    return parsed


def page_of(*runs: RunFacts, benches: tuple[Bench, ...] = ()) -> str:
    return page(list(runs), list(benches), "0.0")


def test_the_page_of_a_run_has_all_sections(tmp_path: Path) -> None:
    facts = facts_of(record_run(tmp_path, faults=FAULTS, job_overrides=("reduction.tree=star",)))
    text = page_of(facts)
    checked(text)
    for title in (
        "Tokens per second, and what each site did",
        "What happened",
        "Where the time",
        "Step time over the run",
        "Sites and links",
        "Timeline",
        "Loss",
        "The plan",
        "Hardware, software and arguments",
    ):
        assert f"<h3>{title}" in text
    assert "star at virginia" in text
    assert "WAN emulated in user space (relay)" in text
    assert "no namespaces here" in text
    assert text.count("data-step=") == 7
    assert "to 10Mbit/s, delay 40ms" in text
    assert 'class="missing"' not in text


def test_figures_follow_from_the_records(tmp_path: Path) -> None:
    facts = facts_of(record_run(tmp_path, faults=FAULTS, steps=40))
    assert (facts.totals.steps, facts.outcome.verified_steps) == (40, 5)
    assert facts.totals.tokens == pytest.approx(245760)
    assert facts.totals.tokens_per_s == pytest.approx(245760 / (40 * 0.4))
    for site in facts.sites:
        assert sum(site.parts_s.values()) == pytest.approx(site.step_s)
    link = facts.links[0]
    assert link.use == pytest.approx(7.5e6 / 25e6)
    assert link.compression_ratio == pytest.approx(2.85)
    assert (link.lost_packets, link.dropped_packets) == (32, 0)
    assert facts.links[-1].sent_bytes is None
    assert not facts.gaps
    assert [each.step for each in facts.time.happened] == [10, 20, 30, 40]
    assert [each.mark for each in facts.time.happened] == [1, 2, 3, 4]
    assert [each.where for each in facts.time.happened] == [
        "oregon → virginia",
        "virginia → oregon",
        "montreal",
        "everywhere",
    ]
    assert facts.steps.num_timelines == 7
    assert json.loads(json.dumps(dataclasses.asdict(facts)))["plan"]["codec"] == "bf16-split"


def test_what_a_run_ran_on_is_told(tmp_path: Path) -> None:
    facts = facts_of(record_run(tmp_path, job_overrides=("trainer.seed=3",)))
    for text in (page_of(facts), markdown([facts], []).replace("\\", "")):
        assert "NVIDIA H100 80GB HBM3" in text
        assert "2.9.1+cu128" in text
        assert "0123456789 + changes" in text
        assert "trainer.seed=3" in text
        assert "different commits" not in text
    other = dataclasses.replace(facts.place.machines[0], commit="f" * 40)
    machines = (other, *facts.place.machines[1:])
    facts = dataclasses.replace(facts, place=dataclasses.replace(facts.place, machines=machines))
    assert "Sites ran different commits of the script." in page_of(facts)


def test_the_planners_reasons_and_alternatives_are_told(tmp_path: Path) -> None:
    folder = record_run(tmp_path)
    assert facts_of(folder).plan is not None
    alternatives = [{"what": HOSTILE[0], "step_s": 0.3, "usd_per_step": 0.0}, {"what": 3}, "x"]
    folder.remember_plan(
        {"why": ["Because."], "predicted": {"step_s": 0.32}, "alternatives": alternatives}
    )
    facts = facts_of(folder)
    text = page_of(facts)
    checked(text)
    assert "Because." in text
    assert "Alternatives, as the planner predicted them" in text
    assert "A step took 400ms, 25% longer than the planned 320ms" in text
    for odd in ({"why": 3, "predicted": [], "alternatives": {}}, {"predicted": {"step_s": "x"}}):
        folder.remember_plan(odd)
        checked(page_of(facts_of(folder)))


def test_stalls_losses_and_what_sites_did_are_drawn(tmp_path: Path) -> None:
    folder = record_run(tmp_path, steps=40)
    for step in range(41, 60):  # twelve seconds after the step before
        values = {"step_s": 0.4, "compute_s": 0.4, "site_tokens": 100.0}
        at_s = ACTIVE_S + 12.0 + step * 0.4
        append_line(folder, json.dumps(metric("oregon", "step", step, at_s, values)) + "\n")
    lost = detail_of(
        Epoch(1, ("oregon", "virginia"), GATHER, 2), "montreal is lost", lost={"montreal": ""}
    )
    with Journal(folder.path) as journal:
        for kind, site, detail in (
            ("epoch.begun", "", lost),
            ("site.lost", "montreal", {"note": "the run continues without site montreal"}),
        ):
            journal.append(
                kind, wall_s=ACTIVE_S + 18, generation=1, run_id="r1", site=site, detail=detail
            )
    facts = facts_of(folder)
    [stall] = facts.time.stalls
    assert (stall.step, stall.cause) == (41, "montreal was lost")
    assert [phase.what for phase in facts.time.lanes[2].phases] == ["training", "out"]
    text = page_of(facts)
    checked(text)
    assert text.count('class="stall"') == 1
    assert "no step for 12s: montreal was lost" in text
    assert "montreal: out for" in text
    assert "the run continues without site montreal" in text
    assert "A site was lost; training stood still once" in text


def test_whom_the_others_waited_for_is_told(tmp_path: Path) -> None:
    folder = record_run(tmp_path, steps=40)
    facts = facts_of(folder)
    assert not facts.time.slow
    assert "Slow, not hung" not in page_of(facts)
    period = SlowPeriod("oregon", 3, 30, num_steps=28, total_s=14.0, for_s=56.0, is_over=True)
    time = dataclasses.replace(facts.time, slow=(period,), slow_times=((1.2, 12.0),))
    facts = dataclasses.replace(facts, time=time)
    for text in (page_of(facts), markdown([facts], [])):
        assert "Slow, not hung" in text
        assert "500ms" in text
        assert "25%" in text


def test_egress_is_priced(tmp_path: Path) -> None:
    text = topology_yaml().replace("rtt: 62ms,", "rtt: 62ms, egress: 0.02USD/GB,")
    facts = facts_of(record_run(tmp_path, topology=text))
    sent = sum(link.sent_bytes or 0 for link in facts.links[:2])
    assert facts.egress is not None
    assert facts.egress.usd == pytest.approx(sent * 0.02e-9)
    assert "egress" in page_of(facts)
    assert facts.egress is not None
    assert facts.links[0].egress_usd_per_day is not None
    assert "a step" in page_of(facts)
    assert "instead of fp32 saves" in page_of(facts)


@pytest.mark.slow
def test_hostile_names_stay_text(tmp_path: Path) -> None:
    folder = record_run(tmp_path, sites=HOSTILE, name=HOSTILE[0], faults=({"what": HOSTILE[1]},))
    facts = facts_of(folder)
    text = page_of(facts, facts)
    parsed = checked(text)
    assert parsed.tags.count("script") == 1
    assert "img" not in parsed.tags
    assert not [name for name, _ in parsed.attributes if name.startswith("on")]
    assert "\u202e" not in text
    written = markdown([facts], [])
    assert "<script>" not in written.replace("\\<script\\>", "")
    assert "\u202e" not in written


@pytest.mark.parametrize("kind", ["link", "step", "timeline", "buckets", "system"])
def test_hostile_metrics_stay_text(tmp_path: Path, kind: str) -> None:
    """Sites write labels as they please; so does who has broken into one."""
    folder = record_run(tmp_path)
    names = ("source", "target", "gateway", "codec", "state", "tree", HOSTILE[0])
    for place, text in enumerate(HOSTILE):
        values = {"rtt_s": 0.1, "sent_bytes": 1.0, "loss": 1.0, HOSTILE[0]: 2.0}
        line = metric("oregon", kind, place + 1, 1.0, values, **dict.fromkeys(names, text))
        append_line(folder, json.dumps(line) + "\n")
    facts = facts_of(folder)
    text = page_of(facts, facts)
    parsed = checked(text)
    assert parsed.tags.count("script") == 1
    assert "img" not in parsed.tags
    assert not [name for name, _ in parsed.attributes if name.startswith("on")]
    written = markdown([facts], [])
    assert "<script>" not in written.replace("\\<script\\>", "")
    assert "<img" not in written.replace("\\<img", "")


@pytest.mark.parametrize(("schedule", "expected_s"), [("overlap", 1.0), ("serial", 3.0)])
def test_with_a_serial_schedule_buckets_wait_for_the_end_of_backward(
    tmp_path: Path, schedule: str, expected_s: float
) -> None:
    folder = record_run(tmp_path, every=0, job_overrides=(f"exchange.schedule={schedule}",))
    bucket = {"bucket": 0.0, "submitted_s": 1.0, "posted_s": 3.2, "reduced_s": 4.0}
    step = {"begin_s": 0.0, "computed_s": 3.0, "end_s": 5.0}
    for kind, values in (("bucket", {**bucket, "finished_s": 4.1}), ("timeline", step)):
        append_line(folder, f"{json.dumps(metric('oregon', kind, 1, 5.0, values))}\n")
    (timeline,) = facts_of(folder).steps.timelines
    assert [each.submitted_s for each in timeline.sites["oregon"].buckets] == [expected_s]


def test_nothing_is_learnt_from_modelled_compute(tmp_path: Path) -> None:
    facts = facts_of(record_run(tmp_path, job_overrides=("trainer.compute=modelled",)))
    text = page_of(facts)
    checked(text)
    assert "nothing is learnt" in text
    assert "training loss" not in text


def test_a_failed_run_says_why_and_where(tmp_path: Path) -> None:
    facts = facts_of(record_run(tmp_path, state="FAILED", reason="rank 1 was killed"))
    assert facts.time.happened[-1].what == "RANK_KILLED"
    assert facts.time.happened[-1].where == "montreal"
    assert facts.time.happened[-1].step == 30
    assert facts.verdict.headline.startswith("Failed after 40 steps (RANK_KILLED).")
    text = page_of(facts)
    checked(text)
    assert "/logs/rank1.log" in text


def test_a_switch_to_other_trees_stands_among_what_happened(tmp_path: Path) -> None:
    folder = record_run(tmp_path, faults=FAULTS)
    with Journal(folder.path) as journal:
        detail = {"plan": "2 weighted trees", "from_round": 12, "note": "from round 12 on"}
        journal.append(
            "run.replanned", wall_s=ACTIVE_S + 5, generation=1, run_id="r1", detail=detail
        )
    facts = facts_of(folder)
    assert [each.what for each in facts.time.happened][1] == "from round 12 on"
    text = page_of(facts)
    checked(text)
    assert "from round 12 on" in text


def test_status_summary_and_report_have_one_loss_when_a_site_was_lost(tmp_path: Path) -> None:
    """Site b is lost in step 2 of 4, and comes back after; what it said last is not the run's."""
    written: list[tuple[float, str, str, dict[str, Any]]] = [
        (0.0, "run.submitted", "",
         {"name": "n", "folder": str(tmp_path), "sites": ["a", "b"], "links": []}),
        (1.0, "run.active", "", {}),
        (4.0, "epoch.begun", "", detail_of(Epoch(1, ("a",), GATHER, 2), "b is lost", lost={"b": ""})),
        (4.0, "site.lost", "b", {}),
    ]  # fmt: skip
    events = [
        RecordedEvent(
            sequence=place,
            wall_s=wall_s,
            run_id="r1",
            generation=1,
            kind=kind,
            site=site,
            detail=detail,
        )
        for place, (wall_s, kind, site, detail) in enumerate(written)
    ]
    kept = RunRecord("r1", ("a", "b"))
    for event in events:
        kept.apply(event)
    for wall_s, site, step, loss in (
        (2.0, "a", 1, 2.0), (2.1, "b", 1, 4.0), (3.0, "a", 2, 8.0), (5.0, "a", 3, 1.0),
        (6.0, "a", 4, 0.5),
    ):  # fmt: skip
        values = {"loss": loss, "site_tokens": 100.0, "step_s": 0.5}
        kept.measure(Measurement.of(metric(site, "step", step, wall_s, values)))
        RunFiles(tmp_path).append_metrics([metric(site, "step", step, wall_s, values)])
    run = run_message(kept.view, kept.measured.progress())
    summary = summarise(kept, active_s=9.0, verified_steps=0)
    facts = run_facts(read_record(run, events))
    assert "loss 0.5000  200 tokens/s" in plain_line(run)
    assert summary["losses"] == [[step, loss] for step, loss in facts.loss.losses]
    assert summary["losses"] == [[1, 3.0], [2, 8.0], [3, 1.0], [4, 0.5]]
    assert facts.totals.loss == 0.5


def test_gateways_are_those_that_were_decided(tmp_path: Path) -> None:
    folder = record_run(tmp_path)

    def gateways() -> list[int]:
        topology = record_of(folder).topology
        assert topology is not None
        return [site.gateways_per_node for site in topology.sites]

    assert gateways() == [1, 1, 1]
    texts = [(folder.path / name).read_text() for name in (JOB, TOPOLOGY)]
    spec = spec_of_texts(texts[0], texts[1])
    agents = {
        site.name: AgentMachine(host=site.name, usable_cores=64) for site in spec.topology.sites
    }
    fast = dataclasses.replace(
        spec.topology,
        links=tuple(dataclasses.replace(each, bytes_per_s=1e10) for each in spec.topology.links),
    )
    decided = with_lanes(fast, decide_lanes(fast, agents))
    RunFiles(folder.path).write_spec(dataclasses.replace(spec, topology=decided).to_bytes())
    assert gateways() == [site.gateways_per_node for site in decided.sites] != [1, 1, 1]


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    folder = record_run(tmp_path, every=0)
    assert "kept no buckets" in page_of(facts_of(folder))
    (folder.path / METRICS).unlink()
    (folder.path / TOPOLOGY).unlink()
    facts = facts_of(folder)
    assert len(facts.gaps) == 2
    text = page_of(facts, facts)
    checked(text)
    assert METRICS in text
    assert "No site reported" in text
    assert "No loss was reported" in text
    assert facts.gaps[0].replace("_", "\\_") in markdown([facts], []).replace("\\#", "#")


def test_lines_that_make_no_sense_are_counted_and_left_out(tmp_path: Path) -> None:
    folder = record_run(tmp_path)
    before = facts_of(folder)
    backwards = {"begin_s": 5.0, "computed_s": 4.0, "end_s": 6.0}
    for line in (
        "{",
        "[]",
        '{"kind": "step"}',
        json.dumps(metric("nowhere", "step", 1, 0.0, {"loss": 1.0})),
        json.dumps(metric("oregon", "timeline", 1, 0.0, backwards)),
        json.dumps({**metric("oregon", "step", 1, 0.0, {}), "wall_s": "NaN"}),
        "[" * 100_000,
    ):
        append_line(folder, f"{line}\n")
    append_line(folder, '{"kind": "st')  # still being written
    facts = facts_of(folder)
    assert facts.loss.losses == before.loss.losses
    assert [gap for gap in facts.gaps if "7 lines" in gap]


@pytest.mark.no_cover
@pytest.mark.slow
def test_a_long_run_is_drawn_in_bounds(tmp_path: Path) -> None:
    facts = facts_of(record_run(tmp_path, steps=400, every=4, buckets=40))
    assert facts.steps.num_timelines == 103
    assert len(facts.steps.timelines) == 12
    assert [facts.steps.timelines[0].step, facts.steps.timelines[-1].step] == [1, 400]
    text = page_of(facts)
    assert "12 of 103 steps" in text
    assert len(text) < 2 << 20


def test_runs_beside_each_other(tmp_path: Path) -> None:
    one, other = facts_of(record_run(tmp_path)), facts_of(record_run(tmp_path, "r2", seed=8))
    text = page_of(one, other)
    checked(text)
    assert "Side by side" in text
    assert text.count("<article") == 3
    assert markdown([one, other], []).startswith("# Side by side")


def test_a_sweep_is_drawn_over_both_axes(tmp_path: Path) -> None:
    bench = read_bench(record_bench(tmp_path) / BENCH)
    text = page_of(benches=(bench,))
    checked(text)
    for title in ("Efficiency over RTT", "Efficiency over bandwidth", "Every setting", "Links"):
        assert f"<h3>{title}" in text
    assert "5ms RTT, 1Gbit/s, fp32" in text
    assert "11 of 12" in text
    assert "RANK_KILLED" in text
    written = markdown([], [bench])
    assert "| 5ms | 1Gbit/s | fp32 |" in written
    result = bench.settings[0].result
    assert result is not None
    assert result.predicted is not None
    for shown in (text, written):
        assert f"{result.predicted.deviation:+.1%}" in shown


def test_a_benchmark_of_one_setting(tmp_path: Path) -> None:
    bench = read_bench(record_bench(tmp_path, swept=False) / BENCH)
    text = page_of(benches=(bench,))
    checked(text)
    assert "<h3>Efficiency over" not in text
    assert "as the job says" in text
    assert "Scaling efficiency" in text
    assert "frame on the way" not in text  # which is said of runs


def test_a_benchmark_that_has_measured_nothing(tmp_path: Path) -> None:
    bench = read_bench(record_bench(tmp_path, swept=False) / BENCH)
    empty = dataclasses.replace(
        bench, settings=tuple(dataclasses.replace(each, result=None) for each in bench.settings)
    )
    text = page_of(benches=(empty,))
    checked(text)
    assert "No setting has a complete repeat" in text
    assert "Links" not in markdown([], [empty])


def test_the_longest_runs_are_read_in_bounds() -> None:
    reader = TimelineReader()
    for step in range(3 * MAX_READ_STEPS):
        for site in ("b", "a"):
            times = {"submitted_s": 1.0, "posted_s": 1.1, "reduced_s": 1.2, "finished_s": 1.3}
            assert reader.add(site, "bucket", step, {"bucket": 0.0, **times})
            assert reader.add(site, "timeline", step, {"begin_s": 0, "computed_s": 1, "end_s": 2})
    steps = reader.steps(("a", "b"))
    assert MAX_READ_STEPS <= len(steps) <= 2 * MAX_READ_STEPS
    assert len(steps) + reader.num_dropped == 3 * MAX_READ_STEPS
    assert {tuple(step.sites) for step in steps} == {("a", "b")}
    assert all(len(site.buckets) == 1 for step in steps for site in step.sites.values())
    chosen = [step.step for step in choose(steps)]
    assert (chosen[0], chosen[-1], len(chosen)) == (0, 3 * MAX_READ_STEPS - 1, 12)
    apart = [after - before for before, after in itertools.pairwise(chosen)]
    assert max(apart) - min(apart) <= 4


@pytest.mark.no_cover
@pytest.mark.slow
def test_samples_of_a_link_are_thinned_to_coarser_ones(tmp_path: Path) -> None:
    folder = record_run(tmp_path, steps=1, every=0)
    ends = {"source": "oregon", "target": "virginia", "gateway": "1"}
    for tick in range(MAX_SAMPLES + 2):
        append_line(
            folder,
            json.dumps(metric("oregon", "link", 0, 1e9 + tick, {"sent_bytes": 3.0 * tick}, **ends))
            + "\n",
        )
    samples = record_of(folder).samples["oregon", "virginia", "1"]
    assert len(samples) <= MAX_SAMPLES // 2 + 2
    assert {rate for _, rate in list(rates(samples))[:-1]} == {3.0}
