"""The regimes `local_sgd` and `diloco` with `min_steps`: rounds that wait for nobody.

A round ends when the fastest site has taken H steps. Others exchange what their steps have come to
by then, weighted by their tokens, and go on with the next round. So steps of the run have the same
numbers at all sites where a round ends, and a slow site leaves numbers out:

    fastest    1  2  3  4  5  6   exchange    7  8 ...
    half       1     2     3      exchange    7     8 ...

A site that has stopped amid a step is passed over: it gives nothing, and has what the others have.
What it had done in that round is lost. open_rounds.py says which of these it is.

With the pseudo-gradients cross the steps that each site has taken. So all ranks know alike which
samples were not used.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import torch
import torch.distributed as dist

from isthmus.protos.errors import ScriptError
from isthmus.sites.worker.exchange.gateway_link import Link
from isthmus.sites.worker.exchange.missing_sites import MissingSites
from isthmus.sites.worker.exchange.rounds import Landing, Round
from isthmus.sites.worker.exchange.sharding import local_of
from isthmus.sites.worker.regimes.local_steps import LocalSteps
from isthmus.sites.worker.regimes.loop import Attached
from isthmus.sites.worker.regimes.open_rounds import OpenRounds, PassedOver, Turn
from isthmus.sites.worker.regimes.outer_buckets import written
from isthmus.sites.worker.regimes.outer_shard import Rates
from isthmus.sites.worker.regimes.round_clock import RoundClock
from isthmus.topology.spec.regime import Regime


class OpenSteps(LocalSteps):
    """One rank's part. For the training thread, but for `_pass_over`."""

    _turn = Turn.GO_ON
    """The site's choice at the end of the step whose gradients are there."""
    _reached = 0
    """The latest step of the run that has ended, or with which a round has."""
    _spare: Mapping[str, torch.Tensor] | None = None
    """Receives parameters in rounds that the site is passed over in; None: there were none."""
    _landed_s = 0.0
    """When the latest round began to cross."""
    _num_passed = 0
    """How often the site was passed over, each time for a round or several."""
    _landing: Landing | None = None
    """What the latest step has ended."""

    def __init__(
        self,
        attached: Attached,
        regime: Regime,
        *,
        link: Link,
        missing_sites: MissingSites,
        gives_numbers: Callable[[], bool],
        deadline_s: float,
        tell: Callable[[str], None],
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """Count as `LocalSteps`.

        Args:
            attached: as `LocalSteps`.
            regime: as `LocalSteps`, with `min_steps`.
            link: tells of rounds that end, and is told.
            missing_sites: is told of rounds that this site was passed over in.
            gives_numbers: whether the script takes the numbers of steps from `site.steps`.
            deadline_s: for every wait.
            tell: tells people something of this site.
            now_s: the clock.
        """
        super().__init__(attached, regime)
        self._missing_sites = missing_sites
        self._gives_numbers = gives_numbers
        self._tell = tell
        self._now_s = now_s
        self._step_began_s = self._landed_s = now_s()
        assert self._regime.min_steps is not None, "else rounds wait for all"
        self._rounds = OpenRounds(
            RoundClock(self._regime.sync_every, self._regime.min_steps),
            link,
            self._buckets,
            is_first=dist.get_rank() == 0,
            is_lone=dist.get_world_size() == 1,
            pass_over=self._pass_over,
            counts=self._counts,
            deadline_s=deadline_s,
            now_s=now_s,
        )

    # ---------------------------------------------------------------- what others ask

    def finish(self) -> None:
        """Take no more rounds."""
        self._rounds.close()

    def close(self) -> None:
        """End it between two steps; the site's latest round has ended with the latest one.

        Raises:
            ScriptError: it has not, and others may be in another step.
        """
        self._rounds.close()
        if self._has_moved:
            raise ScriptError(
                "site.attach: with regime.min_steps sites are not in the same step, so nothing "
                "else can be attached amid a round: leave min_steps out"
            )
        super().close()

    @contextmanager
    def global_parameters(self) -> Iterator[None]:
        """Set the parameters to the global ones: as `LocalSteps`."""
        if not self._has_moved or self._is_away:
            yield
            return
        with self._rounds.held(), super().global_parameters():
            yield

    # ---------------------------------------------------------------- a step

    def _note_gradients(self) -> None:
        if not self._gives_numbers():
            raise ScriptError(
                "regime.min_steps: a round may end before this site has taken all of its steps, so "
                "the script has to ask for their numbers: loop with `for step in "
                "site.steps(num_steps)`"
            )
        super()._note_gradients()
        assert self._squares is not None, "there are gradients"
        float(self._squares)  # on CUDA: until they are there, the step may take long
        self._turn = self._rounds.end_step()

    def before_end(self, step: int) -> Landing | None:
        """Exchange, or go on from rounds that have ended, if it is time."""
        match self._turn:
            case Turn.GO_ON:
                self._note_step(step)
                self._reached, self._landing = step, None
            case Turn.TAKE_PART:
                self._landing = self._take_part(step)
            case Turn.CATCH_UP:
                self._landing = self._catch_up(step)
        return self._landing

    def after_end(self) -> None:
        """Begin the next step."""
        if self._landing is None or not self._landing.is_followed:
            self._step_began_s = self._now_s()
            self._rounds.go_on(self._landing)

    def _next_landing(self) -> int:
        return (self._reached // self._regime.sync_every + 1) * self._regime.sync_every

    def _take_part(self, step: int) -> Landing:
        """Exchange what the site has come to, with the step that is its last one of the round."""
        self._reached, own = step - 1, self._rounds.num_steps
        self._note_step(step)
        self._step = self._next_landing()
        self._latest_tokens = max(self._tokens)
        with written(self._trained) as flats:
            landing, round_ = self._exchange(self._latest_tokens, flats, own)
        self._end_round(round_)
        return landing

    def _catch_up(self, step: int) -> Landing:
        """Go on from the next one of the rounds that the site was passed over in."""
        passed = self._rounds.passed.popleft()
        landing = replace(passed.landing, is_followed=bool(self._rounds.passed))
        self._step, self._is_over = landing.step, True
        self._state.forget()
        self._latest_tokens = 0.0
        self._end_round(passed.round)
        if not landing.is_followed:
            assert self._spare is not None, "they have arrived there"
            with written(self._trained) as flats:
                for name, each in flats.items():
                    each.copy_(self._spare[name])
            self._note_passed_over(landing.step)
        return landing

    def _note_passed_over(self, step: int) -> None:
        """Tell people the first time, the second, the fourth, and so on."""
        self._num_passed += 1
        if self._num_passed & (self._num_passed - 1) == 0:
            took_s = self._now_s() - self._step_began_s
            self._tell(
                "rounds wait for nobody (regime.min_steps): the site was passed over until the one "
                f"that ended with step {step}, while a step took {took_s:.3g} s; so far "
                f"{self._num_passed} times"
            )

    def _end_round(self, round_: Round) -> None:
        self._landed.append(round_)
        self._tokens = [0.0] * len(self._tokens)
        self._has_moved = False

    def _exchange(
        self,
        tokens: float,
        flats: Mapping[str, torch.Tensor],
        own: int,
        *,
        is_passed_over: bool = False,
    ) -> tuple[Landing, Round]:
        """Exchange, in the next round, what the site has come to in so many steps of its own."""
        step, began_s = self._next_landing(), self._landed_s
        num_steps = step - self._reached
        rates = Rates(*self._regime.outer_rates(step, self._num_sites(num_steps - 1)))
        for shard in self._state.shards:
            shard.rates = rates
        self._landed_s = self._now_s()
        turnout = self._buckets.turnout_of(own, 0 if is_passed_over else self._landed_s - began_s)
        round_ = self._buckets.exchange(tokens, flats, self._state.shards, self._since, turnout)
        *present, seconds = (each * round_.weight for each in turnout.tolist())
        taken = {site: round(steps) - 1 for site, steps in enumerate(present) if round(steps)}
        self._reached = step
        landing = Landing(
            step=step,
            num_steps=num_steps,
            round=round_.number,
            taken=taken,
            own=own,
            step_s=seconds / max(1, sum(map(bool, taken.values()))) / self._regime.sync_every,
            is_passed_over=is_passed_over,
        )
        return landing, round_

    def _pass_over(self) -> PassedOver:
        """Contribute nothing to a round while training stalls. From a thread of `OpenRounds`."""
        if self._spare is None:
            self._spare = {
                name: torch.zeros_like(local_of(each).detach()).reshape(-1)
                for name, each in self._trained.items()
            }
        landing, round_ = self._exchange(0.0, self._spare, 0, is_passed_over=True)
        self._missing_sites.end_step(num_steps=landing.num_steps, round_=round_.number)
        return PassedOver(landing, round_)
