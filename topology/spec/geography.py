"""Distances between places, and round trips of light over them."""

import math

from isthmus.topology.spec.world import Location

EARTH_RADIUS_KM = 6371.0088
"""Mean radius of the Earth in kilometres (IUGG)."""
FIBRE_S_PER_KM = 4.9e-6
"""Seconds per kilometre in fibre, one way: glass has a refractive index of about 1.468."""
LONG_HAUL_KM = 1500.0
LONG_INFLATION = 1.6
SHORT_INFLATION = 2.2
"""Ratio of a measured RTT to that of the straight line on short routes, which detour more."""


def great_circle_km(one: Location, other: Location) -> float:
    """Return the length of the shortest path over the Earth's surface (haversine formula)."""
    lat, other_lat = math.radians(one.lat), math.radians(other.lat)
    half_lat = (other_lat - lat) / 2
    half_lon = math.radians(other.lon - one.lon) / 2
    chord = math.sin(half_lat) ** 2 + math.cos(lat) * math.cos(other_lat) * math.sin(half_lon) ** 2
    return 2 * EARTH_RADIUS_KM * math.asin(min(1.0, math.sqrt(chord)))


def rtt_of_distance(distance_km: float) -> float:
    """Return the typical round trip for a distance on the map."""
    inflation = SHORT_INFLATION if distance_km < LONG_HAUL_KM else LONG_INFLATION
    return 2 * distance_km * FIBRE_S_PER_KM * inflation


def least_rtt_of_distance(distance_km: float) -> float:
    """Return the round trip of light in a fibre without detour: a lower bound."""
    return 2 * distance_km * FIBRE_S_PER_KM
