"""How many connections a link opens.

As it is measured, or exactly as the job says; and what the log advises.
"""

from __future__ import annotations

import dataclasses
import logging
import socket
import time
from pathlib import Path

import pytest

from protos.frame import ChunkKey, Frame, Kind
from sites.gateway.config import PeerLink
from sites.gateway.links.congestion import connections
from sites.gateway.links.congestion.connections import ChannelGrowth
from sites.gateway.links.congestion.kernel import Segments
from sites.gateway.links.congestion.rate import Window
from sites.gateway.links.peer_watch import PeerWatch
from sites.gateway.links.send_queue import LinkTotals, Outbox
from sites.gateway.links.streams import Streams
from sites.gateway.links.transport import Peer
from tests.fakes.gateway_sites import gateway_config
from topology.trees.trees import ReductionPlan

LINK = PeerLink(site="birch", bytes_per_s=125e6, rtt_s=0.08, max_flows=16)
PEER = Peer("birch", 0, "127.0.0.1", 1)


class CountedStreams(Streams):
    """Are counted, and not run."""

    def grow(self, num_streams: int) -> None:
        self.num_streams = max(self.num_streams, num_streams)


def growing(folder: Path, wanted: int | None) -> tuple[ChannelGrowth, Streams, Outbox]:
    """Return a link's parts, whose streams are counted and not run."""
    outbox = Outbox(Window(bytes_per_s=125e6, rtt_s=0.08, most_bytes=1 << 25))
    config = gateway_config(folder, ReductionPlan(2, (), "gather"), 0)
    streams = CountedStreams(
        outbox,
        PeerWatch(config, PEER, outbox),
        config=config,
        on_failure=lambda _error: None,
        on_progress=lambda: None,
    )
    return ChannelGrowth(wanted, LINK, PEER, outbox, streams), streams, outbox


def test_auto_follows_the_losses_up_to_the_links_limit(tmp_path: Path) -> None:
    growth, streams, _ = growing(tmp_path, None)
    growth.begin()
    first = streams.num_streams
    assert 2 <= first < 16
    growth._follow(1e-5, 120e6, "cubic")
    growth._follow(1e-3, 5e6, "bbr")
    assert streams.num_streams == first, "it carries enough, or losses do not matter"
    growth._follow(1e-3, 5e6, "cubic")
    assert streams.num_streams == 16


@pytest.mark.parametrize("wanted", [1, 3, 20])
def test_a_number_is_exactly_that_many(
    wanted: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    growth, streams, _ = growing(tmp_path, wanted)
    growth.begin()
    for _ in range(2):
        growth._follow(1e-3, 5e6, "cubic")
    assert streams.num_streams == wanted
    assert len(caplog.records) == 1, "what would help is said, and once"
    assert "with BBR (sysctl net.ipv4.tcp_congestion_control=bbr" in caplog.text


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
    growth, _, outbox = growing(tmp_path, 2)
    monkeypatch.setattr(connections, "starts_slowly_after_idle", lambda: starts_slowly)
    totals = LinkTotals(num_pauses=pauses, paused_s=paused_s)
    monkeypatch.setattr(outbox, "totals", lambda: totals)
    for _ in range(2):
        growth._advise_idle(congestion_control)
    assert len(caplog.records) == is_told
    if is_told:
        assert caplog.records[0].levelno == logging.WARNING
        assert "after 1.5 s on average, TCP starts slowly again to site birch" in caplog.text
        assert "sysctl net.ipv4.tcp_slow_start_after_idle=0" in caplog.text


def test_a_name_that_is_not_known_for_a_while_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    growth, _, outbox = growing(tmp_path, 1)
    asked = []

    def addresses_of(host: str, port: int) -> frozenset[tuple[str, int]]:
        asked.append((host, port))
        if len(asked) == 1:
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        outbox.close()
        return frozenset()

    monkeypatch.setattr(connections, "addresses_of", addresses_of)
    monkeypatch.setattr(connections, "_EVERY_S", 0.0)
    growth.run()
    assert asked == 2 * [(PEER.host, PEER.port)]


@pytest.mark.parametrize("rtt_s", [1e-4, 0.08])
def test_where_nothing_leaves_the_host_nothing_is_lost(
    rtt_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the round trip of a long link, the same connections lead to what emulates it."""
    growth, _, outbox = growing(tmp_path, None)
    growth._link = dataclasses.replace(LINK, rtt_s=rtt_s)
    freed, counted = [], []

    def free_local(addresses: frozenset[tuple[str, int]]) -> bool:
        freed.append(addresses)
        outbox.close()
        return True

    def segments_to(addresses: frozenset[tuple[str, int]]) -> Segments:
        counted.append(addresses)
        outbox.close()
        return Segments(1000, 10, "cubic")

    monkeypatch.setattr(connections, "free_local", free_local)
    monkeypatch.setattr(connections, "segments_to", segments_to)
    monkeypatch.setattr(connections, "_EVERY_S", 0.0)
    growth.run()
    assert (len(freed), len(counted)) == ((1, 0) if rtt_s < 1e-3 else (0, 1))


def pushed(outbox: Outbox, chunks: range) -> None:
    for chunk in chunks:
        key = ChunkKey(0, 0, chunk, 0, Kind.CONTRIBUTION)
        assert outbox.push(Frame(key, 1, 0, 0, 0, 4, 1.0, b"1234"), 4)


def test_streams_are_told_once_when_there_is_something_for_them_again() -> None:
    outbox = Outbox(Window(bytes_per_s=1e15, rtt_s=0.08, most_bytes=1 << 25))
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
        outbox.acknowledge(ChunkKey(0, 0, chunk, 0, Kind.CONTRIBUTION))
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
