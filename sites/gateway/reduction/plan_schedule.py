"""Tells which plan carries which round, where plans are switched while a run goes on. Pure.

A switch has two phases, so that either all sites make it at the same round or none does. First a
plan is proposed for all rounds from R on. A gateway that has not begun R keeps the plan, and does
not begin R before it knows the outcome. Then either all sites use the plan from R on, or all forget
it. Rounds before R end as they began, side by side with R's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from protos.errors import LocalProtocolError
from sites.codecs.codec import Codec
from sites.codecs.registry import codec_named
from sites.gateway.config import Proposal
from sites.gateway.reduction.chunk_reduction import Role, roles
from topology.trees.trees import ReductionPlan


@dataclass(frozen=True, slots=True)
class PlanInForce:
    """What a bucket needs to know of the plan that carries it."""

    plan: ReductionPlan
    codecs: tuple[Codec, ...]
    """One for each tree, or the only one of a gather."""
    roles: tuple[Role, ...]
    """This site's roles in it."""
    epoch: int
    """0 is the plan that the run began with."""
    from_round: int


@dataclass(frozen=True, slots=True)
class Begun:
    """A switch, once it is made at this gateway."""

    epoch: int
    round: int
    """The first that the new plan carries."""


class PlanSchedule:
    """The plans of one gateway, by round. Not thread-safe."""

    def __init__(self, plan: ReductionPlan, codecs: Sequence[str], site: int) -> None:
        """Begin with the plan of the run's configuration."""
        self._site = site
        self._plans = [self._in_force(plan, codecs, epoch=0, from_round=0)]
        self._pending: PlanInForce | None = None
        self._decided_epoch = 0
        self._begun_epoch = 0

    def of(self, round_: int) -> PlanInForce:
        """Return the plan of a round that `is_settled`."""
        assert self.is_settled(round_), "nobody knows yet what carries it"
        return next(each for each in reversed(self._plans) if each.from_round <= round_)

    def is_settled(self, round_: int) -> bool:
        """Whether it is known which plan carries a round."""
        return self._pending is None or round_ < self._pending.from_round

    def needs(self, site: int) -> bool:
        """Whether a plan that carries rounds now, or may later, has bytes go to or from a site."""
        plans = [*self._plans, *([self._pending] if self._pending else [])]
        return any(site in each.plan.neighbours(self._site) for each in plans)

    def propose(self, proposal: Proposal, current: int) -> bool:
        """Keep a proposal; return whether it is still of use.

        It is of no use if its first round has begun or has another new plan already, or if it was
        decided or followed by another one before it got here. An older one that waits here
        undecided is forgotten: its proposer has given it up.
        """
        waiting_epoch = self._pending.epoch if self._pending else 0
        if proposal.epoch <= max(self._decided_epoch, waiting_epoch):
            return False
        self._pending = None
        if proposal.from_round <= max(current, self._plans[-1].from_round):
            return False
        self._pending = self._in_force(
            proposal.plan,
            proposal.codecs,
            epoch=proposal.epoch,
            from_round=proposal.from_round,
        )
        return True

    def decide(self, epoch: int, *, commit: bool) -> None:
        """Take the outcome of a proposal, which may not have been kept here if nothing came of it.

        Raises:
            LocalProtocolError: all are to switch to a plan that is not kept here.
        """
        self._decided_epoch = max(self._decided_epoch, epoch)
        pending = self._pending
        if commit and (pending is None or pending.epoch != epoch):
            raise LocalProtocolError(f"plan {epoch} is to be used, which was not kept here")
        if pending is not None and pending.epoch <= epoch:
            self._pending = None
        if commit and pending is not None:
            self._plans.append(pending)

    def begin(self, round_: int) -> PlanInForce | None:
        """A round begins. Return the plan whose first round it is, if there is one.

        The plan of the rounds before is forgotten one round later.
        """
        over = [each for each in self._plans[1:] if each.from_round < round_]
        del self._plans[: len(over)]
        newest = self.of(round_)
        if newest.epoch == self._begun_epoch:
            return None
        self._begun_epoch = newest.epoch
        return newest

    def _in_force(
        self, plan: ReductionPlan, codecs: Sequence[str], *, epoch: int, from_round: int
    ) -> PlanInForce:
        return PlanInForce(
            plan, tuple(map(codec_named, codecs)), roles(plan, self._site), epoch, from_round
        )
