"""`site.is_main`: true at one rank of all sites at each step, whoever is lost and comes back."""

from __future__ import annotations

from types import SimpleNamespace

from isthmus.sites.local.rank_messages import Missing, Reduced, ReductionTimes
from isthmus.sites.worker.api.site import Site
from isthmus.sites.worker.exchange.missing_sites import NOTICE_STEPS, MissingSites

NUM_SITES = 3


def rank_of(index: int, rank: int, missing: MissingSites, *, follows: bool = False) -> Site:
    """Return what `is_main` reads of a rank."""
    site = object.__new__(Site)
    site.index, site.rank, site.num_sites = index, rank, NUM_SITES
    site._link = SimpleNamespace(missing_sites=missing)
    site._members = SimpleNamespace(follows=follows)  # type: ignore[assignment]
    return site


def main_ranks(missing: MissingSites, *follow: int) -> list[tuple[int, int]]:
    """Return the ranks that are the main one, with all of them knowing the same."""
    return [
        (index, rank)
        for index in range(NUM_SITES)
        for rank in range(2)
        if rank_of(index, rank, missing, follows=index in follow).is_main
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
    missing.enter(0)
    assert main_ranks(missing) == [(0, 0)]


def test_a_site_that_begins_later_or_follows_is_not_asked() -> None:
    missing = MissingSites()
    missing.begin_without([0])
    assert main_ranks(missing) == [(1, 0)]
    missing.begin_without([1])
    assert main_ranks(missing) == [(2, 0)]
    assert main_ranks(MissingSites(), 0) == []
