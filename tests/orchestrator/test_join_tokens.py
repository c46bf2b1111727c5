"""Join tokens: one gets a site its certificates, once; attacks on them fail."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

import grpc
import pytest

from isthmus.orchestrator.certificates import make_authority, make_token, site_files
from isthmus.orchestrator.coordinator.joins import Joins
from isthmus.orchestrator.joining import join
from isthmus.protos.control.v1 import control_pb2
from isthmus.protos.control.v1.control_pb2 import AgentMessage
from isthmus.protos.control.v1.control_pb2_grpc import CoordinatorStub
from isthmus.protos.errors import IsthmusError, PermissionDeniedError, StateConflictError
from isthmus.protos.join_tokens import BadTokenError, JoinToken
from isthmus.protos.mutual_tls import TlsFiles
from isthmus.protos.security import control_security
from tests.fakes.certified import DOMAIN, certify, held_by, speak_tls, tls_options
from tests.fakes.coordinators import Bench, coordinating, status_of

DENIED = grpc.StatusCode.PERMISSION_DENIED
SERVER = f"coordinator.{DOMAIN}"


@pytest.fixture
def certs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The operator's folder, which this process uses."""
    speak_tls(monkeypatch, certify(tmp_path / "certs", "a", "b"))
    return tmp_path / "certs"


async def offered(bench: Bench, certs: Path, site: str = "a", hours: float = 1.0) -> JoinToken:
    """Make a token, and have the coordinator keep what it is good for."""
    token = make_token(certs, site, hours / 24)
    request = control_pb2.OfferJoinRequest(
        site=site,
        holder=token.holder,
        ends_wall_s=time.time() + 3600 * hours,
        sealed=token.seal(site_files(certs, site, 1.0)),
    )
    await bench.stub.OfferJoin(request, timeout=10)
    return token


def kinds(bench: Bench) -> list[str]:
    return [each.kind for each in bench.control._journal.events("", 0)]


async def test_a_token_gets_a_site_its_certificates_once(
    tmp_path: Path, certs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = tmp_path / "there" / "certs"
    own = TlsFiles(
        ca=str(there / "ca.pem"), cert=f"{there}/{{name}}.pem", key=f"{there}/{{name}}.key"
    )

    async with coordinating(tmp_path / "state") as bench:
        token_path = tmp_path / "a.token"
        token_path.write_text((await offered(bench, certs)).text() + "\n")
        with pytest.MonkeyPatch.context() as patch:
            speak_tls(patch, own)
            assert await asyncio.to_thread(join, token_path, "a", bench.address)
            security = control_security("a.agent")
            options = [("grpc.enable_http_proxy", 0)]
            async with security.aio_channel(bench.address, options, "coordinator") as channel:
                call = CoordinatorStub(channel).Session(timeout=20)  # type: ignore[call-arg]
                await call.write(AgentMessage(hello=bench.hello(site="a")))  # type: ignore[attr-defined]
                assert (await call.read()).welcome.generation  # type: ignore[attr-defined]
            assert not await asyncio.to_thread(join, token_path, "a", bench.address)
            assert {path.stat().st_mode & 0o777 for path in there.glob("*.key")} == {0o600}
            # Somebody has copied the token, and comes later.
            for path in there.iterdir():
                path.unlink()
            with pytest.raises(PermissionDeniedError, match="was used before"):
                await asyncio.to_thread(join, token_path, "a", bench.address)
        assert kinds(bench)[-3:] == ["join.offered", "join.used", "caller.refused"]
        assert list((tmp_path / "state" / "joins").iterdir()) == []


async def test_who_has_a_token_can_do_nothing_else_and_nobody_else_can_join(
    tmp_path: Path, certs: Path
) -> None:
    async with coordinating(tmp_path / "state") as bench:
        token = await offered(bench, certs)
        shown = grpc.ssl_channel_credentials(token.ca, token.key, token.cert)
        async with grpc.aio.secure_channel(
            bench.address, shown, options=tls_options(SERVER)
        ) as channel:
            stub = CoordinatorStub(channel)
            for call in (
                stub.ListRuns(control_pb2.ListRunsRequest(), timeout=10),
                stub.ShipLogs(control_pb2.ShipLogsRequest(site="a"), timeout=10),
                stub.OfferJoin(control_pb2.OfferJoinRequest(site="a"), timeout=10),
            ):
                assert (await status_of(call))[0] is DENIED  # type: ignore[arg-type]
        for name in ("a.agent", "b.gateway", "operator"):
            async with grpc.aio.secure_channel(
                bench.address, held_by(certs, name), options=tls_options(SERVER)
            ) as channel:
                joining = CoordinatorStub(channel).Join(control_pb2.JoinRequest(), timeout=10)
                assert (await status_of(joining))[0] is DENIED, name  # type: ignore[arg-type]
        assert await asyncio.to_thread(token.exchange, bench.address)


async def test_a_token_that_was_never_offered_or_has_ended_is_refused(
    tmp_path: Path, certs: Path
) -> None:
    async with coordinating(tmp_path / "state") as bench:
        unknown = make_token(certs, "a", 1.0)
        with pytest.raises(PermissionDeniedError, match="never offered"):
            await asyncio.to_thread(unknown.exchange, bench.address)
        expired = make_token(certs, "a", -0.001)
        with pytest.raises(IsthmusError):
            await asyncio.to_thread(expired.exchange, bench.address)
        late = await offered(bench, certs)
        (path,) = (tmp_path / "state" / "joins").iterdir()
        path.write_text(json.dumps({**json.loads(path.read_text()), "ends_wall_s": 1.0}))
        with pytest.raises(PermissionDeniedError):
            await asyncio.to_thread(late.exchange, bench.address)


async def test_a_token_is_good_until_its_use_is_known_and_the_answer_comes_last(
    tmp_path: Path, certs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dies(_joins: Joins, _holder: str) -> None:
        raise SystemExit("killed")

    async with coordinating(tmp_path / "state") as bench:
        token = await offered(bench, certs)
        with monkeypatch.context() as patch:
            patch.setattr(Joins, "forget", dies)
            with pytest.raises(SystemExit):
                bench.control.use_join(token.holder, "a")
        assert kinds(bench)[-1] == "join.used"
        assert await asyncio.to_thread(token.exchange, bench.address)
        assert list((tmp_path / "state" / "joins").iterdir()) == []


async def test_a_disk_that_takes_no_offer_is_named(tmp_path: Path, certs: Path) -> None:
    async with coordinating(tmp_path / "state") as bench:
        (tmp_path / "state" / "joins").write_text("a file where the folder belongs")
        code, told = await status_of(offered(bench, certs))
        assert code is grpc.StatusCode.ALREADY_EXISTS
        assert told == f"at the coordinator: {tmp_path}/state/joins: File exists"


async def test_nobody_but_the_own_coordinator_learns_anything(tmp_path: Path, certs: Path) -> None:
    foreign = tmp_path / "foreign"
    make_authority(foreign, DOMAIN)
    other = make_token(foreign, "a", 1.0)

    async with coordinating(tmp_path / "state") as bench:
        with pytest.raises(IsthmusError):  # the server's certificate is not of its authority
            await asyncio.to_thread(other.exchange, bench.address)
        assert "join.used" not in kinds(bench)


def test_what_is_sealed_is_for_one_token_and_cannot_be_changed(certs: Path) -> None:
    token, other = make_token(certs, "a", 1.0), make_token(certs, "a", 1.0)
    sealed = token.seal({"a.agent.pem": b"x"})
    assert JoinToken.of_text(token.text()).open(sealed) == {"a.agent.pem": b"x"}
    with pytest.raises(BadTokenError):
        other.open(sealed)
    with pytest.raises(BadTokenError):
        token.open(sealed[:-1] + bytes([sealed[-1] ^ 1]))
    assert b"PRIVATE" not in token.seal(site_files(certs, "a", 1.0))


@pytest.mark.parametrize("text", ["", "isthmus-join-", "isthmus-join-AAAA", "x" * 9000])
def test_what_is_no_token_is_told(text: str) -> None:
    with pytest.raises(BadTokenError, match="no join token"):
        JoinToken.of_text(text)


def test_a_token_of_another_site_or_authority_is_refused(
    tmp_path: Path, certs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "token"
    path.write_text(make_token(certs, "b", 1.0).text())
    there = tmp_path / "there"
    speak_tls(
        monkeypatch,
        TlsFiles(ca=f"{there}/ca.pem", cert=f"{there}/{{name}}.pem", key=f"{there}/{{name}}.key"),
    )
    with pytest.raises(BadTokenError, match="is for site b"):
        join(path, "a", "127.0.0.1:1")
    there.mkdir()
    (there / "ca.pem").write_text("another")
    with pytest.raises(StateConflictError, match="another authority's"):
        join(path, "b", "127.0.0.1:1")
