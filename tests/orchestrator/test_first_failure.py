import random

import pytest

from isthmus.orchestrator.core.first_failure import TIE_S, first_failure
from isthmus.protos.failure import Failure


def failure(
    code: str, at_s: float, site: str = "a", *, is_collateral: bool = False, rank: int = -1
) -> Failure:
    return Failure(
        code=code,
        message=f"{code} at {site}",
        at_s=at_s,
        site=site,
        reported_by=site,
        rank=rank,
        is_collateral=is_collateral,
        log_path=f"{site}.log",
    )


def test_the_earliest_wins_and_keeps_its_log() -> None:
    first = failure("RANK_EXITED", 1.0, "b")
    assert first_failure([failure("RANK_EXITED", 2.0, "a"), first]) is first
    assert first.log_path == "b.log"


def test_a_lost_peer_never_explains_what_has_a_cause() -> None:
    killed = failure("GATEWAY_EXITED", 5.0, "b")
    assert first_failure([failure("PEER_LOST", 1.0, "a"), killed]) is killed
    lost = failure("PEER_LOST", 1.0, "a")
    assert first_failure([lost, failure("RANK_EXITED", 0.5, "a", is_collateral=True)]) is lost


def test_a_silent_site_does_not_explain_unlike_results() -> None:
    unlike = failure("PARAMETERS_DIFFER", 5.0, "")
    assert first_failure([failure("SITE_LOST", 1.0, "b"), unlike]) is unlike


def test_collateral_is_better_than_nothing() -> None:
    only = failure("RANK_KILLED", 1.0, is_collateral=True)
    assert first_failure([only]) is only


def test_between_sites_a_tie_is_decided_by_code_then_time() -> None:
    gateway = failure("GATEWAY_EXITED", 1.0, "a")
    rank = failure("RANK_KILLED", 1.0 + TIE_S / 2, "b")
    assert first_failure([gateway, rank]) is rank
    later = failure("RANK_EXITED", 1.0 + TIE_S / 3, "c")
    assert first_failure([gateway, rank, later]) is later
    after = failure("RANK_KILLED", 1.0 + 2 * TIE_S, "b")
    assert first_failure([gateway, after]) is gateway


def test_within_a_site_time_alone_decides() -> None:
    gateway = failure("GATEWAY_EXITED", 1.0, "a")
    rank = failure("RANK_EXITED", 1.0 + TIE_S / 10, "a", rank=2)
    assert first_failure([rank, gateway]) is gateway


@pytest.mark.parametrize("seed", range(20))
def test_the_order_of_the_reports_does_not_matter(seed: int) -> None:
    draw = random.Random(seed)
    codes = ("PEER_LOST", "RANK_EXITED", "RANK_KILLED", "SITE_LOST", "GATEWAY_EXITED")
    failures = [
        failure(
            draw.choice(codes),
            draw.randrange(10) / 20,
            draw.choice("abc"),
            is_collateral=draw.random() < 0.3,
            rank=rank,
        )
        for rank in range(8)
    ]
    expected = first_failure(failures)
    for _ in range(10):
        draw.shuffle(failures)
        assert first_failure(failures) == expected, f"{seed=}"
