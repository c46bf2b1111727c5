"""What the dashboard answers about recorded runs, and about one that goes on."""

from __future__ import annotations

import json
from pathlib import Path
from unittest import mock
from urllib.parse import quote

import pytest

from isthmus.orchestrator.client.recorded_run import RecordedRun
from isthmus.orchestrator.dashboard import watched_run
from isthmus.orchestrator.dashboard.run_page import Asked, RunShown, run_parts
from isthmus.orchestrator.dashboard.run_places import RunPlace
from isthmus.orchestrator.dashboard.run_view import shown
from isthmus.orchestrator.dashboard.watched_run import WatchedRun
from isthmus.orchestrator.evidence.record.run_record import read_record
from isthmus.orchestrator.evidence.report.run_facts import run_facts
from isthmus.orchestrator.run_folder.home import REMOTE
from isthmus.orchestrator.run_folder.run_files import METRICS
from isthmus.orchestrator.runs import follower
from isthmus.topology.presets.templates import topology_yaml
from tests.fakes.dashboards import Answer, Served, growing_run, serving
from tests.fakes.exported_runs import exported_run
from tests.fakes.recorded_runs import SITES, append_line, record_run
from tests.fakes.waiting import wait_for

pytestmark = pytest.mark.slow


def read_all(served: Served, path: str, step: int) -> Answer:
    """Return the answer once the metrics of a step were read."""
    run = "/".join(path.split("/")[:4])
    wait_for(lambda: bool(served.get(run).json["sites"][0]["step"] == step), look_s=0.02)
    return served.get(path)


def test_the_list_has_each_run_newest_first(tmp_path: Path) -> None:
    record_run(tmp_path, "r1")
    record_run(tmp_path, "r2", state="FAILED", reason="killed")
    with serving(tmp_path) as served:
        runs = served.get("/api/runs").json["runs"]
    assert [(run["run_id"], run["state"]) for run in runs] == [
        ("r2", "FAILED"),
        ("r1", "SUCCEEDED"),
    ]
    assert runs[0]["reason"] == "killed"
    assert runs[1]["num_sites"] == 3


def test_a_run_has_its_sites_links_and_plan(tmp_path: Path) -> None:
    exported_run(tmp_path)
    with serving(tmp_path) as served:
        run = read_all(served, "/api/runs/r1", 40).json
    assert run["tokens_per_s"] == pytest.approx(15360)
    oregon = run["sites"][0]
    assert (oregon["site"], oregon["num_steps"], oregon["num_ranks"]) == ("oregon", 40, 2)
    assert sum(oregon["parts_s"][name] for name in oregon["parts_s"] if "hidden" not in name) == (
        pytest.approx(oregon["step_s"])
    )
    used = run["links"][0]
    assert used["use"] == pytest.approx(
        used["throughput_bytes_per_s"] / used["configured_bytes_per_s"]
    )
    assert run["plan"]["regime"].startswith("sync")
    assert run["plan"]["reduction"]
    assert run["metrics"]["is_complete"]


def test_egress_is_what_the_report_says(tmp_path: Path) -> None:
    text = topology_yaml().replace("rtt: 62ms,", "rtt: 62ms, egress: 0.02USD/GB,")
    folder = record_run(tmp_path, topology=text)
    with serving(tmp_path) as served:
        run = read_all(served, "/api/runs/r1", 40).json
        page = served.get("/runs/r1").body.decode()
    recorded = RecordedRun(folder)
    facts = run_facts(read_record(recorded.run(), recorded.events(0)))
    assert run["sent_bytes"] == facts.totals.sent_bytes
    assert run["egress_usd"] == pytest.approx(facts.egress and facts.egress.usd)
    assert [link.get("egress_usd") for link in run["links"]] == [
        link.egress_usd for link in facts.links
    ]
    assert ">egress<" in page


def test_a_planned_run_has_its_alternatives(tmp_path: Path) -> None:
    folder = exported_run(tmp_path)
    with serving(tmp_path) as served:
        assert served.get("/api/runs/r1").json["plan"]["alternatives"] == []
    folder.remember_plan(
        {
            "why": ["3 of 3 sites take part: <b>all</b> are worth it."],
            "predicted": {"step_s": 0.4},
            "alternatives": [
                {"what": "without montreal", "step_s": 0.5, "usd_per_step": 0.002},
                {"what": "codec int8", "step_s": 0.6, "usd_per_step": 0.0},
            ],
        }
    )
    with serving(tmp_path) as served:
        plan = served.get("/api/runs/r1").json["plan"]
        page = served.get("/runs/r1").text
    assert [each["what"] for each in plan["alternatives"]] == ["without montreal", "codec int8"]
    assert plan["predicted"]["step_s"] == 0.4
    assert "&lt;b&gt;all&lt;/b&gt; are worth it" in page
    assert "without montreal" in page
    assert "500ms (" in page


def test_steps_are_few_with_minimum_mean_and_maximum(tmp_path: Path) -> None:
    record_run(tmp_path, steps=1500, every=0)
    with serving(tmp_path) as served:
        found = read_all(served, "/api/runs/r1/steps", 1500).json
        newest = served.get("/api/runs/r1/steps?window=newest").json
    steps = found["steps"]
    assert len(steps["step"]) <= 600
    assert sum(steps["records"]) == 3 * 1500
    assert steps["step_s"]["min"][0] == steps["step_s"]["max"][0] == pytest.approx(0.4)
    low, mean, high = (steps["exposed_inter_s"][name][0] for name in ("min", "mean", "max"))
    assert low < mean < high
    assert newest["steps"]["step"] == list(range(901, 1501))


def test_a_part_of_the_steps(tmp_path: Path) -> None:
    record_run(tmp_path, steps=1500, every=0)
    with serving(tmp_path) as served:
        read_all(served, "/api/runs/r1/steps", 1500)
        part = served.get("/api/runs/r1/steps?first=101&last=220").json
        assert part["window"] == "first=101&last=220"
        assert part["steps"]["step"] == list(range(101, 221))
        assert part["losses"]["step"][-1] == 220
        page = served.get("/runs/r1?first=101&last=220").text
        assert 'data-live="../live/r1?first=101&amp;last=220"' in page
        assert 'name="first" min="0" value="101"' in page
        for odd in ("first=-1", "first=x", "last=" + "9" * 40, "first=5&last=1", "first=99999"):
            assert served.get(f"/runs/r1?{odd}").status == 200, odd
            assert served.get(f"/api/runs/r1/steps?{odd}").status == 200, odd


def test_a_history_is_shown_while_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follower, "READ_BYTES", 20_000)
    monkeypatch.setattr(watched_run, "KEPT_FIGURES_S", 0.0)
    shares = []
    with growing_run(tmp_path) as run:
        run.take_steps(80)
        folder = run.folder.path
        place = RunPlace("g1", folder, is_own=True, elsewhere="", submitted_wall_s=0.0)
        watched = WatchedRun(place)
        watched.open(folder, SITES, None)
        while watched.read() or not watched.figures()["is_complete"]:
            view = shown(watched)
            shares.append(view["metrics"]["share_read"])
            assert view["steps"] == 80, "what the journal says"
            head = run_parts(RunShown.of(watched, Asked()), Asked())["head"]
            assert f"Reading history, {int(100 * shares[-1])} %" in head
        assert shown(watched)["metrics"]["is_complete"]
    assert shares == sorted(shares)
    assert 0.0 < shares[0] < 0.5
    assert len(shares) > 5


def test_what_was_read_is_not_read_again(tmp_path: Path) -> None:
    with growing_run(tmp_path) as run, serving(tmp_path) as served:
        run.take_steps(20)
        read_all(served, "/api/runs/g1", 20)
        read: list[bytes] = []
        objects_of = follower._objects_of

        def counted(texts: list[bytes]) -> list[dict[str, object] | None]:
            read.extend(texts)
            return objects_of(texts)

        with mock.patch.object(follower, "_objects_of", counted):
            run.take_steps(2)
            read_all(served, "/api/runs/g1", 22)
            for _ in range(5):
                served.get("/api/runs/g1/steps")
        assert len(read) == 2 * (3 + 6)  # of two steps: each site's, and each direction's


def test_a_site_is_lost_and_returns(tmp_path: Path) -> None:
    with growing_run(tmp_path) as run, serving(tmp_path) as served:
        run.take_steps(5)
        read_all(served, "/api/runs/g1", 5)
        run.event("site.lost", "virginia", message="silent for 15 s", note="virginia was lost")
        run.take_steps(3, ("oregon", "montreal"))
        lost = read_all(served, "/api/runs/g1", 8).json
        assert [site["state"] for site in lost["sites"]] == ["RUNNING", "LOST", "RUNNING"]
        assert lost["num_out"] == 1
        page = served.get("/runs/g1").text
        assert 'class="site out"' in page
        assert "virginia was lost" in page
        run.event("site.returning", "virginia")
        run.event("site.returned", "virginia")
        run.take_steps(2)
        back = read_all(served, "/api/runs/g1", 10).json
        assert [site["state"] for site in back["sites"]] == ["RUNNING"] * 3
        marks = served.get("/api/runs/g1/steps").json["marks"]
        assert [(each["step"], each["site"], each["text"]) for each in marks] == [
            (5, "virginia", "virginia was lost"),
            (8, "virginia", "site virginia is training with the others again"),
        ]
        events = served.get("/api/runs/g1/events").json["events"]
        assert [each["kind"] for each in events[-2:]] == ["site.returning", "site.returned"]
        after = events[-2]["sequence"]
        assert len(served.get(f"/api/runs/g1/events?after={after}").json["events"]) == 1
        for text in ("x", "-1", "", "٣", "9" * 5000):
            refused = served.get(f"/api/runs/g1/events?after={quote(text)}")
            assert refused.status == 400
            assert refused.json == {"error": "after: want the sequence of an event"}
        for name in ("first", "last"):
            assert served.get(f"/api/runs/g1/steps?{name}={'9' * 5000}").status == 200


def test_what_a_link_carries_now_is_not_its_mean(tmp_path: Path) -> None:
    with growing_run(tmp_path) as run, serving(tmp_path) as served:
        run.take_steps(30)
        link = read_all(served, "/api/runs/g1", 30).json["links"][0]
    assert link["now_use"] == pytest.approx(0.5)  # 12.5 MB in each second, of 25
    assert link["use"] == pytest.approx(0.625)  # while it was busy


def test_a_run_whose_coordinator_went_has_failed(tmp_path: Path) -> None:
    with serving(tmp_path) as served:
        with growing_run(tmp_path) as run:
            run.take_steps(3)
            assert served.get("/api/runs").json["runs"][0]["state"] == "ACTIVE"
        run_view = served.get("/api/runs").json["runs"][0]
        assert (run_view["state"], run_view["reason_code"]) == ("FAILED", "COORDINATOR_LOST")


def test_a_page_is_sent_again_only_where_it_has_changed(tmp_path: Path) -> None:
    with growing_run(tmp_path) as run, serving(tmp_path) as served:
        run.take_steps(4)
        read_all(served, "/api/runs/g1", 4)
        first = served.get("/live/g1")
        assert set(first.json["parts"]) >= {"head", "sites", "steps", "loss", "events", "plan"}
        again = served.get("/live/g1", if_none_match=first.headers["etag"])
        assert (again.status, again.body) == (304, b"")
        run.take_steps(1)
        read_all(served, "/api/runs/g1", 5)
        assert served.get("/live/g1", if_none_match=first.headers["etag"]).status == 200


def test_damaged_lines_and_removed_runs_break_nothing(tmp_path: Path) -> None:
    folder = record_run(tmp_path)
    for line in ("nonsense\n", "[]\n", '{"kind": "step"}\n', '{"kind": 3, "site": "oregon"}\n'):
        append_line(folder, line)
    with (folder.path / METRICS).open("a", encoding="utf-8") as file:
        file.write(json.dumps({"kind": "step", "site": "oregon", "step": "x", "values": 3}) + "\n")
    with serving(tmp_path) as served:
        assert read_all(served, "/api/runs/r1", 40).status == 200
        for path in ("/api/runs/r9", "/runs/r9", "/live/r9", "/runs/..%2f..", "/assets/x.js"):
            assert served.get(path).status == 404, path
        assert served.get("/runs/r1/../../etc").status == 404


def test_a_run_of_another_machines_coordinator_says_where_to_look(tmp_path: Path) -> None:
    folder = record_run(tmp_path)
    (folder.path / REMOTE).write_text('{"address": "10.0.0.5:7443", "state": ""}')
    with serving(tmp_path) as served:
        (run,) = served.get("/api/runs").json["runs"]
        assert run["state"] == "ELSEWHERE"
        assert "10.0.0.5:7443" in served.get("/runs/r1").text


def test_a_standing_coordinators_runs(tmp_path: Path) -> None:
    folder = record_run(tmp_path / "home")
    with serving(tmp_path / "other", state=folder.path) as served:
        assert [run["run_id"] for run in served.get("/api/runs").json["runs"]] == ["r1"]
        assert read_all(served, "/api/runs/r1", 40).json["sites"]
    with serving(tmp_path / "other", state=tmp_path / "absent") as served:
        assert served.get("/api/runs").status == 503
