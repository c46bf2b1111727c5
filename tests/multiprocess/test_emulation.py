"""Real runs over emulated packets, and with faults.

What happens is written down, and nothing is left.
"""

from __future__ import annotations

import json
import os
import signal

import pytest

from tests.multiprocess.harness import Bench, job_yaml, topology_yaml

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

SITES = [(1, 1), (1, 1)]
END_S = 30.0
FAULTS = """
version: 1
seed: 7
faults:
  - {at: 0s..100ms, link: [a, b], rtt: 40ms, for: 300ms}
  - {at: 50ms, pause: b, for: 200ms}
"""


@pytest.mark.exhaustive
def test_gateways_meet_in_namespaces_and_faults_are_written_down(
    run: Bench, needs_netns: None
) -> None:
    faults = run.folder / "faults.yaml"
    faults.write_text(FAULTS)
    topology = topology_yaml(SITES, emulator="netns", rtt="5ms")

    done = run.launch(topology, job_yaml(steps=30), "--faults", str(faults), "--seed", "11")

    assert done.code == 0, done.err + run.logs()
    assert done.envelope["data"]["verified_steps"] >= 30
    prepared = run.isthmus("events", "--json").envelope["data"]["events"]
    kinds = [event["kind"] for event in prepared]
    assert kinds.index("wan.emulated") < kinds.index("run.preparing") < kinds.index("run.active")
    gateways = [each["detail"]["gateways"] for each in prepared if each["kind"] == "site.prepared"]
    assert all(address.startswith("10.") for (address,) in gateways)
    told = [event["detail"]["change"]["kind"] for event in prepared if event["kind"] == "wan.fault"]
    kept = [each for each in run.metrics() if each["kind"] == "fault"]
    assert [each["labels"]["what"] for each in kept] == told
    assert {"pause", "resume", "shape", "heal"} >= set(told) > {"pause", "shape"}
    shaped = next(each for each in kept if each["labels"]["what"] == "shape")
    assert shaped["values"]["delay_s"] == 0.02
    carried = [each for each in run.metrics() if each["kind"] == "emulated_link"]
    assert {each["labels"]["source"] for each in carried} == {"a", "b"}
    run.wait_for_nothing_left(END_S)


@pytest.mark.exhaustive
def test_an_emulator_that_is_killed_ends_the_run(run: Bench, needs_netns: None) -> None:
    topology = topology_yaml(SITES, emulator="netns")
    job = run.write(topology, job_yaml(steps=100_000))
    launched = run.start("launch", str(job), "--json")
    run.wait_for("the run", lambda: bool(run.pids("isthmus.sites.node.rank")))
    (emulator,) = run.pids("isthmus.orchestrator.emulator.netns")

    os.kill(emulator, signal.SIGKILL)

    out, err = launched.communicate(timeout=END_S + 30)
    error = json.loads(out)["error"]
    assert error["code"] == "LAUNCH_FAILED", err
    assert "the WAN emulator is gone: it ended with SIGKILL" in error["message"]
    run.wait_for_nothing_left(END_S)


def test_a_coordinator_that_is_killed_takes_the_emulator_with_it(
    run: Bench, needs_netns: None
) -> None:
    topology = topology_yaml(SITES, emulator="netns")
    run.isthmus("launch", str(run.write(topology, job_yaml(steps=100_000))), "--detach")
    run.wait_for("the emulator", lambda: bool(run.pids("isthmus.orchestrator.emulator.netns")))
    (coordinator,) = run.pids("isthmus.orchestrator.coordinator")

    os.kill(coordinator, signal.SIGKILL)

    run.wait_for_nothing_left(END_S)
