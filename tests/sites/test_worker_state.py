"""Digests, layouts, and bytes as numbers."""

import json

import pytest
import torch

from isthmus.protos.errors import (
    LocalProtocolError,
    PeerLostError,
    ScriptError,
    StaleGenerationError,
)
from isthmus.protos.limits import CONTROL_MESSAGE_BYTES
from isthmus.sites.local.rank_messages import error_for
from isthmus.sites.worker.exchange.step_records import TokenCount
from isthmus.sites.worker.exchange.tensor_hashes import (
    ParameterHashes,
    hash_of,
    hashes_of,
    layout_of,
)
from isthmus.sites.worker.layouts.initial_state import _write_back, numbers_of

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.complex64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_hash_is_of_bits(dtype: torch.dtype) -> None:
    tensor = torch.ones(3, 5).to(dtype)
    other = tensor.clone()
    assert hash_of(tensor) == hash_of(other)
    other.view(-1)[7] = 0
    assert hash_of(tensor) != hash_of(other)


def test_a_hash_tells_negative_zero_and_ignores_strides() -> None:
    assert hash_of(torch.tensor(0.0)) != hash_of(torch.tensor(-0.0))
    image = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(1))
    assert hash_of(image) == hash_of(image.contiguous(memory_format=torch.channels_last))


def test_a_large_models_digest_fits_in_a_message() -> None:
    names = tuple(f"transformer.layers.{at}.attention.projection.weight" for at in range(9999))
    digest = ParameterHashes(names, tuple(range(2**64 - 9999, 2**64)))
    shown = digest.bounded()
    assert len(json.dumps([shown.names, shown.tensors])) <= CONTROL_MESSAGE_BYTES // 2
    assert shown.names[0].startswith(f"{names[0]} .. ")
    assert shown.names[-1].endswith(names[-1])
    changed = ParameterHashes(names, (*digest.tensors[:-1], 1)).bounded()
    pairs = zip(shown.tensors, changed.tensors, strict=True)
    different = [one for one, other in pairs if one != other]
    assert different == [shown.tensors[-1]], "only the last group"
    assert ParameterHashes(names[:3], (1, 2, 3)).bounded() == ParameterHashes(names[:3], (1, 2, 3))


def test_the_combined_hash_depends_on_order() -> None:
    one, other = torch.ones(3), torch.zeros(3)
    forth = hashes_of([("a", one), ("b", other)])
    back = hashes_of([("a", other), ("b", one)])
    assert forth.combined != back.combined


@pytest.mark.parametrize("size", [1, 2, 7, 4096])
def test_bytes_survive_as_numbers(size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    data = torch.randint(0, 256, (size,), generator=generator).to(torch.uint8)
    numbers = numbers_of(data)
    assert float(numbers.max()) < 65536.0
    # What the exchange does to them, with three sites: a division whose error must not matter.
    received = (numbers / 3).mul_(3).round_()
    parts = [torch.zeros(each, dtype=torch.uint8) for each in (size // 2, size - size // 2)]
    _write_back(received, parts)
    assert torch.equal(torch.cat(parts), data)


def test_every_pair_of_bytes_survives_division_by_the_number_of_sites() -> None:
    numbers = torch.arange(65536, dtype=torch.float32)
    for num_sites in (2, 3, 7, 32, 49):
        assert torch.equal((numbers / num_sites).mul_(num_sites).round_(), numbers), num_sites


def test_a_layout_tells_name_shape_dtype_and_order() -> None:
    one, other = torch.zeros(2, 3), torch.zeros(3, 2)
    layouts = {
        layout_of([("a", one), ("b", other)]),
        layout_of([("b", other), ("a", one)]),
        layout_of([("a", other), ("b", one)]),
        layout_of([("a", one.half()), ("b", other)]),
        layout_of([("a", one), ("c", other)]),
    }
    assert len(layouts) == 5
    assert all(0 <= each < 1 << 32 for each in layouts)


def test_tokens_add_up_until_taken() -> None:
    tokens = TokenCount()
    assert (tokens.take(), tokens.take()) == (1.0, 1.0), "a script that never counts"
    tokens.add(3)
    tokens.add(0)
    tokens.add(4)
    assert tokens.take() == 7.0
    with pytest.raises(ScriptError, match="not before this backward"):
        tokens.take()
    tokens.add(0)
    assert tokens.take() == 0.0
    with pytest.raises(ValueError, match="got -1"):
        tokens.add(-1)


def test_errors_named_by_another_process_get_their_type() -> None:
    lost = error_for("PEER_LOST", "eu is away", "eu")
    assert isinstance(lost, PeerLostError)
    assert lost.site == "eu"
    assert isinstance(error_for("STALE_GENERATION", "old"), StaleGenerationError)
    bug = error_for("INTERNAL", "theirs")
    assert not isinstance(bug, LocalProtocolError)
    assert (bug.code, str(bug)) == ("INTERNAL", "theirs")
    assert not isinstance(error_for("SCRIPT_FAILED", "theirs"), ScriptError)
    assert error_for("GATEWAY_EXITED", "gone").code == "GATEWAY_EXITED"
