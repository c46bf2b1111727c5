"""What a link carried while it was the limit: from frames whose times are made up."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from sites.gateway.limited_rate import STRETCH_S, LimitedRate

RTT_S = 0.02


@dataclass
class Pipe:
    """A link of so many bytes a second that takes frames one after another."""

    bytes_per_s: float
    rate: LimitedRate = field(default_factory=LimitedRate)
    free_s: float = 0.0

    def carry(self, frames: list[tuple[float, int]], *, was_held: bool = False) -> None:
        """Send frames that leave at those times; the link is idle before the first and after the last."""
        self.rate.begin(frames[0][0], RTT_S)
        for index, (left_s, size_bytes) in enumerate(frames):
            self.free_s = max(self.free_s, left_s) + size_bytes / self.bytes_per_s
            self.rate.arrive(
                size_bytes,
                left_s,
                self.free_s + RTT_S,
                rtt_s=RTT_S,
                was_held=was_held,
                is_last=index == len(frames) - 1,
            )

    @property
    def measured(self) -> float:
        return self.rate.limited_bytes / self.rate.limited_s


def test_a_burst_measures_the_link_though_its_window_held_nothing() -> None:
    pipe = Pipe(1e6)
    pipe.carry([(0.001 * index, 50_000) for index in range(10)])
    assert pipe.measured == pytest.approx(1e6, rel=0.01)


def test_frames_that_the_window_held_back_measure_it_too() -> None:
    pipe = Pipe(1e6)
    pipe.carry([(0.05 * index, 50_000) for index in range(10)], was_held=True)
    assert pipe.measured == pytest.approx(1e6, rel=0.01)


def test_a_sender_with_little_to_send_measures_nothing() -> None:
    pipe = Pipe(1e6)
    pipe.carry([(0.1 * index, 10_000) for index in range(20)])
    assert pipe.rate.limited_s == 0


def test_what_connections_carry_before_they_are_warm_is_no_measure() -> None:
    pipe = Pipe(1e6)
    pipe.carry([(0.0, 20_000)] * 8)
    assert pipe.rate.limited_s == 0
    slow_start = LimitedRate()
    slow_start.begin(0.0, RTT_S)
    for trip in range(1, 9):
        for _ in range(2**trip):
            slow_start.arrive(1_000, 0.0, trip * RTT_S, rtt_s=RTT_S, was_held=True, is_last=False)
    assert slow_start.limited_s == 0


def test_an_instant_says_more_of_processors_than_of_links() -> None:
    pipe = Pipe(1e6)
    pipe.carry([(0.0, 20_000)] * 9)
    assert pipe.rate.limited_s == 0


def test_long_transfers_are_told_while_they_go_on() -> None:
    pipe = Pipe(1e6)
    pipe.carry([(0.0, 100_000)] * 50)
    assert pipe.measured == pytest.approx(1e6, rel=0.01)
    assert pipe.rate.limited_s == pytest.approx(5.0, abs=0.3)
    going_on = LimitedRate()
    going_on.begin(0.0, RTT_S)
    for index in range(1, 16):
        now_s = RTT_S + 0.1 * index
        going_on.arrive(100_000, 0.0, now_s, rtt_s=RTT_S, was_held=False, is_last=False)
    assert going_on.limited_s == pytest.approx(STRETCH_S, abs=0.11)
    assert going_on.limited_bytes / going_on.limited_s == pytest.approx(1e6, rel=0.01)
