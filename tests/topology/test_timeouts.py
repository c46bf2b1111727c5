"""Derived timeouts: their order holds for every detect_within, and what cannot be is refused."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus.topology.spec.errors import ConfigError
from isthmus.topology.spec.timeouts import SHORTEST_DETECT_S, Timeouts
from isthmus.topology.spec.world import Detection


def failure(
    detect_within_s: float, start_within_s: float = 1e6, **changes: float | None
) -> Detection:
    figures: dict[str, Any] = {"ride_out_s": 3600.0, **changes}
    return Detection(detect_within_s=detect_within_s, start_within_s=start_within_s, **figures)


@given(st.floats(SHORTEST_DETECT_S, 3600.0), st.floats(3600.0, 7200.0), st.floats(3600.0, 7200.0))
def test_what_knows_the_cause_always_speaks_first(
    detect_within_s: float, ride_out_s: float, coordinator_s: float
) -> None:
    given_failure = failure(
        detect_within_s, ride_out_s=ride_out_s, coordinator_within_s=coordinator_s
    )
    timeouts = Timeouts.derive(given_failure)
    assert (
        3 * timeouts.heartbeat_s
        < timeouts.keepalive_time_s + timeouts.keepalive_timeout_s
        < timeouts.lease_s
        < timeouts.process_group_s
    )
    assert timeouts.process_group_s > max(timeouts.ride_out_s, timeouts.coordinator_s)
    assert timeouts.peer_lost_s == timeouts.lease_s == detect_within_s
    assert timeouts.collect_s <= timeouts.stop_grace_s < timeouts.lease_s


def test_the_figures_for_fifteen_seconds() -> None:
    assert Timeouts.derive(failure(15.0, 120.0, ride_out_s=600.0)) == Timeouts(
        heartbeat_s=3.0,
        keepalive_time_s=5.0,
        keepalive_timeout_s=5.0,
        lease_s=15.0,
        peer_lost_s=15.0,
        stop_grace_s=3.0,
        collect_s=2.0,
        process_group_s=3750.0,
        start_s=120.0,
        ride_out_s=600.0,
        stall_s=15.0,
        stall_steps=5,
        coordinator_s=3600.0,
    )


def test_a_figure_for_stalls_replaces_the_steps() -> None:
    timeouts = Timeouts.derive(failure(15.0, stall_within_s=4.0))
    assert (timeouts.stall_s, timeouts.stall_steps) == (4.0, 0)


@pytest.mark.parametrize(
    ("given_failure", "path", "message"),
    [
        (failure(0.1), "failure.detect_within", "want at least 0.5 s, got 0.1 s"),
        (
            failure(15.0, stall_within_s=0.1),
            "failure.stall_within",
            "want at least 0.5 s, got 0.1 s",
        ),
        (
            failure(15.0, ride_out_s=10.0),
            "failure.ride_out",
            "ride_out (10 s) must not be shorter than detect_within (15 s)",
        ),
        (
            failure(15.0, coordinator_within_s=10.0),
            "failure.coordinator_within",
            "coordinator_within (10 s) must not be shorter than detect_within (15 s)",
        ),
        (
            failure(15.0, 15.0),
            "failure.start_within",
            "start_within (15 s) must be longer than detect_within (15 s)",
        ),
    ],
)
def test_impossible_figures_are_refused(given_failure: Detection, path: str, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        Timeouts.derive(given_failure)
    (problem,) = raised.value.problems
    assert (problem.path, problem.message) == (path, message)
