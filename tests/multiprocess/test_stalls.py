"""One rank hangs, or is stopped, while all others wait: it is named, with what it does."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.multiprocess.harness import UNDER_BOTH_SECURITIES, Bench, job_yaml, topology_yaml

pytestmark = [UNDER_BOTH_SECURITIES, pytest.mark.multiprocess, pytest.mark.slow]

SCRIPT = Path(__file__).parent / "scripts" / "user_hang.py"
STALL_S = 4.0
SLACK_S = 2.0
"""The look at the rank's stack takes so long on a busy machine."""


def start(run: Bench, *arguments: str) -> None:
    topology = topology_yaml([(1, 1), (1, 2)], emulate=False, rtt="2ms")
    topology = topology.replace("failure: {", f"failure: {{stall_within: {STALL_S:g}s, ")
    listed = ", ".join(f'"{argument}"' for argument in arguments)
    job = run.write(topology, job_yaml(entrypoint=str(SCRIPT)) + f"arguments: [{listed}]\n")
    launched = run.isthmus("launch", str(job), "--detach", "--json")
    assert launched.code == 0, launched.err


def stalled(run: Bench, since_s: float) -> dict[str, Any]:
    """Return the event that names a rank, which comes in time."""

    def events() -> list[dict[str, Any]]:
        told: list[dict[str, Any]] = run.isthmus("events", "--json").envelope["data"]["events"]
        return [each for each in told if each["kind"] == "rank.stalled"]

    run.wait_for("the rank's name", lambda: bool(events()), 60)
    (event,) = events()
    assert event["wall_s"] - since_s < STALL_S + SLACK_S
    return event


@pytest.mark.exhaustive
def test_a_rank_in_an_endless_loop_is_named_with_its_line(run: Bench) -> None:
    start(run, "100000", "b", "1", "30")
    run.wait_for("training", lambda: "trains" in run.logs(), 90)
    event = stalled(run, time.time())
    assert event["site"] == "b"
    assert event["detail"]["rank"] == 1
    assert "hang (" in event["detail"]["note"]
    assert "user_hang.py" in event["detail"]["note"]
    assert "in hang" in Path(event["detail"]["stack_path"]).read_text()
    status = run.isthmus("status", "--json")
    assert "stalled: rank 1 of site b" in str(status.envelope["data"])


@pytest.mark.exhaustive
def test_a_rank_that_is_done_before_others_of_its_site_is_named(run: Bench) -> None:
    start(run, "100000", "b", "1", "30", "leave")
    run.wait_for("training", lambda: "trains" in run.logs(), 90)
    event = stalled(run, time.time())
    assert (event["site"], event["detail"]["rank"]) == ("b", 1)
    assert "its script has ended" in event["detail"]["note"]


@pytest.mark.exhaustive
def test_a_rank_that_is_stopped_is_named_as_stopped(run: Bench) -> None:
    start(run, "100000", "none", "0", "0")
    run.wait_for("training", lambda: "trains" in run.logs(), 90)
    agent = run.pids("isthmus.sites.agent", "--site b")[0]
    os.kill(run.children(agent, "isthmus.sites.node.rank")[-1], signal.SIGSTOP)
    event = stalled(run, time.time())
    assert event["site"] == "b"
    assert "its process is stopped" in event["detail"]["note"]
