"""Kernels against numpy, bit for bit, compiled and as plain Python.

Codes, the residual, sums in any order and place, NaN.
"""

from __future__ import annotations

import itertools
from types import ModuleType

import numpy as np
import pytest

from isthmus.sites.codecs.codec import Codec, FloatPart, Floats, Part
from isthmus.sites.codecs.kernels import loops as as_imported
from isthmus.sites.codecs.quantising_codecs import AS_IT_IS, QUANTISED, BlockCodec
from isthmus.sites.codecs.registry import BY_NAME
from isthmus.sites.gateway.reduction.chunk_reduction import add_up
from isthmus.topology.trees.codec_costs import BLOCK, LOSSLESS
from tests.fakes import numpy_codecs as oracle
from tests.fakes.compiled_modules import PLAIN, VECTORISED_WAYS, use

SIZES = (1, 2, 3, 63, 64, 127, 128, 129, 255, 256, 1000, 4097)
SPECIAL = np.array(
    [
        0x00000000, 0x80000000, 0x00000001, 0x80000001, 0x007FFFFF, 0x00800000, 0x7EFFFFFF,
        0xFEFFFFFF, 0x3F800000, 0xBF808000,
    ],
    dtype=np.uint32,
)  # fmt: skip
"""Zeros, subnormal numbers, the smallest normal one, the largest below 2**127, one, a bf16 tie."""
UNFIT = np.array(
    [
        0x7F800000, 0xFF800000, 0x7FC00001, 0xFFC12345, 0x7F800001, 0xFFFFFFFF, 0x7F000000,
        0x7F7FFFFF,
    ],
    dtype=np.uint32,
)  # fmt: skip
"""Infinities, NaN of all kinds, and what is 2**127 or more."""
NAN = 0x7FC00000


@pytest.fixture(params=VECTORISED_WAYS)
def way(request: pytest.FixtureRequest) -> str:
    """A kind of processor that the kernels are compiled for, or plain Python."""
    return str(request.param)


@pytest.fixture(autouse=True)
def loops(way: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Run a test with the kernels of each kind."""
    return use(as_imported, way, monkeypatch)


def sizes(way: str, chance: np.random.Generator) -> tuple[int, ...]:
    """Return numbers of elements: plain Python takes few."""
    if way == PLAIN:
        return (1, 2, 127, 128, 129, 257)
    return (*SIZES, int(chance.integers(1, 20_000)))


def numbers(chance: np.random.Generator, numel: int) -> Floats:
    """Return any finite bits, special ones, ties of levels, one magnitude, or all of these."""
    any_bits = chance.integers(0, 1 << 32, numel, dtype=np.uint32)
    any_bits[any_bits & 0x7FFFFFFF >= 0x7F000000] ^= 0x40000000
    normal = chance.standard_normal(numel).astype(np.float32)
    normal *= np.float32(2.0 ** chance.integers(-140, 120))
    ties = (chance.integers(-254, 255, numel) / 2).astype(np.float32)
    ties[::BLOCK] = (127, 7, 448)[chance.integers(3)]
    kinds = [any_bits, chance.choice(SPECIAL, numel), normal.view(np.uint32), ties.view(np.uint32)]
    mixed = np.choose(chance.integers(0, 4, numel), kinds)
    return [*kinds, mixed][chance.integers(5)].view(np.float32).copy()


def bits(values: Floats) -> list[int]:
    return [int(each) for each in values.view(np.uint32)]


def in_a_frame(payload: bytes | memoryview, chance: np.random.Generator) -> memoryview:
    """Return a payload as it is received: not to be written, and beginning anywhere."""
    offset = int(chance.integers(0, 8))
    return memoryview(bytes(offset) + bytes(payload))[offset:]


@pytest.mark.parametrize("name", ["int8", "int4", "fp8"])
@pytest.mark.parametrize("seed", range(8))
def test_blocks_are_numpy_s_bit_for_bit(name: str, seed: int, way: str) -> None:
    chance, codec = np.random.default_rng(seed), BY_NAME[name]
    for numel in sizes(way, chance):
        residual = np.zeros(numel, dtype=np.float32)
        expected_residual = residual.copy()
        for _ in range(3):
            values = numbers(chance, numel)
            if chance.random() < 0.1:
                values.view(np.uint32)[chance.integers(numel)] = chance.choice(UNFIT)
            before = values.tobytes()
            with np.errstate(all="ignore"):
                total = oracle.meant(values, expected_residual)
                encoded_by_numpy = oracle.encode_blocks(name, total)
            encoded = codec.encode_with_residual(values, residual)
            if encoded_by_numpy is None:
                expected, decoded = bytes((AS_IT_IS,)) + total.tobytes(), total
                expected_residual[:] = 0
            else:
                body, decoded = encoded_by_numpy
                expected = bytes((QUANTISED,)) + body
                expected_residual = oracle.lost(total, decoded)
            assert bytes(encoded.payload) == expected, f"{seed=} {numel=}"
            assert residual.tobytes() == expected_residual.tobytes(), f"{seed=} {numel=}"
            out = np.empty(numel, dtype=np.float32)
            encoded.part.write(out)
            assert out.tobytes() == decoded.tobytes(), f"{seed=} {numel=}"
            received = in_a_frame(encoded.payload, chance)
            assert codec.decode(received, numel).tobytes() == out.tobytes()
            assert values.tobytes() == before
            assert bytes(codec.encode(total)) == expected, f"{seed=} {numel=}: without feedback"


@pytest.mark.parametrize("name", ["bf16", "bf16-split"])
@pytest.mark.parametrize("seed", range(4))
def test_halves_are_numpy_s_bit_for_bit(name: str, seed: int, way: str) -> None:
    chance, codec = np.random.default_rng(seed), BY_NAME[name]
    for numel in sizes(way, chance):
        residual = np.zeros(numel, dtype=np.float32)
        for _ in range(3):
            values = numbers(chance, numel)
            values.view(np.uint32)[chance.integers(numel)] = chance.choice(UNFIT)
            with np.errstate(all="ignore"):
                total = oracle.meant(values, residual)
                decoded = oracle.widen(oracle.round_to_bf16(total))
                expected_residual = oracle.lost(total, decoded)
            encoded = codec.encode_with_residual(values, residual)
            received = in_a_frame(encoded.payload, chance)
            assert bits(codec.decode(received, numel)) == bits(decoded), f"{seed=} {numel=}"
            assert residual.tobytes() == expected_residual.tobytes(), f"{seed=} {numel=}"
            assert bytes(codec.encode(total)) == bytes(encoded.payload)


def parts_in_places(
    codec: Codec, values: list[Floats], own: int, out: Floats, chance: np.random.Generator
) -> list[Part]:
    """Return what sites sent, one's own as numbers in `out` or as it was encoded."""
    found: list[Part] = []
    for site, each in enumerate(values):
        encoded = codec.encode_with_residual(each, None)
        if site != own:
            found.append(codec.part(in_a_frame(encoded.payload, chance), len(each)))
        elif chance.random() < 0.5:
            encoded.part.write(out)
            found.append(FloatPart(out))
        else:
            found.append(encoded.part)
    return found


@pytest.mark.parametrize("codec", BY_NAME.values(), ids=BY_NAME.keys())
def test_sums_are_numpy_s_whatever_lies_where(codec: Codec, way: str) -> None:
    """Parts with NaN, infinities and sums of these among them.

    Several codecs' forms side by side.
    """
    for seed in range(40):
        chance = np.random.default_rng(seed)
        numel, num_parts = int(chance.choice(sizes(way, chance))), int(chance.integers(1, 5))
        values = [numbers(chance, numel) for _ in range(num_parts)]
        for each in values:
            if chance.random() < 0.4:
                places = chance.integers(0, numel, 3)
                each.view(np.uint32)[places] = chance.choice(UNFIT, 3)
        divisor = None if chance.random() < 0.3 else np.float32(chance.integers(1, 1 << 30))
        out = np.empty(numel, dtype=np.float32)
        parts = parts_in_places(codec, values, int(chance.integers(-1, num_parts)), out, chance)
        decoded = [codec.quantize(each) for each in values]
        add_up(parts, out, divisor)
        with np.errstate(all="ignore"):
            assert bits(out) == bits(oracle.mean(decoded, divisor)), f"{seed=}"


@pytest.mark.parametrize("name", ["fp32", "bf16", "int8", "int4", "fp8", "topk", "topk2"])
def test_a_sum_that_is_no_number_is_one_nan_and_a_part_alone_is_left_as_it_is(name: str) -> None:
    codec, two = BY_NAME[name], np.float32(2)
    patterns = [0x7FC00001, 0xFFC20000, 0x7F840000, 0xFF810000]
    values = np.array(patterns, dtype=np.uint32).view(np.float32)
    alone = codec.quantize(values)
    out = np.empty(4, dtype=np.float32)
    add_up([codec.part(codec.encode(values), 4)], out, two)
    assert bits(out) == bits(alone)
    if name != "bf16":
        assert bits(out) == patterns
    ones = np.ones(4, dtype=np.float32)
    for pair in ([values, ones], [ones, values], [values, values[::-1].copy()]):
        add_up([codec.part(codec.encode(each), 4) for each in pair], out, two)
        assert bits(out) == [NAN] * 4
    infinite = np.full(4, np.inf, dtype=np.float32)
    add_up([codec.part(codec.encode(each), 4) for each in (infinite, -infinite)], out, None)
    assert bits(out) == [NAN] * 4


@pytest.mark.parametrize("place", [0, 1023, 1024, 3000])
@pytest.mark.parametrize("pattern", [0x7F800000, 0xFF800000, 0x7FC00000, 0xFFFFFFFF])
def test_the_first_that_is_not_finite_is_found(place: int, pattern: int, loops: ModuleType) -> None:
    values = np.full(3001, 3.4e38, dtype=np.float32)
    assert loops.first_not_finite(values) == -1
    values.view(np.uint32)[[place, 3000]] = pattern
    assert loops.first_not_finite(values) == place
    assert loops.first_not_finite(values[:0]) == -1


@pytest.mark.parametrize("numel", [0, *SIZES])
def test_squares_are_added_in_one_order(numel: int, loops: ModuleType) -> None:
    values = numbers(np.random.default_rng(numel), numel)
    squares = np.square(values, dtype=np.float64)
    lanes = np.zeros(8)
    for row in squares[: numel // 8 * 8].reshape(-1, 8):
        lanes += row
    (a, b, c, d, e, f, g, h), rest = lanes, 0.0
    for each in squares[numel // 8 * 8 :]:
        rest += each
    assert loops.sum_of_squares(values) == (((a + e) + (c + g)) + ((b + f) + (d + h))) + rest


@pytest.mark.parametrize("seed", range(4))
def test_outer_steps_are_numpy_s_however_a_bucket_is_cut(seed: int, loops: ModuleType) -> None:
    """Each product is rounded before it is added, at any place of an element."""
    chance = np.random.default_rng(seed)
    numel = int(chance.integers(1000, 3000))
    base, theta, momentum = (
        chance.standard_normal(numel).astype(np.float32) * np.float32(scale)
        for scale in (1, 1.1, 0.01)
    )
    tokens = np.float32(chance.integers(1, 1 << 26))
    lr, mu = np.float32(chance.random()), np.float32(chance.random())
    moved = (base - theta) * tokens
    mean = chance.standard_normal(numel).astype(np.float32)
    expected_momentum = mu * momentum + mean
    expected = (base - lr * (mean + mu * expected_momentum)).astype(np.float32)
    cuts = [0, *sorted(chance.integers(0, numel, 5).tolist()), numel]
    found, found_momentum, kept, result = theta.copy(), momentum.copy(), base.copy(), mean.copy()
    plain, plain_result = base.copy(), mean.copy()
    for start, stop in itertools.pairwise(cuts):
        part = slice(start, stop)
        loops.write_pseudo_gradient(base[part], found[part], tokens)
        loops.take_outer_step(kept[part], found_momentum[part], result[part], lr, mu)
        loops.take_plain_outer_step(plain[part], plain_result[part], lr)
    assert bits(found) == bits(moved)
    assert bits(found_momentum) == bits(expected_momentum)
    assert bits(kept) == bits(result) == bits(expected)
    assert bits(plain) == bits(plain_result) == bits(base - lr * mean)


def test_without_tokens_nothing_has_moved(loops: ModuleType) -> None:
    values = np.array([1.0, np.nan, np.inf], dtype=np.float32)
    loops.write_pseudo_gradient(np.zeros(3, dtype=np.float32), values, np.float32(0))
    assert bits(values) == [0, 0, 0]


def test_facts_that_others_know_are_the_codecs_own() -> None:
    assert {name for name, codec in BY_NAME.items() if codec.lossless} == LOSSLESS
    assert {codec.name.removesuffix("-zstd") for codec in BY_NAME.values()} >= set(oracle.LEVEL_MAX)
    for codec in BY_NAME.values():
        if isinstance(codec, BlockCodec):
            assert codec.level_max == oracle.LEVEL_MAX[codec.name.removesuffix("-zstd")]


def test_an_array_that_is_not_what_a_kernel_takes_is_refused(way: str, loops: ModuleType) -> None:
    if way == PLAIN:
        return  # it takes all
    with pytest.raises(ValueError, match="expected 'float' but got 'double'"):
        loops.divide(np.zeros(4), np.float32(2))
    with pytest.raises(ValueError, match="contiguous"):
        loops.divide(np.zeros(8, dtype=np.float32)[::2], np.float32(2))
