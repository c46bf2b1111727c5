"""SIGKILL of any process ends the run in time, with the right name, and leaves nothing behind."""

import json
import time

import pytest

from tests.multiprocess.harness import UNDER_BOTH_SECURITIES, Bench, job_yaml, kill, topology_yaml

pytestmark = [UNDER_BOTH_SECURITIES, pytest.mark.multiprocess, pytest.mark.slow]

DETECT_WITHIN_S = 15.0


def victim(run: Bench, role: str) -> int:
    """Return the process to kill."""
    if role == "coordinator":
        return run.pids("isthmus.orchestrator.coordinator")[0]
    if role == "agent":
        return run.pids("isthmus.sites.agent", "--site b")[0]
    if role == "gateway":
        agent = run.pids("isthmus.sites.agent", "--site b")[0]
        return run.children(agent, "isthmus.sites.gateway")[0]
    agent = run.pids("isthmus.sites.agent", "--site b")[0]
    return run.children(agent, "isthmus.sites.node.rank")[-1]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("role", "exit_code", "reason"),
    [
        ("rank", 1, "RANK_KILLED"),
        ("gateway", 1, "GATEWAY_EXITED"),
        ("agent", 4, "SITE_LOST"),
        ("coordinator", 4, "COORDINATOR_LOST"),
    ],
)
def test_the_run_ends_in_time_and_cleanly(
    run: Bench, role: str, exit_code: int, reason: str
) -> None:
    sites = [(1, 1), (1, 2 if role == "rank" else 1)]
    job = run.write(topology_yaml(sites, rtt="2ms"), job_yaml(steps=100_000))
    process = run.start("launch", str(job), "--json")
    run.wait_for("first steps", lambda: _stepping(run))

    kill(victim(run, role))
    killed_s = time.monotonic()
    out, err = process.communicate(timeout=DETECT_WITHIN_S + 45)
    run.wait_for_nothing_left(DETECT_WITHIN_S)

    took_s = time.monotonic() - killed_s
    assert process.returncode == exit_code, f"{out}\n{err}\n{run.logs()}"
    error = json.loads(out)["error"]
    assert error["code"] == reason, error
    if role != "coordinator":
        assert error["where"]["site"] == "b"
    if role == "rank":
        assert error["where"]["exit_code"] == -9
    assert took_s < DETECT_WITHIN_S + 5, f"{took_s:.1f} s"
    status = run.isthmus("status", "--json")
    assert status.envelope["data"]["run_id"]
    events = run.isthmus("events", "--json").check()
    assert any(event["kind"] == "run.submitted" for event in events.envelope["data"]["events"])


def _stepping(run: Bench) -> bool:
    folders = list((run.home / "runs").glob("*/metrics.jsonl"))
    return bool(folders) and folders[0].read_text().count('"kind": "step"') > 8
