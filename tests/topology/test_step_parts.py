"""The parts of a step, over all orders of events."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.topology.spec.step_parts import Crossing, RoundTimes, step_parts

seconds = st.floats(0.0, 100.0, allow_nan=False)
crossings = st.builds(
    lambda start, length, wait: Crossing(start, start + length, wait), seconds, seconds, seconds
)


def test_hidden_communication_costs_nothing() -> None:
    round_ = RoundTimes(((5.0, 4.0),), crossings=(Crossing(1.0, 4.0, 1.0),))
    parts = step_parts(0.0, 10.0, [round_])
    assert (parts.compute_s, parts.intra_s, parts.exposed_inter_s, parts.wait_s) == (10, 0, 0, 0)
    assert parts.inter_s == 3.0
    assert parts.hidden_inter_s == 3.0


def test_the_window_divides_into_waiting_crossing_and_collectives() -> None:
    # Exposed from 5 to 12; two buckets away in 4..8 and 6..10, of which peers were late 2 s and 1
    # s.
    round_ = RoundTimes(((5.0, 12.0),), (Crossing(4.0, 8.0, 2.0), Crossing(6.0, 10.0, 1.0)))
    parts = step_parts(0.0, 20.0, [round_])
    assert parts.compute_s == 13.0
    assert parts.wait_s == 2.0, "5..6 of the first, 6..7 of the second"
    assert parts.exposed_inter_s == 3.0
    assert parts.intra_s == 2.0
    assert parts.inter_s == 6.0
    assert parts.hidden_inter_s == 1.0, "4..5 of the first"


def test_rounds_of_one_step_add_up() -> None:
    rounds = [
        RoundTimes(((1.0, 2.0),), (Crossing(1.0, 2.0, 0.0),)),
        RoundTimes(((3.0, 5.0),), (Crossing(3.0, 5.0, 0.0),)),
    ]
    assert step_parts(0.0, 6.0, rounds).exposed_inter_s == 3.0


@given(st.lists(crossings, max_size=6), seconds, seconds)
def test_no_part_is_negative_and_all_add_up(
    buckets: list[Crossing], submitted_s: float, more_s: float
) -> None:
    end_s = max([submitted_s, *(each.end_s for each in buckets)]) + more_s
    parts = step_parts(0.0, end_s, [RoundTimes(((submitted_s, end_s),), tuple(buckets))])
    every = (parts.compute_s, parts.intra_s, parts.exposed_inter_s, parts.wait_s)
    assert min(every) >= 0.0
    assert sum(every) == pytest.approx(end_s)
    assert 0.0 <= parts.hidden_inter_s <= submitted_s
