"""Nothing damaged, repeated, foreign or too large is ever added.

The whole receiving path, from bytes to sum.
"""

import random
import tracemalloc
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from isthmus.protos.errors import CorruptDataError, IsthmusError, RemoteProtocolError
from isthmus.protos.frame import (
    HEADER_BYTES,
    MAX_FRAME_BYTES,
    MAX_PAYLOAD_BYTES,
    ChunkKey,
    Frame,
    Kind,
    Packed,
    pack,
    unpack,
)
from isthmus.sites.codecs.codec import Codec, Floats
from isthmus.sites.codecs.registry import BY_NAME
from isthmus.sites.gateway.reduction.credit import FRAME_OVERHEAD_BYTES
from isthmus.topology.spec.reduction_plan import ReductionPlan, Tree, star
from tests.fakes.exchanges import Exchanges, Sent
from tests.fuzz.wire_targets import sealed

GATHER = ReductionPlan(2, (), "")
PLANS = {
    "gather": GATHER,
    "star": ReductionPlan(3, (star(3, 1),), ""),
    "chains": ReductionPlan(3, (Tree(0, {1: 0, 2: 1}), Tree(2, {1: 2, 0: 1})), ""),
}
RANKS = (2, 1, 3)
NUMEL, CHUNK_BYTES = 900, 1600
WEIGHTS = (3.0, 2.0, 5.0)
FLIPS, LIES = 1000, 100
"""A codec."""
EACH_CODEC = pytest.mark.parametrize("codec", BY_NAME.values(), ids=BY_NAME.keys())


def parts_of(num_sites: int, seed: int) -> list[Floats]:
    generator = np.random.default_rng(seed)
    return [generator.standard_t(4, NUMEL).astype(np.float32) for _ in range(num_sites)]


def world(plan: ReductionPlan, codec: str) -> Exchanges:
    return Exchanges(plan, codec, RANKS[: plan.num_sites], chunk_bytes=CHUNK_BYTES)


def undisturbed(plan: ReductionPlan, codec: str, seed: int) -> bytes:
    """Return what every site holds where the wire does nothing but its work."""
    parts, sites = parts_of(plan.num_sites, seed), world(plan, codec)
    sites.post_all(parts, WEIGHTS)
    while sites.wire:
        sent = sites.wire.pop(0)
        sites.deliver(sent.source, sent.target, sent.data)
    assert not sites.failures
    assert len({part.tobytes() for part in parts}) == 1
    return parts[0].tobytes()


def flipped(data: Packed, chance: random.Random, bits: int = 1) -> bytes:
    """Return a copy with that many bits changed: half of the time in the header."""
    damaged = bytearray(data)
    most = HEADER_BYTES if chance.random() < 0.5 or len(data) == HEADER_BYTES else len(data)
    for place in chance.sample(range(8 * most), bits):
        damaged[place // 8] ^= 1 << place % 8
    return bytes(damaged)


@EACH_CODEC
def test_no_flipped_bit_is_silent(codec: Codec) -> None:
    """Before each good frame come damaged copies of it, and after it too."""
    seed = 11
    chance = random.Random(f"{seed} {codec.name}")
    plan = chance.choice(list(PLANS.values()))
    expected = undisturbed(plan, codec.name, seed)
    parts, sites = parts_of(plan.num_sites, seed), world(plan, codec.name)
    sites.post_all(parts, WEIGHTS)
    caught: Counter[str] = Counter()
    delivered: list[Sent] = []

    def deliver_damaged(sent: Sent, bits: int) -> None:
        with pytest.raises(CorruptDataError, match=r"checksum of round .* bucket .* chunk"):
            sites.deliver(sent.source, sent.target, flipped(sent.data, chance, bits))
        caught["checksum"] += 1

    while sites.wire:
        sent = sites.wire.pop(0)
        for number in range(min(FLIPS // 8, FLIPS - caught.total())):
            deliver_damaged(sent, 1 if number % 4 else chance.randint(2, 6))
        sites.deliver(sent.source, sent.target, sent.data)
        delivered.append(sent)
    while caught.total() < FLIPS:
        deliver_damaged(chance.choice(delivered), 1)
    print(f"{seed=} {codec.name}: {dict(caught)}, silent: 0")
    assert not sites.failures
    assert {part.tobytes() for part in parts} == {expected}


CHECKS = {
    "not a frame of this version": "magic and version",
    "payload bytes where": "size of the payload",
    "unknown kind": "kind and flags",
    "elements there": "size of the bucket",
    "holds other parameters": "layout",
    "came with codec number": "codec's number",
    "chunks; number": "chunk",
    "is not its to send": "site, kind and tree",
    "a weight of": "weight",
    "ahead": "round",
    "at most": "most bytes",
}
"""What refuses a frame whose checksum is right, by its message; anything else is the codec's."""


def check_of(message: str) -> str:
    return next((check for part, check in CHECKS.items() if part in message), "codec")


def summed(codec: Codec, own: Floats, frames: list[Frame], weight: float) -> Floats:
    """Return site 0's result of a gather, by the definition: its own part, and what frames hold."""
    result = np.empty(NUMEL, dtype=np.float32)
    starts = sorted({*range(0, NUMEL, CHUNK_BYTES // 4), NUMEL // 2, NUMEL})
    for frame in frames:
        start, end = starts[frame.key.chunk], starts[frame.key.chunk + 1]
        part = codec.quantize(own[start:end].copy())
        with np.errstate(all="ignore"):
            total = part + codec.decode(frame.payload, end - start)
            result[start:end] = total / np.float32(weight + frame.weight)
    return result


@pytest.mark.no_cover
@pytest.mark.slow
@EACH_CODEC
def test_a_frame_that_lies_is_refused_or_adds_what_it_says(codec: Codec) -> None:
    """A bit is flipped before the checksum is made, as no link but a broken sender could.

    Then only other checks can tell. What they let through is another payload or weight of a size
    that is possible, and the sum is exactly what these say; or it is kept for a bucket that is not
    there yet.
    """
    seed = 12
    chance = random.Random(f"{seed} {codec.name}")
    counts: Counter[str] = Counter()
    for number in range(LIES):
        parts, sites = parts_of(2, number % 3), world(GATHER, codec.name)
        own = parts[0].copy()
        sites.post_all(parts, WEIGHTS)
        good = [sent.data for sent in sites.wire if sent.target == 0]
        chosen = chance.randrange(len(good))
        lie = sealed(flipped(good[chosen], chance))
        refusal = ""
        try:
            sites.deliver(1, 0, lie)
        except IsthmusError as error:
            refusal = str(error)
        if sites.failures:  # found out when it was decoded
            (failure,) = sites.failures
            assert f"round 0 bucket 0 chunk {unpack(lie).key.chunk}: " in failure.message
            refusal = failure.message
        taken = [unpack(data) for data in good]
        if refusal:
            counts[check_of(refusal)] += 1
        elif lie == good[chosen]:
            counts["only the checksum was flipped"] += 1
        elif (unpack(lie).key.round, unpack(lie).key.bucket) != (0, 0):
            counts["kept for another bucket"] += 1
        else:
            taken[unpack(lie).key.chunk] = unpack(lie)
            counts["none: another payload or weight"] += 1
        if not sites.failures:  # else the run has ended
            for data in good:
                sites.deliver(1, 0, data)
            expected = summed(codec, own, taken, WEIGHTS[0])
            assert parts[0].tobytes() == expected.tobytes(), f"{seed=} {number=} {refusal}"
    assert counts.total() == LIES
    assert len(counts) > 5
    print(f"{seed=} {codec.name}: {dict(counts)}")


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())
@pytest.mark.parametrize("codec", ["fp32", "split", "int4", "topk-zstd"])
@pytest.mark.parametrize("seed", range(3))
def test_repeated_reordered_and_foreign_frames_change_nothing(
    codec: str, plan: ReductionPlan, seed: int
) -> None:
    chance = random.Random(seed)
    expected = undisturbed(plan, codec, seed)
    parts, sites = parts_of(plan.num_sites, seed), world(plan, codec)
    late = chance.randrange(plan.num_sites)  # its peers' frames come before its own part
    for site in range(plan.num_sites):
        if site != late:
            sites.post_site(site, parts[site], WEIGHTS[site])
    seen: list[Sent] = []
    for _ in range(2):
        while sites.wire:
            sent = sites.wire.pop(chance.randrange(len(sites.wire)))
            seen.append(sent)
            # The frame, once to three times; one that came before; and strangers'.
            again = [sent] * chance.randint(1, 3) + [chance.choice(seen)]
            for each in again:
                sites.deliver(each.source, each.target, each.data)
            deliver_foreign(sites, sent, chance)
        if len({site for site, _, _ in sites.reduced}) == 0:
            sites.post_site(late, parts[late], WEIGHTS[late])
    while sites.wire:
        sent = sites.wire.pop(chance.randrange(len(sites.wire)))
        sites.deliver(sent.source, sent.target, sent.data)
    for sent in seen:  # what comes again after the end
        sites.deliver(sent.source, sent.target, sent.data)
    assert not sites.failures, f"{seed=}"
    assert {part.tobytes() for part in parts} == {expected}, f"{seed=}"
    told = Counter((site, rank) for site, rank, _ in sites.reduced)
    everyone = [(site, rank) for site in range(plan.num_sites) for rank in range(RANKS[site])]
    assert told == Counter(everyone), f"{seed=}"


def deliver_foreign(sites: Exchanges, sent: Sent, chance: random.Random) -> None:
    """Send what no site can have got to; it is refused at once."""
    frame = unpack(sent.data)
    foreign = replace(frame, key=replace(frame.key, round=chance.choice((4, 2**40, 2**64 - 1))))
    with pytest.raises(IsthmusError, match="round"):
        sites.deliver(sent.source, sent.target, pack(foreign))


@EACH_CODEC
def test_what_is_too_large_is_refused_before_anything_is_allocated(codec: Codec) -> None:
    parts, sites = parts_of(2, 5), world(GATHER, codec.name)
    sites.post_all(parts, WEIGHTS)
    frame = unpack(next(sent.data for sent in sites.wire if sent.target == 0))
    most = codec.max_bytes(NUMEL)
    huge = bytes(MAX_PAYLOAD_BYTES)
    largest = pack(replace(frame, payload=huge))
    claims = [largest, pack(replace(frame, payload=bytes(most + 1))), bytes(largest) + b"x"]
    claims += [pack(replace(frame, numel=numel)) for numel in (2**40, 2**63)]
    claims += [pack(replace(frame, key=replace(frame.key, chunk=2**32 - 1)))]
    tracemalloc.start()
    for data in claims:
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        with pytest.raises(IsthmusError):
            sites.deliver(1, 0, data)
        assert tracemalloc.get_traced_memory()[1] - before < 32 << 10
    tracemalloc.stop()
    assert len(largest) == MAX_FRAME_BYTES
    assert not sites.reduced


def test_frames_without_a_payload_are_bounded_too() -> None:
    """Of buckets that nobody has posted: each takes memory, though its payload takes none."""
    held_bytes = 1 << 16
    sites = Exchanges(GATHER, "fp32", (1, 1), held_bytes=held_bytes)
    frames = [
        pack(Frame(ChunkKey(0, bucket, 0, 1, Kind.CONTRIBUTION), 0, 1, 0, 77, 0, 1.0, b""))
        for bucket in range(held_bytes // FRAME_OVERHEAD_BYTES + 1)
    ]
    for frame in frames[:-1]:
        sites.deliver(1, 0, frame)
    sites.deliver(1, 0, frames[0])  # once more takes nothing
    with pytest.raises(RemoteProtocolError, match=r"bucket 64 chunk 0: a frame beyond .* 65536"):
        sites.deliver(1, 0, frames[-1])
    with pytest.raises(RemoteProtocolError):
        sites.deliver(1, 0, b"")


def test_results_of_an_epoch_that_never_begins_here_do_not_fill_the_memory() -> None:
    # The coordinator may end before it tells a site that comes back the epoch of the others.
    bench = Exchanges(PLANS["star"], "fp32", RANKS, chunk_bytes=CHUNK_BYTES)
    exchange, payload = bench.exchanges[0], bytes(CHUNK_BYTES)
    exchange._exchanges._results_bytes_max = 8 * CHUNK_BYTES
    for round_ in range(75, 90):
        key = ChunkKey(round_, 0, 0, 1, Kind.RESULT)
        exchange.receive((1, 0), Frame(key, 2, 0, 0, 0, NUMEL, 1.0, payload))
    assert bench.failures
    assert bench.failures[0].code == "PEER_LOST"
    assert "results that may lie here" in bench.failures[0].message
