"""Which losses pass for chance, and how many of a link's packets those are."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from isthmus.sites.gateway.links.congestion.losses import ChanceLosses

SENT = 1000
"""Segments between two looks."""


class Looks:
    """A link that somebody looks at twenty times a second."""

    def __init__(self) -> None:
        self.losses = ChanceLosses()
        self.now_s = 0.0
        self.sent = self.sent_again = 0
        self.see([0])

    def see(
        self, lost: Iterable[int], *, is_full: bool = False, knows_empty: bool = True
    ) -> ChanceLosses:
        """Look once for each number of lost packets."""
        for each in lost:
            self.now_s += 0.05
            self.sent += SENT
            self.sent_again += each
            self.losses.follow(
                self.sent, self.sent_again, self.now_s, is_full=is_full, knows_empty=knows_empty
            )
        return self.losses

    @property
    def is_lossy(self) -> bool:
        return self.losses.is_lossy(self.now_s)


def test_one_of_a_thousand_is_lost() -> None:
    assert Looks().see([1] * 200).share == pytest.approx(1e-3, rel=0.1)
    assert Looks().see([1, 0] * 100).share == pytest.approx(5e-4, rel=0.15)
    assert Looks().see([9, 0] * 100).share == pytest.approx(5e-4, rel=0.15), "those are one loss"


def test_of_few_losses_chance_is_taken_off() -> None:
    assert Looks().see([1, 0]).share == 0.0
    assert 0 < Looks().see([1, 1]).share < 0.5e-3
    assert Looks().see([0] * 100).share == 0.0


def test_what_is_lost_in_a_full_queue_or_soon_after_is_no_chance() -> None:
    looks = Looks()
    looks.see([500] * 5, is_full=True)
    assert looks.see([9] * 19).share == 0.0
    assert not looks.is_lossy
    assert looks.see([0, 0, *[1] * 4]).share > 0
    assert looks.is_lossy


@pytest.mark.parametrize(
    ("lost", "sent", "is_chance"),
    [(40, 1000, True), (60, 1000, False), (1, 20, True), (2, 20, False)],
)
def test_many_lost_at_once_are_a_full_queue_s_until_it_was_empty_once(
    lost: int, sent: int, is_chance: bool
) -> None:
    """Round trips seem short then: nobody knows how short they can be."""
    for knows_empty in (False, True):
        losses = ChanceLosses()
        found = [
            losses.follow(
                sent * look, lost * look, 0.05 * look, is_full=False, knows_empty=knows_empty
            )
            for look in range(8)
        ]
        assert losses.is_lossy(0.4) == (is_chance or knows_empty)
        assert any(found) != losses.is_lossy(0.4)


def test_a_link_is_lossy_for_ten_seconds() -> None:
    looks = Looks()
    looks.see([1] * 3)
    assert not looks.is_lossy
    looks.see([1])
    assert looks.is_lossy
    looks.see([0] * 190)
    assert looks.is_lossy
    looks.see([0] * 20)
    assert not looks.is_lossy


def test_a_link_that_gets_worse_is_found_out() -> None:
    looks = Looks()
    looks.see([0] * 20_000)
    assert looks.see([1] * 300).share > 0.7e-3


def test_what_was_sent_before_a_rest_counts_no_more() -> None:
    """Its losses became known when nobody looked; so did those of connections that have ended."""
    looks = Looks()
    looks.losses.rest()
    looks.sent_again += 300
    assert looks.see([0]).share == 0.0
    looks.sent -= 5 * SENT
    assert looks.see([0] * 4).share == 0.0
    assert looks.see([SENT + 1] * 4).share == 0.0, "more than were sent"
    assert looks.see([1] * 100).share == pytest.approx(1e-3, rel=0.2)
