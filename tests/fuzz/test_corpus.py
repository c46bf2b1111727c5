"""Whatever comes, decoders decode it or refuse it, and allocate no more than their plan says."""

import logging
import random
import tracemalloc
from collections.abc import Iterator

import pytest

from tests.fuzz.inputs import FOLDER, read_corpus
from tests.fuzz.mutations import mutated
from tests.fuzz.target import Target, attempt, peak_bytes
from tests.fuzz.targets import TARGETS

SEED = 20
MEASURED = 5
"""Mutations whose memory is measured: it takes several times as long."""
EACH = pytest.mark.parametrize("target", TARGETS.values(), ids=TARGETS.keys())


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    # Some decoders log what they refuse.
    caplog.set_level(logging.CRITICAL)


def damaged(target: Target, count: int) -> Iterator[bytes]:
    """Yield mutations of a target's corpus, the same ones each time."""
    chance = random.Random(f"{SEED} {target.name}")
    inputs = list(read_corpus(target).values())
    for _ in range(count):
        yield mutated(chance.choice(inputs), inputs, chance)


def check(target: Target, data: bytes, told: str) -> str | None:
    """Decode; a crash tells the input."""
    try:
        return attempt(target, data)
    except Exception as error:
        error.add_note(f"{target.name}, {told}: {data[:400]!r}")
        raise


@EACH
def test_the_corpus_decodes_or_is_refused(target: Target) -> None:
    for name, data in read_corpus(target).items():
        refusal = check(target, data, name)
        if name.startswith("sample-"):
            assert refusal is None, name


@pytest.mark.no_cover  # the samples' decoding is measured
@EACH
def test_damaged_inputs_decode_or_are_refused(target: Target) -> None:
    refused = [
        check(target, data, f"seed {SEED}, number {number}") is not None
        for number, data in enumerate(damaged(target, target.mutations))
    ]
    assert any(refused) or not target.refusals, "no mutation was worth refusing"


@pytest.mark.no_cover
@EACH
def test_memory_is_bounded_by_what_the_caller_expects(target: Target) -> None:
    inputs = [*read_corpus(target).values(), *damaged(target, min(target.mutations, MEASURED))]
    for data in inputs:
        attempt(target, data)  # caches and scratch memory are filled
    tracemalloc.start()
    try:
        for data in inputs:
            taken, most = peak_bytes(target, data), target.most_bytes(data)
            assert taken <= most, f"{taken} bytes, at most {most}: {data[:400]!r}"
    finally:
        tracemalloc.stop()


def test_every_folder_belongs_to_a_target() -> None:
    assert {path.name for path in FOLDER.iterdir()} == set(TARGETS)
