"""From echoes and counts to a link's figures."""

import random

import pytest

from isthmus.protos import metrics
from isthmus.protos.errors import RemoteProtocolError
from isthmus.sites.gateway.links.congestion.kernel import Segments
from isthmus.sites.gateway.probing.prober import LinkFigures, is_steady, percentile, rate_between


@pytest.mark.parametrize(
    ("share", "expected"), [(0.5, 50), (0.99, 99), (1.0, 100), (0.0, 1), (0.005, 1)]
)
def test_a_percentile_is_one_of_the_values(share: float, expected: float) -> None:
    values = [float(value) for value in range(100, 0, -1)]
    assert percentile(values, share) == expected
    assert percentile([7.0], share) == 7


@pytest.mark.parametrize("jitter_s", [0.0, 0.001, 0.02])
def test_jitter_is_what_one_direction_has(jitter_s: float) -> None:
    """Echoes whose both ways are late or early by evenly up to the jitter."""
    generator = random.Random(5)
    echoes = [
        0.1 + sum(generator.uniform(-jitter_s, jitter_s) for _ in "ab") for _ in range(20_000)
    ]
    values = LinkFigures(rtt_s=echoes).values()
    assert values[metrics.RTT_S_P50] == pytest.approx(0.1, abs=0.02 * jitter_s)
    # The 90th percentile of 20,000 samples is known to about 1 %.
    assert values[metrics.JITTER_S] == pytest.approx(jitter_s, rel=0.03)


def test_what_is_not_known_is_not_said() -> None:
    figures = LinkFigures(rtt_s=[0.02])
    assert set(figures.values()) == {metrics.RTT_S_P50, metrics.RTT_S_P99, metrics.JITTER_S}
    figures.segments = Segments(1000, 5)
    figures.bytes_per_s = {1: 5.0, 16: 9.0}
    values = figures.values()
    assert (values[metrics.SEGMENTS], values[metrics.LOST_SEGMENTS]) == (1000, 5)
    assert (values["bytes_per_s_1"], values["bytes_per_s_16"]) == (5.0, 9.0)


def test_a_flow_is_steady_when_two_pieces_carry_the_same() -> None:
    assert is_steady(100.0, 102.0)
    assert not is_steady(100.0, 104.0)
    assert not is_steady(0.0, 0.0)
    assert not is_steady(-1.0, 50.0)


def test_an_echo_that_was_lost_and_sent_again_is_no_jitter() -> None:
    values = LinkFigures(rtt_s=[0.1] * 97 + [0.3] * 3).values()
    assert values[metrics.RTT_S_P99] == 0.3
    assert values[metrics.JITTER_S] == 0


def test_a_rate_is_what_came_in_over_the_peer_s_own_time() -> None:
    assert rate_between((100, 600), (7.0, 9.0)) == 250
    assert rate_between((5, 5), (7.0, 9.0)) == 0


@pytest.mark.parametrize(
    ("counts", "times"),
    [
        ((0, 9), (7.0, 7.0)),
        ((0, 9), (8.0, 7.0)),
        ((9, 0), (7.0, 8.0)),
        ((0, 9), (7.0, float("nan"))),
        ((0, 9), (7.0, float("inf"))),
    ],
)
def test_a_peer_whose_clock_or_count_runs_back_is_refused(
    counts: tuple[int, int], times: tuple[float, float]
) -> None:
    with pytest.raises(RemoteProtocolError, match="want time to pass, and bytes to come"):
        rate_between(counts, times)
