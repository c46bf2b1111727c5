"""A directed link of packets: rate, queue, delay, jitter, loss, changes, cuts; the time is ours.

Frames of a TUN device: what they stand for, and what is left when packets of them are lost.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.orchestrator.emulator.link_shape import LinkShape
from isthmus.orchestrator.emulator.packet_link import (
    MAX_FRAME_BYTES,
    MIN_QUEUE_BYTES,
    PIECE_S,
    Packet,
    PacketLink,
    default_queue_bytes,
    parse,
)
from tests.fakes.segmentation import ACK, CWR, FIN, PSH, VNET_BYTES, segments, tcp_frame

SHAPE = LinkShape(source="eu", target="us", bytes_per_s=1.25e6, delay_s=0.04)
INF = float("inf")
FIXED = settings(max_examples=100)


def shape(**fields: float | None) -> LinkShape:
    figures: dict[str, Any] = dict(fields)
    return replace(SHAPE, **figures)


def packet(num_bytes: int, rng: random.Random | None = None) -> Packet:
    made = parse(tcp_frame(rng or random.Random(0), bytes(num_bytes), 1448))
    assert made is not None
    return made


@dataclass
class World:
    """A link, and what arrives when, if it is looked at exactly when it asks for it."""

    link: PacketLink
    arrivals: list[tuple[float, bytes]] = field(default_factory=list)

    def run(self, until_s: float) -> None:
        while (due_s := self.link.due_s()) <= until_s and due_s < INF:
            for part in self.link.delivered(due_s):
                frame = b"".join(bytes(each) for each in part)
                self.arrivals += [(due_s, each) for each in segments(frame)]

    def offer(self, offered: Packet, now_s: float) -> None:
        self.run(now_s)
        self.link.offer(offered, now_s)


def test_a_packet_arrives_after_its_transmission_and_the_delay() -> None:
    world = World(PacketLink(SHAPE, 1))
    one = packet(1448)
    world.offer(one, 5.0)
    world.run(INF)
    [(arrived_s, _)] = world.arrivals
    assert arrived_s == pytest.approx(5.0 + one.num_bytes / 1.25e6 + 0.04)
    assert world.link.due_s() == INF


def test_packets_queue_for_the_transmitter_and_share_its_rate() -> None:
    world = World(PacketLink(SHAPE, 1))
    for _ in range(40):
        world.offer(packet(1448), 0.0)
    world.run(INF)
    times_s = [arrived_s for arrived_s, _ in world.arrivals]
    each_s = packet(1448).num_bytes / 1.25e6
    assert times_s == pytest.approx([0.04 + each_s * (index + 1) for index in range(40)])


def test_what_finds_the_queue_full_is_dropped_at_its_tail() -> None:
    one = packet(1448)
    world = World(PacketLink(shape(queue_bytes=10 * one.num_bytes), 1))
    for _ in range(25):
        world.offer(one, 0.0)
    # One is on the transmitter, ten wait.
    assert world.link.counters.dropped_packets == 14
    assert world.link.queued_bytes(0.0) == 10 * one.num_bytes
    # Nobody has looked at the link meanwhile: five more are, or have been, on the transmitter.
    assert world.link.queued_bytes(5 * one.num_bytes / 1.25e6) == 5 * one.num_bytes
    world.run(INF)
    assert len(world.arrivals) == 11


def test_a_long_frame_goes_in_pieces_and_loses_its_tail_where_the_queue_ends() -> None:
    long = packet(40 * 1448)
    wire_bytes = long.num_bytes // 40
    world = World(PacketLink(shape(bytes_per_s=5e6, queue_bytes=9 * wire_bytes + 100), 1))
    world.offer(long, 0.0)
    per_piece = int(5e6 * PIECE_S // wire_bytes)
    assert per_piece == 3
    world.run(INF)
    assert [each for _, each in world.arrivals] == segments(long.frame)[: per_piece + 9]
    assert world.link.counters.dropped_packets == 40 - per_piece - 9
    assert len({arrived_s for arrived_s, _ in world.arrivals}) == 4


@pytest.mark.slow
@FIXED
@given(
    fields=st.fixed_dictionaries(
        {
            "bytes_per_s": st.sampled_from([1e4, 1.25e6, 1.25e8]),
            "delay_s": st.sampled_from([0.0, 0.0005, 0.05]),
            "jitter_s": st.sampled_from([0.0, 0.02]),
            "loss": st.sampled_from([0.0, 0.01, 0.3]),
            "queue_bytes": st.sampled_from([None, 3000, 200_000]),
        }
    ),
    seed=st.integers(0, 1 << 32),
    offers=st.lists(st.tuples(st.floats(0, 0.05), st.integers(1, 40_000)), min_size=1, max_size=40),
)
def test_packets_arrive_in_order_at_the_rate_and_all_are_accounted_for(
    fields: dict[str, Any], seed: int, offers: list[tuple[float, int]]
) -> None:
    rng = random.Random(seed)
    shaped = shape(**fields)
    world = World(PacketLink(shaped, seed))
    sent: list[tuple[float, bytes]] = []
    now_s = 0.0
    for gap_s, num_bytes in offers:
        now_s += gap_s
        each = packet(num_bytes, rng)
        world.offer(each, now_s)
        sent += [(now_s, wire) for wire in segments(each.frame)]
        assert world.link.queued_bytes(now_s) <= (shaped.queue_bytes or default_queue_bytes(shaped))
    world.run(INF)
    counters = world.link.counters
    assert counters.sent_bytes == sum(len(wire) for _, wire in sent)
    assert counters.delivered_bytes == sum(len(wire) for _, wire in world.arrivals)
    assert len(sent) == len(world.arrivals) + counters.dropped_packets + counters.lost_packets
    least_s = max(0.0, shaped.delay_s - shaped.jitter_s)
    rest = iter(sent)
    for arrived_s, wire in world.arrivals:  # in order, and none before it can be there
        sent_s = next(sent_s for sent_s, each in rest if each == wire)
        assert arrived_s >= sent_s + len(wire) / shaped.bytes_per_s + least_s - 1e-9
    if not shaped.jitter_s and world.arrivals:
        took_s = world.arrivals[-1][0] - sent[0][0] - shaped.delay_s
        assert counters.delivered_bytes <= took_s * shaped.bytes_per_s * (1 + 1e-9) + 1e-6


def test_losses_hit_single_packets_of_a_long_frame_and_depend_on_the_seed_alone() -> None:
    def arrived(seed: int) -> list[bytes]:
        world = World(PacketLink(shape(bytes_per_s=1.25e8, loss=0.05), seed))
        rng = random.Random(3)
        for index in range(20):
            world.offer(packet(40 * 1448, rng), index * 0.01)
        world.run(INF)
        assert world.link.counters.lost_packets == pytest.approx(40, abs=5)
        assert len(world.arrivals) == 800 - world.link.counters.lost_packets
        return [each for _, each in world.arrivals]

    assert arrived(1) == arrived(1)
    assert arrived(1) != arrived(2)


def test_looking_late_changes_no_transmission() -> None:
    punctual, late = World(PacketLink(SHAPE, 1)), World(PacketLink(SHAPE, 1))
    rng = random.Random(4)
    for index in range(30):
        each = packet(rng.randrange(1, 30_000))
        punctual.offer(each, index * 0.01)
        late.link.offer(each, index * 0.01)
    punctual.run(INF)
    late.run(INF)
    assert late.arrivals == punctual.arrivals


def test_what_waits_leaves_at_the_new_rate_and_what_is_leaving_at_the_old() -> None:
    world = World(PacketLink(shape(bytes_per_s=1.5e3, delay_s=0.0), 1))
    one = packet(1448)
    for _ in range(3):
        world.offer(one, 0.0)
    world.link.reshape(shape(bytes_per_s=1.5e6, delay_s=0.0), 0.1)
    world.run(INF)
    first_s = one.num_bytes / 1.5e3
    each_s = one.num_bytes / 1.5e6
    assert [at_s for at_s, _ in world.arrivals] == pytest.approx(
        [first_s, first_s + each_s, first_s + 2 * each_s]
    )


def test_a_shorter_delay_lets_nothing_overtake() -> None:
    world = World(PacketLink(SHAPE, 1))
    world.offer(packet(1000), 0.0)
    world.link.reshape(shape(delay_s=0.0), 0.01)
    world.offer(packet(1001), 0.01)
    world.run(INF)
    assert [len(each) for _, each in world.arrivals] == sorted(
        len(each) for _, each in world.arrivals
    )
    assert world.arrivals[0][0] == world.arrivals[1][0]


def test_a_cut_loses_all_that_is_under_way_until_it_is_mended() -> None:
    world = World(PacketLink(SHAPE, 1))
    for _ in range(5):
        world.offer(packet(1448), 0.0)
    world.link.cut(0.003)
    assert world.link.due_s() == INF
    assert world.link.queued_bytes(0.003) == 0
    world.offer(packet(2 * 1448), 0.01)
    assert world.link.counters.lost_packets == 7
    world.link.mend()
    world.offer(packet(1448), 1.0)
    world.run(INF)
    assert len(world.arrivals) == 1
    assert world.arrivals[0][0] > 1.04


def test_what_a_cut_has_swallowed_keeps_nothing_waiting() -> None:
    world = World(PacketLink(shape(bytes_per_s=150.0, delay_s=60.0), 1))
    for _ in range(3):
        world.offer(packet(1448), 0.0)
    world.link.cut(0.1)
    world.link.mend()
    world.link.reshape(SHAPE, 0.2)
    one = packet(1448)
    world.offer(one, 0.2)
    world.run(INF)
    assert [at_s for at_s, _ in world.arrivals] == pytest.approx(
        [0.2 + one.num_bytes / 1.25e6 + 0.04]
    )


def test_a_queue_holds_a_round_trip_at_full_rate_and_never_less_than_a_burst() -> None:
    assert default_queue_bytes(shape(bytes_per_s=1.25e8, delay_s=0.04)) == 10_000_000
    assert default_queue_bytes(shape(bytes_per_s=1.25e8, delay_s=0.0)) == 625_000
    assert default_queue_bytes(shape(bytes_per_s=1e4, delay_s=0.0)) == MIN_QUEUE_BYTES


def parsed(frame: bytes) -> Packet:
    packet = parse(frame)
    assert packet is not None
    return packet


def part(packet: Packet, first: int, last: int) -> bytes:
    return b"".join(bytes(each) for each in packet.part(first, last))


@FIXED
@given(
    seed=st.integers(0, 1 << 32),
    num_bytes=st.integers(1, 9000),
    segment_bytes=st.integers(20, 1460),
    flags=st.sets(st.sampled_from([FIN, PSH, CWR])).map(lambda some: ACK + sum(some)),
    data=st.data(),
)
def test_a_part_is_segmented_as_that_part_of_the_whole(
    seed: int, num_bytes: int, segment_bytes: int, flags: int, data: st.DataObject
) -> None:
    rng = random.Random(seed)
    frame = tcp_frame(rng, rng.randbytes(num_bytes), segment_bytes, flags)
    packet = parsed(frame)
    on_the_wire = segments(frame)
    assert packet.num_wire == len(on_the_wire)
    assert packet.num_bytes == sum(len(each) for each in on_the_wire)
    first = data.draw(st.integers(0, packet.num_wire - 1))
    last = data.draw(st.integers(first + 1, packet.num_wire))
    assert segments(part(packet, first, last)) == on_the_wire[first:last]
    assert packet.bytes_of(first, last) == sum(len(each) for each in on_the_wire[first:last])


@FIXED
@given(num_bytes=st.integers(1, 9000), room_bytes=st.integers(-10, 12000), data=st.data())
def test_as_many_packets_fit_as_have_room_one_by_one(
    num_bytes: int, room_bytes: int, data: st.DataObject
) -> None:
    packet = parsed(tcp_frame(random.Random(0), bytes(num_bytes), 1000))
    first = data.draw(st.integers(0, packet.num_wire - 1))
    one_by_one = first
    while one_by_one < packet.num_wire and packet.bytes_of(first, one_by_one + 1) <= room_bytes:
        one_by_one += 1
    assert packet.num_fitting(first, room_bytes) == one_by_one - first


def test_the_whole_is_the_frame_as_it_came() -> None:
    frame = tcp_frame(random.Random(0), bytes(5000), 1000)
    assert parsed(frame).part(0, 5) == (frame,)


def test_what_is_not_tcp_is_one_packet_to_its_destination() -> None:
    frame = bytes(VNET_BYTES) + bytes([0x45, *bytes(15), 10, 203, 0, 7]) + b"datagram"
    packet = parsed(frame)
    assert (packet.num_wire, packet.num_bytes) == (1, 28)
    assert packet.target == int.from_bytes(bytes([10, 203, 0, 7]), "big")
    assert packet.part(0, 1) == (frame,)


SOUND = tcp_frame(random.Random(1), bytes(5000), 1000)


def replaced(at: int, byte: int) -> bytes:
    return SOUND[:at] + bytes([byte]) + SOUND[at + 1 :]


@pytest.mark.parametrize(
    ("why", "frame"),
    [
        ("empty", b""),
        ("no room for an IPv4 header", SOUND[: VNET_BYTES + 19]),
        ("IPv6", bytes(VNET_BYTES) + b"\x60" + bytes(60)),
        ("another kind of segmentation", SOUND[:1] + b"\x05" + SOUND[2:]),
        ("segments of nothing", SOUND[:4] + b"\0\0" + SOUND[6:]),
        ("headers only", SOUND[: VNET_BYTES + 40]),
        ("a TCP header cut short", SOUND[: VNET_BYTES + 32]),
        ("a TCP header that is too short", replaced(VNET_BYTES + 20 + 12, 0x40)),
        ("segments of another protocol", replaced(VNET_BYTES + 9, 17)),
        ("an IP header that is too short", SOUND[:VNET_BYTES] + b"\x44" + SOUND[VNET_BYTES + 1 :]),
    ],
)
def test_a_malformed_frame_is_no_packet(why: str, frame: bytes) -> None:
    assert parse(frame) is None, why


@FIXED
@given(st.binary(max_size=200))
def test_no_frame_of_a_site_breaks_the_emulator(frame: bytes) -> None:
    packet = parse(frame)
    if packet is not None:
        assert packet.num_wire >= 1
        assert len(part(packet, 0, packet.num_wire)) == len(frame) <= MAX_FRAME_BYTES
        for index in range(packet.num_wire):
            part(packet, index, index + 1)
