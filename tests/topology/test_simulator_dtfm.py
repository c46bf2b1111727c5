"""The objective of DT-FM, to 4 decimals.

Yuan et al., "Decentralized training of foundation models in heterogeneous environments", NeurIPS
2022, and github.com/DS3Lab/DT-FM (scheduler/heuristic_evolutionary_solver/config.py: networks, and
delays and bandwidths that were measured between regions of AWS). Seconds for GPT-3-XL on 64 devices
in 8 groups of 8, gradients of 0.65 GB and activations of 0.47125 GB: groups of neighbours, and
groups with a stride of 8. Stages are in the order that is cheapest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from tests.topology.direct_groups import exchange_s, relay_s

DEVICES = 64
GRADIENT_BYTES, ACTIVATION_BYTES = 0.65e9, 0.47125e9
CONTIGUOUS = [list(range(8 * group, 8 * group + 8)) for group in range(8)]
STRIDED = [list(range(group, DEVICES, 8)) for group in range(8)]

Link = tuple[float, float]
"""Milliseconds of delay, Gbit/s."""


@dataclass(frozen=True, slots=True)
class Network:
    """Equally many devices in each of some places."""

    places: Sequence[str]
    inside: Link
    between: dict[str, Link]
    """By the names of two places; `*` is any other pair."""

    def message_s(self, one: int, other: int, num_bytes: float) -> float:
        per_place = DEVICES // len(self.places)
        source, target = self.places[one // per_place], self.places[other // per_place]
        link = self.inside if source == target else self._link(source, target)
        return link[0] / 1e3 + 8 * num_bytes / (link[1] * 1e9)

    def _link(self, source: str, target: str) -> Link:
        either = (f"{source}-{target}", f"{target}-{source}", "*")
        return next(self.between[name] for name in either if name in self.between)


DATACENTER = Network([f"node {index}" for index in range(8)], (0, 100), {"*": (0, 3.125)})
UNIVERSITIES = Network(["Ohio", "Virginia"], (1, 5), {"*": (11, 1.12)})
REGIONAL = Network(
    ["Virginia", "Oregon", "California", "Ohio"],
    (5, 2),
    {
        "Virginia-Oregon": (67, 1.15),
        "Virginia-California": (59, 1.05),
        "Virginia-Ohio": (11, 1.12),
        "Oregon-California": (12, 1.25),
        "Oregon-Ohio": (49, 1.10),
        "California-Ohio": (52, 1.02),
    },
)
WORLD_WIDE = Network(
    ["Oregon", "Virginia", "Ohio", "Tokyo", "Seoul", "London", "Frankfurt", "Ireland"],
    (5, 2),
    {
        "Oregon-Virginia": (67, 0.79),
        "Oregon-Ohio": (49, 1.10),
        "Oregon-Tokyo": (96, 0.523),
        "Oregon-Seoul": (124, 0.46),
        "Oregon-London": (136, 0.42),
        "Oregon-Frankfurt": (143, 0.404),
        "Oregon-Ireland": (124, 0.482),
        "Virginia-Ohio": (11, 1.12),
        "Virginia-Tokyo": (143, 0.524),
        "Virginia-Seoul": (172, 0.500),
        "Virginia-London": (76, 1.16),
        "Virginia-Frankfurt": (90, 1.02),
        "Virginia-Ireland": (67, 1.05),
        "Ohio-Tokyo": (130, 0.694),
        "Ohio-Seoul": (159, 0.529),
        "Ohio-London": (86, 1.05),
        "Ohio-Frankfurt": (99, 0.799),
        "Ohio-Ireland": (77, 1.14),
        "Tokyo-Seoul": (34, 1.10),
        "Tokyo-London": (210, 0.366),
        "Tokyo-Frankfurt": (223, 0.36),
        "Tokyo-Ireland": (199, 0.465),
        "Seoul-London": (238, 0.342),
        "Seoul-Frankfurt": (235, 0.358),
        "Seoul-Ireland": (228, 0.335),
        "London-Frankfurt": (14, 1.14),
        "London-Ireland": (12, 1.09),
        "Frankfurt-Ireland": (24, 1.08),
    },
)


@pytest.mark.parametrize(
    ("network", "groups", "data_parallel_s", "pipeline_s"),
    [
        (DATACENTER, CONTIGUOUS, 0.0910, 16.8896),
        (DATACENTER, STRIDED, 2.9120, 0.5278),
        (UNIVERSITIES, CONTIGUOUS, 1.8340, 15.8141),
        (UNIVERSITIES, STRIDED, 5.5169, 10.5700),
        (REGIONAL, CONTIGUOUS, 4.6200, 34.6206),
        (REGIONAL, STRIDED, 8.3421, 26.4600),
        (WORLD_WIDE, CONTIGUOUS, 4.6200, 54.8169),
        (WORLD_WIDE, STRIDED, 22.7584, 26.4600),
    ],
)
def test_the_objective(
    network: Network, groups: list[list[int]], data_parallel_s: float, pipeline_s: float
) -> None:
    slowest_s = max(exchange_s(group, GRADIENT_BYTES, network.message_s) for group in groups)
    assert slowest_s == pytest.approx(data_parallel_s, abs=1e-4)
    # The peer's own figure is of one way, forward; backward takes as long.
    assert 2 * _cheapest_s(network, groups) == pytest.approx(pipeline_s, abs=1e-4)


def _cheapest_s(network: Network, groups: list[list[int]]) -> float:
    """Return the seconds through all groups in their cheapest order (Held and Karp)."""
    several = range(len(groups))
    step_s = {
        (one, other): relay_s([groups[one], groups[other]], ACTIVATION_BYTES, network.message_s)
        for one in several
        for other in several
        if one != other
    }
    best = {(frozenset({last}), last): 0.0 for last in several}
    for _ in several[1:]:
        longer: dict[tuple[frozenset[int], int], float] = {}
        for (visited, last), so_far_s in best.items():
            for following in set(several) - visited:
                key = (visited | {following}, following)
                total_s = so_far_s + step_s[last, following]
                longer[key] = min(total_s, longer.get(key, total_s))
        best = longer
    return min(best.values())
