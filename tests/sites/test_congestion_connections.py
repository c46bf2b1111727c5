"""How many connections a link opens, and what the kernel counts of them."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
import socket
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from isthmus.protos.frame import ChunkKey, Frame, Kind
from isthmus.sites.gateway.config import PeerLink
from isthmus.sites.gateway.links.congestion import connections
from isthmus.sites.gateway.links.congestion.connections import (
    ChannelGrowth,
    channels_for,
    idle_cost_s,
)
from isthmus.sites.gateway.links.congestion.kernel import (
    Segments,
    begin_bbr_anew,
    segments_of,
    send_buffer_bytes,
)
from isthmus.sites.gateway.links.peer_watch import PeerWatch
from isthmus.sites.gateway.links.progress import Progress
from isthmus.sites.gateway.links.send_queue import LinkTotals, Outbox, SendQueue, outgoing
from isthmus.sites.gateway.links.streams import Streams, _Carrying
from isthmus.sites.gateway.links.transport import Peer
from isthmus.topology.spec.reduction_plan import ReductionPlan
from isthmus.topology.trees.channels import first_channels
from isthmus.topology.trees.wire_load import chunk_bytes_for
from tests.fakes.gateway_sites import gateway_config


def test_the_number_of_channels_follows_the_loss() -> None:
    wanted = [channels_for(loss, 125e6, 0.08, 64) for loss in (1e-7, 1e-6, 1e-5, 1e-4, 1e-3)]
    assert wanted == sorted(wanted)
    assert wanted[0] == 1
    # 158 packets a connection on average, of the 6906 that the link holds: RFC 9438, section 5.2.
    assert wanted[3] == 44
    assert wanted[4] == 64, "and never more than the link allows"
    assert channels_for(1e-4, 12.5e6, 0.01, 64) == 1, "a small window suffices there"


def test_a_link_begins_with_what_fills_it() -> None:
    assert first_channels(None, 32, 125e6, 0.08, None) == 2
    assert first_channels(None, 32, 1.25e6, 0.04, None) == 1, "two would crowd each other out"
    assert first_channels(None, 32, 125e6, 0.15, 3 << 20) == 6
    assert first_channels(None, 4, 125e6, 0.15, 3 << 20) == 4
    assert first_channels(None, 1, 125e6, 0.15, 3 << 20) == 1, "as the topology limits it"
    assert first_channels(5, 4, 125e6, 0.15, 3 << 20) == 5, "exactly as the job says"
    assert first_channels(1, 32, 125e6, 0.15, 3 << 20) == 1


def test_what_a_pause_costs() -> None:
    assert idle_cost_s(0.1, 125e6, 0.08, 2) == 0.0, "no time-out has passed"
    # Five time-outs of 280 ms: of 10 MB, 312.5 kB are left, and 0.3 + 0.6 + ... + 5 MB cross in 0.4
    # s.
    assert idle_cost_s(1.5, 125e6, 0.08, 2) == pytest.approx(5 * 0.08 - 31 * 312.5e3 / 125e6)
    long_s = idle_cost_s(3600.0, 125e6, 0.08, 2)
    assert idle_cost_s(60.0, 125e6, 0.08, 2) == long_s, "ten packets each are always left"
    assert idle_cost_s(60.0, 125e6, 0.08, 32) < 0.6 * long_s
    assert idle_cost_s(60.0, 1e5, 0.08, 2) == 0.0, "and fill a narrow link"


def test_a_rate_and_a_pause_of_a_busy_queue() -> None:
    queue = SendQueue(1 << 20, 0.01)
    for chunk, (sent_s, acknowledged_s) in enumerate([(0.0, 1.0), (1.1, 2.0), (2.5, 3.0)]):
        key = ChunkKey(0, 0, chunk, 0, Kind.CONTRIBUTION)
        queue.push(outgoing(key, 0, b"12345678", 8))
        assert queue.take(0, sent_s) is not None
        queue.acknowledge((key, 0), acknowledged_s)
    totals = queue.totals(9.0)
    assert totals.busy_s == pytest.approx(1.0 + 0.9 + 0.5)
    assert totals.num_pauses == 1, "0.1 s is none"
    assert totals.paused_s == pytest.approx(0.5)


def test_connections_are_asked_and_not_touched() -> None:
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        assert segments_of(()) == Segments()
        clients, served = [], []
        for _ in range(2):
            clients.append(stack.enter_context(socket.socket()))
            clients[-1].settimeout(10)
            clients[-1].connect(listener.getsockname())
            served.append(stack.enter_context(listener.accept()[0]))
            served[-1].settimeout(10)
            clients[-1].sendall(b"x")
            assert served[-1].recv(1) == b"x"
        assert [segments_of(each).sent for each in ((), clients[:1], clients)] == [0, 1, 2]
        found = segments_of(clients)
        assert found.sent_again == 0
        assert found.congestion_control
        clients[0].sendall(b"y")
        assert served[0].recv(1) == b"y", "it was asked, not closed"


def has_bbr() -> bool:
    return "bbr" in Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control").read_text().split()


def bandwidth_known_to_bbr(connection: socket.socket) -> int:
    """Return BBR's estimate, bytes/s (linux/inet_diag.h, struct tcp_bbr_info); others have none."""
    known = connection.getsockopt(socket.IPPROTO_TCP, 26, 20)
    return int(struct.unpack_from("=Q", known)[0]) if known else 0


@pytest.mark.skipif(not has_bbr(), reason="this kernel has no BBR for everybody")
@pytest.mark.parametrize(
    ("algorithm", "rtt_s", "begins"),
    [(b"bbr", 0.0, True), (b"bbr", 0.1, False), (b"reno", 0.0, False)],
)
def test_bbr_begins_anew_where_the_path_is_as_long_as_ever(
    algorithm: bytes, rtt_s: float, begins: bool
) -> None:
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        client = stack.enter_context(socket.socket())
        client.settimeout(10)
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, algorithm)
        client.connect(listener.getsockname())
        served = stack.enter_context(listener.accept()[0])
        served.settimeout(10)
        for _ in range(5):
            client.sendall(bytes(4096))
            assert served.recv(4096, socket.MSG_WAITALL)
            served.sendall(b"x")
            assert client.recv(1) == b"x", "so everything is acknowledged"
        assert (bandwidth_known_to_bbr(client) > 0) == (algorithm == b"bbr")
        assert begin_bbr_anew((client,), rtt_s) == begins
        assert (bandwidth_known_to_bbr(client) > 0) == (algorithm == b"bbr" and not begins)
        assert segments_of((client,)).congestion_control == algorithm.decode()


@pytest.mark.parametrize(
    ("codec", "link", "expected_kib"),
    [
        ("fp32", (25e6, 0.08), 256),
        ("int8", (25e6, 0.08), 1024),
        ("fp32", (1.25e9, 1e-4), 1024),
        ("fp32", (12.5e6, 0.04), 256),
        ("fp32", (2.5e6, 0.08), 128),
        ("fp32", (1.25e6, 0.04), 64),
    ],
)
def test_some_chunks_are_on_the_way_at_once(
    codec: str, link: tuple[float, float], expected_kib: int
) -> None:
    assert chunk_bytes_for(1 << 20, codec, *link) == expected_kib << 10
    assert chunk_bytes_for(1000, codec, *link) == 1000, "the job's, if that is smaller"


def test_a_chunk_of_a_gather_takes_40_ms_to_send() -> None:
    """Nobody waits for a whole one to pass a sum on."""
    found = [chunk_bytes_for(1 << 20, "fp32", rate, 0.02, is_gather=True) for rate in (50e6, 18e6)]
    assert found == [1 << 20, 512 << 10]


LINK = PeerLink(site="birch", bytes_per_s=125e6, rtt_s=0.08, max_flows=16)
PEER = Peer("birch", 0, "127.0.0.1", 1)


@pytest.fixture
def connection() -> Iterator[socket.socket]:
    """One that nobody asks."""
    with socket.socket() as found:
        yield found


class CountedStreams(Streams):
    """Are counted, and not run."""

    def grow(self, num_streams: int) -> None:
        self.num_streams = max(self.num_streams, num_streams)


def growing(
    folder: Path, wanted: int | None, link: PeerLink = LINK
) -> tuple[ChannelGrowth, Streams, Outbox]:
    """Return a link's parts, whose streams are counted and not run."""
    outbox = Outbox(1 << 25, 0.08)
    config = gateway_config(folder, ReductionPlan(2, (), "gather"), 0)
    streams = CountedStreams(
        outbox,
        PeerWatch(config, PEER, outbox),
        config=config,
        soon=lambda _call: None,
        set_up=lambda _connection: None,
        on_failure=lambda _error: None,
        on_broken=lambda: None,
        on_progress=lambda: None,
    )
    return ChannelGrowth(wanted, link, PEER, outbox, streams), streams, outbox


@pytest.mark.parametrize(
    ("bytes_per_s", "congestion_control", "num_lost", "rtt_s", "grows"),
    [
        (5e6, "cubic", 3, 0.08, True),
        (5e6, "cubic", 0, 0.08, False),  # nothing is lost
        (5e6, "cubic", 3, 0.16, False),  # a queue ran over
        (5e6, "bbr", 3, 0.08, False),  # losses do not matter
        (120e6, "cubic", 3, 0.08, False),  # it carries enough
        (1e6, "cubic", 40, 0.08, False),  # connections have ended, or all is lost
    ],
)
def test_auto_follows_the_losses_up_to_the_links_limit(
    bytes_per_s: float,
    congestion_control: str,
    num_lost: int,
    rtt_s: float,
    grows: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    growth, streams, _ = growing(tmp_path, None)
    growth.begin()
    first = streams.num_streams
    assert 2 <= first < 16
    carry(growth, monkeypatch, bytes_per_s, congestion_control, num_lost, rtt_s)
    assert streams.num_streams == (16 if grows else first)


def carry(
    growth: ChannelGrowth,
    monkeypatch: pytest.MonkeyPatch,
    bytes_per_s: float,
    congestion_control: str,
    num_lost: int,
    rtt_s: float = LINK.rtt_s,
) -> None:
    """Look at a link for three seconds in which it carries that, and loses so many in each look."""
    for look in range(60):
        monkeypatch.setattr(time, "monotonic", lambda look=look: 0.05 * look)
        num_sent, lost = round(0.05 * look * bytes_per_s / 1448), num_lost * look
        counted = Segments(
            num_sent, lost, congestion_control, rtt_s, LINK.rtt_s, False, num_sent, 1448
        )
        follow(growth, monkeypatch, [counted])


def test_a_link_that_turns_out_faster_has_as_many_connections_as_fill_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Described as 10 Mbit/s it begins with one; it carries 1 Gbit/s over 80 ms."""
    slow = dataclasses.replace(LINK, bytes_per_s=1.25e6)
    growth, streams, _ = growing(tmp_path, None, slow)
    growth.begin()
    assert streams.num_streams == 1
    for look in range(12):
        monkeypatch.setattr(time, "monotonic", lambda look=look: 0.1 * look)
        found = Segments(9, 0, "bbr", 0.08, 0.08, False, look * 8633, 1448)
        follow(growth, monkeypatch, [found])
    assert streams.num_streams == first_channels(None, 16, 125e6, 0.08, send_buffer_bytes())
    assert streams.num_streams > 1


def test_a_share_of_a_link_that_loses_packets_takes_more_connections(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no window for others' sake, and is looked at all the same."""
    growth, streams, outbox = growing(tmp_path, None, dataclasses.replace(LINK, is_shared=True))
    growth.begin()
    carry(growth, monkeypatch, 5e6, "cubic", 3)
    assert outbox.window_bytes == 1 << 25
    assert streams.num_streams == 16


def follow(
    growth: ChannelGrowth, monkeypatch: pytest.MonkeyPatch, found: Sequence[Segments]
) -> None:
    """Look at a link, of which the kernel says this."""
    for each in found:
        monkeypatch.setattr(connections, "segments_of", lambda _connections, each=each: each)
        growth._follow_path(())


def test_what_a_kernel_does_not_count_limits_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    growth, _, outbox = growing(tmp_path, 2)
    growth.begin()
    follow(growth, monkeypatch, [Segments(9, 0, "bbr", 0.15, 0.08)] * 9)
    assert outbox.window_bytes == 1 << 25
    assert not growth._pace.is_measured


def test_connections_that_are_new_to_the_count_make_no_link_faster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have carried a terabyte since they were last counted."""
    growth, streams, outbox = growing(tmp_path, 2)
    growth.begin()
    pushed(outbox, range(1))
    clock = itertools.count()
    monkeypatch.setattr(time, "monotonic", lambda: 0.02 * next(clock))
    with socket.socket() as first, socket.socket() as later:
        for delivered, connection in [(10_000, first), (700_000_000, later), (700_010_000, later)]:
            found = Segments(9, 0, "", 0.08, 0.08, False, delivered, 1448)
            call = SimpleNamespace(socket=connection, limit=lambda *_: None)
            streams._carrying = {0: _Carrying(call, Progress(0.0, 1.0))}
            monkeypatch.setattr(connections, "segments_of", lambda _connections, found=found: found)
            for _ in range(30):
                growth._look()
    assert growth._pace.bytes_per_s == 1.25 * 125e6


def test_a_share_of_the_pace_is_told_anew_when_frames_turn_out_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, connection: socket.socket
) -> None:
    """Before the first is acknowledged nobody knows that the window holds but one of them."""
    growth, _, outbox = growing(tmp_path, 4, dataclasses.replace(LINK, is_shared=True))
    shares: list[float] = []
    monkeypatch.setattr(
        connections, "set_up", lambda _connections, _link, pace: shares.append(pace)
    )
    growth.begin()
    growth.set_up(connection)
    pushed(outbox, range(1))
    item = outbox.take(0)
    assert item is not None
    outbox.limit(len(item.data))
    outbox.acknowledge(item.key, item.epoch, 0.0)
    follow(growth, monkeypatch, [Segments(9, 0, "bbr", 0.08, 0.08)] * 2)
    assert shares == [125e6 / 4, 125e6]


def test_connections_share_the_pace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, connection: socket.socket
) -> None:
    growth, streams, _ = growing(tmp_path, 4)
    shares: list[float] = []
    monkeypatch.setattr(
        connections, "set_up", lambda _connections, _link, pace: shares.append(pace)
    )
    growth.begin()
    growth.set_up(connection)
    assert shares == [1.25 * 125e6 / 4]
    for look in range(5):
        growth._pace.follow(20_000 * look, 1000, 0.1 * look, 0.05)
    growth.set_up(connection)
    assert shares[1:] == pytest.approx([2 * 200e6 / 4]), (
        "faster than described: it may be faster still"
    )
    streams.grow(5)
    for look in range(5, 15):
        growth._pace.follow(16_000 * look, 1000, 0.1 * look, 0.05)
    growth.set_up(connection)
    assert shares[2:] == pytest.approx([1.25 * 200e6 / 5])


def test_connections_without_a_frame_have_no_share_of_the_pace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, connection: socket.socket
) -> None:
    """With 64 of them and a window of ten frames, a link carried a sixth of its rate."""
    growth, _, outbox = growing(tmp_path, 4)
    shares: list[float] = []
    monkeypatch.setattr(
        connections, "set_up", lambda _connections, _link, pace: shares.append(pace)
    )
    growth.begin()
    pushed(outbox, range(1))
    item = outbox.take(0)
    assert item is not None
    outbox.acknowledge(item.key, item.epoch, 0.0)
    for num_frames, num_in_flight in [(10, 4), (3, 3), (0, 1)]:
        outbox.limit(num_frames * len(item.data))
        growth.set_up(connection)
        assert shares.pop() == 1.25 * 125e6 / num_in_flight


def carrying(indexes: Iterable[int]) -> dict[int, _Carrying]:
    """Streams whose calls take whatever they get."""
    call: Any = SimpleNamespace(post=lambda _data, _on_written: None)
    return {index: _Carrying(call, Progress(0.0, 1.0)) for index in indexes}


def test_frames_leave_by_no_more_connections_than_the_window_holds_frames(tmp_path: Path) -> None:
    """CUBIC had opened 64 connections, and each started slowly again whenever it was its turn."""
    _, streams, outbox = growing(tmp_path, 4)

    def fed(num_in_flight: int) -> list[int]:
        idle = (5, 3, 1, 0)
        streams._idle, streams._carrying = dict.fromkeys(idle), carrying(idle)
        outbox.limit(num_in_flight * outbox.totals().longest_bytes)
        streams._feed()
        return [index for index in idle if index not in streams._idle]

    pushed(outbox, range(1))
    item = outbox.take(0)
    assert item is not None
    outbox.acknowledge(item.key, item.epoch, 0.0)
    pushed(outbox, range(1, 9))
    assert fed(2) == [1, 0]
    assert fed(6) == [5, 3, 1, 0]


def test_a_connection_has_its_part_of_the_window_once_there_is_one(tmp_path: Path) -> None:
    """Before, the kernel alone limits it: nobody has said how often to look."""
    _, streams, outbox = growing(tmp_path, 4)
    streams.grow(4)
    pushed(outbox, range(1))
    item = outbox.take(0)
    assert item is not None
    outbox.acknowledge(item.key, item.epoch, 0.0)
    limits: list[tuple[int, float]] = []
    call: Any = SimpleNamespace(limit=lambda *limit: limits.append(limit))
    streams._limit(call)
    assert limits == []
    streams._carrying = {0: _Carrying(call, Progress(0.0, 1.0))}
    streams.limit(2 * len(item.data), 0.003)
    assert limits == [(len(item.data), 0.003)], "two frames fit, so two connections share it"


def test_frames_leave_by_other_connections_while_the_first_ones_are_broken(tmp_path: Path) -> None:
    _, streams, outbox = growing(tmp_path, 4)
    pushed(outbox, range(1))
    item = outbox.take(0)
    assert item is not None
    outbox.acknowledge(item.key, item.epoch, 0.0)
    outbox.limit(2 * len(item.data))
    pushed(outbox, range(1, 9))

    streams._idle, streams._carrying = dict.fromkeys((3, 2)), carrying((3, 2))
    streams._feed()
    assert not streams._idle


@pytest.mark.parametrize("wanted", [1, 3, 20])
def test_a_number_is_exactly_that_many(
    wanted: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    growth, streams, _ = growing(tmp_path, wanted)
    growth.begin()
    carry(growth, monkeypatch, 5e6, "cubic", 3)
    assert streams.num_streams == wanted
    assert len(caplog.records) == 1, "what would help is said, and once"
    assert "net.ipv4.tcp_allowed_congestion_control" in caplog.text


@pytest.mark.parametrize(
    ("pauses", "paused_s", "congestion_control", "starts_slowly", "is_told"),
    [
        (5, 7.5, "cubic", True, True),
        (4, 6.0, "cubic", True, False),
        (5, 1.25, "cubic", True, False),
        (5, 7.5, "bbr", True, False),
        (5, 7.5, "", True, False),
        (5, 7.5, "cubic", False, False),
    ],
)
def test_what_pauses_cost_is_told_where_the_kernel_could_help(
    pauses: int,
    paused_s: float,
    congestion_control: str,
    starts_slowly: bool,
    is_told: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    growth, _, _ = growing(tmp_path, 2)
    monkeypatch.setattr(connections, "starts_slowly_after_idle", lambda: starts_slowly)
    totals = LinkTotals(num_pauses=pauses, paused_s=paused_s)
    for _ in range(2):
        growth._advise_idle(congestion_control, totals)
    assert len(caplog.records) == is_told
    if is_told:
        assert caplog.records[0].levelno == logging.WARNING
        assert "after 1.5 s on average, TCP starts slowly again to site birch" in caplog.text
        assert "sysctl net.ipv4.tcp_slow_start_after_idle=0" in caplog.text


@pytest.mark.parametrize("ends", [Outbox.close, Outbox.leave])
def test_a_link_is_looked_at_until_it_is_over(
    ends: Callable[[Outbox], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    growth, _, outbox = growing(tmp_path, 2)
    looks: list[None] = []

    def look() -> None:
        looks.append(None)
        if len(looks) == 3:
            ends(outbox)

    monkeypatch.setattr(connections, "_LOOK_S", 0.0)
    monkeypatch.setattr(growth, "_look", look)
    asyncio.run(growth.run())
    assert len(looks) == 3


@pytest.mark.parametrize(("bytes_per_s", "begins"), [(125e6, 0), (200e6, 1)])
def test_bbr_begins_anew_on_a_link_that_turns_out_faster(
    bytes_per_s: float, begins: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    growth, _, _ = growing(tmp_path, 2)
    growth.begin()
    begun: list[float] = []
    monkeypatch.setattr(connections, "begin_bbr_anew", lambda _all, rtt_s: begun.append(rtt_s))
    carry(growth, monkeypatch, bytes_per_s, "bbr", 0)
    assert begun == [LINK.rtt_s] * begins


def test_where_nothing_leaves_the_host_nothing_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is sent again there was acknowledged late."""
    growth, streams, outbox = growing(tmp_path, None)
    growth.begin()
    before = streams.num_streams
    local = [Segments(1000, 9 * look, "cubic", 0.08, 0.08, True) for look in range(9)]
    follow(growth, monkeypatch, local)
    assert streams.num_streams == before
    assert outbox.window_bytes == 1 << 25


def pushed(outbox: Outbox, chunks: range) -> None:
    for chunk in chunks:
        key = ChunkKey(0, 0, chunk, 0, Kind.CONTRIBUTION)
        assert outbox.push(Frame(key, 1, 0, 0, 0, 4, 1.0, b"1234"), 4)


def test_streams_are_told_once_when_there_is_something_for_them_again() -> None:
    outbox = Outbox(1 << 25, 0.08)
    told: list[None] = []
    outbox.listen(lambda: told.append(None))
    pushed(outbox, range(2))
    assert not told, "no stream has asked yet"
    taken = [outbox.take(stream) for stream in (0, 1, 0)]
    assert [item and item.key.chunk for item in taken] == [0, 1, None]
    pushed(outbox, range(2, 9))
    assert len(told) == 1, "who is told takes all of them"
    assert [item.key.chunk for _ in range(7) if (item := outbox.take(1))] == [*range(2, 9)]
    assert outbox.take(0) is None
    assert outbox.requeue(0) == 1
    assert len(told) == 2, "what a broken stream had is there again"
    assert outbox.requeue(0) == 0
    assert len(told) == 2
    again = outbox.take(1)
    assert again is not None
    assert again.key.chunk == 0
    for chunk in range(9):
        outbox.acknowledge(ChunkKey(0, 0, chunk, 0, Kind.CONTRIBUTION), 1, 0.0)
    assert outbox.wait_empty(time.monotonic() + 10)
    outbox.close()
    assert outbox.take(0) is None


def test_what_is_pushed_after_the_peer_left_is_dropped(tmp_path: Path) -> None:
    _, _, outbox = growing(tmp_path, 1)
    key = ChunkKey(0, 0, 0, 0, Kind.CONTRIBUTION)
    frame = Frame(key, 1, 0, 0, 0, 4, 1.0, b"1234")
    assert outbox.push(frame, 4) > 4
    assert not outbox.is_empty
    outbox.leave()
    assert outbox.is_empty
    assert outbox.push(frame, 4) == 0
