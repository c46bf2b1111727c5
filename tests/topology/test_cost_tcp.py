"""TCP over long ways, against RFC 8312's tables 1 to 3 and its text."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus.topology.cost.tcp import (
    CONGESTION_CONTROLS,
    WIRE_SHARE,
    Path,
    connection_bytes_per_s,
    connections_needed,
    link_bytes_per_s,
)
from isthmus.topology.spec.tcp_constants import cubic_window, reno_window


@pytest.mark.parametrize(
    ("rtt_s", "loss", "reno", "cubic"),
    [
        (0.1, 1e-6, 1200, 5926),
        (0.1, 1e-7, 3795, 33325),
        (0.1, 1e-8, 12000, 187400),
        (0.01, 1e-6, 1200, 1200),
        (0.01, 1e-7, 3795, 5926),
        (0.01, 1e-8, 12000, 33325),
    ],
)
def test_mean_windows(rtt_s: float, loss: float, reno: int, cubic: int) -> None:
    """RFC 8312, tables 1 and 2; 1 %."""
    assert reno_window(loss) == pytest.approx(reno, rel=0.01)
    assert cubic_window(rtt_s, loss) == pytest.approx(cubic, rel=0.01)


def test_a_window_as_a_rate() -> None:
    """RFC 8312, 5.2: 1200 packets of 1500 bytes in 10 ms are 1.44 Gbit/s."""
    path = Path(bytes_per_s=1e12, rtt_s=0.01, loss=1e-6, segment_bytes=1500)
    assert 8 * connection_bytes_per_s(path) == pytest.approx(1.44e9, rel=0.01)


def test_bbr_ignores_losses() -> None:
    path = Path(bytes_per_s=1e9, rtt_s=0.1, loss=0.01)
    assert connection_bytes_per_s(path, congestion="bbr") == pytest.approx(0.99e9 * WIRE_SHARE)
    assert connection_bytes_per_s(path, congestion="cubic") < 0.01e9
    worse = Path(bytes_per_s=1e9, rtt_s=0.1, loss=0.3)
    assert connection_bytes_per_s(worse, congestion="bbr") < 0.01e9


def test_connections_that_fill_a_link() -> None:
    """100 Gbit/s over 21 ms are 262 MB in flight: 25 windows of 10 MB hold the payload of it."""
    path = Path(bytes_per_s=12.5e9, rtt_s=0.021)
    assert connections_needed(path, window_bytes=10e6) == 25
    assert connections_needed(path) == 1
    filled = link_bytes_per_s(path, 25, window_bytes=10e6)
    assert filled == pytest.approx(WIRE_SHARE * 12.5e9)
    assert link_bytes_per_s(path, 24, window_bytes=10e6) < filled


@settings(max_examples=80)
@given(
    rate=st.floats(1e5, 1e12),
    rtt_s=st.floats(0, 0.5),
    loss=st.floats(0, 0.5),
    window=st.floats(1e4, 1e9),
    faster=st.floats(1.0, 100.0),
    congestion=st.sampled_from(CONGESTION_CONTROLS),
)
def test_more_is_never_slower(
    rate: float, rtt_s: float, loss: float, window: float, faster: float, congestion: str
) -> None:
    path = Path(bytes_per_s=rate, rtt_s=rtt_s, loss=loss)
    wider = Path(bytes_per_s=rate * faster, rtt_s=rtt_s, loss=loss)
    nearer = Path(bytes_per_s=rate, rtt_s=rtt_s / faster, loss=loss)
    cleaner = Path(bytes_per_s=rate, rtt_s=rtt_s, loss=loss / faster)
    one = link_bytes_per_s(path, 2, window, congestion) * (1 - 1e-9)
    for better in (wider, nearer, cleaner):
        assert link_bytes_per_s(better, 2, window, congestion) >= one
    assert link_bytes_per_s(path, 3, window, congestion) >= one
    count = connections_needed(path, window, congestion)
    assert link_bytes_per_s(path, count, window, congestion) == pytest.approx(WIRE_SHARE * rate)


def test_an_unknown_congestion_control_is_refused() -> None:
    with pytest.raises(ValueError, match=r"congestion: want one of cubic, reno, bbr; got 'vegas'"):
        connection_bytes_per_s(Path(bytes_per_s=1.0, rtt_s=0.1), congestion="vegas")
