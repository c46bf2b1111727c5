"""Plays a fault script on a running emulation, each change at its time."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
from collections.abc import Awaitable, Callable, Iterable, Sequence

from isthmus.orchestrator.emulator.backend import EmulatorError
from isthmus.topology.faults.script import (
    Change,
    Fault,
    FaultScript,
    Kill,
    Pause,
    Span,
    TimedChange,
    expand,
)
from isthmus.topology.spec.errors import ConfigError

MAX_FAULTS = 10_000
"""Limit on faults, including those added during play: enough for days by hand."""
_TICK_S = 1e-6
"""The resolution of a script's times."""


Apply = Callable[[Sequence[Change]], Awaitable[None]]
"""Changes links, all at once; raises EmulatorError when that is no longer possible."""


class FaultPlayer:
    """Plays one script, to which faults may be added, until cancelled.

    `seed` overrides the script's own. `strike` pauses, resumes or kills a site's processes.
    `on_played` is called after each change.
    """

    def __init__(
        self,
        script: FaultScript,
        seed: int | None,
        *,
        apply: Apply,
        strike: Callable[[Pause | Kill], None],
        on_played: Callable[[TimedChange], None],
    ) -> None:
        self._script = script
        self._seed = seed
        self._apply = apply
        self._strike = strike
        self._on_played = on_played
        self._pending = list(expand(script, seed))
        self._played_s = -1.0
        self._began_s: float | None = None
        self._added = asyncio.Event()
        self._moved = asyncio.Event()
        self._why_ended: str | None = None

    @property
    def elapsed_s(self) -> float:
        """Return the seconds since play began; 0 before."""
        return 0.0 if self._began_s is None else self._clock_s() - self._began_s

    async def play(self) -> None:
        """Make each change when it is due. Returns only when the emulation has ended."""
        self._began_s = self._clock_s()
        try:
            while True:
                await self._wait_for_due()
                await self._play_due()
        except EmulatorError as error:  # the emulator's owner reports how it ended
            self._why_ended = str(error)
        except asyncio.CancelledError:
            self._why_ended = "the emulation is ending"
            raise
        finally:
            self._moved.set()

    async def add(self, faults: Sequence[Fault]) -> tuple[Change | Pause | Kill, ...]:
        """Add faults that begin now, whatever their time; earlier faults keep their times.

        Returns:
            The changes made at once.

        Raises:
            ConfigError: there would be too many faults.
            EmulatorError: the emulation has ended.
        """
        if len(self._script.faults) + len(faults) > MAX_FAULTS:
            raise ConfigError(f"more than {MAX_FAULTS} faults: start the emulation again")
        now_s = max(round(self.elapsed_s, 6), round(self._played_s + _TICK_S, 6))
        now = Span(now_s, now_s)
        begun = tuple(dataclasses.replace(fault, at_s=now) for fault in faults)
        self._script = dataclasses.replace(self._script, faults=(*self._script.faults, *begun))
        self._pending = self._after(expand(self._script, self._seed))
        changes = tuple(timed.change for timed in self._pending if timed.at_s == now_s)
        self._added.set()
        while self._why_ended is None and self._pending and self._pending[0].at_s <= now_s:
            self._moved.clear()
            await self._moved.wait()
        if self._why_ended is not None:
            raise EmulatorError(self._why_ended)
        return changes

    def _after(self, timeline: Sequence[TimedChange]) -> list[TimedChange]:
        """Return the changes that were not played yet."""
        return [timed for timed in timeline if timed.at_s > self._played_s]

    async def _wait_for_due(self) -> None:
        """Wait until the next change is due."""
        while not self._pending or self.elapsed_s < self._pending[0].at_s:
            self._added.clear()
            wait_s = self._pending[0].at_s - self.elapsed_s if self._pending else None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._added.wait()

    async def _play_due(self) -> None:
        """Make all changes of the next instant; links first, all at once."""
        at_s = self._pending[0].at_s
        due = list(itertools.takewhile(lambda timed: timed.at_s == at_s, self._pending))
        self._played_s = at_s  # a fault added meanwhile comes after these
        changes = [timed.change for timed in due if isinstance(timed.change, Change)]
        if changes:
            await self._apply(changes)
        for timed in due:
            if not isinstance(timed.change, Change):
                self._strike(timed.change)
            self._on_played(timed)
        self._pending = self._after(self._pending)
        self._moved.set()

    def _clock_s(self) -> float:
        return asyncio.get_running_loop().time()


def needs_relay(faults: Iterable[Fault]) -> str | None:
    """Return why faults need the relay; None: any emulator will do."""
    resets = any(fault.action == "reset" for fault in faults)
    return "reset: only the relay can do that to connections" if resets else None


def needs_run(faults: Iterable[Fault]) -> str | None:
    """Return why faults need a run; None: any emulation will do."""
    struck = [fault for fault in faults if fault.action in {"pause", "kill"}]
    if not struck:
        return None
    first = struck[0]
    return f"{first.action}: {first.site} has no processes here; `isthmus launch --faults` has"
