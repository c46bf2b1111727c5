"""The wire format of a frame: one encoded chunk of a gradient between two gateways.

A frame is a 64-byte little-endian header followed by the codec's payload. The header ends with the
xxh3-64 of its other fields and the payload, so any flipped bit is detected. The receiver allocates
no memory by these numbers: sizes must match its own bucket plan.

An acknowledgement is 32 bytes: the key and epoch of the accepted frame, and the time at which the
acknowledgement left, by the receiver's monotonic clock.
"""

import math
import struct
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
import xxhash

from isthmus.protos.errors import CorruptDataError, RemoteProtocolError
from isthmus.protos.limits import EXCHANGE_CHANNEL_BYTES

HEADER_BYTES = 64
MAX_FRAME_BYTES = EXCHANGE_CHANNEL_BYTES
MAX_PAYLOAD_BYTES = MAX_FRAME_BYTES - HEADER_BYTES

_MAGIC = b"ISTH"
_VERSION = 3
_HEADER = struct.Struct("<4sBBBBIIQIIHHIQd")
_CHECKSUM = struct.Struct("<Q")
_ACK = struct.Struct("<QIIHBxId")
ACK_BYTES = _ACK.size
assert _HEADER.size + _CHECKSUM.size == HEADER_BYTES


Packed = bytes | memoryview
"""A frame's bytes, no longer modified."""


class Kind(IntEnum):
    """The role of a frame in its chunk's reduction."""

    CONTRIBUTION = 1
    """Up a tree: the sum of the sender's subtree, not yet divided."""
    RESULT = 2
    """Down a tree: the finished chunk, divided by the weight of all contributors."""
    PADDING = 3
    """Warms up a connection; acknowledged and dropped. Part of no chunk."""
    HANDOVER = 4
    """A whole frame of an earlier epoch, made by `site`, for sites that may lack it."""
    ROUND_ENDS = 5
    """A site has taken all steps of the round: no other one begins a step in it. No payload, and
    part of no chunk. Each gateway passes the first one of a round on to its other peers."""


_KINDS = frozenset(Kind)


@dataclass(frozen=True, slots=True)
class ChunkKey:
    """Identifies one message of an epoch, so that sending it twice changes nothing."""

    round: int
    """Number of the exchange (one per optimizer step), from 0."""
    bucket: int
    chunk: int
    """Index of the chunk in the bucket's grid."""
    site: int
    """Index of the site that made the payload: the sender, or for a result the tree's root."""
    kind: Kind


@dataclass(frozen=True, slots=True)
class Frame:
    """A parsed and checked frame. `payload` is a view of the received bytes."""

    key: ChunkKey
    epoch: int
    """Epoch whose plan the frame belongs to; for a handover, the epoch in which it is sent."""
    codec: int
    """Number of the codec in sites/codecs/registry.py."""
    tree: int
    """Index of the tree that carries this chunk. In a handover, its number of frames."""
    layout: int
    """crc32c of the bucket's parameter names and shapes: equal at all sites."""
    numel: int
    """float32 elements of the whole bucket."""
    weight: float
    """Tokens of a contribution; for a result, those of all contributors."""
    payload: Packed
    packed: Packed | None = field(default=None, init=False, compare=False, repr=False)
    """The packed frame, cached by `pack` or as received: one copy for all receivers."""


def pack(frame: Frame) -> Packed:
    """Return the frame's bytes.

    The first call copies the payload, whose memory may change afterwards.
    """
    packed = frame.packed
    if packed is None:
        packed = _pack(frame)
        _keep(frame, packed)
    return packed


def _keep(frame: Frame, packed: Packed) -> None:
    object.__setattr__(frame, "packed", packed)  # a cache in a frozen object


def _pack(frame: Frame) -> Packed:
    key = frame.key
    fields = _HEADER.pack(
        _MAGIC,
        _VERSION,
        key.kind,
        frame.codec,
        0,
        frame.epoch,
        key.bucket,
        key.round,
        key.chunk,
        frame.layout,
        key.site,
        frame.tree,
        len(frame.payload),
        frame.numel,
        frame.weight,
    )
    packed = np.empty(HEADER_BYTES + len(frame.payload), np.uint8)
    packed[: _HEADER.size] = np.frombuffer(fields, np.uint8)
    checksum = _CHECKSUM.pack(_checksum(fields, frame.payload))
    packed[_HEADER.size : HEADER_BYTES] = np.frombuffer(checksum, np.uint8)
    # Unlike bytes.join, numpy copies without the interpreter's lock.
    packed[HEADER_BYTES:] = np.frombuffer(frame.payload, np.uint8)
    return memoryview(packed.data)


def unpack(data: Packed) -> Frame:
    """Parse a frame.

    Raises:
        RemoteProtocolError: not a frame of this version, or its size is wrong.
        CorruptDataError: the checksum does not match.
    """
    if len(data) < HEADER_BYTES or len(data) > MAX_FRAME_BYTES:
        raise RemoteProtocolError(f"a frame of {len(data)} bytes")
    fields = _HEADER.unpack_from(data)
    magic, version, kind, codec, flags, epoch, bucket, round_, chunk = fields[:9]
    layout, site, tree, payload_bytes, numel, weight = fields[9:]
    payload = memoryview(data)[HEADER_BYTES:]
    # Check this first: a flipped bit must not count as a peer's mistake.
    if _CHECKSUM.unpack_from(data, _HEADER.size) != (_checksum(data[: _HEADER.size], payload),):
        raise CorruptDataError(f"checksum of round {round_} bucket {bucket} chunk {chunk}")
    if magic != _MAGIC or version != _VERSION:
        raise RemoteProtocolError("not a frame of this version")
    if payload_bytes != len(payload):
        raise RemoteProtocolError(f"{len(payload)} payload bytes where {payload_bytes} are named")
    if kind not in _KINDS or flags:
        raise RemoteProtocolError(f"unknown kind {kind} or flags {flags}")
    key = ChunkKey(round_, bucket, chunk, site, Kind(kind))
    frame = Frame(key, epoch, codec, tree, layout, numel, weight, payload)
    _keep(frame, data)
    return frame


def checksum_of(packed: Packed) -> int:
    """Return the checksum in a packed frame."""
    return int(_CHECKSUM.unpack_from(packed, _HEADER.size)[0])


def pack_ack(key: ChunkKey, epoch: int, left_s: float) -> bytes:
    """Return the acknowledgement of a frame; it leaves at `left_s`."""
    return _ACK.pack(key.round, key.bucket, key.chunk, key.site, key.kind, epoch, left_s)


def unpack_ack(data: Packed) -> tuple[ChunkKey, int, float]:
    """Return an acknowledgement's key, epoch, and departure time by the peer's clock.

    Raises:
        RemoteProtocolError: not an acknowledgement.
    """
    if len(data) != ACK_BYTES:
        raise RemoteProtocolError(f"an acknowledgement of {len(data)} bytes")
    round_, bucket, chunk, site, kind, epoch, left_s = _ACK.unpack(data)
    if kind not in _KINDS:
        raise RemoteProtocolError(f"an acknowledgement of kind {kind}")
    if not math.isfinite(left_s):
        raise RemoteProtocolError(f"an acknowledgement that left at {left_s}")
    return ChunkKey(round_, bucket, chunk, site, Kind(kind)), epoch, left_s


def _checksum(fields: Packed, payload: Packed) -> int:
    """Return the xxh3-64 over both parts; large ones without the interpreter's lock."""
    digest = xxhash.xxh3_64(fields)
    digest.update(payload)
    return int(digest.intdigest())
