"""Distances between known places, and the RTTs that follow."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.topology.spec.geography import great_circle_km, rtt_of_distance
from isthmus.topology.spec.world import Location

LONDON = Location(lat=51.5074, lon=-0.1278)
NEW_YORK = Location(lat=40.7128, lon=-74.0060)
SYDNEY = Location(lat=-33.8688, lon=151.2093)

places = st.builds(Location, lat=st.floats(-90, 90), lon=st.floats(-180, 180))


@pytest.mark.parametrize(
    ("one", "other", "distance_km"),
    [(LONDON, NEW_YORK, 5570), (LONDON, SYDNEY, 16994), (NEW_YORK, SYDNEY, 15989)],
)
def test_distances_of_known_cities(one: Location, other: Location, distance_km: float) -> None:
    assert great_circle_km(one, other) == pytest.approx(distance_km, rel=0.002)


def test_half_way_round_and_nowhere() -> None:
    north, south = Location(lat=90, lon=0), Location(lat=-90, lon=0)
    assert great_circle_km(north, south) == pytest.approx(20015.1, abs=0.1)
    assert great_circle_km(LONDON, LONDON) == 0


@given(places, places)
def test_a_distance_is_the_same_both_ways_and_at_most_half_the_equator(
    one: Location, other: Location
) -> None:
    distance_km = great_circle_km(one, other)
    assert distance_km == pytest.approx(great_circle_km(other, one), rel=1e-9, abs=1e-6)
    assert 0 <= distance_km <= 20015.2


def test_rtts_are_near_what_networks_show() -> None:
    # London to New York is 70 to 76 ms on common paths; the formula is a rule of thumb.
    assert 0.07 < rtt_of_distance(great_circle_km(LONDON, NEW_YORK)) < 0.09
    assert rtt_of_distance(1499.0) == pytest.approx(1499 * 2 * 4.9e-6 * 2.2)
    assert rtt_of_distance(1500.0) == pytest.approx(1500 * 2 * 4.9e-6 * 1.6)
    assert rtt_of_distance(0.0) == 0
