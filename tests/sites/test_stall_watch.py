"""Which rank of a gateway does not come, and which waits; what a rank is doing meanwhile."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from isthmus.sites.gateway.config import StallLimits
from isthmus.sites.gateway.ranks.stall_watch import StalledRanks, StallWatch
from isthmus.sites.local.stack_files import stack_file
from isthmus.sites.node.rank_stacks import RankStack, look_at
from isthmus.sites.worker.exchange import bucket_pipeline
from tests.fakes.waiting import wait_for

LIMITS = StallLimits(least_s=5.0, rounds=3, first_s=60.0)
LOOK_S = 0.5


def trained(num_rounds: int, round_s: float = 1.0) -> tuple[StallWatch, float]:
    """Return the watch of two ranks that have trained some rounds, and when that was."""
    watch, now_s = StallWatch((0, 1), LIMITS, 5.0, 100.0), 100.0
    for number in range(num_rounds):
        for rank in (0, 1):
            watch.handed(rank, number, now_s)
            watch.posted(rank, now_s)
        now_s += round_s
        for rank in (0, 1):
            watch.returned(rank, now_s)
        watch.look(now_s, round_s)
    return watch, now_s


def looks(watch: StallWatch, from_s: float, for_s: float) -> list[tuple[float, StalledRanks]]:
    """Look all the time; return what was told, and when."""
    told = []
    for look in range(int(for_s / LOOK_S)):
        now_s = from_s + (look + 1) * LOOK_S
        standing = watch.look(now_s, LOOK_S)
        if standing is not None:
            told.append((now_s - from_s, standing))
    return told


def test_a_rank_that_catches_up_is_late_where_results_have_waited_for_longer() -> None:
    watch, now_s = trained(5)
    assert watch.look(now_s + 5.5, 5.5, 20.0) == StalledRanks((0, 1), (), is_behind=False)
    assert watch.look(now_s + 19.5, 14.0, 20.0) is None
    assert watch.look(now_s + 20.5, 1.0, 20.0) == StalledRanks((0, 1), (), is_behind=True)
    assert watch.look(now_s + 21.0, 0.5) == StalledRanks((0, 1), (), is_behind=False)


def test_a_rank_that_does_not_begin_with_the_state_is_late_where_results_wait() -> None:
    watch, now_s = trained(0)
    assert watch.look(now_s + 61.0, 61.0) is None
    assert watch.look(now_s + 62.0, 1.0, 0.0) == StalledRanks((0, 1), (), is_behind=True)
    watch.begin_anew(now_s + 63.0)
    assert watch.look(now_s + 63.5, 1.5, 0.0) == StalledRanks((), ())


def test_the_rank_that_handed_nothing_over_is_absent_and_the_other_waits() -> None:
    watch, now_s = trained(5)
    watch.handed(0, 5, now_s + 0.1)
    watch.posted(0, now_s + 0.1)
    told = looks(watch, now_s, 20.0)
    assert told == [(5.5, StalledRanks((1,), (0,)))]
    watch.handed(1, 5, now_s + 20.0)
    watch.posted(1, now_s + 20.0)
    assert watch.look(now_s + 20.1, LOOK_S) == StalledRanks((), (0,))
    for rank in (0, 1):
        watch.returned(rank, now_s + 20.2)
    assert watch.look(now_s + 20.3, LOOK_S) == StalledRanks((), ())


def test_a_rank_that_waits_for_its_checkpoint_does_not_hang() -> None:
    watch, now_s = trained(5)
    watch.handed(0, 5, now_s + 0.1)
    watch.posted(0, now_s + 0.1)
    told = []
    for second in range(1, 21):
        watch.moved(1, now_s + second)
        told += looks(watch, now_s + second, 1.0)
    assert [each for _, each in told] == [StalledRanks((), (0,))]
    assert looks(watch, now_s + 21.0, 20.0)[0][1] == StalledRanks((1,), (0,))


def test_what_was_handed_over_and_does_not_come_makes_a_rank_absent_though_it_waits() -> None:
    watch, now_s = trained(5)
    for rank in (0, 1):
        watch.handed(rank, 5, now_s)
    assert looks(watch, now_s, 20.0) == [(5.5, StalledRanks((0, 1), (0, 1)))]
    watch.posted(0, now_s + 20.0)
    assert watch.look(now_s + 20.1, LOOK_S) == StalledRanks((1,), (1,))


def test_ranks_that_are_all_away_are_told_as_such() -> None:
    watch, now_s = trained(5)
    assert looks(watch, now_s, 20.0) == [(5.5, StalledRanks((0, 1), ()))]


def test_long_rounds_give_time_and_so_do_the_first() -> None:
    watch, now_s = trained(5, round_s=4.0)
    assert looks(watch, now_s, 20.0)[0][0] == 12.5
    watch, now_s = trained(2)
    assert looks(watch, now_s, 80.0)[0][0] == 60.5


def test_a_gateway_that_stood_still_counts_anew() -> None:
    watch, now_s = trained(5)
    assert watch.look(now_s + 100.0, LOOK_S) is None
    assert looks(watch, now_s + 100.0, 20.0)[0][0] == 5.5


def test_a_rank_that_has_left_is_not_missed() -> None:
    watch, now_s = trained(5)
    watch.left(0)
    watch.left(1)
    assert looks(watch, now_s, 20.0) == []


RANK = """
import sys, time
from pathlib import Path
from isthmus.sites.worker.api.stacks import write_stacks_on_signal

def stuck():
    while True:
        pass

write_stacks_on_signal(Path(sys.argv[1]), 3)
stuck()
"""


@pytest.mark.multiprocess
@pytest.mark.slow
def test_a_rank_says_where_it_hangs_and_one_that_is_stopped_is_told_as_stopped(
    tmp_path: Path,
) -> None:
    process = subprocess.Popen([sys.executable, "-c", RANK, str(tmp_path)])
    try:
        path = stack_file(tmp_path, 3)
        wait_for(lambda: path.exists() and path.read_text() != "", lambda: "its file")
        wait_for(lambda: "stuck" in look_at(tmp_path, 3).doing, lambda: "its stack")
        found = look_at(tmp_path, 3)
        assert (found.is_stopped, found.is_in_collective) == (False, False)
        assert found.frames[0].startswith("stuck (<string>:")
        os.kill(process.pid, signal.SIGSTOP)
        wait_for(lambda: look_at(tmp_path, 3).is_stopped, lambda: "that it is stopped")
        assert "SIGSTOP" in look_at(tmp_path, 3).doing
    finally:
        process.kill()
        process.wait()


def test_a_rank_that_waits_for_results_waits_for_other_ranks(tmp_path: Path) -> None:
    """Its main thread is in the pipeline then, wherever that file lies."""
    frame = f"wait_finished ({bucket_pipeline.__file__}:194)"
    assert RankStack(False, ("wait (threading.py:331)", frame), str(tmp_path)).is_in_collective


def test_a_rank_without_a_file_is_left_alone(tmp_path: Path) -> None:
    assert look_at(tmp_path, 0).doing == "it shows no stack"
