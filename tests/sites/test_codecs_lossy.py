"""Quantising codecs: errors within a step, ties to even, no saturation, alike on any machine."""

import contextlib
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import google_crc32c
import hypothesis.strategies as st
import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings

from isthmus.protos.errors import CorruptDataError
from isthmus.sites.codecs import zstd_guard
from isthmus.sites.codecs.codec import Codec, Floats
from isthmus.sites.codecs.quantising_codecs import (
    AS_IT_IS,
    COMPRESSED,
    QUANTISED,
    BlockCodec,
)
from isthmus.sites.codecs.registry import BY_NAME
from isthmus.sites.codecs.sparse_codecs import ROW, ROW_KEPT, num_kept, num_kept_in_rows
from isthmus.topology.trees.codec_costs import BLOCK, RATIOS

BLOCKS = [codec for codec in BY_NAME.values() if isinstance(codec, BlockCodec)]
EACH_BLOCK = pytest.mark.parametrize("codec", BLOCKS, ids=[codec.name for codec in BLOCKS])
TOPK, TOPK2 = BY_NAME["topk"], BY_NAME["topk2"]
QUANTISING = [*BLOCKS, TOPK, BY_NAME["topk-zstd"], TOPK2]
EACH = pytest.mark.parametrize("codec", QUANTISING, ids=[codec.name for codec in QUANTISING])
SIZES = (0, 1, 2, 127, 128, 129, 4097, (1 << 16) - 1, (1 << 16) + 1, (1 << 18) + 77)
FINITE = st.integers(0, 2**32 - 1).filter(lambda bits: bits & 0x7FFFFFFF < 0x7F000000)
"""Bits of the numbers below 2**127, subnormal ones and both zeros among them."""


def gradient(seed: int, numel: int) -> Floats:
    """Return what gradients are like: heavy tails, scales that differ, zeros."""
    generator = np.random.default_rng(seed)
    scales = np.exp(generator.normal(-8, 1, -(-numel // 1000))).repeat(1000)[:numel]
    values = generator.standard_t(4, numel) * scales
    return np.where(generator.random(numel) < 0.05, 0, values).astype(np.float32)


Doubles = npt.NDArray[np.float64]


def steps(codec: BlockCodec, values: Floats) -> Doubles:
    """Return twice the largest error that each element may have, by the definition."""
    blocks = -(-len(values) // BLOCK)
    padded = np.zeros(blocks * BLOCK)
    padded[: len(values)] = np.abs(values.astype(np.float64))
    peaks = padded.reshape(-1, BLOCK).max(1)
    scale: Doubles = np.maximum(peaks / codec.level_max * (1 + 2**-7), 2.0**-126)
    scale = scale.repeat(BLOCK)[: len(values)]
    if codec.name.startswith("fp8"):
        np.maximum(padded[: len(values)] * 2.0**-3, scale * 2.0**-9, out=scale)
    return scale


@EACH_BLOCK
@settings(max_examples=50)
@given(patterns=st.lists(FINITE, max_size=300))
def test_no_error_is_larger_than_half_a_step(codec: BlockCodec, patterns: list[int]) -> None:
    values = np.array(patterns, dtype=np.uint32).view(np.float32)
    payload = codec.encode(values)
    assert payload[0] in (QUANTISED, COMPRESSED)
    decoded = codec.decode(payload, len(values))
    error = np.abs(decoded.astype(np.float64) - values)
    assert (error <= steps(codec, values) * (0.5 + 1e-5)).all()
    assert values.view(np.uint32).tolist() == patterns


@EACH
@pytest.mark.parametrize("numel", SIZES)
def test_sizes(codec: Codec, numel: int) -> None:
    values = gradient(numel, numel)
    payload = codec.encode(values)
    out = np.full(numel, np.nan, dtype=np.float32)
    decoded = codec.decode(payload, numel)
    assert codec.decode(memoryview(b"abc" + payload)[3:], numel, out) is out
    assert out.tobytes() == decoded.tobytes() == codec.quantize(values).tobytes()
    if isinstance(codec, BlockCodec):
        assert (np.abs(decoded - values) <= steps(codec, values) * (0.5 + 1e-5)).all()
    if numel >= 4097:
        ratios = {"int8": 3.9, "int4": 7.5, "fp8": 3.9, "topk": 80, "topk2": 150}
        assert values.nbytes / len(payload) >= ratios[codec.name.removesuffix("-zstd")]


def test_predictions_know_what_does_not_depend_on_values() -> None:
    values = gradient(1, 1 << 18)
    for name, ratio in RATIOS.items():
        assert len(BY_NAME[name].encode(values)) == pytest.approx(values.nbytes * ratio, abs=1)


@EACH
@settings(max_examples=40)
@given(
    patterns=st.lists(st.integers(0, 2**32 - 1), max_size=200),
    special=st.sampled_from(
        [0x7F800000, 0xFF800000, 0x7FC00001, 0x7F800001, 0xFFFFFFFF, 0x7F000000, 0xFF7FFFFF]
    ),
    place=st.integers(0, 200),
)
def test_what_is_not_finite_crosses_bit_for_bit(
    codec: Codec, patterns: list[int], special: int, place: int
) -> None:
    patterns.insert(place, special)
    values = np.array(patterns, dtype=np.uint32).view(np.float32)
    payload = codec.encode(values)
    assert payload[0] == AS_IT_IS
    assert len(payload) == codec.max_bytes(len(values))
    assert codec.decode(payload, len(values)).view(np.uint32).tolist() == patterns


@EACH
@pytest.mark.parametrize("special", [0x7F800000, 0xFF800000, 0x7F800001, 0xFFC00007, 0x7F000000])
def test_what_was_owed_to_a_chunk_that_is_not_finite_crosses_too(
    codec: Codec, special: int
) -> None:
    """Whichever block it is in: those before it are quantised by then, and have to be undone."""
    for seed in range(30):
        chance = np.random.default_rng([special, seed])
        numel = int(chance.integers(1, 1000))
        # Any exponents, and numbers at and beside the middle between two levels.
        values = chance.integers(0, 0x7F000000, numel, dtype=np.uint32).view(np.float32)
        halves = (chance.integers(-30, 30, numel) / 2).astype(np.float32) * np.float32(0.01)
        nearest = halves.view(np.uint32) + chance.integers(0, 3, numel, dtype=np.uint32)
        values = np.where(chance.random(numel) < 0.5, nearest.view(np.float32), values)
        residual = (values * chance.uniform(-0.02, 0.02, numel)).astype(np.float32)
        place = chance.integers(numel)
        values.view(np.uint32)[place], residual[place] = special, 0
        with np.errstate(invalid="ignore"):  # of a signalling NaN
            wanted = (values + residual).view(np.uint32)
        wanted[place] = special
        encoded = codec.encode_with_residual(values, residual)
        assert encoded.payload[0] == AS_IT_IS, f"{seed=}"
        found = codec.decode(encoded.payload, numel).view(np.uint32)
        assert np.array_equal(found, wanted), f"{seed=}"
        assert not residual.any()


@pytest.mark.parametrize(("name", "peak"), [("int8", 127), ("int4", 7)])
def test_ties_go_to_the_even_level(name: str, peak: float) -> None:
    values = np.array([peak, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 1.49, -peak], dtype=np.float32)
    expected = [peak, 0, 2, 2, 0, -2, -2, 1, -peak]
    assert BY_NAME[name].quantize(values).tolist() == expected


def test_fp8_rounds_as_the_format_says() -> None:
    upper = np.arange(1 << 16, dtype=np.uint32) << 16
    odd = (upper | 0x4001).view(np.float32)
    values = np.concatenate([upper.view(np.float32), odd])
    values = values[np.abs(values) <= 448]
    blocks = np.full((-(-len(values) // 127), BLOCK), 448, dtype=np.float32)  # a scale of 1
    padded = np.zeros(len(blocks) * 127, dtype=np.float32)
    padded[: len(values)] = values
    blocks[:, 1:] = padded.reshape(-1, 127)
    expected = torch.from_numpy(blocks).to(torch.float8_e4m3fn).float().numpy()
    assert BY_NAME["fp8"].quantize(blocks.reshape(-1)).tobytes() == expected.tobytes()


@pytest.mark.parametrize("numel", [1, 99, 100, 101, 5000, 30_000])
def test_topk_keeps_exactly_the_largest(numel: int) -> None:
    values = gradient(numel, numel)
    values[numel // 2 :] = np.round(values[numel // 2 :], 3)  # many ties, many zeros
    decoded = TOPK.quantize(values)
    order = np.lexsort((np.arange(numel), -np.abs(values)))[: num_kept(numel)]
    expected = np.zeros(numel, dtype=np.float32)
    expected[order] = torch.from_numpy(values[order]).to(torch.bfloat16).float().numpy()
    assert decoded.tobytes() == (expected + 0).tobytes()
    assert num_kept(numel) == max(1, round(numel / 100))


def test_topk_reaches_far_places() -> None:
    for places in (
        [0],
        [254],
        [255],
        [256],
        [509, 510, 511],
        [9999],
        [0, 9999],
        [4, 4 + 256, 4 + 512],
    ):
        values = np.zeros(10_000, dtype=np.float32)
        values[places] = -1.5
        assert TOPK.quantize(values).tobytes() == values.tobytes()


def best_split(magnitudes: Floats) -> tuple[float, Doubles]:
    """Return the least squared error of two magnitudes for all, and those, by trying each split."""
    ordered = np.sort(magnitudes.astype(np.float64))
    found = [
        (float(((ordered - ordered.mean()) ** 2).sum()), np.full(len(ordered), ordered.mean()))
    ]
    for split in range(1, len(ordered)):
        parts = ordered[:split], ordered[split:]
        levels = np.concatenate([np.full(len(part), part.mean()) for part in parts])
        found.append((float(((ordered - levels) ** 2).sum()), levels))
    return min(found, key=lambda each: each[0])


@pytest.mark.parametrize("numel", [1, 63, 64, 65, 4095, 4096, 4097, 30_000])
def test_topk2_keeps_the_largest_of_each_row_as_the_best_two_magnitudes(numel: int) -> None:
    values = gradient(numel, numel)
    values[numel // 2 :] = np.round(values[numel // 2 :], 3)  # many ties, many zeros
    decoded = TOPK2.quantize(values)
    count = 0
    for first in range(0, numel, ROW):
        row, sent = values[first : first + ROW], decoded[first : first + ROW]
        kept = np.lexsort((np.arange(len(row)), -np.abs(row)))[: -(-len(row) // ROW_KEPT)]
        count += len(kept)
        assert not np.delete(sent, kept).any()
        assert (np.signbit(sent[kept]) == np.signbit(row[kept])).all()
        assert len(np.unique(np.abs(sent[kept]))) <= 2
        least, levels = best_split(np.abs(row[kept]))
        error = float(((sent[kept].astype(np.float64) - row[kept]) ** 2).sum())
        rounding = float(((levels * 2.0**-8) ** 2).sum())  # of both magnitudes to bfloat16
        assert error <= (least**0.5 + rounding**0.5) ** 2 * (1 + 1e-6) + 1e-45
    assert count == num_kept_in_rows(numel)


def test_topk2_is_a_gap_of_a_byte_and_two_bits_an_element() -> None:
    """And 4 bytes a row: 0.0209 bytes an element where the largest lie anywhere."""
    numel = 1 << 18
    values = np.random.default_rng(3).standard_normal(numel).astype(np.float32)
    assert len(TOPK2.encode(values)) / numel == pytest.approx((4 + 16 + 64 + 1.2) / ROW, rel=0.01)


def test_topk2_tells_two_magnitudes_apart_exactly() -> None:
    values = np.zeros(2 * ROW + 100, dtype=np.float32)
    values[:ROW_KEPT] = 3.0
    values[5:9] = -0.5
    values[ROW + 1000] = 2.0**-130  # a row of one element, subnormal, and zeros
    values[-1] = -(2.0**126)  # alone in the last row, but for one zero
    assert TOPK2.quantize(values).tobytes() == values.tobytes()


def test_topk2_bodies_that_no_encoder_makes_are_refused() -> None:
    values = np.zeros(2 * ROW, dtype=np.float32)
    values[: 2 * ROW : 64] = 1.0
    good = bytearray(TOPK2.encode(values))
    assert TOPK2.decode(bytes(good), len(values)).tobytes() == values.tobytes()
    places = 1 + 2 * 4 + 2 * ROW_KEPT // 4
    row = bytearray(good)
    # The first row's last element moves to the begin of the second one, whose first makes way.
    row[places + ROW_KEPT - 1 : places + ROW_KEPT + 2] = bytes((127, 0, 62))
    unordered = bytearray(good)
    unordered[1:5] = b"\x80\x3f\x00\x3f"  # small is 1, large is 0.5
    negative = bytearray(good)
    negative[1:5] = b"\x80\xbf\x80\xbf"
    for body in (row, unordered, negative):
        with pytest.raises(CorruptDataError):
            TOPK2.decode(bytes(body), len(values))
    short = bytearray(TOPK2.encode(values[:65]))  # two elements: half a byte of codes
    short[1 + 4] |= 0x80
    with pytest.raises(CorruptDataError, match="behind the last"):
        TOPK2.decode(bytes(short), 65)


@pytest.mark.parametrize(
    ("name", "crc"),
    [
        ("int8", 582259731),
        ("int4", 2655856120),
        ("fp8", 3780187688),
        ("topk", 4237281705),
        ("topk2", 376691151),
    ],
)
def test_payloads_are_the_same_bytes_everywhere(name: str, crc: int) -> None:
    """Made of integers, so that the input itself is the same on every machine."""
    noise = (np.arange(70_001, dtype=np.uint64) * 2654435761 % 2**32).astype(np.int64) - 2**31
    values = noise.astype(np.float32) / np.float32(2**40)
    values *= values * values
    assert google_crc32c.value(bytes(BY_NAME[name].encode(values))) == crc


@pytest.mark.parametrize("name", ["int8", "int4", "fp8", "topk"])
def test_zstd_follows_where_it_pays(name: str) -> None:
    plain, compressing = BY_NAME[name], BY_NAME[f"{name}-zstd"]
    values = gradient(1, 1 << 16)
    payload = compressing.encode(values)
    assert payload[0] == COMPRESSED
    assert len(payload) < 0.95 * len(plain.encode(values))
    assert compressing.quantize(values).tobytes() == plain.quantize(values).tobytes()
    uniform = (np.arange(1 << 16) * 40503 % 65536 - 32768).astype(np.float32)
    if name == "int8":  # whose codes are then all as frequent; the others' never are
        assert compressing.encode(uniform) == plain.encode(uniform)
    with pytest.raises(CorruptDataError, match="compressed payload"):
        plain.decode(payload, len(values))


def test_zstd_bombs_in_a_payload_are_refused() -> None:
    bomb = bytes((COMPRESSED,)) + zstd_guard.compress(bytes(32 << 20))
    tracemalloc.start()
    for codec in QUANTISING:
        with pytest.raises(CorruptDataError):
            codec.decode(bomb, 1000)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 1 << 20


@pytest.mark.no_cover
@EACH
@settings(max_examples=80)
@given(data=st.data())
def test_mangled_payloads_decode_or_are_corrupt(codec: Codec, data: st.DataObject) -> None:
    numel = data.draw(st.integers(0, 400))
    payload = bytearray(codec.encode(gradient(numel, numel)))
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(payload)))
        cut = data.draw(st.integers(0, 3))
        payload[place : place + cut] = data.draw(st.binary(max_size=4))
    other = data.draw(st.sampled_from([numel, numel, numel + 1, 2 * numel + 300]))
    with contextlib.suppress(CorruptDataError):
        assert codec.decode(bytes(payload), other).shape == (other,)


@EACH
def test_scales_and_places_that_no_encoder_sends_are_refused(codec: Codec) -> None:
    payload = bytearray(codec.encode(np.full(200, 2.0, dtype=np.float32)))
    if codec.name.endswith("-zstd"):
        payload = bytearray(BY_NAME[codec.name.removesuffix("-zstd")].encode(gradient(1, 200)))
    for changed in (b"\x80\x7f", b"\x80\xff", b"\xff\xff"):
        if codec.name.startswith("topk"):
            payload[-2:] = changed
        else:
            payload[1:3] = changed
        with pytest.raises(CorruptDataError):
            codec.decode(bytes(payload), 200)


@EACH
def test_threads_do_not_share_scratch_memory(codec: Codec) -> None:
    chunks = [gradient(seed, 50_000) for seed in range(8)]
    expected = [codec.quantize(chunk).tobytes() for chunk in chunks]
    with ThreadPoolExecutor(4) as pool:
        found = [each.tobytes() for each in pool.map(codec.quantize, chunks * 4)]
    assert found == expected * 4
