"""Hands each rank its samples of each step, so that all sites together use every sample once."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from isthmus.protos.errors import ScriptError
from isthmus.sites.worker.data.batch_shares import BatchShares, Gone
from isthmus.sites.worker.data.data_positions import DataPositions, Positions
from isthmus.sites.worker.data.shuffling import key_of, shuffled, splitmix64
from isthmus.sites.worker.exchange.missing_sites import NOTICE_STEPS

_ALIKE = 1 << 20
"""Weights that are to be alike are multiples of 1 / _ALIKE: so they add up exactly."""
FETCHED_AHEAD = NOTICE_STEPS - 4
"""Most batches that a data loader may fetch ahead. Some ranks hear of a loss two steps after it, or
three where gradients count a step later."""


@dataclass(frozen=True, slots=True)
class _Drawn:
    """One step's batch, of all sites."""

    positions: Positions
    gone: Gone
    """Sites that had no part in it."""
    after: DataPositions


@dataclass(slots=True)
class _Absence:
    """A site takes no part for some steps."""

    since: int
    """The first step without it."""
    known_from: int
    """The first step that no rank draws before it knows."""
    until: int | None = None
    """The first step with it again; None: it is not known."""
    before: tuple[int, ...] = ()
    """Where this rank's site catches up: the positions handed to it in steps before this rank's."""

    @property
    def unnoticed(self) -> range:
        """The steps in which the absent site's part was handed out all the same: its holes."""
        end = self.known_from
        return range(self.since, end if self.until is None else min(end, self.until))

    def is_gone(self, step: int) -> bool:
        """Whether all ranks do without the site in a step."""
        return step >= self.known_from and self.is_away(step)

    def is_away(self, step: int) -> bool:
        """Whether the site takes no part in a step, whoever knows."""
        return step >= self.since and (self.until is None or step < self.until)


class Sampler:
    """This rank's batches, one a step: what a DataLoader takes as its `batch_sampler`.

    Endless: one pass over the data follows another, each in an order of its own. A batch is used
    when the optimizer's step has used it, not when it is drawn, so that a DataLoader may fetch
    ahead. A loop over it that begins anew goes on after the batch that was used last. Made by
    `Site.sampler`, which counts the steps.

    The part of a site that was lost becomes a hole. `notice_steps` after the loss holes are handed
    out, and the others divide the batch among themselves: then every rank knows of it. Where it
    comes back before, they are handed out then.
    """

    def __init__(
        self,
        *,
        num_samples: int,
        shares: BatchShares,
        site: int,
        rank: int,
        seed: int,
        replicas: int | None = None,
        notice_steps: int = NOTICE_STEPS,
        most_ahead: int = FETCHED_AHEAD,
    ) -> None:
        """Start at the run's first sample.

        Args:
            num_samples: of the dataset.
            shares: how the batch is divided.
            site: this rank's, by index.
            rank: inside the site; where ranks share data, the number of its replica.
            seed: names the orders.
            replicas: of the site, whose ranks share data; None: each rank has its own.
            notice_steps: after a loss, in which all ranks hear of it.
            most_ahead: batches that may be drawn for later steps; 0: how many steps a site takes
                in a round is not known before its end.

        Raises:
            ValueError: there are no samples.
        """
        if num_samples < 1:
            raise ValueError("site.sampler: the dataset is empty")
        self.num_samples = num_samples
        self.shares = shares
        self._site = site
        self._rank = rank
        self._replicas = replicas
        self._notice_steps = notice_steps
        self._most_ahead = most_ahead
        self._key = key_of(seed)
        self._first = DataPositions()
        self._drawn: deque[_Drawn] = deque()
        """The latest steps' batches, as long as they may have to be given back, and those ahead."""
        self._num_drawn = 0
        self._num_used = 0
        self._loop = object()
        """Identifies the iterator that draws; an earlier one has ended."""
        self._at_first_step: tuple[int, int] | None = None
        """What had been drawn and used after the first step of this loop."""
        self._since_then = (0, 0)
        """What was drawn and used from there to the latest step."""
        self._absences: dict[int, list[_Absence]] = {}
        """When each site was away, one absence after another."""
        self._divisions: list[tuple[int, tuple[int, ...]]] = []
        """From which steps on sites get other parts of the batch, and which; rising."""
        self._round_start = 0
        """The first step of the round, where `end_round` ends them."""
        self._not_taken: dict[int, deque[range]] = {}
        """Steps of the latest rounds that a site has not come to."""
        self._before_first: Callable[[], None] = lambda: None

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the dataset's indices of this rank's samples, step after step, without an end.

        Goes on after the batch that was used last: what another loop has drawn ahead, and was then
        left, is drawn again.

        Raises:
            ScriptError: that loop took several batches for each step.
            RuntimeError: another loop has begun since.
        """
        self._give_back()
        loop = self._loop
        while loop is self._loop:
            yield self.indices(self.draw()).tolist()
        raise RuntimeError(
            "site.sampler: another loop over it has begun, which goes on after the batch that was "
            "used last: leave this one"
        )

    @property
    def global_batch(self) -> int:
        """Samples of the next step to be drawn, over all sites."""
        return self.shares.batch(self._gone(self._num_drawn)).samples

    def draw(self) -> Positions:
        """Return this rank's positions of the next step: int64, shape (samples of the rank,).

        Raises:
            ScriptError: more is fetched ahead than there is notice of the loss of a site.
        """
        if self._num_drawn - self._num_used > self._most_ahead and len(self.shares.ranks) > 1:
            if not self._most_ahead:
                raise ScriptError(
                    "site.sampler: a batch was fetched ahead, and with regime.min_steps a round "
                    "may end before that: let the data loader have num_workers=0"
                )
            raise ScriptError(
                f"site.sampler: more than {FETCHED_AHEAD} batches were fetched ahead, and of the "
                "loss of another site ranks may hear too late for that: let num_workers x "
                f"prefetch_factor of the data loader be at most {FETCHED_AHEAD}"
            )
        before_first, self._before_first = self._before_first, lambda: None
        before_first()
        positions = self._draw()
        step = self._num_drawn - 1
        if any(each.is_away(step) for each in self._absences.get(self._site, ())):
            # It catches up, and nothing of what it makes of its data counts.
            return positions[:1]
        own = self._own(step)
        return positions[own.start : own.stop]

    def _draw(self) -> Positions:
        """Draw the next step's batch of all sites, and return its positions."""
        step, gone = self._num_drawn, self._gone(self._num_drawn)
        before = self._drawn[-1].after if self._drawn else self._first
        for site, absence in self._all_absences():
            if absence.unnoticed and absence.unnoticed.stop == step:
                before = before.with_holes(self._parts_of(site, absence, absence.unnoticed))
        positions, after = before.taken(self.shares.batch(gone).samples)
        self._drawn.append(_Drawn(positions, gone, after))
        self._num_drawn += 1
        if len(self._drawn) > self._num_drawn - self._num_used + self._notice_steps:
            self._first = self._drawn.popleft().after
        return positions

    @property
    def most(self) -> int:
        """Samples of the site's busiest replica, in the batch that was drawn last."""
        shares = self._shares(self._num_drawn - 1)
        samples = len(shares.of_site(self._site, self._drawn[-1].gone))
        return max(1, -(-samples // self._num_readers))

    @property
    def _num_readers(self) -> int:
        """Ranks of the site that have data of their own."""
        return self._replicas or self.shares.ranks[self._site]

    def weight(self, is_alike: bool) -> float:
        """Return how much this rank's batch of the next step counts beside those of all others.

        1, where each rank has as many samples; else in proportion to them.

        Args:
            is_alike: ranks of the site have to weigh alike: then each does as their mean.

        Raises:
            ScriptError: ranks of the site have to weigh alike, and do not from the start.
        """
        gone, shares = self._gone(self._num_used), self._shares(self._num_used)
        if not self._num_drawn or self._site in gone:
            return 1.0
        unit = shares.even(gone) or 1
        if not is_alike:
            return len(self._own(self._num_used)) / unit
        samples, readers = len(shares.of_site(self._site, gone)), self._num_readers
        if samples % readers and not (gone or shares.parts):
            raise ScriptError(
                f"site.sampler: {readers} ranks of this site share {samples} samples of a step unevenly, "
                "and experts that ranks share, and what fully_shard replicates, are reduced with "
                "equal weights: make global_batch a multiple of the number of ranks that read data"
            )
        return round(samples / readers / unit * _ALIKE) / _ALIKE

    def indices(self, positions: Positions) -> Positions:
        """Return which samples of the dataset stand at positions of the run.

        A pure function of seed, pass over the data, and place in it.
        """
        data_epochs, places = np.divmod(positions, self.num_samples)
        found = np.empty_like(positions)
        for data_epoch in np.unique(data_epochs):
            here = data_epochs == data_epoch
            key = splitmix64(self._key + np.uint64(data_epoch))
            found[here] = shuffled(places[here], self.num_samples, key)
        return found

    @property
    def data_epoch(self) -> int:
        """The pass over the data, from 0, in which the next step's first new sample stands."""
        return self._after_used().next // self.num_samples

    @property
    def used(self) -> DataPositions:
        """What completed steps have used; a checkpoint has it."""
        found = self._after_used()
        for site, each in self._all_absences():
            steps = each.unnoticed
            if steps.start < self._num_used <= steps.stop:
                found = found.with_holes(
                    self._parts_of(site, each, range(steps.start, self._num_used))
                )
        return found

    def handed_out(self) -> dict[str, object]:
        """Return what a site goes on with that begins to catch up now, as JSON.

        Other than `used` it leaves holes to be handed out in the step in which all ranks do.
        """
        now = self._num_used
        return {
            **self._after_used().to_json(),
            "absences": [
                [
                    site,
                    each.since - now,
                    each.known_from - now,
                    None if each.until is None else each.until - now,
                    self._parts_of(site, each, range(each.since, now))
                    if each.unnoticed.stop >= now
                    else [],
                ]
                for site, each in self._all_absences()
                if each.until is None or each.until >= now
            ],
        }

    @property
    def num_own(self) -> int:
        """Samples of the site in the step that is being taken."""
        step = self._num_used
        return len(self._shares(step).of_site(self._site, self._gone(step)))

    def divisions(self) -> list[tuple[int, tuple[int, ...]]]:
        """Return what `divide` was told that counts from the next step on, in steps from it."""
        now = self._num_used
        past = [parts for step, parts in self._divisions if step <= now]
        return [
            *((0, parts) for parts in past[-1:]),
            *((step - now, parts) for step, parts in self._divisions if step > now),
        ]

    def divide(self, step: int, parts: Sequence[int]) -> None:
        """Give sites other parts of the batch from a step on, which no rank has drawn yet.

        It is not before that of an earlier division, of which there was longer notice.
        """
        latest = self._divisions[-1][0] if self._divisions else step
        self._divisions.append((max(step, latest), tuple(parts)))

    def step(self) -> None:
        """Note that the oldest batch drawn has been used.

        Raises:
            ScriptError: several are drawn for each step.
        """
        self._num_used = min(self._num_used + 1, self._num_drawn)
        self._note_used()

    def end_round(self, num_steps: int, taken: Mapping[int, int]) -> None:
        """Note that a round of so many steps has ended, of which sites took as many as they could.

        What they have not come to is in the next batch. Right after the round, at all ranks alike.

        Args:
            num_steps: of the round.
            taken: steps of each site that had a part in it; others are lost, or catch up.

        Raises:
            ScriptError: several batches are drawn for each step.
        """
        start, self._round_start = self._round_start, self._round_start + num_steps
        while self._num_drawn < self._round_start:
            self._draw()
        self._num_used = self._round_start
        last = self._drawn[-1]
        for site, steps in sorted(taken.items()):
            rest = range(start + steps, self._round_start)
            parts = self._parts_in(site, rest)
            last = replace(last, after=last.after.with_holes(parts))
            latest = self._not_taken.setdefault(site, deque(maxlen=self._notice_steps))
            latest.append(rest)
        self._drawn[-1] = last
        self._note_used()

    def _note_used(self) -> None:
        drawn, used = self._at_first_step = self._at_first_step or (self._num_drawn, self._num_used)
        self._since_then = self._num_drawn - drawn, self._num_used - used
        if self._since_then[0] - self._since_then[1] > self._notice_steps:
            self._refuse_several()

    def _give_back(self) -> None:
        """Have what was drawn and not used drawn again, by another loop."""
        batches, steps = self._since_then
        if batches >= 2 * steps > 2:
            self._refuse_several()
        for _ in range(self._num_drawn - self._num_used):
            self._drawn.pop()
        self._num_drawn = self._num_used
        self._loop, self._at_first_step, self._since_then = object(), None, (0, 0)

    def _refuse_several(self) -> None:
        batches, steps = self._since_then
        raise ScriptError(
            f"site.sampler: the script took {batches} batches for {steps} steps of the optimizer, and "
            "counts each step as one batch, in checkpoints and after the loss of a site, too: make "
            "global_batch as large as all that one step takes, and split the batch that comes into "
            "micro-batches"
        )

    def lose(self, absent: Mapping[int, int]) -> None:
        """Take note of sites that are missing since a step, counted as they are drawn."""
        for site, since in absent.items():
            known = self._absences.get(site)
            if known is None or (known[-1].until is not None and since >= known[-1].until):
                self._note(site, since, since + self._notice_steps)

    def notice_steps(self, sites: Iterable[int]) -> int:
        """Return how many steps from now on sites may take part again at the earliest.

        What was drawn is drawn without them, and holes of others are to be handed out before;
        unless nobody else takes part.
        """
        entering = set(sites)
        absent = {at for at, found in self._absences.items() if found[-1].until is None}
        is_alone = absent | entering == {*range(len(self.shares.ranks))}
        ends = [
            each.unnoticed.stop
            for at, each in self._all_absences()
            if at not in entering and not is_alone
        ]
        return max(self._num_drawn, *ends, self._num_used) - self._num_used

    @property
    def num_ahead(self) -> int:
        """Number of batches that were drawn for later steps."""
        return max(self._num_drawn - self._num_used, 0)

    def regain(self, site: int, step: int) -> None:
        """Take note that a site takes part again from a step on, which no rank has drawn yet."""
        self._absences[site][-1].until = step

    def give_up(self, site: int, step: int) -> None:
        """A site that was to take part from a step on does not, and others may have drawn it.

        Right after the step in which all ranks give it up.
        """
        self._note(site, step, max(step, self._num_used + self._notice_steps))

    def begin_without(self, sites: Iterable[int]) -> None:
        """Begin in a run that goes on, or begins, without some sites; all others know it."""
        for site in sites:
            self._note(site, -self._notice_steps - 1, -1)

    def _note(
        self,
        site: int,
        since: int,
        known_from: int,
        until: int | None = None,
        before: Iterable[int] = (),
    ) -> None:
        absence = _Absence(since, known_from, until, tuple(before))
        self._absences.setdefault(site, []).append(absence)

    def resume(
        self,
        used: DataPositions,
        before_first: Callable[[], None],
        absences: Iterable[tuple[int, int, int, int | None, Iterable[int]]] = (),
    ) -> None:
        """Go on after what a checkpoint has, or what others hand out: before anything is used.

        Args:
            used: of the checkpoint, or of `handed_out`.
            absences: of `handed_out`.
            before_first: called before the first batch is drawn. A DataLoader takes a seed from
                torch's generator when it begins, which the run that was saved had done long before.

        Raises:
            RuntimeError: a batch was used already.
        """
        if self._num_used:
            raise RuntimeError("site.checkpoint: call it before the first step, after site.sampler")
        self._give_back()
        self._first = used
        self._before_first = before_first
        for absence in absences:
            self._note(*absence)

    def _own(self, step: int) -> range:
        """Return this rank's places in the batch of a step."""
        shares, gone = self._shares(step), self._gone(step)
        if self._replicas is None:
            return shares.of_rank(self._site, self._rank, gone)
        return shares.of_replica(self._site, self._rank, self._replicas, gone)

    def _shares(self, step: int) -> BatchShares:
        """Return how the batch of a step is divided."""
        parts = [parts for since, parts in self._divisions if since <= step]
        return replace(self.shares, parts=parts[-1]) if parts else self.shares

    def _gone(self, step: int) -> Gone:
        return frozenset(site for site, each in self._all_absences() if each.is_gone(step))

    def _all_absences(self) -> Iterator[tuple[int, _Absence]]:
        return ((site, each) for site in sorted(self._absences) for each in self._absences[site])

    def _after_used(self) -> DataPositions:
        """Return the positions as they were handed out up to the latest step that has ended."""
        at = len(self._drawn) - 1 - (self._num_drawn - self._num_used)
        return self._drawn[at].after if at >= 0 else self._first

    def _parts_of(self, site: int, absence: _Absence, steps: range) -> list[int]:
        """Return the positions of a site in some steps of an absence, from its first one on."""
        not_taken = [step for rest in self._not_taken.get(site, ()) for step in rest]
        found = [*absence.before]
        for step in sorted({*range(max(0, steps.start), steps.stop)} - {*not_taken}):
            found += self._parts_in(site, range(step, step + 1))
        return found

    def _parts_in(self, site: int, steps: range) -> list[int]:
        """Return the positions that were handed out to a site in some of the latest steps."""
        first = self._num_drawn - len(self._drawn)
        found: list[int] = []
        for step in steps:
            drawn = self._drawn[step - first]
            part = self._shares(step).of_site(site, drawn.gone)
            if site not in drawn.gone:
                found += drawn.positions[part.start : part.stop].tolist()
        return found
