"""The agent's command line, and joining.

What is refused, what is waited for, what is served idle.
"""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from pathlib import Path

import grpc
import pytest

from isthmus.protos.control.v1 import control_pb2 as control
from isthmus.protos.versions import CONTROL_PROTOCOL_MAX
from tests.fakes.agent_bench import AgentBench, agent_bench, job_yaml, prepare, topology_yaml
from tests.fakes.agent_coordinator import AgentCoordinator, agent_coordinator
from tests.fakes.waiting import until

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]


def agent(folder: Path, **options: str) -> subprocess.CompletedProcess[str]:
    """Run an agent that cannot get far."""
    given = {
        "site": "a",
        "coordinator": "127.0.0.1:1",
        "topology-hash": "0" * 64,
        "address": "127.0.0.1",
        "detect-within": "6",
        "start-within": "60",
        "state": str(folder / "state"),
        **options,
    }
    listed = [part for name, value in given.items() for part in (f"--{name}", value)]
    return subprocess.run(
        [sys.executable, "-m", "isthmus.sites.agent", *listed, "--json"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(
    ("options", "status", "code", "said"),
    [
        ({"state": "/proc/none"}, 8, "FILE_ERROR", "/proc/none: No such file or directory"),
        ({"detect-within": "0.1"}, 2, "INVALID_CONFIG", "failure.detect_within"),
        ({"coordinator": "10.0.0.1:7"}, 3, "INSECURE_ADDRESS", "10.0.0.1"),
        ({"bind": "0.0.0.0"}, 3, "INSECURE_ADDRESS", "0.0.0.0"),
        ({"join-within": "0.3"}, 4, "COORDINATOR_UNREACHABLE", "no coordinator"),
    ],
)
def test_what_is_wrong_is_named(
    tmp_path: Path, options: dict[str, str], status: int, code: str, said: str
) -> None:
    ended = agent(tmp_path, **options)
    assert ended.returncode == status, ended.stderr
    envelope = json.loads(ended.stdout)
    assert envelope["error"]["code"] == code
    assert envelope["exit_code"] == status
    assert said in envelope["error"]["message"]
    assert "Traceback" not in ended.stderr


def test_arguments_are_checked(tmp_path: Path) -> None:
    ended = agent(tmp_path, coordinator="here")
    assert ended.returncode == 2
    assert "want HOST:PORT" in ended.stderr


@pytest.mark.parametrize(
    ("status", "exit_status"),
    [(grpc.StatusCode.FAILED_PRECONDITION, 8), (grpc.StatusCode.PERMISSION_DENIED, 8)],
)
async def test_a_refusal_is_final(
    tmp_path: Path, status: grpc.StatusCode, exit_status: int
) -> None:
    async with (
        agent_coordinator(refuses_with=(status, "another topology")) as coordinator,
        agent_bench(coordinator, tmp_path, topology_yaml()) as bench,
    ):
        assert await bench.wait_ended() == exit_status, bench.log()
        assert "another topology" in bench.log()


async def test_a_site_that_is_still_taken_is_asked_for_again(tmp_path: Path) -> None:
    refusal = (grpc.StatusCode.ABORTED, "an older session holds the site")
    async with (
        agent_coordinator(refuses_with=refusal) as coordinator,
        agent_bench(coordinator, tmp_path, topology_yaml()) as bench,
    ):
        await _wait_log(bench, "an older session holds the site")
        coordinator.refuses_with = None
        hello = (await coordinator.wait_message("hello")).hello
        assert (hello.site, hello.protocol_max) == ("a", CONTROL_PROTOCOL_MAX)
        assert len(hello.topology_hash) == 64


async def test_an_idle_agent_outlives_its_coordinator(tmp_path: Path) -> None:
    async with (
        agent_coordinator() as coordinator,
        agent_bench(coordinator, tmp_path, topology_yaml()) as bench,
    ):
        await coordinator.wait_message("hello")
        coordinator.hang_up()
        await coordinator.wait_for(
            "a second hello", lambda: len(coordinator.all("hello")) == 2 or None
        )
        first, second = (each.hello for each in coordinator.all("hello"))
        assert first.incarnation == second.incarnation
        bench.process.send_signal(signal.SIGTERM)
        assert await bench.wait_ended() == 0, bench.log()


async def test_a_signal_ends_the_dialling(tmp_path: Path) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{nobody.getsockname()[1]}"
        async with agent_bench(address, tmp_path, topology_yaml()) as bench:
            await _wait_log(bench, "not joined yet")
            bench.process.send_signal(signal.SIGINT)
            assert await bench.wait_ended() == 0, bench.log()


async def _wait_log(bench: AgentBench, text: str) -> None:
    await until(lambda: text in bench.log(), lambda: f"{text!r} in the log:\n{bench.log()}")


async def test_orders_that_do_not_fit_are_answered(tmp_path: Path) -> None:
    async def ended(coordinator: AgentCoordinator, run_id: str) -> control.SiteEnded:
        return await coordinator.wait_for(
            f"end of {run_id}",
            lambda: next(
                (each.ended for each in coordinator.all("ended") if each.ended.run_id == run_id),
                None,
            ),
        )

    topology = topology_yaml()
    async with (
        agent_coordinator(generation=5) as coordinator,
        agent_bench(coordinator, tmp_path, topology, fault="mute") as bench,
    ):
        await coordinator.wait_message("hello")
        coordinator.say(stop=control.Stop(run_id="r0", generation=4))
        assert not (await ended(coordinator, "r0")).failures
        # One of generation 4 may go on under a coordinator that was started again since.
        for run_id, generation in (("old", 4), ("r2", 5)):
            other = prepare(topology, job_yaml(), run_id, generation=generation)
            other.run_spec = b"{}"
            coordinator.say(prepare=other)
            failures = (await ended(coordinator, run_id)).failures
            assert failures[0].code == "CONFIG_MISMATCH"
        coordinator.say(prepare=prepare(topology, job_yaml(), "r1", generation=4))
        assert (await ended(coordinator, "r1")).failures[0].code == "STALE_GENERATION"
        coordinator.say(prepare=prepare(topology, job_yaml(), "r3", generation=6))
        coordinator.say(prepare=prepare(topology, job_yaml(), "r4", generation=7))
        assert (await ended(coordinator, "r4")).failures[0].code == "REFUSED"
        coordinator.say(start=control.Start(run_id="r9", generation=9))
        coordinator.say(stop=control.Stop(run_id="r3", generation=6, grace_s=0.5))
        end = await ended(coordinator, "r3")
        assert not end.failures
        assert not end.succeeded
        assert bench.below() == []
