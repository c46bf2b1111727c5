"""Who is kept out of the coordinator's port on loopback: attacks, each of which fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import pytest

from protos.control.v1 import control_pb2, control_pb2_grpc
from protos.security import HEADER, token_path
from tests.fakes.coordinators import Bench, coordinating, run_scenario, status_of

UNAUTHENTICATED = grpc.StatusCode.UNAUTHENTICATED


def stranger(bench: Bench, channel: grpc.aio.Channel, shown: str | None) -> dict[str, Any]:
    """Begin each unary call of the contract as somebody who shows something else."""
    metadata = () if shown is None else ((HEADER, shown),)
    stub: control_pb2_grpc.CoordinatorAsyncStub = control_pb2_grpc.CoordinatorStub(channel)  # type: ignore[assignment]
    return {
        "Submit": stub.Submit(control_pb2.SubmitRequest(), metadata=metadata, timeout=10),
        "CancelRun": stub.CancelRun(control_pb2.CancelRunRequest(), metadata=metadata, timeout=10),
        "ListRuns": stub.ListRuns(control_pb2.ListRunsRequest(), metadata=metadata, timeout=10),
        "ShipLogs": stub.ShipLogs(control_pb2.ShipLogsRequest(), metadata=metadata, timeout=10),
        "GetRun": stub.GetRun(control_pb2.GetRunRequest(), metadata=metadata, timeout=10),
    }


@pytest.mark.parametrize("shown", [None, "", "Bearer ", "Bearer " + "0" * 64, "Basic cm9vdDo="])
def test_no_call_without_the_secret(tmp_path: Path, shown: str | None) -> None:
    async def scenario() -> None:
        async with (
            coordinating(tmp_path) as bench,
            grpc.aio.insecure_channel(bench.address) as channel,
        ):
            for name, call in stranger(bench, channel, shown).items():
                status, why = await status_of(call)
                assert status is UNAUTHENTICATED, name
                assert str(token_path()) in why
                assert "ISTHMUS_TOKEN_FILE" in why

    run_scenario(scenario())


def test_a_session_is_refused_before_it_says_anything(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with (
            coordinating(tmp_path) as bench,
            grpc.aio.insecure_channel(bench.address) as channel,
        ):
            stub: control_pb2_grpc.CoordinatorAsyncStub = control_pb2_grpc.CoordinatorStub(channel)  # type: ignore[assignment]
            strangers = [stub.Session(timeout=20) for _ in range(600)]
            assert {await each.code() for each in strangers} == {UNAUTHENTICATED}
            (agent,) = await bench.join("a")
            assert agent.welcome.generation

    run_scenario(scenario())


def test_the_secret_is_not_what_a_server_answers(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with (
            coordinating(tmp_path) as bench,
            grpc.aio.insecure_channel(bench.address) as channel,
        ):
            call = stranger(bench, channel, None)["GetRun"]
            _, why = await status_of(call)
            assert token_path().read_text() not in why

    run_scenario(scenario())
