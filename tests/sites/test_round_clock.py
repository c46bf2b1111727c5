"""When a site ends its part of a round that waits for nobody."""

import math

from isthmus.sites.worker.regimes.round_clock import RoundClock


class Steps:
    """Steps of a length, on a clock that only they move."""

    def __init__(self, clock: RoundClock, now_s: float = 0.0) -> None:
        self.clock, self.now_s = clock, now_s
        clock.begin_round(now_s)

    def take(self, step_s: float) -> bool:
        self.clock.begin_step(self.now_s)
        self.now_s += step_s
        self.clock.end_step(self.now_s)
        return self.clock.is_over(self.now_s)


def test_the_fastest_site_takes_all_steps() -> None:
    steps = Steps(RoundClock(4, 1))
    assert [steps.take(1.0) for _ in range(4)] == [False, False, False, True]


def test_another_ends_with_the_step_that_it_is_in() -> None:
    steps = Steps(RoundClock(4, 1))
    assert not steps.take(3.0)
    steps.clock.end_at_another(4.0)
    assert steps.take(3.0)
    assert steps.clock.num_steps == 2


def test_a_slow_site_takes_no_step_that_ends_long_after_the_fastest_ones() -> None:
    """It knows from earlier rounds how long these take."""
    steps = Steps(RoundClock(10, 1))
    for _ in range(3):
        steps.take(4.0)
    steps.clock.end_at_another(10.0)
    steps.clock.begin_round(steps.now_s)
    assert [steps.take(4.0), steps.take(4.0)] == [False, True], "a third would end 2 s later"
    steps.clock.begin_round(steps.now_s)
    assert [steps.take(3.5) for _ in range(3)] == [False, False, True], "and this one a bit later"


def test_too_few_steps_do_not_end_a_round() -> None:
    steps = Steps(RoundClock(10, 3))
    steps.take(4.0)
    steps.clock.end_at_another(4.0)
    assert not steps.clock.is_over(steps.now_s)
    assert steps.clock.passed_over_s == 4.0, "at once: with the next step they are too few, too"


def test_who_stands_is_waited_for_as_long_as_its_steps_take() -> None:
    steps = Steps(RoundClock(10, 1))
    steps.clock.begin_step(0.0)
    steps.clock.end_at_another(1.0)
    assert steps.clock.passed_over_s == math.inf, "nobody knows"
    steps.take(2.0)
    steps.clock.begin_step(2.0)
    assert steps.clock.passed_over_s == 5.0
    steps.take(60.0)
    steps.clock.begin_step(62.0)
    assert steps.clock.passed_over_s == 65.0, "it stood once: that is no step"
    steps.clock.begin_round(70.0)
    assert steps.clock.passed_over_s == math.inf, "no round has ended elsewhere"
    steps.clock.end_at_another(90.0)
    assert steps.clock.passed_over_s == 90.0, "it still stands"


def test_who_ends_before_the_fastest_site_says_so_itself_if_that_one_does_not() -> None:
    steps = Steps(RoundClock(10, 1))
    steps.take(4.0)
    steps.clock.end_at_another(9.0)
    steps.take(4.0)
    steps.clock.begin_round(10.0)
    steps.now_s = 10.0
    assert [steps.take(4.0), steps.take(4.0)] == [False, True], "the round is to end at 19"
    assert steps.clock.overdue_s == 25.0


def test_a_round_that_had_ended_before_this_one_began_says_nothing_of_lengths() -> None:
    steps = Steps(RoundClock(10, 1))
    steps.clock.end_at_another(0.0, is_now=False)
    assert steps.take(1.0)
    steps.clock.begin_round(1.0)
    assert not steps.take(1.0)
