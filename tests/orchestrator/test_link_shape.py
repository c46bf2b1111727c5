"""The shaping arithmetic, exactly, with times that the test makes up.

Which packets are lost: as many as configured in any window, at places that the seed decides.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.orchestrator.emulator.link_shape import (
    LOSSES_PER_DECK,
    LinkShape,
    LossDeck,
    Transmitter,
)
from isthmus.topology.spec.errors import ConfigError
from isthmus.topology.spec.tcp_constants import SEGMENT_BYTES


def shape(rate: float = 1000.0, delay_s: float = 0.5, jitter_s: float = 0.0) -> LinkShape:
    return LinkShape(source="eu", target="us", bytes_per_s=rate, delay_s=delay_s, jitter_s=jitter_s)


def steady() -> float:
    return 0.5


def transmitter_of(shape: LinkShape, draw: Callable[[], float] = steady) -> Transmitter:
    return Transmitter(shape, draw, random.Random(0))


def arrival_s(
    transmitter: Transmitter, num_bytes: int, now_s: float, not_before_s: float = 0.0
) -> float:
    """Return when bytes arrive, as a connection without round-trip time sees it."""
    passage = transmitter.admit(num_bytes, now_s, 0.0)
    return max(not_before_s, passage.departs_s + passage.transit_s)


def test_an_idle_link_takes_transmission_and_delay() -> None:
    transmitter = transmitter_of(shape(), steady)
    assert arrival_s(transmitter, 100, 10.0, 0.0) == 10.0 + 0.1 + 0.5
    assert arrival_s(transmitter, 100, 20.0, 0.0) == 20.0 + 0.1 + 0.5


def test_connections_share_one_transmitter() -> None:
    transmitter = transmitter_of(shape(), steady)
    arrivals = [arrival_s(transmitter, 250, 10.0, 0.0) for _ in range(4)]
    assert arrivals == [10.75, 11.0, 11.25, 11.5]


def test_an_end_waits_behind_the_bytes_before_it_and_takes_no_time_of_its_own() -> None:
    transmitter = transmitter_of(shape(), steady)
    first_s = arrival_s(transmitter, 500, 10.0, 0.0)
    assert arrival_s(transmitter, 0, 10.0, first_s) == first_s
    assert arrival_s(transmitter, 0, 20.0, first_s) == 20.5


def test_backlog_drains_at_the_rate() -> None:
    transmitter = transmitter_of(shape(), steady)
    assert transmitter.backlog_bytes(10.0) == 0
    arrival_s(transmitter, 800, 10.0, 0.0)
    assert transmitter.backlog_bytes(10.0) == pytest.approx(800)
    assert transmitter.backlog_bytes(10.5) == pytest.approx(300)
    assert transmitter.backlog_bytes(11.0) == 0


def test_a_full_queue_has_room_again_when_half_of_it_has_left() -> None:
    link = shape(rate=100e6)
    assert link.room_bytes == 2_500_000
    transmitter = transmitter_of(link, steady)
    arrival_s(transmitter, link.room_bytes - 1, 10.0, 0.0)
    assert not transmitter.is_full(10.0)
    arrival_s(transmitter, 1, 10.0, 0.0)
    assert transmitter.is_full(10.0)
    room_at_s = transmitter.room_at_s()
    assert room_at_s == pytest.approx(10.0125)
    assert transmitter.backlog_bytes(room_at_s) == pytest.approx(link.room_bytes / 2)


def test_pieces_follow_the_rate_between_their_bounds() -> None:
    assert shape(rate=1e3).read_bytes == 3 * SEGMENT_BYTES
    assert shape(rate=12.5e6).read_bytes == 17 * SEGMENT_BYTES
    assert shape(rate=1e9).read_bytes == 45 * SEGMENT_BYTES
    assert shape(rate=1e3).room_bytes == 64 << 10


@pytest.mark.parametrize("seed", range(5))
def test_jitter_stays_in_its_bounds_and_repeats(seed: int) -> None:
    def delays() -> list[float]:
        transmitter = transmitter_of(shape(1e12, 0.5, 0.1), random.Random(seed).random)
        return [arrival_s(transmitter, 1, float(at_s), 0.0) - at_s for at_s in range(200)]

    first = delays()
    assert first == delays(), f"{seed=}"
    assert all(0.4 <= delay_s <= 0.6 + 1e-9 for delay_s in first), f"{seed=}"
    assert max(first) - min(first) > 0.1, f"{seed=}"


def test_jitter_never_makes_a_delay_negative() -> None:
    transmitter = transmitter_of(shape(1e9, 0.01, 0.5), lambda: 0.0)
    assert arrival_s(transmitter, 0, 7.0, 0.0) == 7.0


@given(
    st.lists(
        st.tuples(st.integers(1, 100_000), st.floats(0, 0.2), st.integers(0, 2)),
        min_size=1,
        max_size=60,
    ),
    st.integers(0, 2**32),
)
def test_order_is_kept_and_the_rate_is_never_exceeded(
    arrivals: list[tuple[int, float, int]], seed: int
) -> None:
    """Whatever the sizes, gaps and connections: bytes of any interval fit the rate."""
    rate = 1e5
    transmitter = transmitter_of(shape(rate, 0.05, 0.02), random.Random(seed).random)
    last_due_s = [0.0, 0.0, 0.0]
    now_s, total = 1.0, 0
    for num_bytes, gap_s, connection in arrivals:
        now_s += gap_s
        due_s = arrival_s(transmitter, num_bytes, now_s, last_due_s[connection])
        total += num_bytes
        assert due_s >= last_due_s[connection]
        assert due_s >= now_s + num_bytes / rate + 0.03 - 1e-9
        assert due_s >= 1.0 + total / rate + 0.03 - 1e-6
        last_due_s[connection] = due_s


@given(
    st.lists(st.integers(1, 100_000), min_size=1, max_size=20),
    st.floats(0, 2),
    st.sampled_from((1e3, 1e5, 1e6, 1e9)),
)
def test_what_waits_leaves_at_the_new_rate_from_the_moment_it_changes(
    sizes: list[int], changed_s: float, rate: float
) -> None:
    transmitter = transmitter_of(shape(1e5))
    for num_bytes in sizes:
        transmitter.admit(num_bytes, 1.0, 0.0)
    now_s = 1.0 + changed_s
    waiting_bytes = transmitter.backlog_bytes(now_s)
    assert waiting_bytes == pytest.approx(max(0.0, sum(sizes) - changed_s * 1e5), abs=1e-3)
    stretch = transmitter.reshape(shape(rate), now_s)
    assert stretch == 1e5 / rate
    assert transmitter.backlog_bytes(now_s) == pytest.approx(waiting_bytes, abs=1e-3)
    departs_s = transmitter.admit(500, now_s, 0.0).departs_s
    assert departs_s == pytest.approx(now_s + (waiting_bytes + 500) / rate, abs=1e-3)


def test_a_loss_takes_the_rate_twice_and_a_round_trip_longer() -> None:
    transmitter = transmitter_of(shape(rate=1448.0).changed({"loss": 1.0}))
    departs_s, transit_s = transmitter.admit(1448, 10.0, 3.0)
    assert (departs_s, transit_s) == (12.0, 3.5)
    assert transmitter.lost_packets == 1
    transmitter.reshape(shape(rate=1448.0), 12.0)
    assert transmitter.admit(1448, 12.0, 3.0) == (13.0, 0.5)
    assert transmitter.lost_packets == 1


@pytest.mark.parametrize("seed", range(5))
def test_losses_are_as_many_as_configured_and_repeat(seed: int) -> None:
    """10^5 packets at 0.1 %: 100 losses, and a connection's end has nothing to lose."""

    def lost(num_bytes: int) -> list[int]:
        generator = random.Random(seed)
        transmitter = Transmitter(shape().changed({"loss": 0.001}), steady, generator)
        counts = []
        for _ in range(10_000):
            transmitter.admit(num_bytes, 0.0, 0.0)
            counts.append(transmitter.lost_packets)
        return counts

    counts = lost(10 * SEGMENT_BYTES)
    assert counts == lost(10 * SEGMENT_BYTES), f"{seed=}"
    assert counts[-1] == pytest.approx(100, rel=0.1), f"{seed=}"
    assert lost(0)[-1] == 0, f"{seed=}"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"bytes_per_s": 0.0}, "bytes_per_s: want more than 0"),
        ({"bytes_per_s": float("nan")}, "bytes_per_s: want more than 0"),
        ({"delay_s": -1.0}, "delay_s: want 0 or more"),
        ({"jitter_s": float("inf")}, "jitter_s: want 0 or more"),
        ({"loss": 1.5}, "loss: want 0 to 1"),
        ({"loss": float("nan")}, "loss: want 0 to 1"),
        ({"queue_bytes": 0}, "queue_bytes: want more than 0"),
        ({"target": "eu"}, "target: want another site"),
    ],
)
def test_impossible_links_are_refused(changed: dict[str, float], message: str) -> None:
    fields = {"source": "eu", "target": "us", "bytes_per_s": 1.0, "delay_s": 0.0, **changed}
    with pytest.raises(ConfigError, match=message):
        LinkShape(**fields)  # type: ignore[arg-type]


def test_the_directions_of_a_pair_do_not_share_anything() -> None:
    there, back = transmitter_of(shape(), steady), transmitter_of(shape(), steady)
    arrival_s(there, 5000, 1.0, 0.0)
    assert back.backlog_bytes(1.0) == 0


FIXED = settings(max_examples=100)


def losses(probability: float, seed: int, sizes: list[int]) -> list[int]:
    """The positions of all losses among packets that come in groups of these sizes."""
    deck = LossDeck(probability, random.Random(seed))
    found: list[int] = []
    taken = 0
    for size in sizes:
        lost = deck.take(size)
        assert all(0 <= index < size for index in lost)
        found += [taken + index for index in lost]
        taken += size
    return found


@pytest.mark.parametrize("probability", [0.001, 0.01])
@pytest.mark.parametrize("seed", range(5))
def test_any_100_000_packets_lose_what_is_configured_within_a_tenth(
    probability: float, seed: int
) -> None:
    found = losses(probability, seed, [45] * 6667)
    for start in range(0, 200_001, 7919):
        count = sum(start <= position < start + 100_000 for position in found)
        assert abs(count - probability * 100_000) <= 0.1 * probability * 100_000, (seed, start)


@FIXED
@given(
    probability=st.floats(1e-4, 1.0),
    seed=st.integers(0, 1 << 32),
    sizes=st.lists(st.integers(0, 64), max_size=200),
)
def test_losses_are_never_more_than_a_deck_off_and_grouping_changes_nothing(
    probability: float, seed: int, sizes: list[int]
) -> None:
    found = losses(probability, seed, sizes)
    assert found == sorted(set(found))
    assert abs(len(found) - probability * sum(sizes)) <= LOSSES_PER_DECK + 1
    assert found == losses(probability, seed, [1] * sum(sizes))


def test_seeds_differ_and_places_are_irregular() -> None:
    found = losses(0.01, 1, [100_000])
    assert found != losses(0.01, 2, [100_000])
    gaps = {after - before for before, after in itertools.pairwise(found)}
    assert min(gaps) <= 5
    assert max(gaps) >= 300


def test_the_extremes() -> None:
    assert losses(0.0, 1, [1000]) == []
    assert losses(5e-324, 1, [1000]) == []
    assert losses(1.0, 1, [7, 1000]) == list(range(1007))
