"""How much memory a link's frames may take, its round trip, and what it carried as the limit."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from isthmus.sites.gateway.config import PeerLink
from isthmus.sites.gateway.links.congestion.rate import (
    WARM_ROUND_TRIPS,
    IdleRoundTrip,
    LimitedRate,
    Pace,
    WayBack,
    window_bytes,
)
from isthmus.topology.spec.reduction_plan import ReductionPlan
from tests.fakes.gateway_sites import gateway_config


def test_a_window_is_far_beyond_what_its_link_holds(tmp_path: Path) -> None:
    config = gateway_config(tmp_path, ReductionPlan(2, (), "gather"), 0)
    far = PeerLink(site="birch", bytes_per_s=1.25e9, rtt_s=0.1)
    assert window_bytes(config, far) == 4 * 125_000_000
    assert window_bytes(config, replace(far, bytes_per_s=1e5)) == 32 << 20
    chunky = replace(config, chunk_bytes=16 << 20)
    assert window_bytes(chunky, replace(far, bytes_per_s=1e5)) >= 4 * (16 << 20)
    assert window_bytes(replace(config, window_bytes=7), far) == 7


def test_round_trips() -> None:
    trip = IdleRoundTrip(0.08)
    trip.note(0.1, is_idle=False)
    assert trip.shortest_s == 0.08, "that one may have waited in a queue"
    assert trip.median_s is None
    trip.note(0.11, is_idle=True)
    assert trip.shortest_s == 0.11, "measured, where the other was configured"
    trip.note(0.09, is_idle=False)
    assert trip.shortest_s == 0.09
    for _ in range(8):
        trip.note(0.2, is_idle=True)
    assert trip.shortest_s == 0.2, "the path has become longer"


def test_one_greeting_that_had_to_connect_changes_little() -> None:
    """It took three round trips: the mean of two, as medians have it, would be far too long."""
    trip = IdleRoundTrip(0.08)
    for rtt_s, median_s in [(0.24, 0.24), (0.082, 0.082), (0.084, 0.084), (0.09, 0.084)]:
        trip.note(rtt_s, is_idle=True)
        assert trip.median_s == pytest.approx(median_s)
    again = IdleRoundTrip(0.08)
    for rtt_s, median_s in [(0.08, 0.08), (0.24, 0.08), (0.09, 0.09)]:
        again.note(rtt_s, is_idle=True)
        assert again.median_s == pytest.approx(median_s)


def test_the_round_trip_can_be_asked_for_at_any_time() -> None:
    """Also between two steps of another thread's `note`, for it is read without a lock."""
    trip = IdleRoundTrip(0.08)

    class Watched(deque[float]):
        def clear(self) -> None:
            super().clear()
            assert trip.shortest_s > 0

        def append(self, rtt_s: float, /) -> None:
            assert trip.shortest_s > 0
            super().append(rtt_s)

    trip._rtts_s = Watched(trip._rtts_s)
    trip.note(0.11, is_idle=True)
    assert trip.shortest_s == 0.11


RTT_S = 0.02
WARM_S = WARM_ROUND_TRIPS * RTT_S


@dataclass
class Pipe:
    """A link of so many bytes a second that takes frames one after another."""

    bytes_per_s: float
    rate: LimitedRate = field(default_factory=LimitedRate)
    free_s: float = 0.0

    def carry(self, frames: Iterable[tuple[float, int]]) -> None:
        """Send frames that leave at those times; the link is idle before the first."""
        for index, (left_s, size_bytes) in enumerate(frames):
            if index == 0:
                self.rate.begin(left_s, RTT_S)
            self.free_s = max(self.free_s, left_s) + size_bytes / self.bytes_per_s
            self.rate.arrive(size_bytes, left_s, self.free_s + RTT_S, RTT_S)

    def carry_window(self, num_frames: int, size_bytes: int, most: int) -> None:
        """Send frames of which only so many are ever on the way."""
        acknowledged: list[float] = []
        for index in range(num_frames):
            left_s = 0.0 if index < most else acknowledged[index - most]
            if index == 0:
                self.rate.begin(left_s, RTT_S)
            self.free_s = max(self.free_s, left_s) + size_bytes / self.bytes_per_s
            acknowledged.append(self.free_s + RTT_S)
            self.rate.arrive(size_bytes, left_s, acknowledged[-1], RTT_S)

    @property
    def measured(self) -> float:
        return self.rate.limited_bytes / self.rate.limited_s


def test_a_burst_measures_the_link() -> None:
    pipe = Pipe(1e6)
    pipe.carry((0.001 * index, 20_000) for index in range(30))
    assert pipe.measured == pytest.approx(1e6)
    assert pipe.rate.limited_s == pytest.approx(0.6 + RTT_S - WARM_S, abs=0.03)


def test_a_window_that_is_too_small_makes_no_link_slower() -> None:
    pipe = Pipe(1e7)
    pipe.carry_window(100, 10_000, 1)
    assert pipe.rate.limited_s == 0
    pairs = Pipe(1e7)
    pairs.carry_window(100, 10_000, 2)
    assert pairs.measured == pytest.approx(1e7), "one of two was there when the other was through"


def test_a_sender_with_little_to_send_measures_nothing() -> None:
    pipe = Pipe(1e6)
    pipe.carry((0.1 * index, 10_000) for index in range(20))
    assert pipe.rate.limited_s == 0


@pytest.mark.parametrize("seed", range(5))
def test_pauses_of_the_sender_are_no_part_of_it(seed: int) -> None:
    chance = random.Random(seed)
    pipe, now_s, frames = Pipe(1e6), 0.0, []
    for _ in range(200):
        frames.append((now_s, chance.randint(5_000, 30_000)))
        now_s += chance.choice((0.0, 0.001, 0.005, 0.08))
    pipe.carry(frames)
    assert pipe.rate.limited_s > 0.5, f"{seed=}"
    assert pipe.measured == pytest.approx(1e6), f"{seed=}"


def test_what_connections_carry_before_they_are_warm_is_no_measure() -> None:
    slow_start = LimitedRate()
    slow_start.begin(0.0, RTT_S)
    for trip in range(1, WARM_ROUND_TRIPS + 1):
        for _ in range(2**trip):
            slow_start.arrive(1_000, 0.0, trip * RTT_S, RTT_S)
    assert slow_start.limited_s == 0


SEGMENT = 1000


@dataclass
class Looks:
    """A link that somebody looks at ten times a second, with frames on the way all the time."""

    pace: Pace
    now_s: float = 0.0
    delivered: int = 0

    def see(self, bytes_per_s: float, for_s: float) -> list[bool]:
        """Return which of the looks changed the pace."""
        changes = []
        for _ in range(round(10 * for_s)):
            self.now_s += 0.1
            self.delivered += round(0.1 * bytes_per_s / SEGMENT)
            changes.append(self.pace.follow(self.delivered, SEGMENT, self.now_s, RTT_S))
        return changes


def test_a_link_that_is_as_described_keeps_its_pace() -> None:
    pace = Pace(1e6)
    assert pace.bytes_per_s == 1.25e6
    looks = Looks(pace)
    assert not any(looks.see(9.9e5, 2.0) + looks.see(5e5, 2.0))
    assert pace.bytes_per_s == pytest.approx(1.25e6), "never less than described"
    assert pace.believed_bytes_per_s == pytest.approx(1e6)
    assert pace.carried == pytest.approx(0.5)


def test_a_faster_link_is_tried_at_twice_its_rate_until_it_has_no_more() -> None:
    pace = Pace(1e6)
    looks = Looks(pace)
    paces = []
    for _ in range(20):
        looks.see(min(pace.bytes_per_s, 4.2e6), 0.4)
        paces.append(pace.bytes_per_s)
    assert paces[:2] == pytest.approx([1.25e6, 2 * 1.25e6])
    assert max(paces) == pytest.approx(2 * 4.2e6)
    assert paces[-1] == pytest.approx(1.25 * 4.2e6)
    assert pace.believed_bytes_per_s == pytest.approx(4.2e6)
    assert not pace.is_searching
    assert not any(looks.see(1e6, 1.0)), "others use it: it is no slower link"


def test_what_left_before_a_rest_measures_nothing() -> None:
    """Until a round trip after a rest, what arrives says how fast frames were sent, at most."""
    pace = Pace(1e6)
    delivered = 0
    for start in range(20):
        for look in range(3):
            delivered += 500
            assert not pace.follow(delivered, SEGMENT, start + 0.1 * look, rtt_s=0.5)
        pace.rest()
    assert not pace.is_measured


def test_short_measurements_of_a_pace_add_up() -> None:
    pace = Pace(1e6)
    looks = Looks(pace)
    for _ in range(3):
        assert not pace.is_measured
        looks.see(9e5, 0.3)
        looks.now_s += 60.0
        pace.rest()
    assert pace.is_measured
    assert pace.carried == pytest.approx(0.9)


def test_a_connection_that_ended_makes_no_link_slower_or_faster() -> None:
    pace = Pace(1e6)
    looks = Looks(pace)
    looks.see(1e6, 2.0)
    looks.delivered = 10
    assert not any(looks.see(1e6, 2.0))
    assert pace.carried == pytest.approx(1.0)


def test_a_link_that_a_run_has_a_share_of_is_never_sent_more() -> None:
    pace = Pace(1e6, is_shared=True)
    assert pace.bytes_per_s == 1e6
    looks = Looks(pace)
    assert not any(looks.see(5e6, 2.0))
    assert pace.bytes_per_s == pace.believed_bytes_per_s == 1e6
    assert pace.carried == 1.0
    looks.see(3e5, 2.0)
    assert pace.carried == pytest.approx(0.3), "what it carries is known all the same"
    assert pace.is_slow


def test_a_link_is_slow_when_it_has_been_for_a_second() -> None:
    pace = Pace(1e6)
    looks = Looks(pace)
    looks.see(5e5, 0.7)
    assert pace.carried == pytest.approx(0.5)
    assert not pace.is_slow, "a loss may be being mended"
    looks.see(5e5, 1.0)
    assert pace.is_slow
    looks.see(9e5, 1.5)
    assert not pace.is_slow


def test_a_search_of_which_nothing_is_measured_ends() -> None:
    """After it, only bursts are sent that are shorter than two looks."""
    pace = Pace(1e6)
    looks = Looks(pace)
    looks.see(2e6, 0.6)
    assert pace.is_searching
    changes = []
    for _ in range(20):
        pace.rest()
        looks.now_s += 0.4
        changes += looks.see(2e6, 0.1)
    assert changes.count(True) == 1
    assert not pace.is_searching
    assert pace.bytes_per_s == pytest.approx(1.25 * 2e6)


@pytest.mark.parametrize("ahead_s", [0.0, 1e6, -1e6])
def test_waiting_on_the_way_back_is_known_whatever_the_clocks_say(ahead_s: float) -> None:
    """A queue of 30 ms fills up and drains, while the peer's clock is ahead, and runs faster."""
    way = WayBack()
    for tick in range(6000):
        now_s = 0.01 * tick
        queue_s = 0.03 if 2000 <= tick < 3000 else 0.0
        way.note((now_s - 0.025 - queue_s) * (1 + 5e-5) + ahead_s, now_s)
        if tick % 1000 > 50:
            assert way.waited_s(now_s, queue_s) == pytest.approx(queue_s, abs=0.004)
    assert way.waited_s(1e4, 0.0) == 0.0, "nothing came for long"


@pytest.mark.parametrize("stood_still_s", [2.0, 1e300])
def test_a_clock_that_stood_still_is_no_waiting(stood_still_s: float) -> None:
    """A machine that was suspended would be taken for a full queue for hours; so would a lie."""
    way = WayBack()
    waited_s = []
    for tick in range(100):
        now_s = 0.01 * tick
        queue_s = 0.03 if tick >= 80 else 0.0
        way.note(now_s - queue_s - (stood_still_s if tick >= 40 else 0.0), now_s)
        waited_s.append(way.waited_s(now_s, queue_s))
    assert max(waited_s[:80]) == 0.0
    if stood_still_s < 1e9:  # else a clock has no digits left for a queue
        assert waited_s[-1] == pytest.approx(0.03, abs=1e-3)
    way.note(2.0, 2.0)
    assert way.waited_s(2.0, 0.0) == 0.0, "it goes right again"
