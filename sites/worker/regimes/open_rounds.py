"""Rounds that wait for nobody: when a rank's site takes part in one, and when it is passed over.

The site's first rank decides. What the training thread is to do, all ranks of the site hear in a
sum that they take in each step. So they agree on the step with which the site's part of a round
ends. If the site has stopped amid a step, the first rank tells the others by way of the gateway,
and a thread of each takes the round in the training thread's place: with no tokens. So the rank
has what all sites have, and the others do not wait.

    the fastest site   takes H steps; says so                       RoundEnds
    another            ends with the step that it is in, or before
    one that stands    its threads give nothing, and get the result
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum

from isthmus.protos.errors import DeadlineExceededError, IsthmusError
from isthmus.sites.local.rank_messages import RoundEnds
from isthmus.sites.worker.exchange.gateway_link import Link
from isthmus.sites.worker.exchange.rounds import Landing, Round
from isthmus.sites.worker.regimes.outer_buckets import OuterBuckets
from isthmus.sites.worker.regimes.round_clock import RoundClock

_NEVER = (math.inf, -1)
_LOOK_EVERY_S = 1.0
"""How often who waits for this site's threads looks whether they have failed."""


class Turn(IntEnum):
    """The site's choice at the end of a step."""

    GO_ON = 0
    """Take the next one."""
    TAKE_PART = 1
    """Exchange what it has, with the others."""
    CATCH_UP = 2
    """Go on from rounds that have ended without it."""


@dataclass(frozen=True, slots=True)
class PassedOver:
    """A round that the site had no part in."""

    landing: Landing
    round: Round


class OpenRounds:
    """One rank's turns. For the training thread, but where it says otherwise."""

    def __init__(
        self,
        clock: RoundClock,
        link: Link,
        buckets: OuterBuckets,
        *,
        is_first: bool,
        is_lone: bool,
        pass_over: Callable[[], PassedOver],
        counts: Callable[[], bool],
        deadline_s: float,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin with the first step.

        Args:
            clock: of the site; only the first rank's decides.
            link: tells of rounds that end, and is told.
            buckets: what crosses in rounds.
            is_first: this is the site's first rank.
            is_lone: it is the only one.
            pass_over: takes a round with nothing, from a thread of this.
            counts: whether the site takes part; else it catches up: it takes all steps, and gets
                results only.
            deadline_s: for every wait.
            now_s: the clock.
        """
        self._clock = clock
        self._link = link
        self._is_first, self._is_lone = is_first, is_lone
        self._buckets = buckets
        self._pass_over = pass_over
        self._counts = counts
        self._deadline_s = deadline_s
        self._now_s = now_s
        self._changed = threading.Condition()
        """Guards all below, and the clock."""
        clock.begin_round(now_s())
        clock.begin_step(now_s())
        self._round = math.inf
        """The number of the round that the clock is of; infinity: the first step has not ended."""
        self._ended_round = -1
        """The latest round of which another site has taken all steps."""
        self._told_round = -1
        """The latest one that this site's first rank passes over."""
        self._is_at_end = True
        """The training thread is at the end of a step, or before the first one."""
        self._is_passing = self._is_closed = False
        self._says_so = _NEVER
        """When this rank says that a round has ended, unless it hears that before, and which."""
        self.passed: deque[PassedOver] = deque()
        """Rounds that the training thread has yet to hear of."""
        self._thread = threading.Thread(target=self._watch, name="isthmus-rounds", daemon=True)
        link.on_round_ends = self._note
        self._thread.start()

    def close(self) -> None:
        """Take no more rounds. Idempotent."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._thread is not threading.current_thread():
            self._thread.join(_LOOK_EVERY_S)

    @property
    def num_steps(self) -> int:
        """Steps that the site has taken in this round."""
        return self._clock.num_steps

    # ---------------------------------------------------------------- the training thread

    def end_step(self) -> Turn:
        """Return what the site does at the end of the step whose gradients are there.

        A collective of the site.

        Raises:
            IsthmusError: a thread that has passed over a round has failed.
        """
        turn, is_fastest = Turn.GO_ON, False
        with self._held():
            self._clock.end_step(self._now_s())
            if self._is_first:
                turn = self._decide()
                takes_part = turn is Turn.TAKE_PART and self._counts()
                is_fastest = takes_part and self._clock.has_all
                if takes_part and not (is_fastest or self._clock.has_ended):
                    self._says_so = self._clock.overdue_s, self._buckets.next_round
                    self._changed.notify_all()
        if is_fastest:
            self._link.send(RoundEnds(round=self._buckets.next_round))
        return turn if self._is_lone else Turn(int(self._buckets.site_sums([float(turn)])[0]))

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold off passing rounds over in this context. A collective of the site."""
        was_at_end = self._is_at_end
        with self._held():
            pass
        yield
        with self._changed:
            self._is_at_end = was_at_end
            self._changed.notify_all()

    @contextmanager
    def _held(self) -> Iterator[None]:
        """Wait until all ranks of the site are done with rounds that it was passed over in.

        From here on there are none until `go_on`; the lock is held in this context.
        """
        num_passed = 0
        if self._is_first:
            with self._changed:
                self._wait(lambda: not self._is_passing)
                num_passed, self._is_at_end = len(self.passed), True
        if not self._is_lone:
            num_passed = int(self._buckets.site_sums([float(num_passed)])[0])
        with self._changed:
            self._wait(lambda: len(self.passed) >= num_passed)
            self._is_at_end = True
            yield

    def go_on(self, landing: Landing | None) -> None:
        """Begin the next step; `landing`: a round has ended with the one before."""
        now_s = self._now_s()
        with self._changed:
            if landing is not None and landing.is_passed_over:
                self._clock.drop_steps()
            elif landing is not None:
                self._clock.begin_round(now_s)
            self._clock.begin_step(now_s)
            self._says_so, self._round = _NEVER, self._buckets.next_round
            self._look(is_now=False)
            self._is_at_end = False
            self._changed.notify_all()

    def _decide(self) -> Turn:
        """Return what the site does; the caller holds the lock."""
        if self.passed:
            return Turn.CATCH_UP
        is_over = self._clock.is_over(self._now_s()) if self._counts() else self._clock.has_all
        return Turn.TAKE_PART if is_over else Turn.GO_ON

    def _wait(self, until: Callable[[], bool]) -> None:
        """Wait for this site's threads; the caller holds the lock.

        Raises:
            IsthmusError: one of them has failed, or it takes too long.
        """
        deadline_s = self._now_s() + self._deadline_s
        while not self._changed.wait_for(until, _LOOK_EVERY_S):
            self._buckets.check()
            if self._now_s() > deadline_s:
                raise DeadlineExceededError(
                    f"round {self._buckets.next_round}, which this site was passed over in, was not back "
                    f"after {self._deadline_s:g} s"
                )

    # ---------------------------------------------------------------- other threads

    def _note(self, told: RoundEnds) -> None:
        """A round ends. From the link's thread."""
        with self._changed:
            if told.is_passed_over:
                self._told_round = max(self._told_round, told.round)
            else:
                self._ended_round = max(self._ended_round, told.round)
                self._look(is_now=True)
            self._changed.notify_all()

    def _look(self, *, is_now: bool) -> None:
        """Tell the clock of a round that has ended elsewhere; the caller holds the lock."""
        if self._ended_round >= self._round:
            self._clock.end_at_another(self._now_s(), is_now=is_now)

    def _is_due(self) -> bool:
        """Whether this rank is to pass the next round over; the caller holds the lock."""
        if self._is_first:
            return self._counts() and self._now_s() >= self._clock.passed_over_s
        return self._told_round >= self._buckets.next_round

    def _watch(self) -> None:
        """Pass rounds over as they become due."""
        try:
            while self._wait_due():
                round_ = self._buckets.next_round
                if self._is_first and not self._is_lone:
                    self._link.send(RoundEnds(round=round_, is_passed_over=True))
                passed = self._pass_over()
                with self._changed:
                    self.passed.append(passed)
                    self._clock.begin_round(self._now_s())
                    self._round = self._buckets.next_round
                    self._look(is_now=False)
                    self._is_passing = False
                    self._changed.notify_all()
        except IsthmusError:
            return  # The exchange has kept it: whoever waits looks there.

    def _wait_due(self) -> bool:
        """Wait until a round is to be passed over; False: this is closed."""
        with self._changed:
            while not self._is_closed:
                if not self._is_at_end and self._is_due():
                    self._is_passing = True
                    return True
                until_s, round_ = self._says_so
                if not self._is_at_end:
                    decides = self._is_first and self._counts()
                    until_s = self._clock.passed_over_s if decides else math.inf
                elif self._now_s() >= until_s:
                    self._says_so = _NEVER
                    if self._ended_round < round_:
                        self._link.send(RoundEnds(round=round_))
                    continue
                self._changed.wait(None if until_s == math.inf else until_s - self._now_s())
        return False
