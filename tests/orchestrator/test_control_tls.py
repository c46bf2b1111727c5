"""The coordinator's port with mutual TLS: attacks, each of which fails, and who gets through."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import shutil
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509

from isthmus.orchestrator import certificates
from isthmus.orchestrator.certificates import issue, make_authority, renew, revoke
from isthmus.orchestrator.client import coordinator_client
from isthmus.orchestrator.client.coordinator_client import Client
from isthmus.orchestrator.coordinator.service import CoordinatorService
from isthmus.protos.control.v1 import control_pb2, control_pb2_grpc
from isthmus.protos.control.v1.control_pb2 import AgentMessage
from isthmus.protos.errors import IsthmusError
from isthmus.protos.identities import CALLERS
from isthmus.protos.mutual_tls import CertificateError
from isthmus.protos.revocation import RevocationError
from isthmus.protos.security import TLS_VARIABLES, control_security
from isthmus.sites.agent.coordinator_channel import CoordinatorChannel
from isthmus.sites.agent.known_coordinator import KnownCoordinator
from isthmus.sites.agent.session import (
    Dialler,
    RefusedError,
    Session,
    UnreachableError,
    channel_options,
)
from tests.fakes.certified import DOMAIN, certify, files_in, held_by, speak_tls, tls_options
from tests.fakes.coordinators import Bench, FakeAgent, coordinating, status_of
from tests.fakes.methods import described_methods
from tests.fakes.waiting import until
from tests.fakes.worlds import topology_text

DENIED = grpc.StatusCode.PERMISSION_DENIED
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE
SERVER = f"coordinator.{DOMAIN}"


@pytest.fixture
def certs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with certificates, which this process uses."""
    speak_tls(monkeypatch, certify(tmp_path / "certs", "a", "b"))
    return tmp_path / "certs"


@asynccontextmanager
async def caller(
    bench: Bench, credentials: grpc.ChannelCredentials | None, server: str = SERVER
) -> AsyncIterator[control_pb2_grpc.CoordinatorAsyncStub]:
    """Give the stub of somebody with these credentials; None: without TLS."""
    options = tls_options(server)
    channel = (
        grpc.aio.insecure_channel(bench.address)
        if credentials is None
        else grpc.aio.secure_channel(bench.address, credentials, options=options)
    )
    async with channel:
        yield control_pb2_grpc.CoordinatorStub(channel)  # type: ignore[misc]


async def refused(bench: Bench, credentials: grpc.ChannelCredentials | None) -> str:
    """Return how a call fails that never gets a connection."""
    async with caller(bench, credentials) as stub:
        status, why = await status_of(stub.ListRuns(control_pb2.ListRunsRequest(), timeout=10))
        assert status is UNAVAILABLE, (status, why)
        return why


def reasons(bench: Bench) -> list[str]:
    """Return what was written down of callers that were refused."""
    events = bench.control._journal.events("", 0)
    return [each.detail["why"] for each in events if each.kind == "caller.refused"]


async def test_an_operator_gets_through(tmp_path: Path, certs: Path) -> None:
    async with coordinating(tmp_path / "state") as bench:
        assert (await bench.stub.ListRuns(control_pb2.ListRunsRequest(), timeout=10)).runs == []


async def test_without_a_certificate_of_the_authority_there_is_no_connection(
    tmp_path: Path, certs: Path
) -> None:
    foreign = tmp_path / "foreign"
    make_authority(foreign, DOMAIN)
    issue(foreign, "operator", 1.0)
    issue(certs, "operator", -0.001, replace=True)

    # The bench's own channel is not used, for its operator's certificate is the one that expired.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("isthmus.protos.mutual_tls.TlsSecurity._check_time", lambda *_: None)
        async with coordinating(tmp_path / "state") as bench:
            await refused(bench, None)
            await refused(bench, grpc.ssl_channel_credentials((certs / "ca.pem").read_bytes()))
            await refused(bench, held_by(foreign, "operator", ca=certs / "ca.pem"))
            await refused(bench, held_by(certs, "operator"))  # it has expired


@pytest.mark.parametrize("name", ["a.agent", "a.gateway", "coordinator"])
async def test_only_operators_do_what_operators_do(tmp_path: Path, certs: Path, name: str) -> None:
    async with (
        coordinating(tmp_path / "state") as bench,
        caller(bench, held_by(certs, name)) as stub,
    ):
        calls = {
            "Submit": stub.Submit(control_pb2.SubmitRequest(), timeout=10),
            "CancelRun": stub.CancelRun(control_pb2.CancelRunRequest(), timeout=10),
            "ListRuns": stub.ListRuns(control_pb2.ListRunsRequest(), timeout=10),
            "GetRun": stub.GetRun(control_pb2.GetRunRequest(), timeout=10),
        }
        for method, call in calls.items():
            assert (await status_of(call))[0] is DENIED, method  # type: ignore[arg-type]
        for stream in (
            stub.WatchRun(control_pb2.GetRunRequest(), timeout=10),
            stub.ReadLogs(control_pb2.ReadLogsRequest(), timeout=10),
            stub.ReadEvents(control_pb2.ReadEventsRequest(), timeout=10),
        ):
            assert await stream.code() is DENIED


@pytest.mark.parametrize("name", ["operator", "a.agent", "a.gateway", "a.joiner", "coordinator"])
async def test_each_call_is_for_one_role_and_for_nobody_else(
    tmp_path: Path, certs: Path, name: str
) -> None:
    role = name.rpartition(".")[2]
    if role == "joiner":
        issue(certs, name, 1.0)
    served = [each for each in described_methods() if each.startswith("/isthmus.control.")]

    async with (
        coordinating(tmp_path / "state") as bench,
        grpc.aio.secure_channel(
            bench.address, held_by(certs, name), options=tls_options(SERVER)
        ) as channel,
    ):
        for method in served:
            call: Any = channel.stream_stream(method)
            answers = call(iter([b""]), timeout=10)
            with contextlib.suppress(grpc.aio.AioRpcError):
                [_ async for _ in answers]  # its status comes after them
            is_refused = await answers.code() is DENIED
            is_refused &= "is not for" in await answers.details()  # one may be for more, too
            assert is_refused is (CALLERS.get(method) != role), method
        unlisted: Any = channel.stream_stream("/isthmus.control.v1.Coordinator/Nothing")
        code = await unlisted(iter([b""]), timeout=10).code()
        assert code is not grpc.StatusCode.OK


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("of another authority", "operator.pem: is of another authority than "),
        ("expired", "operator.pem: has expired ("),
        ("made by a clock ahead", "operator.pem: counts from "),
        ("another key", "operator.key: is not the key of "),
        ("all of another authority", "the certificate shown there is not believed here: it is of"),
        ("another party's server", "there is of another party than the one that ought to answer"),
        ("not believed there", "the certificate of this end is not believed there: it is of"),
        (
            "none",
            "perhaps it speaks TLS, and this process knows no certificates: name them in $IST",
        ),
    ],
)
async def test_a_bad_certificate_is_named_with_its_cure(
    tmp_path: Path, certs: Path, monkeypatch: pytest.MonkeyPatch, case: str, said: str
) -> None:
    """What an operator, and an agent, is told who has it: by the own files, or by the handshake."""
    foreign = tmp_path / "foreign"
    make_authority(foreign, DOMAIN)
    issue(foreign, "operator", 1.0)

    async with coordinating(tmp_path / "state") as bench:
        match case:
            case "of another authority":
                for kind in ("pem", "key"):
                    (certs / f"operator.{kind}").write_bytes(
                        (foreign / f"operator.{kind}").read_bytes()
                    )
            case "expired":
                renew(certs, "operator", -0.001)
            case "made by a clock ahead":
                monkeypatch.setattr(certificates, "CLOCK_SKEW", -timedelta(hours=1))
                renew(certs, "operator", 1.0)
            case "another key":
                pem = (certs / "operator.pem").read_bytes()
                issue(certs, "operator", 1.0, replace=True)
                (certs / "operator.pem").write_bytes(pem)
            case "all of another authority":
                speak_tls(monkeypatch, files_in(foreign))
            case "another party's server":
                monkeypatch.setattr(coordinator_client, "COORDINATOR", "a.agent")
            case "none":
                for variable in TLS_VARIABLES.values():
                    monkeypatch.delenv(variable)
            case "not believed there":
                monkeypatch.setattr("isthmus.protos.mutual_tls._is_signed", lambda *_: True)
                issue(foreign, "operator", 1.0, replace=True)
                (foreign / "ca.pem").write_bytes((certs / "ca.pem").read_bytes())
                speak_tls(monkeypatch, files_in(foreign))
        with pytest.raises(IsthmusError) as caught:
            await asyncio.to_thread(asked_by_a_client, bench.address)
        assert said in str(caught.value)


async def test_an_agent_says_once_why_it_is_not_let_in(
    tmp_path: Path, certs: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    speak_tls(monkeypatch, certify(tmp_path / "foreign", "a"))
    security = control_security("a.agent")
    speak_tls(monkeypatch, files_in(certs))
    caplog.set_level("INFO")

    async with coordinating(tmp_path / "state") as bench:
        timeouts = bench.control.timeouts
        channel = CoordinatorChannel(security, bench.address, channel_options(timeouts))
        known = KnownCoordinator(tmp_path, "a")
        dialler = Dialler(channel, bench.hello(site="a"), known, timeouts, lambda: None)
        with pytest.raises(UnreachableError, match="shown there is not believed here"):
            await dialler.dial(time.monotonic() + 2)
        await channel.close()
    assert caplog.text.count("coordinator not joined yet: the certificate shown there") == 1


def asked_by_a_client(address: str) -> None:
    with Client(address) as client:
        client.list_runs()


async def test_500_idle_connections_lock_nobody_out(tmp_path: Path, certs: Path) -> None:
    async with coordinating(tmp_path / "state") as bench:
        host, _, port = bench.address.rpartition(":")
        idle = [await asyncio.open_connection(host, int(port)) for _ in range(500)]
        assert (await bench.stub.ListRuns(control_pb2.ListRunsRequest(), timeout=10)).runs == []
        for _, writer in idle:
            writer.close()
        await asyncio.gather(*(each.wait_closed() for _, each in idle), return_exceptions=True)


async def test_operators_are_no_agents(tmp_path: Path, certs: Path) -> None:
    async with coordinating(tmp_path / "state") as bench:
        agent = FakeAgent("a", bench.stub.Session(timeout=60))  # refused before it says Hello
        assert (await agent.end_of_session())[0] is DENIED
        lines = control_pb2.ShipLogsRequest(site="a")
        assert (await status_of(bench.stub.ShipLogs(lines, timeout=10)))[0] is DENIED


async def test_a_site_speaks_as_itself_only_and_what_else_it_tries_is_written_down(
    tmp_path: Path, certs: Path
) -> None:
    async with (
        coordinating(tmp_path / "state") as bench,
        caller(bench, held_by(certs, "a.agent")) as stub,
    ):
        for site, welcome in (("b", False), ("a", True)):
            call = stub.Session(timeout=20)
            await call.write(AgentMessage(hello=bench.hello(site=site)))
            if welcome:
                answer = await call.read()
                assert isinstance(answer, control_pb2.CoordinatorMessage)
                assert answer.welcome.generation
            else:
                assert await call.code() is DENIED
                assert "speaks for site 'b'" in (await call.details() or "")
        lines = control_pb2.ShipLogsRequest(site="b", run_id="r", generation=1)
        assert (await status_of(stub.ShipLogs(lines, timeout=10)))[0] is DENIED
        assert [why.partition(" (")[0] for why in reasons(bench)] == ["the agent of site a"] * 2


async def test_a_server_with_another_partys_certificate_is_not_believed(
    tmp_path: Path, certs: Path
) -> None:
    async with (
        coordinating(tmp_path / "state") as bench,
        caller(bench, held_by(certs, "operator"), f"gateway.a.site.{DOMAIN}") as stub,
    ):
        call = stub.ListRuns(control_pb2.ListRunsRequest(), timeout=10)
        assert (await status_of(call))[0] is UNAVAILABLE


async def test_a_renewed_certificate_counts_without_a_restart(tmp_path: Path, certs: Path) -> None:
    async def serial(bench: Bench) -> int:
        host, _, port = bench.address.rpartition(":")
        process = await asyncio.create_subprocess_exec(
            *("openssl", "s_client", "-connect", f"{host}:{port}", "-alpn", "h2"),
            *("-cert", str(certs / "operator.pem"), "-key", str(certs / "operator.key")),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
        out, _ = await asyncio.wait_for(process.communicate(), 20)
        begin = out.index(b"-----BEGIN CERTIFICATE-----")
        return x509.load_pem_x509_certificate(out[begin:]).serial_number

    async with coordinating(tmp_path / "state") as bench:
        before = await serial(bench)
        renew(certs, "coordinator", 1.0)
        after = await serial(bench)
        (certs / "coordinator.pem").write_text("damaged")
        assert before != after == await serial(bench)


async def test_the_authority_is_changed_while_the_coordinator_goes_on(
    tmp_path: Path, certs: Path
) -> None:
    """In each order in which a party may get what is new; then the former one opens nothing."""
    names = ["a.agent", "b.agent", "coordinator", "operator"]
    former = tmp_path / "former"
    shutil.copytree(certs, former)
    old_ca = (certs / "ca.pem").read_bytes()

    async def listed(bench: Bench, folder: Path, ca: Path) -> None:
        async with caller(bench, held_by(folder, "operator", ca=ca)) as stub:
            await stub.ListRuns(control_pb2.ListRunsRequest(), timeout=10)

    async with coordinating(tmp_path / "state") as bench:
        certificates.change_authority(certs)
        both = certs / "ca.pem"
        assert both.read_bytes().endswith(old_ca)
        await listed(bench, former, former / "ca.pem")  # has nothing new yet
        await listed(bench, former, both)
        with pytest.raises(CertificateError, match="still of a former authority"):
            certificates.forget_former_authorities(certs)
        for name in names:
            assert certificates.is_due(certs, name, 1.0)
            renew(certs, name, 30.0)
            assert not certificates.is_due(certs, name, 1.0)
            # The coordinator believes both, and who has both believes it.
            await listed(bench, certs, both)
            await listed(bench, former, both)
        for name in certificates.of_former_authorities(certs):
            renew(certs, name, 30.0)
        certificates.forget_former_authorities(certs)
        await listed(bench, certs, both)
        await refused(bench, held_by(former, "operator", ca=both))
        await refused(bench, held_by(certs, "operator", ca=former / "ca.pem"))


@pytest.mark.parametrize("place", [0, 1])
async def test_an_authority_from_before_these_had_names_can_be_changed(
    tmp_path: Path, certs: Path, monkeypatch: pytest.MonkeyPatch, place: int
) -> None:
    """Both one subject and no key identifiers: as they were made once."""
    shutil.rmtree(certs)
    with monkeypatch.context() as patch:
        patch.setattr(x509.CertificateBuilder, "add_extension", without_key_identifiers)
        certify(certs, "a", "b")
    former = tmp_path / "former"
    shutil.copytree(certs, former)

    async with coordinating(tmp_path / "state") as bench:
        certificates.change_authority(certs)
        if place:
            renew(certs, "coordinator", 30.0)
        for folder in (former, certs):
            async with caller(bench, held_by(folder, "operator", certs / "ca.pem")) as stub:
                await stub.ListRuns(control_pb2.ListRunsRequest(), timeout=10)


def without_key_identifiers(
    builder: x509.CertificateBuilder, extension: x509.ExtensionType, critical: bool
) -> x509.CertificateBuilder:
    if isinstance(extension, x509.SubjectKeyIdentifier | x509.AuthorityKeyIdentifier):
        return builder
    return ADD_EXTENSION(builder, extension, critical)


ADD_EXTENSION = x509.CertificateBuilder.add_extension


async def test_an_agent_dials_again_with_its_renewed_certificate(
    tmp_path: Path, certs: Path
) -> None:
    shown: list[int] = []

    class Noting(CoordinatorService):
        async def Session(  # type: ignore[override]  # noqa: N802 - gRPC fixes the name
            self,
            _: object,
            context: Any,  # noqa: ANN401
        ) -> None:
            (pem,) = context.auth_context()["x509_pem_cert"]
            shown.append(x509.load_pem_x509_certificate(pem).serial_number)
            await context.abort(UNAVAILABLE, "not now")

    async with coordinating(tmp_path / "state", service=Noting) as bench:
        options = channel_options(bench.control.timeouts)
        channel = CoordinatorChannel(control_security("a.agent"), bench.address, options)
        known = KnownCoordinator(tmp_path, "a")
        hello = bench.hello(site="a")
        dialler = Dialler(channel, hello, known, bench.control.timeouts, lambda: None)
        dialling = asyncio.create_task(dialler.dial(time.monotonic() + 20))
        await until(lambda: bool(shown))
        renew(certs, "a.agent", 1.0)
        await until(lambda: len(set(shown)) == 2)
        (certs / "a.agent.pem").write_text("damaged")
        num_shown = len(shown)
        await until(lambda: len(shown) >= num_shown + 2)
        assert len(set(shown)) == 2
        dialling.cancel()
        await channel.close()


@asynccontextmanager
async def agents_of(bench: Bench, certs: Path, *sites: str) -> AsyncIterator[list[FakeAgent]]:
    """Give agents that have joined, each with a connection and the certificate of its own."""
    async with AsyncExitStack() as stack:
        agents = []
        for site in sites:
            stub = await stack.enter_async_context(caller(bench, held_by(certs, f"{site}.agent")))
            agent = FakeAgent(site, stub.Session(timeout=60))
            await agent.say(hello=bench.hello(site=site))
            agent.welcome = (await agent.hear("welcome")).welcome
            agents.append(agent)
        yield agents


async def whole(agent: FakeAgent) -> None:
    """Read a session to its end."""
    while await agent.call.read():
        pass


def told(bench: Bench, kind: str) -> list[Mapping[str, Any]]:
    """Return what was written down of a kind beside the runs."""
    return [each.detail for each in bench.control._journal.events("", 0) if each.kind == kind]


async def test_a_revoked_site_is_shut_out_while_the_coordinator_goes_on_and_a_new_certificate_counts(
    tmp_path: Path, certs: Path
) -> None:
    stolen = tmp_path / "stolen"
    shutil.copytree(certs, stolen)

    async with (
        coordinating(tmp_path / "state") as bench,
        agents_of(bench, certs, "a", "b") as (a, b),
    ):
        revoke(certs, "a")
        status, why = await a.end_of_session()
        assert (status, why) == (DENIED, "site a: its certificate was revoked")
        assert (await b.hear("revoked")).revoked.list == (certs / "ca.crl").read_text()
        async with caller(bench, held_by(stolen, "a.agent")) as stub:
            again = FakeAgent("a", stub.Session(timeout=20))
            status, why = await again.end_of_session()
            assert (status, why) == (
                DENIED,
                "the certificate of the agent of site a was revoked",
            )
        assert [each["why"].partition(";")[0] for each in told(bench, "caller.refused")] == [why]
        issue(certs, "a.agent", 30.0, replace=True)
        async with agents_of(bench, certs, "a") as (a,):
            assert (await a.hear("revoked")).revoked.list == (certs / "ca.crl").read_text()


async def test_a_run_goes_on_without_a_revoked_site_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certs = tmp_path / "certs"
    speak_tls(monkeypatch, certify(certs, "a", "b", "c"))

    async with (
        coordinating(tmp_path / "state", topology_text(3, min_sites=1)) as bench,
        agents_of(bench, certs, "a", "b", "c") as (a, b, c),
    ):
        await bench.submit()
        for agent in (a, b, c):
            await agent.prepare()
        for agent in (a, b, c):
            await agent.run()
        await bench.until(lambda run: run.state == control_pb2.RUN_STATE_ACTIVE)
        state = control_pb2.Metric(kind="state")
        await a.say(metrics=control_pb2.MetricBatch(metrics=[state]))
        for agent in (a, b, c):
            await agent.step()
        events = bench.control._journal.events
        await until(lambda: "run.first_step" in {each.kind for each in events("run-1", 0)})
        revoke(certs, "c")
        assert await status_of(whole(c)) == (DENIED, "site c: its certificate was revoked")
        for agent in (a, b):
            await agent.hear("revoked")
            await agent.hear("settle")  # c is to leave; and then it is gone
            settle = (await agent.hear("settle")).settle
            assert (settle.epoch, list(settle.lost), settle.stops) == (2, ["c"], True)
            settled = control_pb2.Settled(epoch=2, round=5, chain=7, chain_round=4)
            await agent.say(settled=settled)
        for agent in (a, b):
            await agent.hear("resume")
        dropped = control_pb2.SITE_STATE_DROPPED
        run = await bench.until(lambda run: run.sites[2].state == dropped)
        assert list(run.notes) == [
            "site c was dropped, and the run continues without it: its certificate was revoked"
        ]
        issue(certs, "c.agent", 30.0, replace=True)
        async with agents_of(bench, certs, "c") as (c,):
            await c.hear("revoked")
            stop = (await c.hear("stop")).stop
            c.run_id, c.generation = stop.run_id, stop.generation
            await c.end()  # nothing is left of it
            await bench.stub.AddSite(control_pb2.SiteRequest(site="c"), timeout=20)
            prepare = (await c.hear("prepare")).prepare
            assert prepare.returns
            assert prepare.revoked == (certs / "ca.crl").read_text()


async def test_a_list_that_is_damaged_older_or_gone_changes_nothing_and_is_named(
    tmp_path: Path, certs: Path
) -> None:
    stolen = tmp_path / "stolen"
    shutil.copytree(certs, stolen)
    listed = certs / "ca.crl"

    def is_told(bench: Bench, why: str) -> bool:
        return any(why in each["why"] for each in told(bench, "certificates.list_refused"))

    async def is_refused(bench: Bench) -> bool:
        async with caller(bench, held_by(stolen, "a.agent")) as stub:
            return (await FakeAgent("a", stub.Session(timeout=20)).end_of_session())[0] is DENIED

    async with coordinating(tmp_path / "state") as bench:
        revoke(certs, "a")
        older = listed.read_text()
        revoke(certs, "a")
        await until(lambda: len(told(bench, "certificates.revoked")) == 1)
        for text, why in (
            ("damaged", "it is no list of revoked certificates"),
            (older, "its number is 1, and that of the list in force 2"),
        ):
            listed.write_text(text)
            refused = f"a list of revoked certificates is not used: {listed}: {why}"
            await until(functools.partial(is_told, bench, refused))
            assert await is_refused(bench)
    listed.unlink()
    async with coordinating(tmp_path / "state") as bench:  # the next one has it, too
        assert await is_refused(bench)


async def test_a_coordinator_does_not_begin_with_a_list_that_it_cannot_use(
    tmp_path: Path, certs: Path
) -> None:
    (certs / "ca.crl").write_text("damaged")

    with pytest.raises(RevocationError, match=r"ca.crl: it is no list of revoked certificates"):
        async with coordinating(tmp_path / "state"):
            pass


async def test_an_agent_whose_certificate_is_revoked_ends_by_name(
    tmp_path: Path, certs: Path
) -> None:
    async with coordinating(tmp_path / "state") as bench:
        timeouts = bench.control.timeouts
        security = control_security("a.agent")
        channel = CoordinatorChannel(security, bench.address, channel_options(timeouts))
        known = KnownCoordinator(tmp_path, "a")
        dialler = Dialler(channel, bench.hello(site="a"), known, timeouts, lambda: None)
        session = Session(*await dialler.dial(time.monotonic() + 20), dialler)
        serving = asyncio.create_task(session.serve(lambda _: None))
        revoke(certs, "a")
        with pytest.raises(RefusedError, match="site a: its certificate was revoked") as caught:
            await serving
        assert caught.value.code == "PERMISSION_DENIED"
        await channel.close()


async def test_a_certificate_that_ends_soon_is_warned_of_while_nothing_connects(
    certs: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("isthmus.protos.mutual_tls.WATCH_S", 0.02)
    issue(certs, "a.agent", 13.5, replace=True)

    watching = asyncio.create_task(control_security("a.agent").watch())
    await until(lambda: "a.agent.pem: ends in 13.5 days: renew it" in caplog.text)
    issue(certs, "a.agent", -0.001, replace=True)
    await until(lambda: "a.agent.pem: has expired" in caplog.text)
    watching.cancel()
