"""Which parts of the batch sites get by how fast they are."""

from __future__ import annotations

import random

import pytest

from isthmus.topology.spec.shares import divided_by_speed, place_of, whole_units


def test_parts_are_in_proportion_to_speed() -> None:
    parts, speeds = (84, 84, 84), (1.0, 0.7, 0.4)
    compute_s = [part / speed for part, speed in zip(parts, speeds, strict=True)]
    assert divided_by_speed(parts, compute_s, (1, 1, 1)) == (120, 84, 48)
    assert divided_by_speed(parts, compute_s, (4, 4, 4)) == (120, 84, 48)


def test_a_division_by_the_same_speeds_stays() -> None:
    again = divided_by_speed((120, 84, 48), (120.0, 120.0, 120.0), (4, 4, 4))
    assert again == (120, 84, 48)


@pytest.mark.parametrize("seed", range(50))
def test_the_batch_stays_and_ranks_have_whole_micro_batches(seed: int) -> None:
    chance = random.Random(seed)
    readers = [chance.randint(1, 4) for _ in range(chance.randint(1, 5))]
    micro_batch = chance.choice([1, 2, 8])
    parts = [each * micro_batch * chance.randint(1, 8) for each in readers]
    compute_s = [part * chance.uniform(0.1, 1.0) for part in parts]
    units = whole_units(parts, readers, micro_batch)
    found = divided_by_speed(parts, compute_s, units)
    assert sum(found) == sum(parts), f"{seed=}"
    for part, each in zip(found, readers, strict=True):
        assert part > 0, f"{seed=}"
        assert part % (each * micro_batch) == 0, f"{seed=}"


def test_pieces_of_micro_batches_and_uneven_ranks_stay_as_they_are() -> None:
    assert whole_units((12, 24), (1, 2), 8) == (4, 8)
    assert whole_units((30, 16), (4, 1), 8) == (1, 8)


def test_a_division_stays_where_whole_units_come_to_no_other() -> None:
    assert divided_by_speed((4, 3), (40.0, 1.0), (4, 3)) == (4, 3)


def test_places_follow_each_other_and_leave_none_out() -> None:
    weights = (3, 0, 5, 4)
    places = [place_of(12, weights, site) for site in range(4)]
    assert [each for place in places for each in place] == list(range(12))
    assert [len(each) for each in places] == [3, 0, 5, 4]
