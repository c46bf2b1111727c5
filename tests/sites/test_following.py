"""When a site that follows may take part, with a clock of its own."""

from __future__ import annotations

import itertools

from isthmus.sites.gateway.reduction.following import LEVEL_EVERY, Following

PATIENCE_S = 10.0


def followed(
    following: Following, seconds: float, *, step_s: float, others_s: float, behind: int
) -> list[tuple[int, int]]:
    """Follow for so long; return each round in which something is said, and what.

    The others take a step in `others_s`, and the site in `step_s` where results are there.
    """
    said, now_s, round_ = [], 0.0, 0
    while now_s < seconds:
        newest = int(behind + now_s / others_s) - 1
        if (found := following.begins(round_, newest, now_s)) is not None:
            said.append((round_, found))
        result_s = max(0.0, (round_ + 1 - behind) * others_s)
        now_s, round_ = max(now_s + step_s, result_s), round_ + 1
    return said


def test_a_site_that_is_faster_says_that_it_is_level_now_and_then() -> None:
    said = followed(Following(PATIENCE_S), 9.0, step_s=0.01, others_s=0.1, behind=50)
    assert all(found == 0 for _, found in said)
    assert 50 <= said[0][0] <= 60
    rounds = [round_ for round_, _ in said]
    assert all(later - one >= LEVEL_EVERY for one, later in itertools.pairwise(rounds))


def test_a_site_that_gains_is_not_waited_for() -> None:
    said = followed(Following(PATIENCE_S), 38.0, step_s=0.06, others_s=0.1, behind=200)
    assert 490 <= said[0][0] <= 510
    assert {found for _, found in said} == {0}


def test_a_fast_site_that_lacks_very_much_is_not_waited_for() -> None:
    """After a while it has made up for a sixth of it, and the others could wait for the rest."""
    said = followed(Following(PATIENCE_S), 60.0, step_s=0.01, others_s=0.02, behind=2900)
    assert 5790 <= said[0][0] <= 5810
    assert said[0][1] == 0


def test_a_site_that_gains_too_little_enters_behind_the_others() -> None:
    ((round_, behind),) = followed(
        Following(PATIENCE_S), 11.0, step_s=0.08, others_s=0.1, behind=200
    )
    assert 124 <= round_ <= 126
    assert 175 + 11 <= behind <= 176 + 13, "and what a second makes"


def test_a_site_that_gains_nothing_enters_behind_the_others() -> None:
    ((round_, behind),) = followed(
        Following(PATIENCE_S), 11.0, step_s=0.01, others_s=0.01, behind=30
    )
    assert 990 <= round_ <= 1010
    assert 30 + 95 <= behind <= 31 + 101, "and what a second makes"


def test_a_site_that_would_hold_the_others_up_for_long_is_not_let_in() -> None:
    following = Following(PATIENCE_S)
    assert following.longest_wait_s == 40.0
    assert followed(following, 60.0, step_s=1.0, others_s=1.0, behind=41) == []
    assert followed(Following(PATIENCE_S), 11.0, step_s=1.0, others_s=1.0, behind=39) == [(10, 40)]


def test_a_site_that_is_level_in_vain_enters_a_little_behind() -> None:
    following = Following(PATIENCE_S)
    said = [following.begins(round_, round_ - 1, 0.005 * round_) for round_ in range(2001)]
    assert set(said[:2000]) == {0, None}
    assert said[2000] == 200
