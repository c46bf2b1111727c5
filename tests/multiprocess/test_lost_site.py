"""A site fails in the midst of a run: the others go on, lose no step, and end with the same bits."""

import json
import time
from collections import Counter

import psutil
import pytest

from tests.multiprocess.harness import Bench, job_yaml, kill, topology_yaml

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

DETECT_S = 5.0
STEPS = 40


def victim(run: Bench, role: str) -> int:
    """Return the process of site c to kill."""
    agent = run.pids("sites.agent", "--site c")[0]
    if role == "agent":
        return agent
    words = {"gateway": "sites.gateway", "torchrun": "sites.launcher.node"}
    if role in words:
        return run.children(agent, words[role])[0]
    return run.children(agent, "sites.launcher.rank")[-1]


def steps_of(run: Bench, site: str) -> list[int]:
    return [
        each["step"] for each in run.metrics() if each["kind"] == "step" and each["site"] == site
    ]


def is_training(run: Bench, steps: int) -> bool:
    folders = list((run.home / "runs").glob("*/metrics.jsonl"))
    return bool(folders) and folders[0].read_text().count('"kind": "step"') > 3 * steps


@pytest.mark.parametrize(
    ("role", "tree"),
    [
        ("gateway", "auto"),
        ("rank", "star"),
        pytest.param("torchrun", "auto", marks=pytest.mark.exhaustive),
        ("agent", "auto"),
    ],
)
def test_the_others_go_on_and_end_alike(run: Bench, role: str, tree: str) -> None:
    topology = topology_yaml(
        [(1, 1), (1, 1), (1, 1)], rtt="2ms", detect_within=f"{DETECT_S:g}s", min_sites=1
    )
    job = run.write(topology, job_yaml(steps=STEPS, tree=tree, codec="int8"))
    process = run.start("launch", str(job), "--json")
    run.wait_for("first steps", lambda: is_training(run, 5))

    psutil.Process(victim(run, role))
    kill(victim(run, role))
    killed_s = time.monotonic()
    before = max(steps_of(run, "a"))
    run.wait_for("a further step", lambda: max(steps_of(run, "a")) > before + 2, 60)
    stalled_s = time.monotonic() - killed_s
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, f"{out}\n{err}\n{run.logs()}"
    assert stalled_s < DETECT_S, f"{stalled_s:.1f} s"

    for site in "ab":
        assert Counter(steps_of(run, site)) == Counter(range(1, STEPS + 1)), site
    events = run.isthmus("events", "--json").check().envelope["data"]["events"]
    told = ["epoch.proposed", "epoch.begun", "site.lost"]
    assert [each["kind"] for each in events if each["kind"] in told] == told
    status = run.isthmus("status", "--json").check().envelope["data"]
    assert status["state"] == "SUCCEEDED"
    assert "sites lost on the way: c" in status["notes"]
    assert json.dumps(status["sites"]).count("LOST") == 1
    # Hashes of all that were left were compared after every step, and equal.
    assert status["totals"]["verified_steps"] >= STEPS - 5
    run.wait_for_nothing_left(DETECT_S)
