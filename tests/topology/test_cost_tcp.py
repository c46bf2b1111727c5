"""TCP over long ways, against RFC 8312's tables 1 to 3 and its text."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from topology.cost.tcp import (
    CONGESTION_CONTROLS,
    PAYLOAD_SHARE,
    Path,
    channel_of,
    connection_bytes_per_s,
    connections_needed,
    cubic_window,
    link_bytes_per_s,
    loss_allowed,
    pftk_bytes_per_s,
    reno_window,
    slow_start_s,
)


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


@pytest.mark.parametrize(
    ("bits_per_s", "reno", "cubic"), [(1e9, 2.0e-8, 6.3e-7), (10e9, 2.0e-10, 2.9e-8)]
)
def test_loss_that_a_link_allows(bits_per_s: float, reno: float, cubic: float) -> None:
    """RFC 8312, table 3: 0.1 s, 1500 bytes; printed with two digits, so 5 %."""
    path = Path(bytes_per_s=bits_per_s / 8, rtt_s=0.1, segment_bytes=1500)
    assert loss_allowed(path, "reno") == pytest.approx(reno, rel=0.05)
    assert loss_allowed(path, "cubic") == pytest.approx(cubic, rel=0.05)


def test_a_window_as_a_rate() -> None:
    """RFC 8312, 5.2: 1200 packets of 1500 bytes in 10 ms are 1.44 Gbit/s."""
    path = Path(bytes_per_s=1e12, rtt_s=0.01, loss=1e-6, segment_bytes=1500)
    assert 8 * connection_bytes_per_s(path) == pytest.approx(1.44e9, rel=0.01)


def test_timeouts_make_reno_slower() -> None:
    """By hand: S / (R sqrt(2p/3) + T min(1, 3 sqrt(3p/8)) p (1 + 32 p^2))."""
    path = Path(bytes_per_s=1e12, rtt_s=0.1, loss=0.01)
    seconds = 0.1 * math.sqrt(0.02 / 3) + 0.2 * 3 * math.sqrt(0.03 / 8) * 0.01 * 1.0032
    assert pftk_bytes_per_s(path) == pytest.approx(1460 / seconds)
    mathis = reno_window(0.01, math.sqrt(1.5)) * 1460 / 0.1
    assert pftk_bytes_per_s(path) < mathis
    assert pftk_bytes_per_s(path, window_bytes=1000) == pytest.approx(1e4)


def test_bbr_ignores_losses() -> None:
    path = Path(bytes_per_s=1e9, rtt_s=0.1, loss=0.01)
    assert connection_bytes_per_s(path, congestion="bbr") == pytest.approx(0.99e9 * PAYLOAD_SHARE)
    assert connection_bytes_per_s(path, congestion="cubic") < 0.01e9
    worse = Path(bytes_per_s=1e9, rtt_s=0.1, loss=0.3)
    assert connection_bytes_per_s(worse, congestion="bbr") < 0.01e9


def test_connections_that_fill_a_link() -> None:
    """100 Gbit/s over 21 ms are 262 MB in flight: 25 windows of 10 MB hold the payload of it."""
    path = Path(bytes_per_s=12.5e9, rtt_s=0.021)
    assert connections_needed(path, window_bytes=10e6) == 25
    assert connections_needed(path) == 1
    filled = link_bytes_per_s(path, 25, window_bytes=10e6)
    assert filled == pytest.approx(PAYLOAD_SHARE * 12.5e9)
    assert link_bytes_per_s(path, 24, window_bytes=10e6) < filled


def test_slow_start_after_a_pause() -> None:
    # 10 packets fill a tenth of what is in flight, so four round trips are partly idle.
    path = Path(bytes_per_s=1.46e6 / PAYLOAD_SHARE, rtt_s=0.1)
    windows_s = [0.01, 0.02, 0.04, 0.08]
    expected_s = sum(0.1 - window_s for window_s in windows_s)
    assert slow_start_s(path, 1, 1e9) == pytest.approx(expected_s)
    assert slow_start_s(path, 1, 10_000) == 0.0
    assert slow_start_s(path, 16, 1e9) == 0.0


def test_a_path_as_collectives_see_it() -> None:
    channel = channel_of(Path(bytes_per_s=1e9, rtt_s=0.1), 4, window_bytes=10e6)
    assert channel.latency_s == 0.05
    assert channel.bytes_per_s == pytest.approx(4e8)


@settings(max_examples=80, deadline=None)
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
    assert link_bytes_per_s(path, count, window, congestion) == pytest.approx(PAYLOAD_SHARE * rate)


def test_impossible_paths_are_refused() -> None:
    with pytest.raises(ValueError, match=r"Path: want .* loss in \[0, 1\)"):
        Path(bytes_per_s=1.0, rtt_s=0.1, loss=1.0)
    with pytest.raises(ValueError, match=r"congestion: want one of cubic, reno, bbr; got 'vegas'"):
        connection_bytes_per_s(Path(bytes_per_s=1.0, rtt_s=0.1), congestion="vegas")
    with pytest.raises(ValueError, match=r"num_connections: want >= 1"):
        link_bytes_per_s(Path(bytes_per_s=1.0, rtt_s=0.1), 0)
    with pytest.raises(ValueError, match=r"congestion: want cubic or reno"):
        loss_allowed(Path(bytes_per_s=1.0, rtt_s=0.1), "bbr")
