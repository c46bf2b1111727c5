"""Whose turn it is, and who is wrong."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from isthmus.sites.worker.checks.gradient_verdict import (
    LEARNT,
    SKETCH_NUMEL,
    Computed,
    Spread,
    judge,
    whose_turn,
)

NUM_TENSORS = 3


def test_each_rank_of_each_site_has_its_turn_and_sites_alternate() -> None:
    ranks = [1, 3, 2]
    turns = [whose_turn(number, ranks) for number in range(18)]
    assert turns[:9] == [0, 1, 4, 0, 2, 5, 0, 3, 4]
    assert {*turns} == {*range(6)}


def test_sites_that_are_gone_have_none() -> None:
    turns = [whose_turn(number, [2, 1, 2], gone={1}) for number in range(4)]
    assert turns == [0, 3, 1, 4]
    assert whose_turn(5, [1, 1], gone={0, 1}) == 0, "somebody has to ask"


def computed(
    value: int = 7, again: int | None = None, *, kind: str = "k", off: float = 0.0, **more: object
) -> Computed:
    """What a rank tells whose last tensor has this hash, and is so far off."""
    sketch = np.ones((NUM_TENSORS, SKETCH_NUMEL), dtype=np.float32)
    sketch[-1] += np.float32(off)
    own = Computed(
        kind=kind,
        place="node 0",
        repeats=True,
        hashes=((1, 2, value), (1, 2, value if again is None else again)),
        sketch=sketch,
        spread=Spread(np.zeros(NUM_TENSORS, dtype=np.float32)),
    )
    return dataclasses.replace(own, **more)  # type: ignore[arg-type]


def test_what_a_rank_tells_crosses_as_it_is() -> None:
    spread = Spread(np.array([0.5, 0, 1], dtype=np.float32), 3)
    own = computed(2**64 - 1, 5, off=0.25, place="node 1, GPU-\N{SNOWMAN}", spread=spread)
    read = Computed.from_bytes(own.to_bytes())
    assert (read.kind, read.place, read.repeats, read.hashes) == (
        *(own.kind, own.place, own.repeats, own.hashes),
    )
    assert np.array_equal(read.sketch, own.sketch)
    assert np.array_equal(read.spread.largest, spread.largest)
    assert read.spread.count == 3


def test_of_one_kind_the_fewer_are_wrong_by_one_bit() -> None:
    verdict = judge({0: computed(), 1: computed(), 4: computed(8)})
    assert (verdict.wrong, verdict.is_tied) == ({4: 2}, False)


def test_two_that_repeat_unlike_results_are_tied() -> None:
    verdict = judge({0: computed(), 1: computed(8)})
    assert (verdict.wrong, verdict.is_tied) == ({0: 2, 1: 2}, True)
    four = judge({0: computed(), 1: computed(), 2: computed(8), 3: computed(8)})
    assert four.is_tied
    assert four.wrong.keys() == {0, 1, 2, 3}


def test_who_does_not_repeat_its_own_result_is_wrong() -> None:
    verdict = judge({0: computed(), 1: computed(9, 7)})
    assert (verdict.wrong, verdict.is_tied) == ({1: 2}, False)


def test_where_most_do_not_repeat_theirs_the_script_does_not() -> None:
    verdict = judge({0: computed(5, 6), 1: computed(7, 8), 2: computed(9, 9)})
    assert not verdict.wrong
    assert verdict.spread is not None
    assert verdict.spread.count == 1


def test_kernels_that_round_otherwise_each_time_are_not_blamed_for_a_bit() -> None:
    rounds = computed(5, 6, repeats=False, off=1e-6)
    assert not judge({0: computed(), 1: computed(), 2: rounds}).wrong


@pytest.mark.parametrize("far", [5e-6, 1e-2, float("nan")])
def test_unlike_kinds_are_judged_by_what_was_learnt_of_their_rounding(far: float) -> None:
    spread = Spread(np.zeros(NUM_TENSORS, dtype=np.float32))
    for _ in range(LEARNT):
        verdict = judge(
            {0: computed(spread=spread), 1: computed(8, kind="other", off=1e-6, spread=spread)}
        )
        assert not verdict.wrong
        assert verdict.spread is not None
        spread = verdict.spread
    assert spread.count == LEARNT
    new = Spread(np.zeros(NUM_TENSORS, dtype=np.float32))
    ranks = {
        0: computed(spread=spread),
        1: computed(spread=new),  # it has come back, and has learnt nothing
        2: computed(8, kind="other", off=far, spread=spread),
    }
    verdict = judge(ranks)
    assert verdict.wrong == ({} if far < 1e-5 else {2: 2})


def test_a_gradient_that_is_nan_everywhere_blames_nobody() -> None:
    spread = Spread(np.zeros(NUM_TENSORS, dtype=np.float32), LEARNT)
    nan = float("nan")
    verdict = judge(
        {
            0: computed(spread=spread, off=nan),
            1: computed(8, kind="other", off=nan, spread=spread),
        }
    )
    assert not verdict.wrong
