"""All sites switch to another plan at one round, or none does.

The coordinator's side of the two phases.

Pure. Every site answers once whether it can, and with the hash of what it understood. The first
refusal, another hash, a site that goes away or a deadline mean that nobody switches. Decided is
decided: what comes later changes nothing, so no two sites hear different outcomes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReductionPrepared:
    """A site's answer to a proposal."""

    site: str
    epoch: int
    is_accepted: bool
    plan_hash: str
    round: int
    """The latest that it has begun."""
    is_late: bool
    """It had begun the proposal's first round: a later one may do."""
    why: str
    must_keep_codecs: bool = False
    """Its ranks encode: every chunk has to keep its codec."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a proposal."""

    is_committed: bool
    site: str = ""
    """Who was the first not to; empty: nobody."""
    why: str = ""
    may_try_again: bool = False
    """Nothing is wrong with the plan: a later round may do."""
    is_silent: bool = False
    """A site said nothing, and ranks of others may have waited for it until the deadline."""
    must_keep_codecs: bool = False
    """A plan may do that leaves every chunk its codec."""


class PlanSwitch:
    """One proposal to all sites."""

    def __init__(self, sites: Iterable[str], epoch: int, plan_hash: str, deadline_s: float) -> None:
        """Wait for all answers.

        Args:
            sites: Of the run.
            epoch: Of the proposal.
            plan_hash: What each has to answer.
            deadline_s: By when, on the coordinator's clock.
        """
        self.epoch = epoch
        self.outcome: Outcome | None = None
        """None while it is open."""
        self._missing = set(sites)
        self._plan_hash = plan_hash
        self._deadline_s = deadline_s

    def answer(self, answer: ReductionPrepared) -> None:
        """A site answers. Repeated answers, and those to other proposals, change nothing."""
        if self.outcome is not None or answer.epoch != self.epoch:
            return
        if answer.site not in self._missing:
            return
        if not answer.is_accepted:
            self.outcome = Outcome(
                is_committed=False,
                site=answer.site,
                why=answer.why,
                may_try_again=answer.is_late,
                must_keep_codecs=answer.must_keep_codecs,
            )
        elif answer.plan_hash != self._plan_hash:
            self._abort(answer.site, "it understood another plan: is it of another build?")
        else:
            self._missing.remove(answer.site)
            if not self._missing:
                self.outcome = Outcome(is_committed=True)

    def gone(self, site: str) -> None:
        """A site takes part no more."""
        if self.outcome is None:
            self._abort(site, "it has ended or is lost")

    def tick(self, now_s: float) -> None:
        """Time has passed."""
        if self.outcome is None and now_s >= self._deadline_s:
            self.outcome = Outcome(
                is_committed=False,
                site=min(self._missing),
                why="it did not answer in time",
                may_try_again=True,
                is_silent=True,
            )

    def _abort(self, site: str, why: str) -> None:
        self.outcome = Outcome(is_committed=False, site=site, why=why)
