"""Lets a round begin once it is known which plan carries it, and takes what is said of plans."""

from __future__ import annotations

import threading
import time

from protos.errors import DeadlineExceededError, PeerLostError
from sites.gateway.config import GatewayConfig
from sites.gateway.proposal import Proposal
from sites.gateway.reduction.plan_schedule import Begun
from sites.gateway.reduction.under_way import UnderWay
from sites.silence import Standstills

_CHECK_S = 1.0
_OUTCOME_LEASES = 3
"""Times `peer_lost_s`, for the outcome of a proposed plan: the coordinator decides within one, and
whoever has lost it by then is ended within another."""


class PlanGate:
    """Where ranks wait for the outcome of a proposal. All methods may be called from any thread."""

    def __init__(
        self, config: GatewayConfig, under_way: UnderWay, condition: threading.Condition
    ) -> None:
        """Begin open.

        Args:
            config: this gateway's.
            under_way: whose rounds are let in; guarded by `condition`, like everything here.
            condition: the executor's.
        """
        self._config = config
        self._under_way = under_way
        self._condition = condition
        self._closed = False

    @property
    def round(self) -> int:
        """The latest round that a local rank has posted; -1 before the first."""
        return self._under_way.rounds.current

    @property
    def begun(self) -> Begun | None:
        """The latest switch of plans that a local rank has got to."""
        return self._under_way.begun

    def propose(self, proposal: Proposal) -> tuple[bool, int]:
        """Keep a plan for the rounds from a later one on, and begin none of them before `decide`.

        Returns:
            Whether it is kept, and the latest round that a local rank has posted.
        """
        with self._condition:
            return self._under_way.plans.propose(proposal, self.round), self.round

    def decide(self, epoch: int, *, commit: bool) -> None:
        """Take the outcome of a proposal: ranks that wait for it go on.

        Raises:
            LocalProtocolError: all are to switch to what is not kept here.
        """
        with self._condition:
            self._under_way.plans.decide(epoch, commit=commit)
            self._condition.notify_all()

    def needs(self, site: int) -> bool:
        """Whether a plan of rounds under way, or of later ones, needs the link to a site."""
        with self._condition:
            return self._under_way.plans.needs(site)

    def wait(self, round_: int) -> None:
        """Wait until it is known which plan carries a round; the caller holds the lock.

        Raises:
            DeadlineExceededError: nobody has said so for too long.
            PeerLostError: this gateway ends.
        """
        patience_s = _OUTCOME_LEASES * self._config.peer_lost_s
        now_s = time.monotonic()
        deadline_s, standstills = now_s + patience_s, Standstills(now_s, self._config.peer_lost_s)
        while not self._under_way.plans.is_settled(round_):
            if self._closed:
                raise PeerLostError("this gateway is stopping", self._config.site)
            remaining_s = deadline_s - time.monotonic()
            if remaining_s <= 0:
                raise DeadlineExceededError(
                    f"round {round_} has waited {patience_s:g} s to hear whether it has a new plan"
                )
            wait_s = min(remaining_s, _CHECK_S)
            self._condition.wait(wait_s)
            deadline_s += standstills.look(time.monotonic(), wait_s)  # nobody could say it then

    def close(self) -> None:
        """Let everybody who waits go."""
        with self._condition:
            self._closed = True
            self._condition.notify_all()
