"""Sites are lost and come back in every order: ranks agree, and every sample is used once."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field

import pytest

from isthmus.sites.local.rank_messages import Members
from isthmus.sites.worker.data.batch_shares import BatchShares
from isthmus.sites.worker.data.sampler import FETCHED_AHEAD
from isthmus.sites.worker.exchange.member_history import CatchingUp, CaughtUp
from isthmus.sites.worker.exchange.missing_sites import NOTICE_STEPS
from isthmus.topology.spec.batch_rule import FullBatch
from isthmus.topology.spec.shares import AS_BEGUN, Shares
from tests.fakes.rank_data import RankData
from tests.sites.test_worker_sampler import check_used_once

SITES = "abcd"
STEPS = 500
QUIET_STEPS = 3 * NOTICE_STEPS
"""At the end, in which nothing happens any more."""


def names_of(sites: Iterable[int]) -> tuple[str, ...]:
    return tuple(SITES[at] for at in sorted(sites))


@dataclass
class Run:
    """Sites that train, as their gateways and the coordinator have it."""

    chance: random.Random
    shares: BatchShares
    ahead: int
    ranks: dict[int, RankData] = field(default_factory=dict)
    members: set[int] = field(default_factory=set)
    catching_up: int | None = None
    entering: int | None = None
    """The epoch of an entry that ranks have yet to mark."""
    is_marked: bool = False
    """Whether all ranks begin the next round as the one of an entry."""
    returning: int = -1
    epoch: int = 0
    missing: dict[int, int] = field(default_factory=dict)
    heard: dict[int, dict[int, int]] = field(default_factory=dict)
    """What each site's gateway says is missing."""
    late: list[tuple[int, RankData, Members]] = field(default_factory=list)
    used: list[int] = field(default_factory=list)
    told_shares: Shares = AS_BEGUN
    is_cut_short: bool = False
    """A site is lost before the round begins from which sites are to have other parts."""
    num_returned: int = 0
    most_notice: int = 0

    def tell(self, step: int, members: Members) -> None:
        """Tell all ranks, in this step or in the next one."""
        for rank in self.ranks.values():
            self.late.append((step + self.chance.randint(0, 1), rank, members))

    def told(self, from_round: int, *, enters: str = "", follows: str = "") -> Members:
        names = names_of(self.members)
        return Members(
            epoch=self.epoch,
            from_round=from_round,
            sites=names,
            enters=tuple(enters),
            follows=tuple(follows),
            state="state" if follows else "",
            shares=self.told_shares,
        )

    def lose(self, step: int, lost: set[int], has_entered: bool) -> None:
        """Sites are lost in a round; whoever catches up has to begin anew then."""
        self.epoch += 1
        if self.entering is not None and self.catching_up is not None and has_entered:
            self.enter(step)
        if self.catching_up is not None:
            lost = lost | {self.catching_up}
        self.missing |= dict.fromkeys(self.members & lost, step)
        self.members -= lost
        self.catching_up = self.entering = None
        for site in lost:
            self.ranks.pop(site, None)
        self.late = [each for each in self.late if each[1] in self.ranks.values()]
        self.tell(step, self.told(step))

    def enter(self, step: int) -> None:
        """A round begins in which who has caught up takes part."""
        assert self.catching_up is not None
        self.members.add(self.catching_up)
        self.missing.pop(self.catching_up, None)
        self.catching_up = self.entering = None
        self.num_returned += 1

    def step(self, step: int, *, is_quiet: bool) -> None:
        chance = self.chance
        was_missing = dict(self.missing)
        present = [*self.members, *([] if self.catching_up is None else [self.catching_up])]
        if self.is_marked:
            for rank in self.ranks.values():
                rank.missing.begin_round(step)
        has_marked, self.is_marked = self.is_marked and self.entering is not None, False
        lost: set[int] = set()
        if self.is_cut_short or (not is_quiet and chance.random() < (0.5 if has_marked else 0.02)):
            keeps = chance.choice([*self.members])
            others = [at for at in present if at != keeps]
            lost = {at for at in others if chance.random() < 0.6}
            lost |= {*others[:1]} if self.is_cut_short else set()
            self.is_cut_short = False
        if lost:
            self.lose(step, lost, has_marked and chance.random() < 0.5)
        elif has_marked:
            self.enter(step)
        elif not self.late and self.entering is None and len(self.members) < len(SITES):
            if self.catching_up is None and chance.random() < 0.2:
                self.begin_return(step)
            elif self.catching_up is not None and chance.random() < 0.1:
                self.epoch += 1
                self.entering = self.epoch
                self.tell(step, self.told(step + 2, enters=SITES[self.catching_up]))
        is_open = (self.entering, self.catching_up) == (None, None)
        if is_open and not (is_quiet or self.late) and chance.random() < 0.1:
            self.divide(step)
        for at, rank, members in self.late:
            if at <= step:
                rank.history.tell(members)
        self.late = [each for each in self.late if each[0] > step]
        for site, rank in self.ranks.items():
            batch = rank.use(step)
            if site in self.members:
                self.used += batch
            knows = {at: since for at, since in was_missing.items() if at in self.missing}
            rank.end_step(step, self.missing if chance.random() < 0.5 else knows)
        self.end_steps(step)

    def divide(self, step: int) -> None:
        """Sites are to get other parts; where one is lost at once, not all have heard of it."""
        self.epoch += 1
        parts = tuple(self.chance.randint(1, 9) for _ in SITES)
        self.told_shares = Shares(self.epoch, parts)
        self.is_cut_short = (
            step + 1 < STEPS and len(self.members) > 1 and self.chance.random() < 0.3
        )
        self.tell(step, self.told(step + 1 + self.is_cut_short))
        if self.is_cut_short:
            self.late = [each for each in self.late if self.chance.random() < 0.5]

    def begin_return(self, step: int) -> None:
        """A site that is out is to catch up."""
        self.epoch += 1
        self.returning = self.chance.choice([*{*range(len(SITES))} - self.members])
        self.entering = self.epoch
        name = SITES[self.returning]
        self.tell(step, self.told(step + 2, enters=name, follows=name))

    def end_steps(self, step: int) -> None:
        def most(sites: Iterable[str]) -> int:
            asked = {at: rank.notice_steps(sites) for at, rank in self.ranks.items()}
            found = max(asked[at] for at in self.members)
            assert max(asked.values()) <= found, asked
            self.most_notice = max(self.most_notice, found)
            return found

        changes = {site: rank.history.end_step(step + 1, most) for site, rank in self.ranks.items()}
        kinds = {tuple(type(each) for each in found) for found in changes.values()}
        assert len(kinds) <= 1, (step, changes)
        for site, found in changes.items():
            for change in found:
                self.ranks[site].apply(change)
        for kind in kinds.pop():
            if kind is CatchingUp and self.entering is not None:
                self.catching_up, self.entering = self.returning, None
                rank = RankData(
                    SITES[self.returning], SITES, self.shares, begins=step + 1, ahead=self.ahead
                )
                rank.take(self.ranks[min(self.members)].state(), names_of(self.members))
                self.ranks[self.returning] = rank
            elif kind is CaughtUp:
                self.is_marked = True


@pytest.mark.parametrize("rule", ["keep", "shrink"])
@pytest.mark.parametrize("seed", range(40))
def test_every_sample_is_used_once(seed: int, rule: str) -> None:
    chance = random.Random(seed)
    shares = BatchShares(full=FullBatch(12, len(SITES)), rule=rule, ranks=(1,) * len(SITES))
    run = Run(chance, shares, chance.choice([0, 4, FETCHED_AHEAD]))
    run.members = {*range(len(SITES))}
    run.ranks = {
        at: RankData(name, SITES, shares, ahead=run.ahead) for at, name in enumerate(SITES)
    }
    for step in range(STEPS + QUIET_STEPS):
        run.step(step, is_quiet=step >= STEPS)
        if not run.missing or max(run.missing.values()) < step:
            assert len({rank.sampler.used for rank in run.ranks.values()}) == 1, f"{seed=} {step=}"
    assert run.most_notice <= NOTICE_STEPS, f"{seed=}"
    assert run.num_returned >= 2, f"{seed=}"
    assert {rank.divided for rank in run.ranks.values()} == {run.told_shares.number}, f"{seed=}"
    assert check_used_once(run.used, run.ranks[min(run.members)].sampler.used, seed) == []
