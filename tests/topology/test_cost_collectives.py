"""Collectives inside a site, against ASTRA-sim 2.0 (analytical backend, commit f66c1dac)."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.topology.cost.collectives import (
    Channel,
    Level,
    all_reduce_s,
    all_to_all_s,
    levels_of,
    reduce_scatter_s,
    ring_s,
)

GIB, MIB = 2**30, 2**20


def test_astra_sim_ring_of_sixteen() -> None:
    """16 NPU, 1 GiB, 50 GB/s, 500 ns: 39,448,540 ns; 3 %."""
    ring = [Level(16, Channel(50e9, 500e-9))]
    assert all_reduce_s(ring, GIB) == pytest.approx(39_448_540e-9, rel=0.03)


def test_astra_sim_ring_of_eight_in_four_splits() -> None:
    """8 NPU, 1 MiB in four splits one after another, 50 GB/s, 500 ns: 64,440 ns; 3 %."""
    ring = [Level(8, Channel(50e9, 500e-9))]
    assert all_reduce_s(ring, MIB, num_splits=4) == pytest.approx(64_440e-9, rel=0.03)


def test_astra_sim_two_levels() -> None:
    """Switch(8) 400 GB/s 936 ns, ring(2) 12.5 GB/s 10.5 ms, 1 GiB: 36,267,145 ns; 3 %."""
    levels = [Level(8, Channel(400e9, 936e-9)), Level(2, Channel(12.5e9, 10.5e-3))]
    assert all_reduce_s(levels, GIB) == pytest.approx(36_267_145e-9, rel=0.03)


def test_levels_by_hand() -> None:
    levels = [Level(4, Channel(100.0, 1.0)), Level(2, Channel(10.0, 5.0))]
    inside_s = 3 * 1.0 + 3 / 4 * 800 / 100
    across_s = 1 * 5.0 + 1 / 2 * 200 / 10
    assert reduce_scatter_s(levels, 800) == pytest.approx(inside_s + across_s)
    assert all_reduce_s(levels, 800) == pytest.approx(2 * (inside_s + across_s))


def test_one_ring_through_nodes_by_hand() -> None:
    levels = [Level(4, Channel(100.0, 1.0, 10.0)), Level(2, Channel(10.0, 5.0, 20.0))]
    # Eight ranks: six hops inside nodes, one between; 700 bytes, a quarter of it each of four ways
    # out.
    assert ring_s(levels, 800) == pytest.approx(6 * 1.0 + 5.0 + (700 / 4 + 20) / 10)
    # Where the node is the slower one, it sets the pace.
    slow = [Level(4, Channel(20.0, 1.0)), Level(2, Channel(10.0, 5.0))]
    assert ring_s(slow, 800) == pytest.approx(6 * 1.0 + 5.0 + 700 / 20)
    alone = [Level(1, Channel(20.0, 1.0)), Level(4, Channel(10.0, 5.0))]
    assert ring_s(alone, 800) == reduce_scatter_s(alone, 800) == 3 * 5.0 + 600 / 10
    assert ring_s(levels, 0) == ring_s([Level(1, Channel(1.0, 1.0))], 800) == 0.0


def test_what_leaves_a_node_in_an_all_to_all() -> None:
    levels = [Level(4, Channel(100.0)), Level(2, Channel(10.0))]
    # Of 800 bytes a rank keeps an eighth, three go to its node, four leave it.
    assert all_to_all_s(levels, 800) == pytest.approx(300 / 100 + 400 / 10)


def test_half_the_bandwidth_at_the_half_message() -> None:
    channel = Channel(1e9, 0.0, half_bytes=4e6)
    assert 4e6 / channel.send_s(4e6) == pytest.approx(0.5e9)
    assert 4e9 / channel.send_s(4e9) == pytest.approx(1e9, rel=0.002)
    assert channel.send_s(0) == 0.0


@pytest.mark.parametrize(
    ("ranks", "stride", "inside", "across"),
    [(8, 1, 8, 1), (16, 1, 8, 2), (8, 2, 4, 2), (6, 2, 2, 3), (4, 8, 1, 4), (4, 16, 1, 4)],
)
def test_members_that_share_a_node(ranks: int, stride: int, inside: int, across: int) -> None:
    levels = levels_of(ranks, stride, 8, Channel(9.0), Channel(3.0))
    assert [level.ranks for level in levels] == [inside, across]
    assert [level.channel.bytes_per_s for level in levels] == [9.0, 3.0]


@given(
    ranks=st.lists(st.integers(1, 64), min_size=1, max_size=3),
    message=st.floats(0, 1e12),
    rate=st.floats(1e6, 1e12),
    faster=st.floats(1.0, 1e3),
)
def test_more_bandwidth_is_never_slower(
    ranks: list[int], message: float, rate: float, faster: float
) -> None:
    for collective in (all_reduce_s, reduce_scatter_s, all_to_all_s, ring_s):
        slow = [Level(count, Channel(rate, 1e-5, 1e5)) for count in ranks]
        fast = [Level(count, Channel(rate * faster, 1e-5, 1e5)) for count in ranks]
        assert collective(fast, message) <= collective(slow, message) * (1 + 1e-12)


def test_alone_or_for_free_takes_no_time() -> None:
    assert all_reduce_s([Level(1, Channel(1.0, 1.0))], 1e9) == 0.0
    assert all_reduce_s([Level(8, Channel(math.inf))], 1e9) == 0.0
