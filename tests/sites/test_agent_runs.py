"""The agent with real torchruns.

What it starts, what it reports, and what it leaves behind: nothing.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from isthmus.protos.control.v1 import control_pb2 as control
from tests.fakes.agent_bench import AgentBench, agent_bench, job_yaml, prepare, topology_yaml
from tests.fakes.agent_coordinator import AgentCoordinator, agent_coordinator

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

DETECT_WITHIN_S = 6.0
Scene = tuple[AgentCoordinator, AgentBench]


@asynccontextmanager
async def scene(
    folder: Path,
    *action: str,
    nodes: int = 1,
    ranks: int = 2,
    gateways: int = 1,
    fault: str = "none",
    detect_within: str = "6s",
    coordinator_within: str = "1h",
    more: str = "",
    **fields: object,
) -> AsyncIterator[Scene]:
    """Give an agent whose ranks have been started, and its coordinator."""
    topology = topology_yaml(
        nodes, ranks, detect_within, gateways=gateways, coordinator_within=coordinator_within
    )
    topology = topology.replace("{name: a,", f"{{name: a, {more}," if more else "{name: a,")
    async with (
        agent_coordinator(**fields) as coordinator,
        agent_bench(coordinator, folder, topology, fault=fault) as bench,
    ):
        await coordinator.wait_message("hello")
        coordinator.say(prepare=prepare(topology, job_yaml(*action)))
        prepared = (await coordinator.wait_message("prepared")).prepared
        assert [each.gateway for each in prepared.endpoints] == list(range(nodes * gateways))
        coordinator.say(start=control.Start(run_id="r1", generation=1))
        yield coordinator, bench


async def ended(coordinator: AgentCoordinator, bench: AgentBench) -> control.SiteEnded:
    """Return how the run ended; by then no process of it is left."""
    message = (await coordinator.wait_message("ended")).ended
    assert bench.below() == [], bench.log()
    return message


LEFT_OVER = {
    "RANK": "5",
    "LOCAL_RANK": "3",
    "WORLD_SIZE": "64",
    "LOCAL_WORLD_SIZE": "8",
    "GROUP_RANK": "2",
    "NODE_RANK": "2",
    "ROLE_RANK": "4",
    "MASTER_ADDR": "192.0.2.7",
    "MASTER_PORT": "1",
    "PET_NNODES": "9",
    "PET_NPROC_PER_NODE": "7",
    "PET_RDZV_ENDPOINT": "192.0.2.7:1",
    "PET_MAX_RESTARTS": "3",
    "TORCHELASTIC_RESTART_COUNT": "4",
    "SLURM_PROCID": "6",
    "SLURM_NTASKS": "64",
    "SLURM_JOB_NODELIST": "n[1-8]",
    "SLURM_LOCALID": "3",
    "PMI_RANK": "5",
    "OMPI_COMM_WORLD_RANK": "5",
}
"""What a launcher leaves in the environment of an agent that it starts."""


@pytest.mark.parametrize(
    ("nodes", "ranks"), [(1, 2), pytest.param(2, 1, marks=pytest.mark.exhaustive)]
)
async def test_a_run_succeeds_and_the_next_one_follows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nodes: int, ranks: int
) -> None:
    """Ranks have what a prologue sets up, and nothing that a launcher has left."""
    for name, value in {**LEFT_OVER, "KEPT_BY_RANKS": "yes"}.items():
        monkeypatch.setenv(name, value)
    lines = """prologue: [export A='b c', echo some noise, cat, 'set -- env B=2 "$@"']"""
    started = scene(tmp_path, "done", nodes=nodes, ranks=ranks, more=lines)
    async with started as (coordinator, bench):
        end = await ended(coordinator, bench)
        assert end.succeeded, end
        assert not end.failures
        assert coordinator.all("running")
        metrics = [each.metrics for each in coordinator.all("metrics")]
        assert sum(len(batch.metrics) for batch in metrics) == 2
        assert {each.digest.rank for each in coordinator.all("digest")} == {0, 1}
        # Everything about the run came before its end.
        assert coordinator.messages[-1].HasField("ended")
        for rank in range(2):
            assert f"rank {rank} done in a" in coordinator.text(f"rank{rank}")
            check_environment(coordinator, rank)
        assert "r1" in coordinator.text("agent")
        coordinator.forget()
        topology = topology_yaml(nodes, ranks)
        coordinator.say(prepare=prepare(topology, job_yaml("done"), "r2", generation=2))
        await coordinator.wait_message("prepared")
        coordinator.say(start=control.Start(run_id="r2", generation=2))
        assert (await ended(coordinator, bench)).succeeded
        bench.process.send_signal(signal.SIGTERM)
        assert await bench.wait_ended() == 0, bench.log()


def check_environment(coordinator: AgentCoordinator, rank: int) -> None:
    """What a rank has written of its environment is its own, the prologue's and the agent's."""
    (line,) = (line for line in coordinator.text(f"rank{rank}").splitlines() if "{" in line)
    environment = json.loads(line.removeprefix(f"rank{rank}: "))
    left = {name for name, value in LEFT_OVER.items() if environment.get(name) == value}
    assert left == set()
    assert (environment["RANK"], environment["WORLD_SIZE"]) == (str(rank), "2")
    assert not [name for name in environment if name.startswith(("SLURM_", "PET_"))]
    assert [environment[name] for name in ("KEPT_BY_RANKS", "A", "B")] == ["yes", "b c", "2"]


async def test_a_line_of_the_prologue_that_fails_is_named(tmp_path: Path) -> None:
    lines = "prologue: [export A=1, 'module load cuda/99']"
    async with scene(tmp_path, "done", more=lines) as (coordinator, bench):
        end = await ended(coordinator, bench)
        (failure,) = end.failures
        assert failure.code == "LAUNCH_FAILED"
        assert "was not started: prologue.1: module load cuda/99 (status " in failure.message


@pytest.mark.parametrize(
    ("nodes", "action", "code", "exit_code", "said"),
    [
        pytest.param(
            *(1, "exit", "SCRIPT_FAILED", 17, "exiting with 17"), marks=pytest.mark.exhaustive
        ),
        (1, "raise", "SCRIPT_FAILED", 1, "ValueError: a mistake in the script"),
        pytest.param(
            *(2, "raise", "SCRIPT_FAILED", 1, "ValueError: a mistake in the script"),
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(1, "kill", "RANK_KILLED", -9, "", marks=pytest.mark.exhaustive),
    ],
)
async def test_the_rank_that_failed_is_named(
    tmp_path: Path, nodes: int, action: str, code: str, exit_code: int, said: str
) -> None:
    started = scene(tmp_path, action, "1", nodes=nodes, ranks=2 // nodes)
    async with started as (coordinator, bench):
        end = await ended(coordinator, bench)
        assert not end.succeeded
        first = end.failures[0]
        assert (first.code, first.rank, first.exit_code) == (code, 1, exit_code), end
        assert (first.site, first.node, first.collateral) == ("a", nodes - 1, False)
        assert all(each.collateral for each in end.failures[1:]), end
        assert 0 <= first.age_s < DETECT_WITHIN_S, end
        assert said in await asyncio.to_thread(Path(first.log_path).read_text)
        assert said in coordinator.text("rank1"), "the traceback comes before the end"
        if action == "raise":
            assert said in first.message


async def test_a_script_that_ends_without_having_joined_is_named(tmp_path: Path) -> None:
    async with scene(tmp_path, "absent") as (coordinator, bench):
        message = await ended(coordinator, bench)
        assert not message.succeeded
        (failure,) = message.failures
        assert failure.code == "NEVER_JOINED"
        assert failure.message.split()[0].endswith("agent_rank.py")
        assert "`site = isthmus.join()`" in failure.message


@pytest.mark.parametrize("action", [pytest.param("done", marks=pytest.mark.exhaustive), "quit"])
async def test_whoever_ended_first_is_named_and_not_the_rank_that_lost_it(
    tmp_path: Path, action: str
) -> None:
    async with scene(tmp_path, action, "0", "victim") as (coordinator, bench):
        end = await ended(coordinator, bench)
        first = end.failures[0]
        assert (first.code, first.rank, first.collateral) == ("SCRIPT_FAILED", 0, False), end
        assert "rank 0 of site a ended with status 0 while others" in first.message
        victims = [each for each in end.failures if each.rank == 1]
        assert victims, end
        assert all(each.collateral for each in end.failures[1:]), end
        assert "status 75" not in str(end)


@pytest.mark.exhaustive  # tests/sites/test_launcher.py, and lost sites of whole runs
async def test_a_rank_that_lost_the_exchange_is_collateral(tmp_path: Path) -> None:
    async with scene(tmp_path, "lost", "0") as (coordinator, bench):
        end = await ended(coordinator, bench)
        assert all(each.collateral for each in end.failures), end
        assert any(each.rank == 0 and each.exit_code == 75 for each in end.failures), end


@pytest.mark.parametrize(
    ("words", "code"),
    [
        # As one of several: the test below.
        pytest.param(
            "-m tests.fakes.agent_gateway", "GATEWAY_EXITED", marks=pytest.mark.exhaustive
        ),
        ("-m isthmus.sites.node.launcher", "RANK_KILLED"),
    ],
)
async def test_a_killed_gateway_or_torchrun_is_named(tmp_path: Path, words: str, code: str) -> None:
    async with scene(tmp_path, "wait") as (coordinator, bench):
        await coordinator.wait_message("running")
        bench.kill(words)
        killed_s = time.monotonic()
        first = (await ended(coordinator, bench)).failures[0]
        assert (first.code, first.exit_code, first.rank) == (code, -9, -1), first
        assert not first.collateral
        assert time.monotonic() - killed_s < DETECT_WITHIN_S


@pytest.mark.exhaustive
async def test_one_of_a_nodes_gateways_is_named_by_its_number(tmp_path: Path) -> None:
    started = scene(tmp_path, "wait", nodes=2, ranks=2, gateways=2)
    async with started as (coordinator, bench):
        await coordinator.wait_message("running")  # each rank has found its gateway
        gateways = bench.below("-m tests.fakes.agent_gateway")
        assert len(gateways) == 4
        os.kill(sorted(gateways)[3], signal.SIGKILL)
        first = (await ended(coordinator, bench)).failures[0]
        assert (first.code, first.site, first.node, first.gateway) == (
            "GATEWAY_EXITED",
            "a",
            1,
            3,
        ), first
        assert first.message == "gateway 3 of site a was killed by SIGKILL"
        assert first.log_path.endswith("node1/gateway3.log")


@pytest.mark.parametrize("action", [pytest.param("wait", marks=pytest.mark.exhaustive), "ignore"])
async def test_a_run_goes_on_when_its_coordinator_comes_back_and_stop_ends_it_within_the_grace(
    tmp_path: Path, action: str
) -> None:
    async with scene(tmp_path, action, lease_s=2.0) as (coordinator, bench):
        await coordinator.wait_for("ranks", lambda: "rank 1 waits" in coordinator.text("rank1"))
        coordinator.hang_up()
        await coordinator.wait_for(
            "a second hello", lambda: len(coordinator.all("hello")) == 2 or None
        )
        hello = coordinator.all("hello")[1].hello
        assert (hello.session, hello.run.run_id, hello.run.generation) == ("one", "r1", 1)
        assert len(bench.below("isthmus.sites.node.rank")) == 2
        stopped_s = time.monotonic()
        coordinator.say(stop=control.Stop(run_id="r1", generation=1, reason="x", grace_s=1.0))
        end = await ended(coordinator, bench)
        assert not end.succeeded
        assert not end.failures
        assert time.monotonic() - stopped_s < 5.0


async def test_a_killed_agent_leaves_no_process(tmp_path: Path) -> None:
    async with scene(tmp_path, "ignore") as (coordinator, bench):
        await coordinator.wait_for("ranks", lambda: "rank 1 waits" in coordinator.text("rank1"))
        assert len(bench.below("isthmus.sites.node.rank")) == 2
        os.kill(bench.process.pid, signal.SIGKILL)
        await bench.wait_gone(5.0)


async def test_without_a_coordinator_the_site_goes_on_for_a_while_then_stops_itself(
    tmp_path: Path,
) -> None:
    async with scene(
        *(tmp_path, "wait"), lease_s=1.0, detect_within="2s", coordinator_within="3s"
    ) as (coordinator, bench):
        await coordinator.wait_message("running")
        coordinator.leave()
        lost_s = time.monotonic()
        assert await bench.wait_ended() == 4, bench.log()
        assert 2.0 < time.monotonic() - lost_s < 3.0 + DETECT_WITHIN_S
        assert "the site goes on without one for 3 s at most" in bench.log()
        assert bench.below() == []


@pytest.mark.parametrize(
    ("signum", "status"),
    [(signal.SIGTERM, 143), pytest.param(signal.SIGINT, 130, marks=pytest.mark.exhaustive)],
)
async def test_a_signal_stops_the_run_and_says_so(
    tmp_path: Path, signum: signal.Signals, status: int
) -> None:
    async with scene(tmp_path, "wait") as (coordinator, bench):
        await coordinator.wait_message("running")
        bench.process.send_signal(signum)
        first = (await coordinator.wait_message("ended")).ended.failures[0]
        assert first.code == "SITE_LOST"
        assert signum.name in first.message
        assert await bench.wait_ended() == status, bench.log()
        assert bench.below() == []


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        ("fail", "PEER_LOST"),
        pytest.param("garbage", "INTERNAL", marks=pytest.mark.exhaustive),
        pytest.param("exit", "GATEWAY_EXITED", marks=pytest.mark.exhaustive),
    ],
)
async def test_what_a_gateway_says_is_passed_on(tmp_path: Path, fault: str, code: str) -> None:
    async with scene(tmp_path, "wait", fault=fault) as (coordinator, bench):
        first = (await ended(coordinator, bench)).failures[0]
        assert first.code == code, first
        assert not first.collateral
        assert first.site == ("c" if fault == "fail" else "a")
        assert first.exit_code == (3 if fault == "exit" else 0)


async def test_a_flood_of_metrics_and_logs_holds_up_nobody(tmp_path: Path) -> None:
    async with scene(tmp_path, "talk", "0", fault="flood") as (coordinator, bench):
        end = await ended(coordinator, bench)
        assert end.failures[0].rank == 0
        text = coordinator.text("rank0")
        assert "lines dropped" in text or text.count("rank0: line ") == 30_000
        assert "bytes cut]" in text
        assert "RuntimeError: the last words" in text
        assert coordinator.largest_batch_bytes <= 32 << 10
        assert all(each.ByteSize() <= 64 << 10 for each in coordinator.messages)
        assert coordinator.num_heartbeats > 2


async def test_what_the_system_refuses_is_told_and_the_agent_goes_on(tmp_path: Path) -> None:
    topology = topology_yaml()
    # Stands for a full disk: the gateway's log cannot be opened.
    (tmp_path / "state" / "r1" / "node0" / "gateway0.log").mkdir(parents=True)
    async with (
        agent_coordinator() as coordinator,
        agent_bench(coordinator, tmp_path, topology) as bench,
    ):
        await coordinator.wait_message("hello")
        coordinator.say(prepare=prepare(topology, job_yaml("done")))
        first = (await ended(coordinator, bench)).failures[0]
        assert first.code == "LAUNCH_FAILED"
        assert "node0/gateway0.log: " in first.message
        assert "Is a directory" in first.message
        bench.process.send_signal(signal.SIGTERM)
        assert await bench.wait_ended() == 0, bench.log()
