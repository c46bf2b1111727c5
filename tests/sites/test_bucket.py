"""Which buckets may still come, and how late peers are."""

from __future__ import annotations

import pytest

from isthmus.protos.errors import LayoutMismatchError, RemoteProtocolError
from isthmus.sites.gateway.reduction.bucket import Arrival, RoundHistory


def test_rounds() -> None:
    rounds = RoundHistory()
    assert rounds.is_ahead((0, 5))
    assert rounds.is_ahead((1, 0)), "this gateway may be behind its site"
    with pytest.raises(RemoteProtocolError, match="round 2, when this site is in round -1"):
        rounds.is_ahead((2, 0))
    rounds.begin(0)
    rounds.note_posted((0, 0))
    assert rounds.is_ahead((0, 1))
    assert rounds.is_ahead((1, 0))
    rounds.note_done((0, 0))
    assert not rounds.is_ahead((0, 0))
    rounds.begin(1)
    assert not rounds.is_ahead((0, 0))
    with pytest.raises(LayoutMismatchError, match="round 0 bucket 1, which this site has never"):
        rounds.is_ahead((0, 1))
    rounds.begin(2)
    rounds.begin(3)
    assert not rounds.is_ahead((0, 1)), "too long ago to know"


@pytest.mark.parametrize(
    ("at_s", "previous_s", "channels", "is_result", "late_s"),
    [
        (10.0, 0.0, 1, False, 0.0),  # before this site was ready
        (10.15, 0.0, 1, False, 0.0),  # half a round trip and the transmission
        (10.65, 0.0, 1, False, 0.5),
        (10.65, 0.0, 3, False, 0.3),  # two others may have been on the link with it
        (10.65, 10.55, 1, False, 0.0),  # the link was busy with earlier frames
        (10.65, 10.35, 3, False, 0.0),
        (10.65, 0.0, 1, True, 0.35),  # a result takes a whole round trip and both transmissions
    ],
)
def test_lateness(
    at_s: float, previous_s: float, channels: int, is_result: bool, late_s: float
) -> None:
    arrival = Arrival(at_s, previous_s, 1000, channels, is_result, rtt_s=0.1, bytes_per_s=10_000.0)
    assert arrival.lateness_s(10.0) == pytest.approx(late_s)
