"""Every tree, codec, set of sites and order of arrival.

The same bits everywhere, NaN and infinity included.

The executors are the gateways' own, and what they exchange are packed frames. The reference is the
definition (test_reduction.py); what must become of numbers that are not finite is said here once
more, without any codec or tree.
"""

import random
from collections.abc import Sequence

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from isthmus.protos.errors import NonFiniteError
from isthmus.sites.codecs.codec import Codec, Floats
from isthmus.sites.codecs.registry import BY_NAME, EXACT
from isthmus.sites.local.chunk_grid import grid
from isthmus.topology.spec.codec_names import CODECS
from isthmus.topology.spec.reduction_plan import ReductionPlan
from tests.fakes.exchanges import Exchanges
from tests.fakes.reductions import BUCKET, Reference
from tests.fakes.tree_worlds import FORMS, make_plan

SPECIAL = (
    0x7FC00000, 0x7FC12345, 0xFFC00001, 0x7F800001, 0x7F800000, 0xFF800000, 0x7F7FFFFF, 0x7F000000, 0x00000001,
    0x80000000,
)  # fmt: skip
"""Bits of float32: quiet NaN with three payloads, a signalling one, both infinities, the largest
number, 2**127, the smallest number, and minus zero."""
LARGE = 2.0**126
"""A sum of five numbers below it does not overflow."""


class CarefulReference(Reference):
    """As the definition, and an element that is not finite leaves no residual."""

    def sent(self, site: int, chunk: int, values: Floats) -> Floats:
        decoded = super().sent(site, chunk, values)
        residual = self.residual.get((site, chunk))
        if residual is not None:
            residual[~np.isfinite(residual)] = 0
        return decoded


def make_parts(
    num_sites: int, numel: int, specials: Sequence[tuple[int, int, int]], seed: int
) -> list[Floats]:
    """Return each site's contribution: heavy tails, and some numbers that are special.

    Args:
        specials: site, place (both modulo how many there are) and index into SPECIAL.
    """
    generator = np.random.default_rng(seed)
    parts = [generator.standard_t(3, numel).astype(np.float32) for _ in range(num_sites)]
    for site, place, index in specials:
        if numel:
            parts[site % num_sites].view(np.uint32)[place % numel] = SPECIAL[index]
    return parts


def run(
    sites: Exchanges,
    parts: list[Floats],
    weights: Sequence[float],
    chance: random.Random,
    round_: int,
    *,
    exact: bool,
) -> None:
    """Hand over and deliver everything in a random order, some of it several times."""
    unposted = list(range(len(parts)))
    chance.shuffle(unposted)
    while unposted or sites.wire:
        if unposted and (not sites.wire or chance.random() < 0.2):
            site = unposted.pop()
            sites.post_site(
                site, parts[site], weights[site], round=round_, bucket=BUCKET, exact=exact
            )
            continue
        sent = sites.wire.pop(chance.randrange(len(sites.wire)))
        for _ in range(chance.choice((1, 1, 1, 2, 3))):
            sites.deliver(sent.source, sent.target, sent.data)
    assert not sites.failures


def check_special(parts: list[Floats], result: Floats) -> None:
    """What was not finite stays so, with its sign; and nothing else becomes so.

    But for what is so large that a sum overflows, or rounding to bf16.
    """
    with np.errstate(all="ignore"):
        specials = sum(np.where(np.isfinite(part), np.float32(0), part) for part in parts)
    assert isinstance(specials, np.ndarray)
    is_large = np.any([np.isfinite(part) & (np.abs(part) >= LARGE) for part in parts], axis=0)
    is_special = ~np.isfinite(specials) & ~is_large
    assert np.array_equal(result[is_special], specials[is_special], equal_nan=True)
    assert np.isfinite(result[np.isfinite(specials) & ~is_large]).all()


@st.composite
def cases(draw: st.DrawFn) -> tuple[ReductionPlan, tuple[int, ...], int, int]:
    """Return a plan, the ranks of its sites, a bucket's elements and a chunk's."""
    num_sites = draw(st.integers(2, 5))
    plan = make_plan(draw(st.sampled_from(FORMS)), num_sites, draw(st.integers(0, 50)))
    ranks = tuple(draw(st.integers(1, 4)) for _ in range(num_sites))
    numel = draw(st.one_of(st.integers(1, 6), st.integers(1, 300), st.integers(1, 5000)))
    return plan, ranks, numel, max(draw(st.integers(1, 2000)), numel // 6)


@pytest.mark.no_cover
@pytest.mark.slow
@settings(max_examples=60)
@given(
    case=cases(),
    names=st.lists(st.sampled_from(CODECS), min_size=1, max_size=4),
    feedback=st.booleans(),
    exact=st.booleans(),
    specials=st.lists(
        st.tuples(  # often several of one element
            st.integers(0, 4),
            st.one_of(st.integers(0, 2), st.integers(0, 4999)),
            st.integers(0, len(SPECIAL) - 1),
        ),
        max_size=8,
    ),
    weights=st.tuples(*[st.sampled_from([0.0, 1.0, 3.0, 2048.0])] * 4),
    seed=st.integers(0, 1000),
)
def test_all_sites_hold_the_same_bits(
    case: tuple[ReductionPlan, tuple[int, ...], int, int],
    names: list[str],
    feedback: bool,
    exact: bool,
    specials: list[tuple[int, int, int]],
    weights: tuple[float, ...],
    seed: int,
) -> None:
    plan, ranks, numel, chunk_numel = case
    own_weights = [1.0, *weights][: plan.num_sites]
    # One codec for all trees, or trees with different ones.
    codecs = tuple(names[tree % len(names)] for tree in range(max(1, len(plan.trees))))
    meant: tuple[Codec, ...] = tuple(EXACT if exact else BY_NAME[name] for name in codecs)
    reference = CarefulReference(plan, meant, feedback)
    cut = grid(numel, chunk_numel, ranks)
    sites = Exchanges(plan, codecs, ranks, chunk_bytes=4 * chunk_numel, error_feedback=feedback)
    chance = random.Random(seed)
    for round_, these in enumerate(
        (specials, [])
    ):  # what a special number leaves for the next round
        parts = make_parts(plan.num_sites, numel, these, seed + round_)
        given_parts = [part.copy() for part in parts]
        with np.errstate(all="ignore"):
            expected = reference.reduce(cut, [part.copy() for part in parts], own_weights)
        run(sites, parts, own_weights, chance, round_, exact=exact)
        assert len({part.tobytes() for part in parts}) == 1
        is_nan = np.isnan(expected)
        assert np.array_equal(is_nan, np.isnan(parts[0]))
        assert parts[0][~is_nan].tobytes() == expected[~is_nan].tobytes()
        check_special(given_parts, parts[0])


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("form", FORMS)
def test_an_empty_bucket_is_reduced_at_once(form: str, name: str) -> None:
    plan = make_plan(form, 3, 1)
    sites = Exchanges(plan, name, (1, 2, 3))
    parts = [np.empty(0, dtype=np.float32) for _ in range(3)]
    run(sites, parts, (1.0, 2.0, 0.0), random.Random(1), 0, exact=False)
    assert sorted((site, rank) for site, rank, _ in sites.reduced) == [
        (site, rank) for site in range(3) for rank in range(site + 1)
    ]
    assert all(np.isnan(reduced.weight) for _, _, reduced in sites.reduced)


@pytest.mark.parametrize("bits", SPECIAL)
@pytest.mark.parametrize("place", [0, 99_999, 70_000])
def test_what_is_not_finite_ends_the_run_where_it_is_to_stop(bits: int, place: int) -> None:
    plan = make_plan("gather", 2, 1)
    parts = [np.ones(150_000, dtype=np.float32) for _ in range(2)]
    parts[1].view(np.uint32)[place] = bits
    value, before = parts[1][place], parts[1].copy()
    sites = Exchanges(plan, "int8", (1, 1), non_finite="stop")
    if np.isfinite(value):
        run(sites, parts, (1.0, 1.0), random.Random(1), 0, exact=False)
        assert len(sites.reduced) == 2
        return
    message = f"round 0 bucket 0: element {place} of 150000 of its part is {value}"
    with pytest.raises(NonFiniteError, match=message):
        sites.post_site(1, parts[1], 1.0)
    assert not sites.wire
    assert parts[1].tobytes() == before.tobytes()
