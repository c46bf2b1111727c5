"""Which sites a run does without, as its ranks hear of it: the same at each rank, step by step.

Gateways decide nothing of that; each result says since which round a site is missing. The results
of a round reach ranks before or after a loss is known, but each rank knows it one round later at
the latest. So what ranks have to do alike, they do `notice_steps` later: then all of them know, and
so do data loaders that fetch ahead.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Iterable

from isthmus.sites.local.rank_messages import Reduced
from isthmus.topology.spec.regime import Regime

NOTICE_STEPS = 64
"""More batches than a data loader fetches ahead."""
_KEPT_ROUNDS = 8
"""A loss is known one round after its first."""


def notice_steps_of(regime: Regime) -> int:
    """Return how many steps after a loss all ranks know of it, and no batch was drawn before.

    It is known after the round after the first one without the site.
    """
    return NOTICE_STEPS + (2 * regime.sync_every if regime.is_local else 0)


class MissingSites:
    """The missing sites, noted by a link's thread, asked for by the training thread.

    Steps count from 0 in a process.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._round = -1
        self._missing: dict[int, int] = {}
        self._rejoined: dict[int, float] = {}
        """The round from which a site takes part again; infinity: that has not begun yet. What
        results of earlier rounds say of the site is past; what later ones say counts from it on."""
        self._rounds: deque[tuple[int, int]] = deque(maxlen=_KEPT_ROUNDS)
        """The first step whose data are in a round, and the round."""
        self._num_steps = 0
        self._first_step = 0
        """The first one whose data are in the next round."""
        self.notice_steps = NOTICE_STEPS
        """How many steps after a loss all ranks act on it."""
        self._absent: dict[int, int] = {}
        self.delay_steps = 0
        """Steps by which results come after the step whose gradients they are of."""

    def note(self, reduced: Reduced) -> None:
        """Take what a result says."""
        with self._lock:
            self._round = max(self._round, reduced.round)
            for each in reduced.missing:
                first = self._rejoined.get(each.site, -1)
                if reduced.round >= first:
                    self._missing[each.site] = max(each.from_round, int(first))

    def end_step(
        self, *, has_landed: bool = True, num_steps: int = 1, round_: int | None = None
    ) -> None:
        """Count a step: all results of it are there, or of the one `delay_steps` before.

        Args:
            has_landed: a round has ended with it; else its data are in a later one.
            num_steps: of the run, of which this site may have taken fewer.
            round_: that has ended; None: the latest one with results.
        """
        with self._lock:
            self._num_steps += num_steps
            if has_landed:
                latest = self._round if round_ is None else round_
                self._rounds.append((self._first_step - self.delay_steps, latest))
                self._first_step = self._num_steps

    def end_delay(self, round_: int | None) -> None:
        """Note that results come in the step whose gradients they are of, from this step on.

        `round_` is that of the step before, which has landed; None: there was none.
        """
        with self._lock:
            if round_ is not None:
                self._rounds.append((self._first_step - self.delay_steps, round_))
            self.delay_steps = 0

    def absent(self) -> dict[int, int]:
        """Return, by site, the first step without it; of steps that have ended."""
        with self._lock:
            for site, from_round in self._missing.items():
                steps = [step for step, round_ in self._rounds if round_ >= from_round]
                if steps:
                    self._absent.setdefault(site, steps[0])
            return dict(self._absent)

    def begin_without(self, sites: Iterable[int]) -> None:
        """Begin in a run that goes on, or begins, without some sites; all others know it."""
        with self._lock:
            self._absent.update(dict.fromkeys(sites, -self.notice_steps - 1))

    def begin_amid(self, absent: Iterable[tuple[int, int]]) -> None:
        """Rejoin a run in which sites are missing since some steps before this one."""
        with self._lock:
            self._absent.update(absent)

    def absent_before(self) -> list[tuple[int, int]]:
        """Return what `begin_amid` takes, for who begins with the next step: the same at all sites.

        Whatever the order in which they have heard of it.
        """
        return [(site, since - self._num_steps) for site, since in sorted(self.absent().items())]

    def rejoin(self, site: int) -> None:
        """Note that a site takes part again from the next step on, and from `begin_round`."""
        with self._lock:
            self._rejoined[site] = math.inf
            self._missing.pop(site, None)
            self._absent.pop(site, None)

    def begin_round(self, round_: int) -> None:
        """Gradients begin to cross in a round: sites that rejoin take part from it on.

        Unless it is begun without them after all, for something has failed: its result says so.
        """
        with self._lock:
            for site, first in self._rejoined.items():
                if first == math.inf:
                    self._rejoined[site] = round_

    def gone(self, step: int | None = None, *, ahead: int = 0) -> frozenset[int]:
        """Return the sites that all ranks do without in a step; None: `ahead` of the next one."""
        absent = self.absent()
        at = self._num_steps + ahead if step is None else step
        return frozenset(site for site, since in absent.items() if since + self.notice_steps <= at)
