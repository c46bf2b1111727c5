"""A site whose gateway is killed is lost, and the others train to the end."""

from __future__ import annotations

import json

import pytest

from tests.multiprocess.harness import Bench, job_yaml, kill, topology_yaml

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow, pytest.mark.timeout(180)]


@pytest.mark.parametrize("tree", ["star", pytest.param("gather", marks=pytest.mark.exhaustive)])
def test_the_others_go_on_with_equal_parameters(run: Bench, tree: str) -> None:
    """Equal, for the hashes of each step are compared."""
    sites = [(1, 1), (1, 2), (1, 1)]
    topology = topology_yaml(sites, rtt="2ms", min_sites=1, detect_within="5s")
    job = run.write(topology, job_yaml(steps=60, codec="int8", tree=tree))
    process = run.start("launch", str(job), "--json")
    run.wait_for("first steps", lambda: _num_steps(run) > 8)
    agent = run.pids("sites.agent", "--site b")[0]
    kill(run.children(agent, "sites.gateway")[0])
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, f"{out}\n{err}\n{run.logs()}"
    events = run.isthmus("events", "--json").check().envelope["data"]["events"]
    assert {event["site"] for event in events if event["kind"] == "site.resumed"} == {"a", "c"}
    steps = [each for each in run.metrics() if each["kind"] == "step" and each["site"] != "b"]
    assert {each["site"] for each in steps if each["step"] >= 59} == {"a", "c"}, json.dumps(events)
    run.wait_for_nothing_left(15.0)


def _num_steps(run: Bench) -> int:
    folders = list((run.home / "runs").glob("*/metrics.jsonl"))
    return folders[0].read_text().count('"kind": "step"') if folders else 0
