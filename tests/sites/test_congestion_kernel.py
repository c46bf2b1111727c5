"""What the kernel is told: what TCP follows, how packets leave, and when BBR begins anew."""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from isthmus.protos.frame import ChunkKey, Frame, Kind
from isthmus.sites.gateway.config import PeerLink
from isthmus.sites.gateway.links.congestion import kernel
from isthmus.sites.gateway.links.congestion.kernel import (
    Segments,
    begin_bbr_anew,
    segments_of,
    set_up,
    use_pauses,
)
from isthmus.sites.gateway.links.send_queue import Outbox
from tests.fakes.looks import Looks

KEY = ChunkKey(0, 0, 0, 0, Kind.CONTRIBUTION)
UNPACED = 2**64 - 1
ALLOWED = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control").read_text().split()


def nothing() -> None:
    """Happens."""


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as found:
        yield found


def connected(stack: ExitStack, listener: socket.socket, own: str) -> socket.socket:
    """Return a connection from an address of this host; from 127.0.0.2 it is not a local one."""
    client = stack.enter_context(socket.socket())
    client.settimeout(10)
    client.bind((own, 0))
    client.connect(listener.getsockname())
    return client


def congestion_of(connection: socket.socket) -> str:
    name = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
    return name.split(b"\0", 1)[0].decode()


def link(congestion: str = "", rtt_s: float = 0.05) -> PeerLink:
    return PeerLink(site="birch", bytes_per_s=1e8, rtt_s=rtt_s, congestion=congestion)


@pytest.mark.parametrize("wanted", ["reno", "", "bbr"])
def test_a_connection_follows_what_its_link_asks_for(listener: socket.socket, wanted: str) -> None:
    if wanted != "reno" and "bbr" not in ALLOWED:
        pytest.skip("this kernel has no BBR for everybody")
    with ExitStack() as stack:
        client = connected(stack, listener, "127.0.0.2")
        set_up((client,), link(wanted), 1e7)
        assert congestion_of(client) == (wanted or "bbr")
        assert most_paced(client) == 10_000_000
        set_up((client,), link(wanted), 2e7)
        assert most_paced(client) == 20_000_000
        low = client.getsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT)
        assert low == kernel._UNSENT_BYTES
        assert not segments_of((client,)).is_local


def test_what_the_kernel_does_not_have_is_told_and_ends_nothing(
    listener: socket.socket, caplog: pytest.LogCaptureFixture
) -> None:
    with ExitStack() as stack:
        client = connected(stack, listener, "127.0.0.2")
        before = congestion_of(client)
        with caplog.at_level(logging.WARNING):
            set_up((client,), link("nosuch"), 1e7)
        assert congestion_of(client) == before
        assert "TCP to site birch cannot use nosuch" in caplog.text


@pytest.mark.skipif("bbr" not in ALLOWED, reason="this kernel has no BBR for everybody")
@pytest.mark.parametrize(("rtt_s", "left"), [(1e-4, "reno"), (0.05, "bbr")])
def test_connections_that_stay_on_the_host_are_left_alone_but_for_bbr(
    listener: socket.socket, rtt_s: float, left: str
) -> None:
    """A link that is said to be long, and stays on the host, is an emulated one."""
    with ExitStack() as stack:
        client = connected(stack, listener, "127.0.0.1")
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"bbr")
        set_up((client,), link(rtt_s=rtt_s), 1e7)
        assert congestion_of(client) == left
        assert most_paced(client) == UNPACED
        assert segments_of((client,)).is_local


@pytest.mark.parametrize(("info_bytes", "is_counted"), [(196, True), (160, False)])
def test_an_older_kernel_counts_what_it_does(
    listener: socket.socket, info_bytes: int, is_counted: bool
) -> None:
    """Before Linux 4.18 it does not say what has arrived, but what was sent, and sent again."""

    class Connection(socket.socket):
        def getsockopt(self, level: int, option: int, *length: int) -> Any:  # noqa: ANN401
            found: Any = super().getsockopt(level, option, *length)
            return found[:info_bytes] if option == socket.TCP_INFO else found

    with ExitStack() as stack:
        client = connected(stack, listener, "127.0.0.2")
        older = stack.enter_context(Connection(fileno=client.detach()))
        older.sendall(b"1234")
        found = segments_of((older,))
    assert found.sent == 1
    assert 0 < found.shortest_rtt_s < 10
    assert (found.delivered > 0) == is_counted


def test_connections_that_have_ended_meanwhile_are_left_out(listener: socket.socket) -> None:
    """The event loop closes them when streams break; threads ask for those that there were."""
    with ExitStack() as stack:
        ended, refused, lives = (connected(stack, listener, "127.0.0.2") for _ in range(3))
        served = [stack.enter_context(listener.accept()[0]) for _ in range(3)]
        for each in (ended, refused, lives):
            each.sendall(b"1234")
        ended.close()
        served[1].setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        served[1].close()
        with pytest.raises(ConnectionResetError):
            refused.recv(1)
        found = (ended, refused, lives)
        assert segments_of(found).sent == 1
        set_up(found, link(), 1e7)
        assert most_paced(lives) == 10_000_000
        assert not segments_of(found).is_local
        begin_bbr_anew(found, 0.0)
    assert segments_of(found) == Segments()


def most_paced(connection: socket.socket) -> int:
    """Return what a connection may send a second (linux/tcp.h, tcpi_max_pacing_rate)."""
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 160)
    return int(struct.unpack_from("=Q", info, 112)[0])


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the round trips with which BBR was had begin anew."""
    found: list[float] = []
    monkeypatch.setattr(kernel, "begin_bbr_anew", lambda _connections, rtt_s: found.append(rtt_s))
    return found


@pytest.fixture
def far_outbox() -> Outbox:
    return Outbox(1 << 25, 0.08)


@pytest.fixture
def looks(far_outbox: Outbox, monkeypatch: pytest.MonkeyPatch) -> Looks:
    made = Looks(far_outbox)
    monkeypatch.setattr(kernel, "asyncio", made)
    return made


def test_pauses_are_used_and_only_pauses(
    begun: list[float], far_outbox: Outbox, looks: Looks
) -> None:
    def send() -> None:
        assert len(begun) == 1
        far_outbox.push(Frame(KEY, 1, 0, 0, 0, 4, 1.0, b"1234"), 4)
        assert far_outbox.take(0)

    def arrive() -> None:
        assert len(begun) == 1, "not while the frame was on its way"
        far_outbox.acknowledge(KEY, 1, 0.0)

    looks.turns = [nothing, send, nothing, arrive]
    asyncio.run(use_pauses(tuple, far_outbox, 0.08))
    assert begun == [0.08, 0.08]
    assert max(looks.waited_s) < 2.5, "of BBR's ten seconds, and its third version's five"
    assert min(looks.waited_s) > 0.05


def test_a_measured_round_trip_counts_more_than_the_configured(
    begun: list[float], far_outbox: Outbox, looks: Looks
) -> None:
    looks.turns = [lambda: far_outbox.note_round_trip(0.05, is_idle=True)]
    asyncio.run(use_pauses(tuple, far_outbox, 0.08))
    assert begun == [0.05]
