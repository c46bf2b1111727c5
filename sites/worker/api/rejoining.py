"""Sites that rejoin a run: what a rank does for them step by step, and how it rejoins itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from isthmus.protos import metrics
from isthmus.protos.errors import ScriptError
from isthmus.sites.worker.api.averaging import Averaging
from isthmus.sites.worker.api.rank import Rank
from isthmus.sites.worker.api.regimes import Regimes
from isthmus.sites.worker.data.run_data import RunData
from isthmus.sites.worker.exchange.member_history import (
    Announced,
    CatchingUp,
    CaughtUp,
    Changed,
    Divided,
    Entering,
    GivenUp,
)

if TYPE_CHECKING:
    from isthmus.sites.checkpoint.entry_state import Entered, EntryState

_ASK_EVERY_S = 1.0


class Rejoining:
    """One rank's part in letting sites rejoin. For the training thread."""

    def __init__(self, rank: Rank, averaging: Averaging, data: RunData, regimes: Regimes) -> None:
        """Let nobody in until `begin`."""
        self._context, self._members = rank.context, rank.members
        self._steps, self._records = rank.steps, rank.records
        self._missing_sites = rank.link.missing_sites
        self._averaging, self._data, self._regimes = averaging, data, regimes
        self._entry: EntryState | None = None
        """Writes the training state for sites that catch up."""
        self._make_common: Callable[[], object] = lambda: None
        self._on_catching_up: Callable[[], None] = lambda: None
        self._next_epoch = 0
        """The epoch that the next gradients begin, for sites catch up from there; 0: none."""
        self._taken_at = 0
        """Steps that the others had taken when this site took their state."""
        if not rank.context.rejoins:
            self._missing_sites.begin_without(rank.context.late_sites)

    def begin(
        self,
        entry: EntryState,
        make_common: Callable[[], object],
        on_catching_up: Callable[[], None],
    ) -> None:
        """Let sites rejoin from now on, by the state that `entry` writes.

        After the step from whose state sites catch up, `make_common` has all sites have the same
        one, and `on_catching_up` is called once it is noted.
        """
        self._entry, self._make_common, self._on_catching_up = entry, make_common, on_catching_up

    def end_step(self, step: int) -> None:
        """Do what is due after this step for sites that rejoin."""
        landing, num_rounds = self._steps.landing, self._averaging.pipeline.num_rounds
        if landing is not None and landing.is_followed:
            num_rounds = landing.round + 1
        changes = self._members.end_step(
            num_rounds,
            self._notice_steps,
            has_landed=self._regimes.now.meets_at(step),
            num_steps=1 if landing is None else landing.num_steps,
        )
        for change in changes:
            if isinstance(change, Divided):
                self._data.divide(change.step, change.shares)
            elif isinstance(change, Changed):
                self._regimes.change(change.rung)
            elif self._entry is not None:
                self._apply(self._entry, change)

    def take_epoch(self) -> int:
        """Return the epoch that the gradients begin which are about to cross; 0: none."""
        epoch, self._next_epoch = self._next_epoch, 0
        if epoch:
            self._missing_sites.begin_round(self._averaging.pipeline.num_rounds)
        return epoch

    def _apply(self, entry: EntryState, change: Entering) -> None:
        sites = [*map(self._context.welcome.sites.index, change.sites)]
        match change:
            case Announced():
                for site in sites:
                    self._data.regain(site, change.step)
            case GivenUp():
                for site in sites:
                    self._data.give_up(site, change.step)
            case CatchingUp():
                self._make_common()
                entry.write(change, self._steps.num_steps)
                self._next_epoch = change.epoch
                self._on_catching_up()
            case CaughtUp():
                for site in sites:
                    self._missing_sites.rejoin(site)
                if self._regimes.now.is_local:
                    # What its optimizer has made of steps that do not count is not to stay.
                    self._make_common()
                entry.discard()
                self._next_epoch = change.epoch
                if self._context.site in change.sites:
                    self._note_caught_up()

    def _note_caught_up(self) -> None:
        """Count what this site does from now on."""
        self._steps.counts = True
        if self._context.rank == 0:
            step = self._steps.num_steps
            values = {metrics.FOLLOWED_STEPS: step - self._taken_at}
            self._records.record(metrics.ENTERED, step, values)

    def _notice_steps(self, sites: Sequence[str]) -> int:
        """Return after how many steps at least sites take part again: the same at all ranks.

        A round ends with the last of them. What this site says counts for nothing while it catches
        up: it may have heard of a loss before those that have more results.
        """
        own = self._data.notice_steps(map(self._context.welcome.sites.index, sites))
        if own is None:
            return 0
        most = self._averaging.largest(own, limit=self._missing_sites.notice_steps)
        num_ahead = self._data.num_ahead
        if num_ahead > most:
            raise ScriptError(
                f"site.sampler: this site's data loader fetches {num_ahead} batches ahead, and those of the "
                f"sites that it comes back to {most}: give all of them the same num_workers and "
                "prefetch_factor"
            )
        sync_every = self._regimes.now.sync_every
        return -(-most // sync_every) * sync_every

    def take_state(
        self, entry: EntryState, adopt: Callable[[Sequence[bytes]], None] | None
    ) -> Entered:
        """Rejoin a run that goes on: wait to be let in, and take the others' state.

        `adopt` is given what each site has told of its tensors, where any site may shard.

        Raises:
            IsthmusError: the gateway has ended, or it is the state of another model.
        """
        pipeline = self._averaging.pipeline
        while (admitted := self._members.own_entry(_ASK_EVERY_S)) is None:
            pipeline.check()
        self._regimes.begin_at(admitted.rung)
        entered = entry.take(Path(admitted.state))
        if adopt is not None:
            adopt(entered.lists)
        present = set(admitted.sites) - set(admitted.follows)
        sites = self._context.welcome.sites
        self._missing_sites.begin_without(
            at for at, name in enumerate(sites) if name not in present
        )
        pipeline.num_rounds = admitted.from_round
        self._members.note_state(entered.data.get("divided", 0), admitted.rung.number)
        self._taken_at = entered.step
        return entered
