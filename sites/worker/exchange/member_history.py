"""When a site that rejoins takes part again, decided alike by all ranks of all sites. Pure.

Gateways tell their ranks of changes (`Members`) at different times. Two bounds hold:

- Every rank has heard that a site rejoins before round `from_round` - 1 can be completed.
- Every rank has heard of a loss that begins with round r once round r + 1 is completed, and so
  after a step by whose end r + 2 rounds have begun. From then on the loss undoes what was told of
  rejoining before.

A site that rejoins catches up first: the others write their state after a step that all know, and
from the next gradients on it gets all results, and gives nothing. Once it has caught up, it hears
with the others that it takes part. Data loaders fetch ahead. So ranks agree on a step then, and the
site takes part some steps later. So is it with other parts of the batch: they are told with an
epoch, and again with all later ones, as long as it is not certain that all have heard of them.
Another regime is told in the same way, and begins at once when all know of it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from isthmus.sites.local.rank_messages import Members
from isthmus.topology.spec.regime import Rung
from isthmus.topology.spec.shares import Shares

HEARD_AFTER = 2
"""Rounds that must have begun from a loss's first one on, that one included."""


@dataclass(frozen=True, slots=True)
class CatchingUp:
    """Sites catch up from the next gradients on."""

    sites: tuple[str, ...]
    epoch: int
    state: Path
    """The folder for what they take over."""


@dataclass(frozen=True, slots=True)
class Announced:
    """Sites take part again from a step on, unless something happens before."""

    sites: tuple[str, ...]
    step: int


@dataclass(frozen=True, slots=True)
class GivenUp:
    """Sites that were announced do not take part."""

    sites: tuple[str, ...]
    step: int


@dataclass(frozen=True, slots=True)
class CaughtUp:
    """Sites have caught up, and take part again from the next step on."""

    sites: tuple[str, ...]
    epoch: int


@dataclass(frozen=True, slots=True)
class Divided:
    """Sites get other parts of the batch from a step on."""

    shares: Shares
    step: int


@dataclass(frozen=True, slots=True)
class Changed:
    """The run has another regime from the next step on."""

    rung: Rung


Entering = CatchingUp | Announced | GivenUp | CaughtUp
Change = Entering | Divided | Changed


class MemberHistory:
    """What a gateway has told of members. All methods may be called from any thread."""

    def __init__(self, own: str, *, rejoins: bool = False) -> None:
        """With `rejoins`, site `own` comes into a run that goes on, and has yet to catch up."""
        self._own = own
        self._condition = threading.Condition()
        self._known_from: dict[int, int] = {}
        """By epoch in which nobody rejoins: rounds that have begun when all ranks know it."""
        self._told: dict[int, Members] = {}
        """By epoch, those with which others rejoin."""
        self._decided: dict[Shares | Rung, int] = {}
        """What is to come, and how many rounds have begun when all ranks know it."""
        self._known: dict[type[Shares | Rung], int] = {Shares: 0, Rung: 0}
        """By kind, the number of the latest decision whose step is known."""
        self._announced: Members | None = None
        self._rejoined = 0
        """The latest epoch with which others have rejoined; it may be told again."""
        self._num_steps = 0
        self._step = 0
        """With which the latest sites that were announced take part."""
        self._own_entry: Members | None = None
        self.awaits_state = rejoins
        """This site rejoins, and has not got the others' state yet."""
        self.is_catching_up = rejoins
        """This site gets all results, and gives nothing."""

    def tell(self, told: Members) -> None:
        """The gateway tells of other members."""
        with self._condition:
            for decided in (told.shares, told.rung):
                if decided.number > self._known[type(decided)]:
                    # Who has missed the epoch that decides hears with one that goes back behind.
                    since = told.from_round + HEARD_AFTER
                    self._decided[decided] = min(since, self._decided.get(decided, since))
            if not told.enters:
                self._known_from[told.epoch] = told.from_round + HEARD_AFTER
            elif self._own in told.follows:
                self._own_entry = told
                self._condition.notify_all()
            elif told.epoch > self._rejoined:
                self._told[told.epoch] = told

    def end_step(
        self,
        num_rounds: int,
        notice_steps: Callable[[Sequence[str]], int],
        *,
        has_landed: bool = True,
        num_steps: int = 1,
    ) -> list[Change]:
        """Count a step of this process, or several, at whose end so many rounds have begun.

        Nothing changes unless sites hold the same after it: `has_landed`. Once all know of sites
        that have caught up, these take part as many steps later as `notice_steps` says of them: the
        same at all ranks. No lock is held then, for it may be an average over sites.
        """
        with self._condition:
            self._num_steps += num_steps
            if not has_landed:
                return []
            known = (at for at, since in self._known_from.items() if since <= num_rounds)
            newest = max(known, default=0)
            changes: list[Change] = []
            if self._announced is not None and self._announced.epoch < newest:
                changes.append(GivenUp(self._announced.enters, self._step))
                self._announced = None
            self._told = {epoch: each for epoch, each in self._told.items() if epoch > newest}
            decided = self._take_decided(num_rounds)
            # What sites enter with contains all that was decided before.
            due = [
                each
                for each in self._told.values()
                if each.from_round <= num_rounds and not self._decided
            ]
        changes += [
            Changed(each)
            if isinstance(each, Rung)
            else Divided(each, self._num_steps + notice_steps(()))
            for each in decided
        ]
        if self._announced is None and due and due[0].follows:
            changes.append(CatchingUp(due[0].follows, due[0].epoch, Path(due[0].state)))
            self._leave_behind(due[0])
        elif self._announced is None and due:
            self._announced = due[0]
            wanted = self._num_steps + notice_steps(due[0].enters)
            self._step = max(wanted, self._step)
            changes.append(Announced(due[0].enters, self._step))
        if self._announced is not None and self._step == self._num_steps:
            changes.append(CaughtUp(self._announced.enters, self._announced.epoch))
            self.is_catching_up = self.is_catching_up and self._own not in self._announced.enters
            self._leave_behind(self._announced)
            self._announced = None
        return changes

    def _take_decided(self, num_rounds: int) -> list[Shares | Rung]:
        """Return in order what all know to be decided, and know it; the caller holds the lock."""
        due = [each for each, since in self._decided.items() if since <= num_rounds]
        due.sort(key=lambda decided: decided.number)
        for decided in due:
            del self._decided[decided]
            self._known[type(decided)] = decided.number
        return due

    def _leave_behind(self, told: Members) -> None:
        """It is done; it may be told again."""
        with self._condition:
            self._rejoined = told.epoch
            del self._told[told.epoch]

    # ---------------------------------------------------------------- a site that rejoins

    def own_entry(self, within_s: float) -> Members | None:
        """Return with what this site is let in, and wait for it; None: it was not in time."""
        with self._condition:
            self._condition.wait_for(lambda: self._own_entry is not None, within_s)
            return self._own_entry

    def note_state(self, divided: int, rung: int = 0) -> None:
        """Note that this site has the others' state; up to which decisions it knows the steps.

        These are the numbers of the latest division, and of the regime that it begins with.
        """
        self.awaits_state = False
        with self._condition:
            self._known = known = {Shares: divided, Rung: rung}
            self._decided = {
                each: since
                for each, since in self._decided.items()
                if each.number > known[type(each)]
            }

    def check_may_begin(self, round_: int, *, is_gradient: bool) -> None:
        """Allow a site that comes back to begin with the others' gradients only.

        Raises:
            RuntimeError: it begins with something else.
        """
        if self.awaits_state:
            raise RuntimeError(
                "this site comes back to a run that goes on, whose state it gets by "
                "site.checkpoint(model, optimizer): call that before anything is averaged"
            )
        own = self._own_entry
        if own is not None and own.from_round == round_ and not is_gradient:
            raise RuntimeError(
                "this site comes back to a run that goes on: after site.checkpoint the first that "
                "is averaged has to be gradients"
            )
