"""`site.is_main`: true at one rank of all sites at each step, whoever is lost and comes back."""

from __future__ import annotations

from types import SimpleNamespace

from isthmus.sites.local.rank_messages import Missing, Reduced, ReductionTimes
from isthmus.sites.worker.api.life import Life
from isthmus.sites.worker.exchange.missing_sites import NOTICE_STEPS, MissingSites

NUM_SITES = 3


def life_of(index: int, rank: int, missing: MissingSites, *, is_catching_up: bool) -> Life:
    """Return what `is_main` reads of a rank."""
    life = object.__new__(Life)
    life._context = SimpleNamespace(index=index, rank=rank, num_sites=NUM_SITES)  # type: ignore[assignment]
    life._link = SimpleNamespace(missing_sites=missing)
    life._members = SimpleNamespace(is_catching_up=is_catching_up)  # type: ignore[assignment]
    return life


def main_ranks(missing: MissingSites, *catching_up: int) -> list[tuple[int, int]]:
    """Return the ranks that are the main one, with all of them knowing the same."""
    return [
        (index, rank)
        for index in range(NUM_SITES)
        for rank in range(2)
        if life_of(index, rank, missing, is_catching_up=index in catching_up).is_main
    ]


def lose(missing: MissingSites, site: int, round_: int) -> None:
    result = Reduced(
        round=round_,
        bucket=0,
        weight=1.0,
        times=ReductionTimes(),
        wire_bytes=0,
        missing=(Missing(site=site, from_round=round_),),
    )
    missing.note(result)


def test_it_is_the_first_sites_first_rank() -> None:
    assert main_ranks(MissingSites()) == [(0, 0)]


def test_the_next_site_takes_over_when_all_know_and_the_first_has_it_again() -> None:
    missing = MissingSites()
    lose(missing, 0, 0)
    for _ in range(NOTICE_STEPS):
        # The lost one has ended; the others do not call themselves main before all know.
        assert main_ranks(missing) == [(0, 0)]
        missing.end_step()
    assert main_ranks(missing, 0) == [(1, 0)]
    missing.rejoin(0)
    assert main_ranks(missing) == [(0, 0)]


def test_a_site_that_begins_later_or_catches_up_is_not_asked() -> None:
    missing = MissingSites()
    missing.begin_without([0])
    assert main_ranks(missing) == [(1, 0)]
    missing.begin_without([1])
    assert main_ranks(missing) == [(2, 0)]
    assert main_ranks(MissingSites(), 0) == []
