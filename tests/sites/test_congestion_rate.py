"""The window and the pace of a link, the search for its rate, and what it carried as the limit."""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import pytest

from protos.frame import ChunkKey, Kind
from sites.gateway.links.congestion.rate import WARM_ROUND_TRIPS, LimitedRate, Window
from sites.gateway.links.send_queue import SendQueue, outgoing

FRAME = 1 << 18
ZEROS = bytes(FRAME)


@dataclass
class ModelledLink:
    """Carries frames of one sender; notes how long its queue was."""

    bytes_per_s: float
    rtt_s: float
    queue: SendQueue
    now_s: float = 0.0
    most_queued_bytes: float = 0.0
    busy_until_s: float = 0.0
    acknowledgements: list[tuple[float, int]] = field(default_factory=list)
    keys: Iterator[int] = field(default_factory=lambda: iter(range(1 << 30)))
    latest_s: Callable[[], float] = lambda: 0.0
    """By how much an acknowledgement is late."""

    def carry(self, num_frames: int) -> float:
        """Send frames; return how long it took until the last was acknowledged."""
        began_s = self.now_s
        self._push(num_frames)
        while not self.queue.is_empty:
            assert self._step(math.inf), "nothing is on the way, and nothing leaves"
        return self.now_s - began_s

    def offer(self, num_frames: int, for_s: float) -> None:
        """Send frames, and go on after so long, whatever is still on the way."""
        end_s = self.now_s + for_s
        self._push(num_frames)
        while self._step(end_s):
            pass
        self.now_s = end_s

    def _push(self, num_frames: int) -> None:
        for _ in range(num_frames):
            self.queue.push(outgoing(self._key(next(self.keys)), ZEROS, FRAME))

    def _step(self, end_s: float) -> bool:
        """Let happen what happens next, if that is before `end_s`."""
        self._send()
        delay_s = self.queue.window.delay_s(self.now_s)
        due_s = self.now_s + delay_s if delay_s > 0 else math.inf
        acknowledged_s = self.acknowledgements[0][0] if self.acknowledgements else math.inf
        if min(due_s, acknowledged_s) >= end_s:
            return False
        if acknowledged_s <= due_s:
            self.now_s, chunk = heapq.heappop(self.acknowledgements)
            self.queue.acknowledge(self._key(chunk), self.now_s)
        else:
            self.now_s = due_s
        return True

    def _send(self) -> None:
        while (item := self.queue.take(0, self.now_s)) is not None:
            self.busy_until_s = max(self.busy_until_s, self.now_s) + FRAME / self.bytes_per_s
            queued_s = self.busy_until_s - self.now_s
            self.most_queued_bytes = max(self.most_queued_bytes, queued_s * self.bytes_per_s)
            arrived_s = self.busy_until_s + self.rtt_s + self.latest_s()
            heapq.heappush(self.acknowledgements, (arrived_s, item.key.chunk))

    def _key(self, chunk: int) -> ChunkKey:
        return ChunkKey(0, 0, chunk, 0, Kind.CONTRIBUTION)


def link(bytes_per_s: float, rtt_s: float, believed: float | None = None) -> ModelledLink:
    window = Window(bytes_per_s=believed or bytes_per_s, rtt_s=rtt_s, most_bytes=1 << 30)
    return ModelledLink(bytes_per_s, rtt_s, SendQueue(window))


@pytest.mark.parametrize(
    ("bytes_per_s", "rtt_s"), [(25e6, 0.08), (125e6, 0.02), (125e6, 0.08), (125e6, 0.15)]
)
def test_a_link_is_filled_and_its_queue_is_not(bytes_per_s: float, rtt_s: float) -> None:
    modelled = link(bytes_per_s, rtt_s)
    for _ in range(5):
        took_s = modelled.carry(256)
        modelled.now_s += 1.0
        assert took_s <= 1.02 * (256 * FRAME / bytes_per_s + rtt_s)
    assert modelled.most_queued_bytes <= 0.7 * bytes_per_s * rtt_s


@pytest.mark.parametrize("times", [1.5, 4.0, 20.0, 100.0])
@pytest.mark.parametrize("rtt_s", [0.0005, 0.02, 0.08])
def test_a_link_faster_than_described_is_found_within_a_few_round_trips(
    times: float, rtt_s: float
) -> None:
    modelled = link(times * 12.5e6, rtt_s, believed=12.5e6)
    took_s = modelled.carry(400)
    late_s = took_s - 400 * FRAME / modelled.bytes_per_s - rtt_s
    # Two rounds to believe it, and one for each doubling; a round is a frame's time where that is
    # more.
    round_s = max(rtt_s, FRAME / 12.5e6)
    assert late_s <= (6 + 1.5 * math.log2(times)) * round_s
    # Beside a round trip's: what the window holds for the time that gateways take, and a few
    # frames.
    allowed_s = 1.3 * rtt_s + 0.003
    assert modelled.most_queued_bytes <= modelled.bytes_per_s * allowed_s + 4 * FRAME


@pytest.mark.parametrize("seed", range(10))
def test_late_acknowledgements_do_not_make_a_link_look_faster(seed: int) -> None:
    chance = random.Random(seed)
    modelled = link(25e6, 0.04)
    modelled.latest_s = lambda: chance.choice((0.0, 0.0, 0.0, chance.uniform(0, 0.012)))
    for _ in range(4):
        modelled.carry(64)
        modelled.now_s += 0.5
        assert modelled.queue.window.bytes_per_s < 1.1 * 25e6, f"{seed=}"
    assert modelled.most_queued_bytes <= 0.8 * 25e6 * 0.04, f"{seed=}"


def test_few_frames_are_whole_ones() -> None:
    """Where a link holds less than a frame, a second is sent while the first is acknowledged."""
    modelled = link(1.25e6, 0.04)
    assert modelled.carry(32) <= 1.02 * (32 * FRAME / 1.25e6 + 0.04)


@pytest.mark.parametrize("bytes_per_s", [1e6, 2e6, 3e6, 4e6, 5e6])
def test_of_few_frames_a_small_one_takes_no_large_ones_place(bytes_per_s: float) -> None:
    frame_bytes = 64 << 10
    window = Window(bytes_per_s=bytes_per_s, rtt_s=0.02, most_bytes=1 << 30)
    window.depart(frame_bytes, 0.0, is_alone=True, was_held=False)
    least = bytes_per_s * 0.02 + frame_bytes
    assert window.num_bytes % frame_bytes == 0
    assert window.num_bytes - frame_bytes // 2 >= least


def test_a_rate_taken_for_too_large_is_found_out() -> None:
    modelled = link(12.5e6, 0.08, believed=100e6)
    modelled.carry(500)
    modelled.most_queued_bytes = 0.0
    assert modelled.carry(256) <= 1.02 * (256 * FRAME / 12.5e6 + 0.08)
    assert modelled.most_queued_bytes <= 0.8 * 12.5e6 * 0.08
    assert modelled.queue.window.bytes_per_s == pytest.approx(12.5e6, rel=0.05)


def test_short_bursts_say_nothing_about_a_link() -> None:
    modelled = link(125e6, 0.15)
    for _ in range(100):
        modelled.carry(1)
        modelled.now_s += 0.5
    assert modelled.queue.window.bytes_per_s == 125e6
    assert modelled.queue.window.num_bytes > 125e6 * 0.15


def test_bursts_that_follow_each_other_say_nothing_about_a_link() -> None:
    modelled = link(12.5e6, 0.08)
    for _ in range(400):
        modelled.offer(3, 3 * FRAME / 7.5e6)
    assert modelled.queue.window.bytes_per_s == 12.5e6
    assert modelled.queue.unsent_bytes == 0
    narrower = link(6.25e6, 0.08, believed=12.5e6)
    for _ in range(400):
        narrower.offer(3, 3 * FRAME / 7.5e6)
    assert narrower.queue.window.bytes_per_s == pytest.approx(6.25e6, rel=0.05)


def test_a_peer_that_took_nothing_for_a_while_is_not_left_waiting() -> None:
    modelled = link(1000.0, 0.01, believed=125e6)  # blocked, as it seems
    modelled.carry(200)
    window = modelled.queue.window
    assert window.bytes_per_s == 125e6 / 8
    assert window.delay_s(modelled.now_s) <= FRAME / window.bytes_per_s


def test_round_trips() -> None:
    window = Window(bytes_per_s=1e6, rtt_s=0.08, most_bytes=1 << 30)
    window.note_round_trip(0.1, is_idle=False)
    assert window.rtt_s == 0.08, "that one may have waited in a queue"
    window.note_round_trip(0.11, is_idle=True)
    assert window.rtt_s == 0.11, "measured, where the other was configured"
    window.note_round_trip(0.09, is_idle=False)
    assert window.rtt_s == 0.09
    for _ in range(8):
        window.note_round_trip(0.2, is_idle=True)
    assert window.rtt_s == 0.2, "the path has become longer"


def test_one_greeting_that_had_to_connect_changes_little() -> None:
    """It took three round trips: the mean of two, as medians have it, would be far too long."""
    window = Window(bytes_per_s=1e6, rtt_s=0.08, most_bytes=1 << 30)
    for rtt_s, median_s in [(0.24, 0.24), (0.082, 0.082), (0.084, 0.084), (0.09, 0.084)]:
        window.note_round_trip(rtt_s, is_idle=True)
        assert window.idle_rtt_s == pytest.approx(median_s)
    again = Window(bytes_per_s=1e6, rtt_s=0.08, most_bytes=1 << 30)
    for rtt_s, median_s in [(0.08, 0.08), (0.24, 0.08), (0.09, 0.09)]:
        again.note_round_trip(rtt_s, is_idle=True)
        assert again.idle_rtt_s == pytest.approx(median_s)


def test_the_round_trip_can_be_asked_for_at_any_time() -> None:
    """Also between two steps of another thread's `note_round_trip`.

    The window is read without a lock.
    """
    window = Window(bytes_per_s=1e6, rtt_s=0.08, most_bytes=1 << 30)

    class Watched(deque[float]):
        def clear(self) -> None:
            super().clear()
            assert window.rtt_s > 0

        def append(self, rtt_s: float, /) -> None:
            assert window.rtt_s > 0
            super().append(rtt_s)

    window._rtts_s = Watched(window._rtts_s)
    window.note_round_trip(0.11, is_idle=True)
    assert window.rtt_s == 0.11


def test_limits() -> None:
    narrow = Window(bytes_per_s=1e9, rtt_s=1.0, most_bytes=1 << 20)
    assert narrow.num_bytes == 1 << 20
    assert Window(bytes_per_s=1e9, rtt_s=1.0, most_bytes=9, fixed_bytes=7).num_bytes == 7


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
