"""What comes over the WAN: codecs' payloads, frames, acknowledgements.

A frame's checksum would stop every mutation, so `sealed` targets get frames whose checksum is made
right again: what a peer of another build, or a hostile one, could send.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Iterable

import numpy as np
import xxhash

from isthmus.protos.errors import (
    CorruptDataError,
    LayoutMismatchError,
    RemoteProtocolError,
    StaleGenerationError,
)
from isthmus.protos.frame import (
    HEADER_BYTES,
    ChunkKey,
    Frame,
    Kind,
    pack,
    pack_ack,
    unpack,
    unpack_ack,
)
from isthmus.sites.codecs.codec import Codec, Floats
from isthmus.sites.codecs.registry import BY_NAME
from isthmus.sites.gateway.reduction.chunk_reduction import (
    Action,
    Bucket,
    BucketReduction,
    Own,
    Received,
    roles,
)
from isthmus.sites.local.chunk_grid import grid
from isthmus.topology.spec.reduction_plan import ReductionPlan, star
from tests.fuzz.target import KIB, Target

_SIZE = struct.Struct("<H")
"""Before a payload: how many elements the receiver's plan says that it holds."""
_NUMEL_MAX = 5000
_CHECKSUM_AT = 56
_NUMEL, _CHUNK_NUMEL = 300, 200
"""Of the bucket that `sealed` frames belong to."""


def gradient(numel: int, seed: int = 1) -> Floats:
    """Return float32 with heavy tails and some zeros, shape (numel,)."""
    generator = np.random.default_rng(seed)
    values = generator.standard_t(4, numel) * 1e-3
    return np.where(generator.random(numel) < 0.1, 0, values).astype(np.float32)


def sealed(data: bytes) -> bytes:
    """Return a frame with the checksum that its bytes have."""
    if len(data) < HEADER_BYTES:
        return data
    mended = bytearray(data)
    checksum = xxhash.xxh3_64_intdigest(data[:_CHECKSUM_AT] + data[HEADER_BYTES:])
    struct.pack_into("<Q", mended, _CHECKSUM_AT, checksum)
    return bytes(mended)


def _numel(data: bytes) -> int:
    return 0 if len(data) < _SIZE.size else int(_SIZE.unpack_from(data)[0]) % (_NUMEL_MAX + 1)


def _codec_target(codec: Codec) -> Target:
    def decode(data: bytes) -> None:
        numel = _numel(data)
        assert codec.decode(memoryview(data)[_SIZE.size :], numel).shape == (numel,)

    def samples() -> list[bytes]:
        broken = gradient(20)
        broken[[3, 7]] = np.nan, np.inf
        arrays = [gradient(0), gradient(1), gradient(70), gradient(200), broken]
        arrays.append(np.repeat(np.array([0, 1.5], dtype=np.float32), (600, 8)))
        return [_SIZE.pack(len(each)) + codec.encode(each) for each in arrays]

    return Target(
        name=f"codec-{codec.name}",
        decode=decode,
        refusals=(CorruptDataError,),
        samples=samples,
        # The elements, their planes or codes, and what joins them; scratch memory is there before.
        most_bytes=lambda data: 8 * KIB + 24 * _numel(data),
    )


def _frame_samples() -> list[bytes]:
    keys = [
        ChunkKey(0, 0, 0, 0, Kind.CONTRIBUTION),
        ChunkKey(2**40, 70_000, 12, 3, Kind.RESULT),
    ]
    frames = [Frame(key, 9, 4, 1, 0xDEADBEEF, 2**33, 12345.5, bytes(range(40))) for key in keys]
    return [bytes(pack(each)) for each in (*frames, Frame(keys[0], 1, 1, 0, 0, 0, 0.0, b""))]


_PLANS = {
    "gather": ReductionPlan(2, (), ""),
    "star": ReductionPlan(3, (star(3, 1), star(3, 0)), ""),
}


def _receiver(plan: str, codec: str) -> tuple[BucketReduction, int]:
    """Return site 1's machine of a bucket, its own part given, and who sends to it."""
    cut = grid(_NUMEL, _CHUNK_NUMEL, (1, 2, 1)[: _PLANS[plan].num_sites])
    codecs = (BY_NAME[codec],) * max(1, len(_PLANS[plan].trees))
    bucket = Bucket(1, 4, 1, 7, codecs, cut, time.thread_time)
    machine = BucketReduction(bucket, _PLANS[plan], roles(_PLANS[plan], 1), None)
    for chunk in range(cut.num_chunks):
        start, numel = cut.span(chunk)
        own = Own(gradient(_NUMEL)[start : start + numel].copy(), 3.0)
        _exhaust(machine.chunk(chunk).handle(own))
    return machine, 0


def _exhaust(actions: Iterable[Action]) -> None:
    """Have a machine do all that it does between its actions."""
    for _ in actions:
        pass


def _sealed_target(plan: str, codec: str) -> Target:
    """Return the whole way of a frame: checksum, header, the receiver's plan, codec, sum."""

    def decode(data: bytes) -> None:
        machine, sender = _receiver(plan, codec)
        frame = unpack(sealed(data))
        machine.check(sender, frame)
        _exhaust(machine.chunk(frame.key.chunk).handle(Received(sender, frame)))

    def samples() -> list[bytes]:
        machine, sender = _receiver(plan, codec)
        cut = machine.bucket.grid
        found = []
        for chunk in range(cut.num_chunks):
            start, numel = cut.span(chunk)
            payload = BY_NAME[codec].encode(gradient(_NUMEL, 2)[start : start + numel].copy())
            tree = 0 if plan == "gather" else _PLANS[plan].tree_index(cut.num_chunks + chunk)
            kind = Kind.RESULT if plan == "star" and tree == 1 else Kind.CONTRIBUTION
            key = ChunkKey(4, 1, chunk, sender, kind)
            frame = Frame(key, 1, BY_NAME[codec].number, tree, 7, _NUMEL, 5.0, payload)
            found.append(bytes(pack(frame)))
        return found

    return Target(
        name=f"sealed-{plan}-{codec}",
        decode=decode,
        refusals=(
            CorruptDataError,
            LayoutMismatchError,
            RemoteProtocolError,
            StaleGenerationError,
        ),
        samples=samples,
        most_bytes=lambda data: 32 * KIB + 40 * _NUMEL + 4 * len(data),
        mutations=100,
    )


def _ack_samples() -> list[bytes]:
    return [pack_ack(unpack(data).key, 9, 3.5) for data in _frame_samples()]


WIRE_TARGETS = (
    *(_codec_target(codec) for codec in BY_NAME.values()),
    Target(
        name="frame",
        decode=unpack,
        refusals=(CorruptDataError, RemoteProtocolError),
        samples=_frame_samples,
        most_bytes=lambda data: 4 * KIB,
    ),
    Target(
        name="sealed-frame",
        decode=lambda data: unpack(sealed(data)),
        refusals=(CorruptDataError, RemoteProtocolError),
        samples=_frame_samples,
        most_bytes=lambda data: 4 * KIB + 4 * len(data),
    ),
    Target(
        name="acknowledgement",
        decode=unpack_ack,
        refusals=(RemoteProtocolError,),
        samples=_ack_samples,
        most_bytes=lambda data: 4 * KIB,
    ),
    *(
        _sealed_target(plan, codec)
        for plan in _PLANS
        for codec in ("split", "int4-zstd", "topk", "topk2")
    ),
)
