"""Gateways with mutual TLS: tensors cross, and attacks on the port fail."""

from __future__ import annotations

import asyncio
import logging
import shutil
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from isthmus.orchestrator.certificates import (
    change_authority,
    issue,
    make_authority,
    renew,
    revoke,
)
from isthmus.protos import mutual_tls
from isthmus.protos.exchange.v1 import exchange_pb2, exchange_pb2_grpc
from isthmus.protos.identities import CALLERS
from isthmus.protos.security import exchange_security
from isthmus.sites.gateway.agent_port import Listening, Said
from isthmus.sites.gateway.config import PeerLink
from isthmus.sites.gateway.links import frame_listener
from isthmus.sites.gateway.links.status import CallError
from isthmus.sites.gateway.links.transport import HELLO_METHOD, PUSH_METHOD, SESSION_KEY, Peer
from isthmus.sites.gateway.probing.probing_gateway import ProbingGateway
from isthmus.sites.gateway.transfer.donors import donor
from isthmus.sites.gateway.transfer.state_fetch import StateFetch
from isthmus.sites.local.entry_folder import entry_folder
from isthmus.topology.spec.job import Probe
from tests.fakes.certified import DOMAIN, certify, held_by, speak_tls, tls_options
from tests.fakes.gateway_process import GatewayProcess
from tests.fakes.gateway_sites import (
    GATHER_2,
    Member,
    gateway_config,
    gateways,
    join,
    leave,
    reduce_once,
    through_proxies,
)
from tests.fakes.library_calls import channel_to, hello_by_library, push_by_library
from tests.fakes.methods import FRAME_METHODS, described_methods
from tests.fakes.waiting import wait_for
from tests.sites.test_state_transfer import EPOCH, files_of, make_state

SITES = ("ash", "birch")
PACKAGE = "isthmus.exchange.v1"
EVERY_METHOD = described_methods() | FRAME_METHODS
DENIED = grpc.StatusCode.PERMISSION_DENIED
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE
UNAUTHENTICATED = grpc.StatusCode.UNAUTHENTICATED
DEADLINE_S = 20.0
LASTS_S = 1.0
"""A certificate that ends while a test goes on."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


@pytest.fixture
def certs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with certificates, which this process uses."""
    folder = tmp_path / "certs"
    speak_tls(monkeypatch, certify(folder, *SITES))
    return folder


def dialled(port: int, credentials: grpc.ChannelCredentials) -> grpc.Channel:
    """Return a channel to the second site's gateway."""
    options = tls_options(f"gateway.{SITES[1]}.site.{DOMAIN}")
    return grpc.secure_channel(f"127.0.0.1:{port}", credentials, options=options)


def hello(channel: grpc.Channel, folder: Path, site: int = 0) -> str:
    """Say Hello as a site; return the session."""
    return hello_by_library(channel, gateway_config(folder, GATHER_2, site)).session


def push(channel: grpc.Channel, session: str) -> grpc.StatusCode:
    """Return how a Push of what is no frame fails."""
    metadata = ((SESSION_KEY, session),)
    return status_of(lambda: push_by_library(channel, PUSH_METHOD, [b"x" * 64], metadata))


def status_of(begin: Callable[[], object]) -> grpc.StatusCode:
    """Return how a call fails."""
    with pytest.raises(grpc.RpcError) as caught:
        begin()
    status: grpc.StatusCode = caught.value.code()
    return status


def test_tensors_cross(tmp_path: Path, certs: Path) -> None:
    configs = [gateway_config(tmp_path, GATHER_2, site) for site in range(2)]
    with gateways(configs) as members, ExitStack() as stack:
        ranks = [join(stack, member) for member in members]
        result, _ = reduce_once(ranks, 0, 5000, [1.0, 3.0], seed=1)
        assert np.isfinite(result).all()
        leave(members, ranks)


def test_links_are_made_while_the_authority_is_changed(tmp_path: Path, certs: Path) -> None:
    """One site has its new certificate, the other one not yet."""
    change_authority(certs)
    renew(certs, f"{SITES[0]}.gateway", 30.0)
    configs = [gateway_config(tmp_path, GATHER_2, site) for site in range(2)]
    with gateways(configs) as members, ExitStack() as stack:
        ranks = [join(stack, member) for member in members]
        result, _ = reduce_once(ranks, 0, 5000, [1.0, 3.0], seed=1)
        assert np.isfinite(result).all()
        leave(members, ranks)


def test_the_state_that_a_returning_site_takes_over_crosses(tmp_path: Path, certs: Path) -> None:
    configs = [
        gateway_config(tmp_path, GATHER_2, site, state_folder=str(tmp_path / SITES[site]))
        for site in range(2)
    ]
    make_state(tmp_path / SITES[1], 9 << 20)
    with gateways(configs) as members:
        peer = members[1].peer
        taken = entry_folder(tmp_path / "taken", EPOCH)
        donors = [donor(configs[0], peer, lambda: peer)]
        asyncio.run(StateFetch(donors, EPOCH, taken, timeout_s=DEADLINE_S).run())
    assert files_of(tmp_path / "taken") == files_of(tmp_path / SITES[1])


def test_only_gateways_of_the_deployment_get_in_and_only_as_themselves(
    tmp_path: Path, certs: Path
) -> None:
    foreign = tmp_path / "foreign"
    make_authority(foreign, DOMAIN)
    issue(foreign, "ash.gateway", 1.0)
    ca = certs / "ca.pem"
    configs = [gateway_config(tmp_path, GATHER_2, site) for site in range(2)]
    with gateways(configs) as members:
        port = members[1].peer.port
        with dialled(port, held_by(certs, "ash.gateway")) as own:
            session = hello(own, tmp_path)
        calls: tuple[Callable[[grpc.Channel], grpc.StatusCode], ...] = (
            lambda channel: status_of(lambda: hello(channel, tmp_path)),
            lambda channel: push(channel, session),
        )
        for call in calls:
            with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
                assert call(channel) is UNAVAILABLE
            with dialled(port, held_by(foreign, "ash.gateway", ca=ca)) as channel:
                assert call(channel) is UNAVAILABLE
            for name in ("ash.agent", "coordinator", "operator"):
                with dialled(port, held_by(certs, name)) as channel:
                    assert call(channel) is DENIED, name
            with dialled(port, held_by(certs, "birch.gateway")) as channel:
                assert call(channel) is DENIED


@contextmanager
def probing(folder: Path) -> Iterator[int]:
    """Serve the second site's gateway, which only measures links; give its port."""
    written: list[Said] = []
    config = gateway_config(folder, GATHER_2, 1)
    gateway = ProbingGateway(config, Probe(connections=(2,)), written.append)
    gateway.start()
    try:
        (listening,) = written
        assert isinstance(listening, Listening)
        yield listening.port
    finally:
        gateway.stop()
        gateway.close()


@contextmanager
def training(folder: Path) -> Iterator[int]:
    """Serve the gateways of two sites, which reduce buckets; give the second one's port."""
    with gateways([gateway_config(folder, GATHER_2, site) for site in range(2)]) as members:
        yield members[1].peer.port


KINDS = {"training": training, "probing": probing}


def served_by(kind: str) -> set[str]:
    """Return the methods that a gateway of a kind serves."""
    services = {"training": ("Exchange", "State"), "probing": ("Exchange", "Probe")}[kind]
    prefixes = tuple(f"/{PACKAGE}.{service}/" for service in services)
    return {each for each in EVERY_METHOD if each.startswith(prefixes)}


def asked(method: str, port: int, keys: grpc.ChannelCredentials, session: str = "") -> str:
    """Return how a call ends that says nothing beside its session: its status, and why."""
    with dialled(port, keys) as channel:
        call: Any = channel.stream_stream(method)
        named = exchange_pb2.LeaveRequest(session=session).SerializeToString()
        said = named if method.endswith("/Leave") else b""
        answers = call(iter([said]), metadata=((SESSION_KEY, session),), timeout=DEADLINE_S)
        return f"{answers.code().name}: {answers.details()}"


@pytest.mark.parametrize("kind", KINDS)
def test_each_call_between_gateways_is_for_them_and_for_nobody_else(
    tmp_path: Path, certs: Path, kind: str
) -> None:
    """A gateway gets as far as being asked who it is; every other role is refused before."""
    issue(certs, "ash.joiner", 1.0)
    own = held_by(certs, "ash.gateway")
    wrong = ("operator", "coordinator", "ash.agent", "birch.agent", "ash.joiner")
    served = served_by(kind)
    absent = EVERY_METHOD - served
    with KINDS[kind](tmp_path) as port:
        for method in served:
            who = "PERMISSION_DENIED: the gateway of site ash" if "Hello" in method else "ABORTED"
            assert asked(method, port, own).startswith(who), method
            for name in wrong:
                refused = asked(method, port, held_by(certs, name))
                name_of_method = method.rpartition("/")[2]
                assert refused.startswith(f"PERMISSION_DENIED: {name_of_method} is not for "), name
        for method in (*absent, f"/{PACKAGE}.State/Nothing"):
            assert asked(method, port, own).startswith("UNIMPLEMENTED"), method


@pytest.mark.parametrize("kind", KINDS)
def test_no_call_is_let_in_with_the_session_of_another_site(
    tmp_path: Path, certs: Path, kind: str
) -> None:
    other = held_by(certs, "birch.gateway")
    with KINDS[kind](tmp_path) as port:
        with dialled(port, held_by(certs, "ash.gateway")) as own:
            session = hello(own, tmp_path)
        for method in served_by(kind):
            refused = asked(method, port, other, session)
            assert refused.startswith("PERMISSION_DENIED: the gateway of site birch ("), method
            assert "speaks for site" in refused


def test_a_session_is_of_no_use_to_another_site(tmp_path: Path, certs: Path) -> None:
    configs = [gateway_config(tmp_path, GATHER_2, site) for site in range(2)]
    with gateways(configs) as members:
        port = members[1].peer.port
        with (
            dialled(port, held_by(certs, "ash.gateway")) as own,
            dialled(port, held_by(certs, "birch.gateway")) as other,
        ):
            session = hello(own, tmp_path)
            assert push(other, session) is DENIED
            request = exchange_pb2.LeaveRequest(session=session, code="RANK_LOST", message="forged")
            stub = exchange_pb2_grpc.ExchangeStub(other)
            assert status_of(lambda: stub.Leave(request, timeout=DEADLINE_S)) is DENIED
    assert not [each for each in members[1].messages if each["op"] == "failed"]


@pytest.mark.parametrize("record", [b"\x17\x03\x03\x01\x00" + b"\x77" * 256, b"\x00" * 64])
def test_bytes_that_are_injected_into_a_link_become_part_of_no_sum(
    tmp_path: Path, certs: Path, record: bytes
) -> None:
    """What looks like a record of TLS, and what does not: connections break, and are made anew."""
    configs = [gateway_config(tmp_path, GATHER_2, site) for site in range(2)]
    with ExitStack() as stack:
        dial, proxies = through_proxies(stack)
        members = stack.enter_context(gateways(configs, dial))
        ranks = [join(stack, member) for member in members]
        results = []
        for number in range(4):
            results.append(reduce_once(ranks, number, 5000, [1.0, 3.0], seed=1)[0])
            for proxy in proxies:
                proxy.inject(record)
        assert all(np.array_equal(results[0], each) for each in results)
        assert not [
            each for member in members for each in member.messages if each["op"] == "failed"
        ]
        leave(members, ranks)


@pytest.mark.parametrize(
    ("ended", "behind_nat"),
    [
        (SITES, False),
        pytest.param(SITES[:1], False, marks=pytest.mark.exhaustive),
        pytest.param(SITES[:1], True, marks=pytest.mark.exhaustive),
        pytest.param(SITES[1:], True, marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_an_expired_certificate_is_ridden_out_until_it_is_renewed(
    tmp_path: Path,
    certs: Path,
    ended: tuple[str, ...],
    behind_nat: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All connections break meanwhile, several times. The round waits, and has the same bits."""
    crashed: list[object] = []
    monkeypatch.setattr(threading, "excepthook", crashed.append)
    configs = [
        gateway_config(
            tmp_path,
            GATHER_2,
            site,
            peer_lost_s=1.5,
            keepalive_time_s=0.5,
            keepalive_timeout_s=0.5,
            listens=not (behind_nat and site == 0),
            links=(
                PeerLink(
                    site=SITES[1 - site],
                    bytes_per_s=1e9,
                    rtt_s=0.001,
                    dials_in=behind_nat and site == 1,
                ),
            ),
        )
        for site in range(2)
    ]
    with ExitStack() as stack:
        dial, proxies = through_proxies(stack)
        members = stack.enter_context(gateways(configs, dial))
        ranks = [join(stack, member) for member in members]
        first, _ = reduce_once(ranks, 0, 5000, [1.0, 3.0], seed=1)
        for site in ended:
            ends = issue(certs, f"{site}.gateway", LASTS_S / 86_400, replace=True).ends
        wait_for(lambda: datetime.now(UTC) > ends, "the certificates' end", DEADLINE_S)
        for proxy in proxies:
            proxy.reset()
        for member, other in zip(members, reversed(SITES), strict=True):
            suspect = member.wait("suspect")
            assert (suspect["site"], suspect["is_gone"]) == (other, False)
        for proxy in proxies:
            proxy.reset()
        for site in ended:
            renew(certs, f"{site}.gateway", 30.0)
        for member, other in zip(members, reversed(SITES), strict=True):
            assert member.wait("reached")["site"] == other
        again, _ = reduce_once(ranks, 1, 5000, [1.0, 3.0], seed=1)
        assert np.array_equal(first, again)
        assert not [
            each for member in members for each in member.messages if each["op"] == "failed"
        ]
        assert not crashed
        leave(members, ranks)


def test_a_certificate_that_is_not_believed_is_told_of_once_and_not_by_each_connection(
    tmp_path: Path,
    certs: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mutual_tls, "_is_signed", lambda *_: True)  # its owner believes it
    foreign = tmp_path / "foreign"
    certify(foreign, *SITES)
    caplog.set_level("DEBUG", "isthmus.sites.gateway.links.streams")
    configs = [gateway_config(tmp_path, GATHER_2, site) for site in range(2)]
    with ExitStack() as stack:
        dial, proxies = through_proxies(stack)
        members = stack.enter_context(gateways(configs, dial))
        ranks = [join(stack, member) for member in members]
        reduce_once(ranks, 0, 5000, [1.0, 3.0], seed=1)
        for kind in ("pem", "key"):
            own = certs / f"birch.gateway.{kind}"
            own.write_bytes((foreign / own.name).read_bytes())
        for proxy in proxies:
            proxy.inject(bytes(64))

        def said() -> list[logging.LogRecord]:
            reason = "the certificate shown there is not believed here"
            return [each for each in caplog.records if reason in each.getMessage()]

        wait_for(lambda: len(said()) >= 5, "five attempts", DEADLINE_S)
        warned = [each.getMessage() for each in said() if each.levelno == logging.WARNING]
        assert 0 < len(warned) < 5
        # The number of the stream is left out: each gateway says a cause once of all its streams.
        words = [each.split(" to ", 1)[1] for each in warned]
        assert len({*words}) == len(words)


def test_a_client_that_drips_its_handshake_is_closed_and_locks_nobody_out(
    tmp_path: Path, certs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says something all the time, and so is never idle; and it never gets anywhere."""
    monkeypatch.setattr(frame_listener, "HANDSHAKE_S", 1.0)
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    outgoing = ssl.MemoryBIO()
    greeting = client.wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname="x")
    with pytest.raises(ssl.SSLWantReadError):
        greeting.do_handshake()
    configs = [gateway_config(tmp_path, GATHER_2, site) for site in range(2)]
    with gateways(configs) as members, ExitStack() as stack:
        slow = stack.enter_context(
            socket.create_connection(("127.0.0.1", members[1].peer.port), timeout=DEADLINE_S)
        )
        slow.settimeout(0.1)
        ended_s = time.monotonic() + DEADLINE_S
        for byte in outgoing.read():
            assert time.monotonic() < ended_s
            try:
                slow.sendall(bytes([byte]))
                assert slow.recv(1) == b""
                break
            except TimeoutError:
                continue
            except OSError:
                break
        else:
            raise AssertionError("it was never closed")
        ranks = [join(stack, member) for member in members]
        reduce_once(ranks, 0, 5000, [1.0, 3.0], seed=1)
        leave(members, ranks)


def test_on_loopback_a_frame_of_a_stranger_is_not_taken(tmp_path: Path) -> None:
    configs = [gateway_config(tmp_path, GATHER_2, site) for site in range(2)]
    with gateways(configs) as members:
        port = members[1].peer.port
        with channel_to(port, configs[0], SITES[1]) as own:
            session = hello(own, tmp_path)
        with grpc.insecure_channel(f"127.0.0.1:{port}") as stranger:
            assert status_of(lambda: hello(stranger, tmp_path)) is UNAUTHENTICATED
            assert push(stranger, session) is UNAUTHENTICATED
            request = exchange_pb2.LeaveRequest(session=session, code="RANK_LOST", message="forged")
            stub = exchange_pb2_grpc.ExchangeStub(stranger)
            assert status_of(lambda: stub.Leave(request, timeout=DEADLINE_S)) is UNAUTHENTICATED
    assert not [each for each in members[1].messages if each["op"] == "failed"]


def test_on_loopback_a_call_without_a_role_is_refused_as_with_tls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with training(tmp_path) as port:
        monkeypatch.delitem(CALLERS, PUSH_METHOD)
        config = gateway_config(tmp_path, GATHER_2, 0)
        with channel_to(port, config, SITES[1]) as channel:
            assert push(channel, "") is DENIED


def nothing_until(over: threading.Event) -> Iterator[bytes]:
    over.wait(DEADLINE_S)
    yield from ()


REVOKED = "PERMISSION_DENIED: the certificate of the gateway of site ash was revoked"


def test_a_revoked_site_is_refused_its_connections_break_and_a_new_certificate_counts(
    tmp_path: Path, certs: Path
) -> None:
    """Birch has the list, and ash goes on with what it has had, as a thief would."""
    stolen = tmp_path / "stolen"
    shutil.copytree(certs, stolen)
    quick: dict[str, Any] = {
        "peer_lost_s": 1.5,
        "keepalive_time_s": 0.4,
        "keepalive_timeout_s": 0.4,
    }
    configs = [gateway_config(tmp_path, GATHER_2, site, **quick) for site in range(2)]
    with gateways(configs) as (ash, birch), ExitStack() as stack:
        reduce_once([join(stack, each) for each in (ash, birch)], 0, 5000, [1.0, 3.0], seed=1)
        port = birch.peer.port
        keys, over = held_by(stolen, "ash.gateway"), threading.Event()
        with dialled(port, keys) as channel, dialled(port, keys) as frames:
            # Connections from before the list.
            session = hello(channel, tmp_path)
            method: Any = frames.stream_stream(PUSH_METHOD)
            said, named = nothing_until(over), ((SESSION_KEY, session),)
            pushed = method(said, metadata=named, timeout=DEADLINE_S)
            pushed.initial_metadata()
            revoke(certs, "ash")
            birch.gateway.take_revoked((certs / "ca.crl").read_text())
            assert pushed.code() is UNAVAILABLE
            over.set()
            assert status_of(lambda: hello(channel, tmp_path)) is DENIED
        failed = ash.end()
        assert failed is not None
        assert failed["code"] == "PERMISSION_DENIED"
        assert "the certificate of the gateway of site ash was revoked" in failed["message"]
        birch.wait("suspect", site="ash")
        for method in served_by("training"):
            assert asked(method, port, keys, session) == REVOKED, method
        with dialled(port, keys) as channel:
            assert push(channel, session) is DENIED
        issue(certs, "ash.gateway", 30.0, replace=True)
        with dialled(port, held_by(certs, "ash.gateway")) as channel:
            assert hello(channel, tmp_path) == session
        assert not [each for each in birch.messages if each["op"] == "failed"]


def test_no_frame_goes_to_who_shows_a_revoked_certificate(tmp_path: Path, certs: Path) -> None:
    config = gateway_config(tmp_path, GATHER_2, 0)

    async def send(peer: Peer) -> None:
        async with peer.dial(config, "", HELLO_METHOD):
            pass

    with probing(tmp_path) as port:
        birch = Peer("birch", 0, "127.0.0.1", port)
        asyncio.run(send(birch))
        revoke(certs, "birch")
        exchange_security("ash").take_revoked((certs / "ca.crl").read_text())
        with pytest.raises(CallError, match="certificate of the gateway of site birch was revoked"):
            asyncio.run(send(birch))


def test_a_gateway_has_the_list_before_it_lets_anybody_in(tmp_path: Path, certs: Path) -> None:
    revoke(certs, "ash")
    text = (certs / "ca.crl").read_text()
    with GatewayProcess(tmp_path / "good.log") as process:
        process.configure(gateway_config(tmp_path, GATHER_2, 1, revoked=text))
        port = int(process.wait("listening")["port"])
        keys = held_by(certs, "ash.gateway")
        assert asked("/isthmus.exchange.v1.State/Read", port, keys) == REVOKED
    with GatewayProcess(tmp_path / "bad.log") as process:
        process.configure(gateway_config(tmp_path, GATHER_2, 1, revoked=text.lower()))
        assert process.wait("failed")["code"] == "BAD_REVOCATION_LIST"


def test_what_never_speaks_http_is_closed_and_locks_nobody_out(
    tmp_path: Path, certs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frame_listener, "HANDSHAKE_S", 3.0)
    configs = [gateway_config(tmp_path, GATHER_2, site) for site in range(2)]
    with ExitStack() as stack:
        mute: list[socket.socket] = []
        began_s = time.monotonic()

        def before_others(_member: Member, peer: Peer) -> Peer:
            for _ in range(200):
                where = (peer.host, peer.port)
                mute.append(stack.enter_context(socket.create_connection(where, DEADLINE_S)))
            return peer

        members = stack.enter_context(gateways(configs, before_others))
        ranks = [join(stack, member) for member in members]
        reduce_once(ranks, 0, 5000, [1.0, 3.0], seed=1)
        assert time.monotonic() - began_s < 3.0, "others wait until they are closed"
        for each in mute:
            assert each.recv(1) == b""
        leave(members, ranks)


def test_a_hello_has_a_size(tmp_path: Path) -> None:
    configs = [gateway_config(tmp_path, GATHER_2, site) for site in range(2)]
    with (
        gateways(configs) as members,
        channel_to(members[1].peer.port, configs[0], SITES[1]) as channel,
    ):
        request = exchange_pb2.HelloRequest(site="ash", build="x" * (64 << 10))
        stub = exchange_pb2_grpc.ExchangeStub(channel)
        status = status_of(lambda: next(stub.Hello(iter([request]), timeout=DEADLINE_S)))
        assert status is grpc.StatusCode.INVALID_ARGUMENT
