"""What may be done from a run's page: by whom, and what becomes of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from isthmus.orchestrator.dashboard import pages
from isthmus.orchestrator.dashboard.actions import Attempt, RunActions
from isthmus.orchestrator.dashboard.run_places import RunPlace
from isthmus.protos.control.v1 import control_pb2
from tests.cli.runs import a_run, announce
from tests.fakes.dashboards import Answer, GrowingRun, Served, growing_run, serving, session_of
from tests.fakes.recorded_runs import record_run
from tests.fakes.scripted_coordinator import ScriptedCoordinator
from tests.fakes.scripted_coordinator import serving as coordinating
from tests.fakes.waiting import PROCESSES_S, wait_for

pytestmark = pytest.mark.slow

TOKEN = "a-token-of-this-test"
STOP = "/actions/g1/stop"


@pytest.fixture
def run(tmp_path: Path) -> Iterator[GrowingRun]:
    with growing_run(tmp_path) as run:
        run.take_steps(2)
        yield run


@pytest.fixture
def served(run: GrowingRun, tmp_path: Path) -> Iterator[Served]:
    with serving(tmp_path, token=TOKEN, allows_actions=True) as served:
        yield served


def from_page(served: Served, path: str = STOP, **changed: str) -> Answer:
    """Ask as the run's page does, but for some headers."""
    root, cookie = session_of(served, f"/?token={TOKEN}")
    page = served.get(f"{root}runs/g1", cookie=cookie).text
    shown = page.partition('data-action-token="')[2].partition('"')[0]
    headers = {
        "cookie": cookie,
        "host": f"127.0.0.1:{served.port}",
        "origin": f"http://127.0.0.1:{served.port}",
        "sec_fetch_site": "same-origin",
        "x_isthmus_action": shown,
    }
    given = {name: value for name, value in {**headers, **changed}.items() if value}
    return served.get(root + path.removeprefix("/"), method="POST", **given)


def last_attempt(served: Served) -> str:
    return str(served.get("/runs/g1", authorization=f"Bearer {TOKEN}").text)


@pytest.mark.parametrize(
    ("changed", "status"),
    [
        ({"cookie": ""}, 401),
        ({"cookie": "isthmus_dashboard_1=x"}, 401),
        ({"origin": ""}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "http://127.0.0.1:1"}, 403),
        ({"origin": "http://127.0.0.1"}, 403),
        ({"sec_fetch_site": "cross-site"}, 403),
        ({"sec_fetch_site": "same-site"}, 403),
        ({"x_isthmus_action": ""}, 403),
        ({"x_isthmus_action": TOKEN}, 403),
        ({"host": "evil.example", "origin": "http://evil.example"}, 421),
    ],
)
def test_another_page_cannot_have_anything_done(
    served: Served, changed: dict[str, str], status: int
) -> None:
    assert from_page(served, **changed).status == status
    assert "Stopping" not in last_attempt(served)


def test_nothing_else_is_done(served: Served) -> None:
    bearer = {"authorization": f"Bearer {TOKEN}"}
    for method, path, status in (
        ("GET", STOP, 405),
        ("PUT", STOP, 405),
        ("DELETE", STOP, 405),
        ("POST", "/actions/g1/drop", 404),
        ("POST", "/actions/g9/stop", 404),
        ("POST", "/actions/..%2fg1/stop", 404),
        ("POST", "/api/runs/g1", 405),
        ("POST", "/runs/g1", 405),
    ):
        assert served.get(path, method=method, **bearer).status == status, (method, path)
    wrong = served.get(STOP, method="POST", authorization="Bearer wrong")
    assert wrong.status == 401


def test_without_leave_nothing_is_offered_or_done(run: GrowingRun, tmp_path: Path) -> None:
    with serving(tmp_path, token=TOKEN) as served:
        bearer = {"authorization": f"Bearer {TOKEN}"}
        assert served.get(STOP, method="POST", **bearer).status == 405
        page = served.get("/runs/g1", **bearer).text
        assert "data-action" not in page
        assert "Read-only." in page


def test_an_ended_run_is_not_stopped(run: GrowingRun, served: Served, tmp_path: Path) -> None:
    record_run(tmp_path, "r1")
    bearer = {"authorization": f"Bearer {TOKEN}"}
    assert served.get("/actions/r1/stop", method="POST", **bearer).status == 409
    assert "data-action=" not in served.get("/runs/r1", **bearer).text
    assert "data-action=" in served.get("/runs/g1", **bearer).text


def test_without_checkpoints_none_is_offered(run: GrowingRun, served: Served) -> None:
    bearer = {"authorization": f"Bearer {TOKEN}"}
    page = served.get("/runs/g1", **bearer).text
    assert ("Checkpoint and stop" in page) is served.get("/api/runs/g1", **bearer).json[
        "keeps_checkpoints"
    ]
    view = {"state": "ACTIVE", "run_id": "g1", "keeps_checkpoints": False}
    offered = pages.actions(view, None)
    assert "its training is lost" in offered
    assert "Checkpoint" not in offered


def test_a_page_stops_a_run_as_the_command_does(
    run: GrowingRun, served: Served, tmp_path: Path
) -> None:
    led = a_run("ACTIVE", "g1")
    scripted = ScriptedCoordinator(runs=[led])
    with coordinating(scripted) as address:
        announce(run.folder, address)
        assert from_page(served).status == 202
        assert "Stopping…" in last_attempt(served)
        wait_for(lambda: "Stopping" not in last_attempt(served), within_s=60.0, look_s=PROCESSES_S)
        assert led.state == control_pb2.RUN_STATE_STOPPING
        assert "refused" not in last_attempt(served)


def test_what_the_command_refuses_stands_on_the_page(run: GrowingRun, served: Served) -> None:
    assert from_page(served, "/actions/g1/checkpoint-and-stop").status == 202
    again = from_page(served)
    assert again.status == 409
    assert "Writing a checkpoint" in last_attempt(served)
    wait_for(lambda: "refused. " in last_attempt(served), within_s=60.0, look_s=PROCESSES_S)


def test_closing_ends_what_is_being_done(tmp_path: Path) -> None:
    def sleeps(_module: str, *_words: str) -> list[str]:
        return ["sleep", "600"]

    actions = RunActions(tmp_path, None, sleeps)
    place = RunPlace("r1", tmp_path, is_own=True, elsewhere="", submitted_wall_s=0.0)

    def attempt() -> Attempt:
        found = actions.attempt("r1")
        assert found is not None
        return found

    assert actions.begin(place, "stop")
    assert not actions.begin(place, "stop"), "one at a time"
    wait_for(lambda: bool(actions._processes))
    actions.close()
    wait_for(lambda: attempt().is_over)
    assert attempt().trouble
    assert not actions.begin(place, "stop"), "it is closed"
