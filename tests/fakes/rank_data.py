"""What one rank knows of members that are lost and return, and its batches: no threads, no I/O."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from isthmus.sites.local.rank_messages import Missing, Reduced, ReductionTimes
from isthmus.sites.worker.data.batch_shares import BatchShares
from isthmus.sites.worker.data.data_positions import DataPositions
from isthmus.sites.worker.data.sampler import Sampler
from isthmus.sites.worker.exchange.member_history import (
    Announced,
    CaughtUp,
    Change,
    Changed,
    Divided,
    GivenUp,
    MemberHistory,
)
from isthmus.sites.worker.exchange.missing_sites import NOTICE_STEPS, MissingSites
from isthmus.topology.spec.regime import AS_LAUNCHED


class RankData:
    """The parts of a rank of a site of one rank, as `RunData` and `Rejoining` use them."""

    def __init__(
        self,
        name: str,
        names: Sequence[str],
        shares: BatchShares,
        *,
        rejoins: bool = False,
        begins: int = 0,
        ahead: int = 0,
        notice_steps: int = NOTICE_STEPS,
    ) -> None:
        """Begin with a step of the run; fetch so many batches ahead."""
        self._names, self._begins, self._ahead = names, begins, ahead
        self.history, self.missing = MemberHistory(name, rejoins=rejoins), MissingSites()
        self.missing.notice_steps = notice_steps
        self.sampler = Sampler(
            num_samples=10**6,
            shares=shares,
            site=names.index(name),
            rank=0,
            seed=1,
            notice_steps=notice_steps,
        )
        self._drawn: list[list[int]] = []
        self.divided = 0
        self.rung = AS_LAUNCHED

    @property
    def place(self) -> DataPositions:
        """The place in the data after the latest step, without what is yet to be given back."""
        return self.sampler._after_used()

    @property
    def parts(self) -> tuple[int, ...]:
        """What sites get of the batch in the next step; empty: what they began with."""
        return self.sampler._shares(self.sampler._num_used).parts

    def begin_without(self, names: Iterable[str]) -> None:
        """Begin in a run that begins without some sites; all others know it."""
        absent = self._at(names)
        self.missing.begin_without(absent)
        self.sampler.begin_without(absent)

    def state(self) -> dict[str, Any]:
        """Return what a rank takes that begins to catch up now."""
        return {
            **self.sampler.handed_out(),
            "absent": self.missing.absent_before(),
            "divisions": self.sampler.divisions(),
            "divided": self.divided,
        }

    def take(self, state: Mapping[str, Any], present: Iterable[str]) -> None:
        """Begin to catch up; all but those present take no part."""
        self.missing.begin_without({*range(len(self._names))} - {*self._at(present)})
        self.sampler.resume(DataPositions.from_json(state), lambda: None, state["absences"])
        self.missing.begin_amid(state["absent"])
        for step, parts in state["divisions"]:
            self.sampler.divide(step, parts)
        self.divided = state["divided"]
        admitted = self.history.own_entry(0.0)
        self.rung = AS_LAUNCHED if admitted is None else admitted.rung
        self.history.note_state(self.divided, self.rung.number)

    def use(self, step: int) -> list[int]:
        """Return the batch of a step, having fetched some more."""
        own = step - self._begins
        while len(self._drawn) <= own + (self._ahead if own else 0):
            self._drawn.append(self.sampler.draw().tolist())
        return self._drawn[own]

    def end_step(self, round_: int, missing: Mapping[int, int], *, has_landed: bool = True) -> None:
        """End a step; the latest result says since which rounds sites are missing."""
        self.missing.note(
            Reduced(
                round=round_,
                bucket=0,
                weight=1.0,
                times=ReductionTimes(),
                wire_bytes=0,
                missing=tuple(Missing(site=site, from_round=at) for site, at in missing.items()),
            )
        )
        self.missing.end_step(has_landed=has_landed)
        self.sampler.lose(self.missing.absent())
        self.sampler.step()

    def apply(self, change: Change) -> None:
        """Do what `Rejoining` does."""
        if isinstance(change, Divided):
            self.divided = change.shares.number
            self.sampler.divide(change.step, change.shares.parts)
            return
        if isinstance(change, Changed):
            self.rung = change.rung
            return
        for site in self._at(change.sites):
            match change:
                case Announced():
                    self.sampler.regain(site, change.step)
                case GivenUp():
                    self.sampler.give_up(site, change.step)
                case CaughtUp():
                    self.missing.rejoin(site)

    def notice_steps(self, sites: Iterable[str]) -> int:
        """Return after how many steps sites may take part again at the earliest."""
        return self.sampler.notice_steps(self._at(sites))

    def _at(self, names: Iterable[str]) -> list[int]:
        return [self._names.index(each) for each in names]
