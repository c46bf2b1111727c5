"""Sessions of agents: who may join, and what becomes of a run whose agent is gone."""

import asyncio
from pathlib import Path

import grpc
import pytest

from orchestrator.core.leases import Leases
from protos.control.v1 import control_pb2 as pb
from tests.fakes.coordinators import FakeAgent, active, coordinating, run_scenario
from tests.fakes.worlds import topology_text

pytestmark = pytest.mark.slow


def test_a_broken_session_is_a_lost_site(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with coordinating(tmp_path) as bench:
            a, b = await active(bench, "a", "b")
            b.call.cancel()
            stop = (await a.hear("stop")).stop
            assert "site b" in stop.reason
            assert stop.grace_s == 1
            await a.end()
            ended = await bench.ended()
            assert (ended.reason_code, ended.failure.site) == ("SITE_LOST", "b")

    run_scenario(scenario())


def test_a_silent_agent_loses_its_lease(tmp_path: Path) -> None:
    async def scenario() -> None:
        topology = topology_text(detect_within="1s", start_within="20s")
        async with coordinating(tmp_path, topology) as bench:
            a, b = await active(bench, "a", "b")

            async def beat() -> None:
                for sequence in range(1000):
                    await a.say(heartbeat=pb.Heartbeat(sequence=sequence))
                    await asyncio.sleep(0.1)

            beating = asyncio.create_task(beat())
            try:
                code, detail = await b.end_of_session()
                assert code == grpc.StatusCode.ABORTED
                assert "its lease has ended" in detail
                ended = await bench.ended()
            finally:
                beating.cancel()
            assert (ended.reason_code, ended.failure.site) == ("SITE_LOST", "b")
            assert "silent for 1." in ended.reason

    run_scenario(scenario())


@pytest.mark.parametrize(
    ("fields", "code", "said"),
    [
        ({"site": "c"}, grpc.StatusCode.FAILED_PRECONDITION, "no site 'c'; there are a, b"),
        ({"topology_hash": "0" * 64}, grpc.StatusCode.FAILED_PRECONDITION, "another topology"),
        ({"protocol_min": 7, "protocol_max": 9}, grpc.StatusCode.FAILED_PRECONDITION, "7 to 9"),
        ({"incarnation": "a-2"}, grpc.StatusCode.ABORTED, "has an agent already, on host host-a"),
    ],
    ids=["site", "topology", "version", "second agent"],
)
def test_who_may_not_join(
    tmp_path: Path, fields: dict[str, object], code: grpc.StatusCode, said: str
) -> None:
    async def scenario() -> None:
        async with coordinating(tmp_path) as bench:
            await bench.join("a")
            refused = await bench.dial("a", **fields)
            status, detail = await refused.end_of_session()
            assert status == code
            assert said in detail

    run_scenario(scenario())


def test_the_same_agent_may_replace_its_own_session(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with coordinating(tmp_path) as bench:
            (old,) = await bench.join("a")
            (new,) = await bench.join("a")
            assert (await old.end_of_session())[0] == grpc.StatusCode.ABORTED
            await new.say(heartbeat=pb.Heartbeat(sequence=7))
            assert (await new.hear("heartbeat_ack")).heartbeat_ack.sequence == 7

    run_scenario(scenario())


def test_a_session_begins_with_hello_and_keeps_to_its_limits(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with coordinating(tmp_path) as bench:
            rude = FakeAgent("a", bench.stub.Session(timeout=60))
            await rude.say(heartbeat=pb.Heartbeat())
            code, detail = await rude.end_of_session()
            assert (code, "Hello" in detail) == (grpc.StatusCode.INVALID_ARGUMENT, True)
            (again,) = await bench.join("a")
            await again.say(digest=pb.Digest(names=["x" * 70_000]))
            code, detail = await again.end_of_session()
            assert (code, "limit" in detail) == (grpc.StatusCode.INVALID_ARGUMENT, True)

    run_scenario(scenario())


def test_a_site_that_is_lost_after_a_stall_tells_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with coordinating(tmp_path) as bench:
            a, b = await active(bench, "a", "b")
            monkeypatch.setattr(Leases, "stall_s", lambda _self, _now_s: 12.0)
            b.call.cancel()
            await a.hear("stop")
            await a.end()
            said = (await bench.ended()).failure.message
            assert "site b" in said
            assert "this coordinator had itself stood still for 12.0 s" in said

    run_scenario(scenario())
