"""Frames on the wire: what was sent comes out, and no flipped bit is silent."""

import math
import random
from dataclasses import replace

import pytest

from isthmus.protos.errors import CorruptDataError, RemoteProtocolError
from isthmus.protos.frame import (
    ACK_BYTES,
    HEADER_BYTES,
    MAX_FRAME_BYTES,
    ChunkKey,
    Frame,
    Kind,
    pack,
    pack_ack,
    unpack,
    unpack_ack,
)


def frame() -> Frame:
    key = ChunkKey(2**40, 70_000, 123, 3, Kind.RESULT)
    return Frame(key, 9, 4, 1, 0xDEADBEEF, 2**33, 12345.5, bytes(range(256)))


def test_round_trip() -> None:
    data = pack(frame())
    assert len(data) == HEADER_BYTES + 256
    assert unpack(data) == frame()
    ack = pack_ack(frame().key, 9, 12.25)
    assert len(ack) == ACK_BYTES
    assert unpack_ack(ack) == (frame().key, 9, 12.25)


def test_all_who_get_a_frame_get_the_same_copy() -> None:
    payload = bytearray(b"abcd")
    sent = replace(frame(), payload=memoryview(payload))
    data = pack(sent)
    payload[0] = 0  # as a gateway goes on to work in the memory that it has sent
    assert pack(sent) is data
    assert pack(unpack(data)) is data
    assert unpack(pack(replace(unpack(data), tree=3))).tree == 3


def test_every_single_bit_flip_is_detected() -> None:
    data = pack(frame())
    for position in range(8 * len(data)):
        mangled = bytearray(data)
        mangled[position // 8] ^= 1 << position % 8
        with pytest.raises(CorruptDataError):
            unpack(bytes(mangled))


def test_other_damage_is_detected() -> None:
    seed = 5
    generator, data = random.Random(seed), pack(frame())
    for _ in range(2000):
        mangled = bytearray(data)
        for _ in range(generator.randrange(1, 9)):
            mangled[generator.randrange(len(data))] = generator.randrange(256)
        cut = bytes(mangled[: generator.choice((len(data), generator.randrange(len(data))))])
        if cut != data:
            with pytest.raises((CorruptDataError, RemoteProtocolError)):
                unpack(cut)


@pytest.mark.parametrize("size", [0, HEADER_BYTES - 1, MAX_FRAME_BYTES + 1])
def test_impossible_sizes(size: int) -> None:
    with pytest.raises(RemoteProtocolError, match=f"a frame of {size} bytes"):
        unpack(bytes(size))


def test_an_acknowledgement_that_left_at_no_time() -> None:
    for left_s in (math.nan, math.inf):
        with pytest.raises(RemoteProtocolError, match="acknowledgement that left at"):
            unpack_ack(pack_ack(frame().key, 9, left_s))


@pytest.mark.parametrize("data", [b"", bytes(ACK_BYTES), bytes(ACK_BYTES + 1)])
def test_not_an_acknowledgement(data: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match="acknowledgement of"):
        unpack_ack(data)
