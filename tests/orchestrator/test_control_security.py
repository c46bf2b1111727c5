"""Who is kept out of the coordinator's port on loopback: attacks, each of which fails."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest

from isthmus.orchestrator.cli.views import log_line
from isthmus.orchestrator.coordinator import service
from isthmus.orchestrator.run_folder import log_files
from isthmus.protos import security
from isthmus.protos.control.v1 import control_pb2, control_pb2_grpc
from isthmus.protos.errors import RemoteProtocolError
from isthmus.protos.identities import CALLERS
from isthmus.protos.limits import CONNECTION_LIMITS, CONTROL_CHANNEL_BYTES, CONTROL_MESSAGE_BYTES
from isthmus.protos.mutual_streams import HANDSHAKE_S
from isthmus.protos.security import HEADER, token_path
from isthmus.topology.spec.timeouts import Timeouts
from isthmus.topology.spec.world import Detection
from tests.fakes.coordinators import Bench, coordinating, status_of

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
async def test_no_call_without_the_secret(tmp_path: Path, shown: str | None) -> None:
    async with (
        coordinating(tmp_path) as bench,
        grpc.aio.insecure_channel(bench.address) as channel,
    ):
        for name, call in stranger(bench, channel, shown).items():
            status, why = await status_of(call)
            assert status is UNAUTHENTICATED, name
            assert str(token_path()) in why
            assert "ISTHMUS_TOKEN_FILE" in why


async def test_a_method_without_a_role_is_refused_as_with_tls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So who adds a method and no role for it hears of it in a test on loopback."""
    monkeypatch.delitem(CALLERS, "/isthmus.control.v1.Coordinator/ListRuns")

    async with coordinating(tmp_path) as bench:
        call = bench.stub.ListRuns(control_pb2.ListRunsRequest(), timeout=10)
        status, why = await status_of(call)
        assert status is grpc.StatusCode.PERMISSION_DENIED
        assert "ListRuns is for nobody" in why


async def test_a_session_is_refused_before_it_says_anything(tmp_path: Path) -> None:
    async with (
        coordinating(tmp_path) as bench,
        grpc.aio.insecure_channel(bench.address) as channel,
    ):
        stub: control_pb2_grpc.CoordinatorAsyncStub = control_pb2_grpc.CoordinatorStub(channel)  # type: ignore[assignment]
        strangers = [stub.Session(timeout=20) for _ in range(600)]
        assert {await each.code() for each in strangers} == {UNAUTHENTICATED}
        (agent,) = await bench.join("a")
        assert agent.welcome.generation


async def test_the_secret_is_not_what_a_server_answers(tmp_path: Path) -> None:
    async with (
        coordinating(tmp_path) as bench,
        grpc.aio.insecure_channel(bench.address) as channel,
    ):
        call = stranger(bench, channel, None)["GetRun"]
        _, why = await status_of(call)
        assert token_path().read_text() not in why


async def test_sessions_without_hello_end_soon_and_lock_nobody_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "HELLO_S", 0.5)

    async with coordinating(tmp_path) as bench:
        idle = [bench.stub.Session(timeout=20) for _ in range(300)]
        ends = [await each.code() for each in idle]
        assert set(ends) <= {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNAVAILABLE}
        assert ends.count(grpc.StatusCode.INVALID_ARGUMENT) == service.UNGREETED_MAX
        await bench.join("a")


async def test_500_idle_connections_lock_nobody_out(tmp_path: Path) -> None:
    async with coordinating(tmp_path) as bench:
        host, _, port = bench.address.rpartition(":")
        idle = [await asyncio.open_connection(host, int(port)) for _ in range(500)]
        await bench.join("a")
        for _, writer in idle:
            writer.close()


async def test_what_never_speaks_http_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = (("grpc.server_handshake_timeout_ms", 500), ("grpc.max_connection_idle_ms", 500))
    monkeypatch.setattr(security, "CONNECTION_LIMITS", limits)

    async with coordinating(tmp_path) as bench:
        host, _, port = bench.address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        async with asyncio.timeout(20):
            await reader.read()  # until the end
        writer.close()


async def test_a_connection_without_a_call_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It speaks HTTP/2, answers pings if need be, and asks for nothing."""
    limits = (("grpc.server_handshake_timeout_ms", 500), ("grpc.max_connection_idle_ms", 500))
    monkeypatch.setattr(security, "CONNECTION_LIMITS", limits)
    preface, settings = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\0\0\0\4\0\0\0\0\0"
    acknowledgement = b"\0\0\0\4\1\0\0\0\0"

    async with coordinating(tmp_path) as bench:
        host, _, port = bench.address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(preface + settings + acknowledgement)
        async with asyncio.timeout(20):
            said = await reader.read()  # until the end
        assert b"\7" in said, "no GOAWAY"
        writer.close()


def test_what_is_idle_or_half_open_is_closed_within_a_minute() -> None:
    limits = dict(CONNECTION_LIMITS)
    assert limits["grpc.server_handshake_timeout_ms"] <= 60_000
    assert limits["grpc.max_connection_idle_ms"] <= 60_000
    for within_s in (2.0, 15.0, 60.0):
        timeouts = Timeouts.derive(Detection(detect_within_s=within_s, start_within_s=600.0))
        asked_s = timeouts.keepalive_time_s + timeouts.keepalive_timeout_s
        assert asked_s <= min(60.0, within_s)
    assert HANDSHAKE_S <= 60.0


async def test_a_hello_has_a_size(tmp_path: Path) -> None:
    async with coordinating(tmp_path) as bench:
        agent = await bench.dial("a", host="x" * CONTROL_MESSAGE_BYTES)
        status, why = await agent.end_of_session()
        assert status is grpc.StatusCode.INVALID_ARGUMENT
        assert "the limit is 65536" in why


def test_log_sources_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_files, "SOURCES_MAX", 3)
    writer = log_files.LogWriter(tmp_path)
    lines = [control_pb2.LogLine(site="a", source=f"rank{rank}", text="x") for rank in range(4)]
    writer.append("a", lines[:3])
    with pytest.raises(RemoteProtocolError, match="more than 3 log sources"):
        writer.append("a", lines[3:])
    writer.append("a", lines[:1])


@pytest.mark.parametrize("source", ["../x", "rank0/../../x", "/etc/x", "", "rank0\n", "RANK0"])
def test_a_log_source_is_no_path(tmp_path: Path, source: str) -> None:
    line = control_pb2.LogLine(site="a", source=source, text="x")
    with pytest.raises(RemoteProtocolError, match="a log line of"):
        log_files.LogWriter(tmp_path).append("a", [line])


@pytest.mark.parametrize("has_colour", [False, True])
def test_a_log_line_does_not_steer_the_terminal(has_colour: bool) -> None:
    text = "\x1b]0;owned\x07\x1b[2Jfine\tstill\x9b31m\u202e"
    line = control_pb2.LogLine(site="a", source="rank0", text=text)
    shown = log_line(line, has_colour=has_colour)
    assert shown == "a/rank0 | fine\tstill�31m�"


@pytest.mark.parametrize("run_id", ["../x", "a/b", "/etc/x", ".", "..", "", "x\x1b[2J", "<b>x</b>"])
async def test_a_runs_name_is_no_path_and_no_markup(tmp_path: Path, run_id: str) -> None:
    async with coordinating(tmp_path / "state") as bench:
        status, _ = await status_of(bench.submit(run_id))
        assert status is grpc.StatusCode.INVALID_ARGUMENT
        assert not bench.runs.exists()


async def test_a_message_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    async with coordinating(tmp_path) as bench:
        document = control_pb2.Document(text="x" * (CONTROL_CHANNEL_BYTES + 1))
        options = [("grpc.max_send_message_length", -1)]
        shown = security.control_security()
        async with shown.aio_channel(bench.address, options, "coordinator") as channel:
            call: Any = channel.unary_unary("/isthmus.control.v1.Coordinator/Submit")
            request = control_pb2.SubmitRequest(run_id="r", job=document).SerializeToString()
            status, _ = await status_of(call(request, timeout=20))
        assert status is grpc.StatusCode.RESOURCE_EXHAUSTED
