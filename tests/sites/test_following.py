"""When a site that follows may take part, with a clock of its own."""

from __future__ import annotations

import itertools

import pytest

from isthmus.sites.gateway.reduction.following import (
    GAINS,
    NEAR_EVERY,
    NEAR_STEPS,
    Following,
)

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


def test_a_site_that_is_faster_says_that_it_is_near_now_and_then() -> None:
    said = followed(Following(PATIENCE_S), 9.0, step_s=0.01, others_s=0.1, behind=50)
    assert all(found <= NEAR_STEPS for _, found in said)
    assert 45 <= said[0][0] <= 60
    rounds = [round_ for round_, _ in said]
    assert all(later - one >= NEAR_EVERY for one, later in itertools.pairwise(rounds))


def test_a_site_as_fast_as_the_others_that_is_hardly_behind_rejoins_with_its_first_round() -> None:
    """As a script without `site.sampler` is, once it has the state: it would gain nothing."""
    said = followed(Following(PATIENCE_S), 9.0, step_s=0.2, others_s=0.2, behind=NEAR_STEPS)
    assert said[0] == (0, NEAR_STEPS)


@pytest.mark.parametrize(("steps_per_round", "near"), [(1, 2), (2, 1), (3, 0), (30, 0)])
def test_where_rounds_are_of_several_steps_it_is_near_by_steps(
    steps_per_round: int, near: int
) -> None:
    """Else others would wait for twice the steps of a round, though it gains on them."""
    said = [
        Following(PATIENCE_S, steps_per_round).begins(0, behind - 1, 0.0) for behind in range(4)
    ]
    assert said == [behind if behind <= near else None for behind in range(4)]


def test_a_site_that_gains_is_not_waited_for() -> None:
    said = followed(Following(PATIENCE_S), 30.0, step_s=0.06, others_s=0.1, behind=200)
    assert 485 <= said[0][0] <= 510
    assert {found for _, found in said} <= {0, 1, NEAR_STEPS}


def test_a_fast_site_that_lacks_very_much_is_not_waited_for() -> None:
    """After a while it has made up for a sixth of it, and the others could wait for the rest."""
    said = followed(Following(PATIENCE_S), 60.0, step_s=0.01, others_s=0.02, behind=2900)
    assert 5780 <= said[0][0] <= 5810
    assert said[0][1] <= NEAR_STEPS


@pytest.mark.parametrize(("step_s", "others_s", "behind"), [(0.08, 0.1, 200), (0.1, 0.1, 12)])
def test_a_site_that_gains_too_little_enters_behind_the_others(
    step_s: float, others_s: float, behind: int
) -> None:
    """As soon as that is seen: it would be as far behind later."""
    round_, found = followed(
        Following(PATIENCE_S), 11.0, step_s=step_s, others_s=others_s, behind=behind
    )[0]
    assert 1.9 <= round_ * step_s <= 2.2
    lacks = behind + round_ * (step_s / others_s - 1.0)
    assert lacks <= found <= lacks + 1 / step_s + 2, "and what a second makes"


@pytest.mark.parametrize(("step_s", "behind"), [(1.0, 60), (0.2, 930), (5.0, 40)])
def test_a_site_that_would_hold_the_others_up_for_long_follows_longer_and_not_for_ever(
    step_s: float, behind: int
) -> None:
    wait_s = behind * step_s
    assert wait_s > 4 * PATIENCE_S
    following = Following(PATIENCE_S)
    said = followed(following, 5 * wait_s, step_s=step_s, others_s=step_s, behind=behind)
    after_s = said[0][0] * step_s
    assert wait_s / GAINS <= after_s <= 1.1 * wait_s / GAINS
    assert wait_s <= following.wait_s


def test_a_site_that_is_near_in_vain_enters_a_little_behind() -> None:
    following = Following(PATIENCE_S)
    said = [following.begins(round_, round_ - 1, 0.005 * round_) for round_ in range(2410)]
    assert set(said[:2000]) == {0, None}
    assert 200 in said[2000:]
