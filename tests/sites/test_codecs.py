"""Codecs: every bit where they promise it, the right rounding, and nothing silent or large."""

import contextlib
import random
import resource
import struct

import hypothesis.strategies as st
import numpy as np
import pytest
import zstandard
from hypothesis import given, settings

from isthmus.protos.errors import CorruptDataError
from isthmus.protos.frame import MAX_PAYLOAD_BYTES
from isthmus.sites.codecs import zstd_guard
from isthmus.sites.codecs.codec import Codec, Floats
from isthmus.sites.codecs.registry import BY_NAME, codec_named
from isthmus.topology.documents.load import load_job
from isthmus.topology.spec.codec_names import CODECS
from isthmus.topology.spec.errors import ConfigError

ALL = pytest.mark.parametrize("codec", BY_NAME.values(), ids=BY_NAME.keys())
ROUNDING = ("fp32", "bf16", "split", "bf16-split")
"""Those whose result follows from each element by itself.

The others are in test_codecs_lossy.py.
"""
EACH_ALONE = pytest.mark.parametrize("codec", [BY_NAME[name] for name in ROUNDING], ids=ROUNDING)
SPECIAL = np.array(
    [
        0x00000000, 0x80000000, 0x7F800000, 0xFF800000, 0x7FC00001, 0xFFC12345, 0x7F800001,
        0xFF80FFFF, 0x7FFFFFFF, 0xFFFFFFFF, 0x00000001, 0x807FFFFF, 0x7F7FFFFF, 0x3F808000,
        0x3F818000, 0x3F808001, 0x3F80FFFF,
    ],
    dtype=np.uint32,
)  # fmt: skip
"""Zeros, infinities, quiet and signalling NaNs, subnormals, the largest, and ties."""


def bits(values: Floats) -> list[int]:
    return [int(pattern) for pattern in values.view(np.uint32)]


def gradient(seed: int, numel: int) -> Floats:
    generator = np.random.default_rng(seed)
    return (generator.standard_normal(numel) * 1e-4).astype(np.float32)


def reference_bf16(pattern: int) -> int:
    """Round by the definition: the nearest of both neighbours, the even one on a tie."""
    low, dropped = pattern >> 16 << 16, pattern & 0xFFFF
    if pattern & 0x7FFFFFFF > 0x7F800000:
        return low | 0x400000
    up = dropped > 0x8000 or (dropped == 0x8000 and pattern >> 16 & 1)
    return low + 0x10000 if up else low


def test_registry_is_what_jobs_may_name_and_numbers_are_unique() -> None:
    assert set(BY_NAME) == set(CODECS)
    assert {name: codec.number for name, codec in BY_NAME.items()} == {
        "fp32": 1, "bf16": 2, "split": 3, "bf16-split": 4, "int8": 5, "int8-zstd": 6,
        "int4": 7, "int4-zstd": 8, "fp8": 9, "fp8-zstd": 10, "topk": 11,
        "topk-zstd": 12, "topk2": 13,
    }  # fmt: skip
    with pytest.raises(ConfigError, match=r"exchange\.codec: want one of fp32.*got 'int3'"):
        codec_named("int3")


@pytest.mark.parametrize("name", CODECS)
def test_the_largest_chunk_fits_a_frame(name: str) -> None:
    """Whatever it holds: `max_bytes` is what a chunk that cannot be quantised takes."""
    largest_bytes = 16 << 20
    job = "{version: 1, name: a, topology: t.yaml, entrypoint: a.py, exchange: {chunk: CHUNK}}"
    parsed = load_job(job.replace("CHUNK", "16MiB"), "job.yaml")
    assert parsed.exchange.chunk_bytes == largest_bytes
    assert codec_named(name).max_bytes(largest_bytes // 4) <= MAX_PAYLOAD_BYTES
    with pytest.raises(ConfigError, match="want 64KiB to 16MiB"):
        load_job(job.replace("CHUNK", "17MiB"), "job.yaml")


@EACH_ALONE
@settings(max_examples=60)
@given(patterns=st.lists(st.integers(0, 2**32 - 1) | st.sampled_from(SPECIAL.tolist())))
def test_any_bits_round_trip_as_promised(codec: Codec, patterns: list[int]) -> None:
    values = np.array(patterns, dtype=np.uint32).view(np.float32)
    payload = codec.encode(values)
    assert len(payload) <= codec.max_bytes(len(values))
    expected = patterns if codec.lossless else [reference_bf16(pattern) for pattern in patterns]
    out = np.full(len(values), 7, dtype=np.float32)
    assert bits(codec.decode(payload, len(values))) == expected
    assert codec.decode(memoryview(payload), len(values), out) is out
    assert bits(out) == expected
    assert bits(codec.quantize(values)) == expected
    assert bits(values) == patterns


def test_compressing_codecs_compress_gradients() -> None:
    values = gradient(1, 1 << 18)
    assert values.nbytes / len(BY_NAME["split"].encode(values)) > 1.15
    assert values.nbytes / len(BY_NAME["bf16-split"].encode(values)) > 2.7
    zeros = np.zeros(1 << 18, dtype=np.float32)
    assert zeros.nbytes / len(BY_NAME["split"].encode(zeros)) > 20


@ALL
def test_every_wrong_size_is_corrupt(codec: Codec) -> None:
    payload = bytes(codec.encode(gradient(2, 5000)))
    for wrong in (payload[:-1], payload + b"\0", b"", payload[:9]):
        with pytest.raises(CorruptDataError):
            codec.decode(wrong, 5000)
    for numel in (0, 4000, 6000):
        with pytest.raises(CorruptDataError):
            codec.decode(payload, numel)


@pytest.mark.parametrize("name", ["split", "bf16-split"])
def test_flipped_bits_of_compressed_planes_are_never_silent(name: str) -> None:
    codec, seed = BY_NAME[name], 11
    values = gradient(seed, 3000)
    payload, plain = codec.encode(values), bits(codec.quantize(values))
    generator = random.Random(seed)
    table = struct.unpack_from(f"<{(2, 4)[codec.lossless]}I", payload)
    compressed_bytes = table[-1] & 0x7FFFFFFF
    assert table[-1] >> 31, "the exponents are compressed"
    for _ in range(2000):
        position = 8 * (len(payload) - compressed_bytes) + generator.randrange(8 * compressed_bytes)
        mangled = bytearray(payload)
        mangled[position // 8] ^= 1 << position % 8
        try:
            decoded = codec.decode(bytes(mangled), 3000)
        except CorruptDataError:
            continue
        assert bits(decoded) == plain, f"{seed=} {position=}"


@ALL
@settings(max_examples=60)
@given(payload=st.binary(max_size=200), numel=st.integers(0, 40))
def test_any_bytes_decode_or_are_corrupt(codec: Codec, payload: bytes, numel: int) -> None:
    with contextlib.suppress(CorruptDataError):
        assert len(codec.decode(payload, numel)) == numel


def test_zstd_frames_that_would_allocate_are_refused() -> None:
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    bomb = zstandard.ZstdCompressor(level=3, write_checksum=True).compress(bytes(64 << 20))
    peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    unknown = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(1000))
    unchecked = zstandard.ZstdCompressor().compress(bytes(1000))
    good = zstd_guard.compress(bytes(1000))
    frames = [
        bomb,
        bytes.fromhex("28b52ffde06c06060663636363"),
        unknown,
        unchecked,
        good + good,
        good + b"\0",
        good[:-1],
        b"",
        b"\x50\x2a\x4d\x18\x04\x00\x00\x00abcd",
    ]
    for frame in frames:
        with pytest.raises(CorruptDataError):
            zstd_guard.decompress(frame, 1000)
    assert zstd_guard.decompress(good, 1000) == bytes(1000)
    after_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert after_kib - max(before_kib, peak_kib) < 8 << 10
