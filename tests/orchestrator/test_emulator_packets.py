"""Frames of a TUN device: what they stand for, and what is left when packets of them are lost."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.emulator.packet_link import MAX_FRAME_BYTES, Packet, parse
from tests.fakes.segmentation import ACK, CWR, FIN, PSH, VNET_BYTES, segments, tcp_frame

FIXED = settings(deadline=None, derandomize=True, max_examples=100)


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
