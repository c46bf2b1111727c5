"""A machine with everything on it is suspended for longer than `detect_within`, and goes on.

So does its run.
"""

from __future__ import annotations

import os
import signal
import threading

import pytest

from tests.multiprocess.harness import UNDER_BOTH_SECURITIES, Bench, job_yaml, topology_yaml

pytestmark = [
    UNDER_BOTH_SECURITIES,
    pytest.mark.slow,
    pytest.mark.multiprocess,
    pytest.mark.exhaustive,
    pytest.mark.timeout(180),
]

DETECT_S = 2.0


def steps_of(bench: Bench) -> int:
    """Return how many steps some rank has told of."""
    runs = bench.home / "runs"
    paths = runs.glob("*/metrics.jsonl") if runs.is_dir() else []
    return sum(path.read_text().count('"kind": "step"') for path in paths)


def test_a_run_whose_processes_all_stand_still_goes_on(run: Bench) -> None:
    """All but the emulated WAN, whose round trip is so long that a greeting is often under way."""
    topology = topology_yaml([(1, 1)] * 2, rtt="200ms", detect_within=f"{DETECT_S}s")
    path = run.write(topology, job_yaml(steps=10_000))
    launch = run.start("launch", str(path), "--json")
    run.wait_for("steps", lambda: steps_of(run) > 0)
    stopped = [pid for pid, command in run.processes.living().items() if "emulator" not in command]
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    threading.Event().wait(1.5 * DETECT_S)
    done = steps_of(run)
    for pid in stopped:
        os.kill(pid, signal.SIGCONT)
    run.wait_for("more steps", lambda: steps_of(run) > done + 2 or launch.poll() is not None, 60.0)
    assert launch.poll() is None, f"{launch.communicate()}\n{run.logs()}"
