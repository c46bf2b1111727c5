"""Codecs of a rank's device: the bodies that a gateway's codecs would make, any bits, any sizes."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch

from isthmus.sites.codecs.codec import BodyCodec, Floats
from isthmus.sites.codecs.quantising_codecs import AS_IT_IS
from isthmus.sites.codecs.registry import BY_NAME
from isthmus.sites.worker.exchange.device_codecs import DEVICE_CODECS

CPU = torch.device("cpu")
EACH = pytest.mark.parametrize("name", DEVICE_CODECS)
SIZES = (1, 2, 3, 127, 128, 129, 255, 1000, 4097)
SPECIAL = (
    0x00000000, 0x80000000, 0x00000001, 0x80000001, 0x007FFFFF, 0x00800000, 0x7EFFFFFF, 0xFEFFFFFF,
)  # fmt: skip
"""Bits of float32: zeros, subnormal numbers, the smallest normal one, the largest below 2**127."""
UNFIT = (0x7F800000, 0xFF800000, 0x7FC00001, 0x7F800001, 0xFFFFFFFF, 0x7F000000, 0xFF7FFFFF)
"""Infinities, NaN, and what is 2**127 or more."""


def body_codec(name: str) -> BodyCodec:
    codec = BY_NAME[name]
    assert isinstance(codec, BodyCodec)
    return codec


def octets(body: torch.Tensor) -> memoryview:
    found: npt.NDArray[np.uint8] = body.numpy()
    return found.data


def numbers(chance: np.random.Generator, numel: int) -> Floats:
    """Return any finite bits, normal ones of one magnitude, halves of steps, or all of these."""
    any_bits = chance.integers(0, 1 << 32, numel, dtype=np.uint32)
    any_bits[any_bits & 0x7FFFFFFF >= 0x7F000000] ^= 0x40000000
    special = chance.choice(np.array(SPECIAL, dtype=np.uint32), numel)
    normal = chance.standard_normal(numel).astype(np.float32) * np.float32(
        2.0 ** chance.integers(-140, 120)
    )
    halves = (chance.integers(-254, 255, numel) / 2).astype(np.float32)
    halves[::128] = 127.0  # then the scale is one, and halves are ties
    kinds = [any_bits.view(np.float32), special.view(np.float32), normal, halves]
    mixed = np.choose(chance.integers(0, 4, numel), [each.view(np.uint32) for each in kinds])
    return [*kinds, mixed.view(np.float32)][chance.integers(5)].copy()


@EACH
@pytest.mark.parametrize("seed", range(12))
def test_bodies_are_those_of_the_gateways_codecs(name: str, seed: int) -> None:
    chance, codec = np.random.default_rng(seed), body_codec(name)
    device_codec = DEVICE_CODECS[name](CPU)
    for numel in (*SIZES, int(chance.integers(1, 70_000))):
        values = numbers(chance, numel)
        tensor, body = (
            torch.from_numpy(values),
            torch.empty(codec.body_bytes(numel), dtype=torch.uint8),
        )
        before = values.tobytes()
        is_fit = device_codec.encode(tensor, body)
        payload = codec.seal(octets(body), numel).payload
        assert bool(is_fit), (seed, numel)
        assert payload == codec.encode(values), (seed, numel)
        decoded = device_codec.decode(tensor, is_fit)
        # Numbers, not bits: a zero has lost its sign in some of the codes.
        assert np.array_equal(decoded.numpy(), codec.decode(payload, numel)), (seed, numel)
        assert values.tobytes() == before
        assert 0 < codec.body_bytes(numel) == device_codec.body_bytes(numel) <= 4 * numel


@EACH
@pytest.mark.parametrize("pattern", UNFIT, ids=hex)
def test_what_has_no_code_is_seen(name: str, pattern: int) -> None:
    chance, codec = np.random.default_rng(pattern), body_codec(name)
    device_codec = DEVICE_CODECS[name](CPU)
    for numel in SIZES:
        values = numbers(chance, numel)
        values.view(np.uint32)[chance.integers(numel)] = pattern
        body = torch.empty(codec.body_bytes(numel), dtype=torch.uint8)
        is_fit = device_codec.encode(torch.from_numpy(values), body)
        has_codes = codec.encode(values)[0] != AS_IT_IS
        assert bool(is_fit) == (np.isfinite(values).all() if name == "bf16" else has_codes)


@pytest.mark.slow
@EACH
def test_an_encoder_looks_at_no_value(name: str) -> None:
    """On a device without values, whatever would wait for one raises."""
    meta = torch.device("meta")
    device_codec = DEVICE_CODECS[name](meta)
    for numel in SIZES:
        values = torch.empty(numel, device=meta)
        body = torch.empty(body_codec(name).body_bytes(numel), dtype=torch.uint8, device=meta)
        device_codec.decode(values, device_codec.encode(values, body))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")  # a prototype
@EACH
def test_on_cuda_bodies_are_the_same_and_nothing_waits(name: str) -> None:
    chance, codec, device = np.random.default_rng(1), body_codec(name), torch.device("cuda")
    device_codec = DEVICE_CODECS[name](device)
    for numel in (*SIZES, 70_000) * 8:
        values = numbers(chance, numel)
        tensor = torch.from_numpy(values).to(device)
        body = torch.empty(codec.body_bytes(numel), dtype=torch.uint8, device=device)
        torch.cuda.set_sync_debug_mode("error")
        try:
            decoded = device_codec.decode(tensor, device_codec.encode(tensor, body))
        finally:
            torch.cuda.set_sync_debug_mode("default")
        payload = codec.seal(octets(body.cpu()), numel).payload
        assert payload == codec.encode(values), numel
        assert np.array_equal(decoded.cpu().numpy(), codec.decode(payload, numel)), numel
