"""Which parts of the batch sites get by how fast they are."""

from __future__ import annotations

import random

import pytest

from isthmus.topology.spec.shares import divided_by_speed, place_of, whole_units

SPEEDS = (1.0, 0.7, 0.4)


def test_parts_are_in_proportion_to_speed() -> None:
    sample_s = [1 / each for each in SPEEDS]
    for unit in (1, 4):
        found = divided_by_speed(252, sample_s, [unit] * 3, (1, 1, 1))
        assert found == (120, 84, 48)


@pytest.mark.parametrize("seed", range(50))
def test_the_batch_stays_and_ranks_have_whole_micro_batches(seed: int) -> None:
    chance = random.Random(seed)
    readers = [chance.randint(1, 4) for _ in range(chance.randint(1, 5))]
    micro_batch = chance.choice([1, 2, 8])
    parts = [each * micro_batch * chance.randint(1, 8) for each in readers]
    sample_s = [chance.uniform(0.1, 1.0) for _ in readers]
    units = whole_units(parts, readers, micro_batch)
    found = divided_by_speed(sum(parts), sample_s, units, readers)
    assert not found or sum(found) == sum(parts), f"{seed=}"
    for part, each in zip(found, readers, strict=bool(found)):
        assert part > 0, f"{seed=}"
        assert part % (each * micro_batch) == 0, f"{seed=}"


def test_pieces_of_micro_batches_and_uneven_ranks_stay_as_they_are() -> None:
    assert whole_units((12, 24), (1, 2), 8) == (4, 8)
    assert whole_units((30, 16), (4, 1), 8) == (1, 8)
    assert divided_by_speed(24, (0.1, 0.1), (1, 8), (4, 1)) == (16, 8)


def test_there_is_no_division_where_whole_units_do_not_add_up() -> None:
    assert divided_by_speed(8, (10.0, 1.0), (4, 3), (1, 1)) == ()
    assert divided_by_speed(6, (10.0, 1.0), (4, 3), (1, 1)) == ()


def test_places_follow_each_other_and_leave_none_out() -> None:
    weights = (3, 0, 5, 4)
    places = [place_of(12, weights, site) for site in range(4)]
    assert [each for place in places for each in place] == list(range(12))
    assert [len(each) for each in places] == [3, 0, 5, 4]
