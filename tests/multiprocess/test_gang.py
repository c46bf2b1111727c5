"""All sites or none: what happens when one is missing, and when someone changes their mind."""

import json
import signal

import pytest

from tests.multiprocess.harness import UNDER_BOTH_SECURITIES, Bench, job_yaml, topology_yaml

pytestmark = [
    UNDER_BOTH_SECURITIES,
    pytest.mark.multiprocess,
    pytest.mark.slow,
    pytest.mark.exhaustive,
]


def test_a_missing_site_is_named_and_the_others_are_rolled_back(run: Bench) -> None:
    topology = topology_yaml([(1, 1), (1, 1)], emulate=False, detect_within="3s", start_within="6s")
    job = run.write(topology, job_yaml())
    topology_path, state = str(run.folder / "topology.yaml"), run.folder / "coordinator"
    run.start(
        *("coordinator", "--topology", topology_path, "--state", str(state)),
        *("--bind", "127.0.0.1:0"),
    )
    announced = state / "coordinator.json"
    run.wait_for("the coordinator", announced.exists, 30)
    address = json.loads(announced.read_text())["address"]
    run.start(
        *("agent", "--site", "a", "--coordinator", address),
        *("--topology", topology_path, "--state", str(run.folder / "agent-a")),
    )

    result = run.isthmus("launch", str(job), "--coordinator", address, "--json").check(4)

    assert result.envelope["error"]["code"] == "START_TIMED_OUT"
    assert "b" in result.envelope["error"]["message"]
    assert not run.pids("isthmus.sites.node.rank")


def test_detach_cancel_wait(run: Bench) -> None:
    job = run.write(topology_yaml([(1, 1), (1, 1)], rtt="2ms"), job_yaml(steps=100_000))
    following = run.start("launch", str(job))
    assert following.stdout is not None
    run_id = following.stdout.readline().strip()
    run.wait_for("ranks", lambda: bool(run.pids("isthmus.sites.node.rank")))

    following.send_signal(signal.SIGINT)

    _, err = following.communicate(timeout=20)
    assert following.returncode == 130
    assert f"isthmus status {run_id}" in err
    waiting = run.isthmus("wait", run_id, "--timeout", "1s", "--json").check(5)
    assert waiting.envelope["error"]["code"] == "TIMED_OUT"
    assert run.isthmus("status", run_id, "--json").envelope["data"]["state"] in {
        "FORMING",
        "ACTIVE",
    }
    run.isthmus("cancel", run_id, "--json").check()
    ended = run.isthmus("wait", run_id, "--timeout", "60s", "--json").check(6)
    assert ended.envelope["error"]["code"] == "CANCELLED"
    run.isthmus("cancel", run_id, "--json").check()
    run.wait_for_nothing_left(30)


@pytest.mark.parametrize("comes", ["launch", "cancel"])
def test_who_comes_while_a_run_is_being_launched_waits_for_it(run: Bench, comes: str) -> None:
    job = run.write(topology_yaml([(1, 1), (1, 1)], emulate=False), job_yaml(steps=100_000))
    words = {
        "launch": ("launch", str(job), "--run-id", "r", "--detach", "--json"),
        "cancel": ("cancel", "r", "--json"),
    }
    launching = run.start(*words["launch"])
    claimed = run.home / "runs" / "r" / "job.yaml"
    run.wait_for("the run's folder", claimed.exists, 30)
    for command in (launching, run.start(*words[comes])):
        out, err = command.communicate(timeout=60)
        assert command.returncode == 0, (command.args, out, err)
    run.isthmus("cancel", "r", "--json").check()
    ended = run.isthmus("wait", "r", "--timeout", "60s", "--json").check(6)
    assert ended.envelope["error"]["code"] == "CANCELLED"
