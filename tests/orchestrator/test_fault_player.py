"""Fault scripts carried out.

In order, together where they belong together, with faults added on the way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import pytest

from isthmus.orchestrator.emulator.backend import EmulatorError
from isthmus.orchestrator.emulator.fault_player import (
    MAX_FAULTS,
    FaultPlayer,
    needs_relay,
    needs_run,
)
from isthmus.topology.faults.loading import load_faults
from isthmus.topology.faults.script import Change, FaultScript, Kill, Pause, TimedChange, expand
from isthmus.topology.spec.errors import ConfigError
from tests.fakes.worlds import topology

WITHIN_S = 20.0
WORLD = topology(3)


class Stage:
    """Notes what is done to it."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.is_gone = False

    async def apply(self, changes: Sequence[Change]) -> None:
        await asyncio.sleep(0)
        if self.is_gone:
            raise EmulatorError("it has ended")
        self.done.append(" | ".join(str(change) for change in changes))

    def strike(self, strike: Pause | Kill) -> None:
        self.done.append(str(strike))


class Told(list[TimedChange]):
    """What was played, and a way to wait for it."""

    def __init__(self) -> None:
        super().__init__()
        self._more = asyncio.Event()

    def note(self, timed: TimedChange) -> None:
        self.append(timed)
        self._more.set()

    async def wait(self, number: int) -> None:
        while len(self) < number:
            self._more.clear()
            await self._more.wait()


def script(*faults: str) -> FaultScript:
    lines = "".join(f"  - {{{fault}}}\n" for fault in faults)
    return load_faults(f"version: 1\nseed: 7\nfaults:\n{lines}", "faults.yaml", WORLD)


def played(
    loaded: FaultScript,
    scene: Callable[[FaultPlayer, Stage, Told], Awaitable[None]],
) -> None:
    """Play a script during the scene."""

    async def run() -> None:
        stage, told = Stage(), Told()
        player = FaultPlayer(
            loaded, None, apply=stage.apply, strike=stage.strike, on_played=told.note
        )
        playing = asyncio.create_task(player.play())
        try:
            async with asyncio.timeout(WITHIN_S):
                await scene(player, stage, told)
        finally:
            playing.cancel()
            await asyncio.wait([playing])
        assert playing.cancelled() or playing.exception() is None

    asyncio.run(run())


def test_everything_comes_in_order_and_together_where_it_is_one_instant() -> None:
    loaded = script(
        "at: 30ms, cut: [a, b]",
        "at: 10ms..20ms, link: [b, c], rate: 10Mbit/s, oneway: true",
        "at: 40ms, pause: c, for: 10ms",
        "at: 40ms, heal: all",
    )

    async def scene(player: FaultPlayer, stage: Stage, told: Told) -> None:
        await told.wait(len(expand(loaded)))
        assert tuple(told) == expand(loaded)
        assert stage.done[0].startswith("b -> c: 10Mbit/s")
        assert stage.done[1] == "a -> b: cut | b -> a: cut"
        assert stage.done[2].count("healed") == 3
        assert stage.done[3:] == ["c: paused", "c: goes on"]

    played(loaded, scene)


def test_nothing_happens_before_its_time() -> None:
    async def scene(player: FaultPlayer, stage: Stage, told: Told) -> None:
        await told.wait(2)
        assert player.elapsed_s >= 0.05
        assert all(timed.at_s == 0.05 for timed in told)

    played(script("at: 50ms, cut: [a, b]", "at: 10min, cut: [a, c]"), scene)


def test_what_is_added_begins_now_and_keeps_what_is_there() -> None:
    async def scene(player: FaultPlayer, stage: Stage, told: Told) -> None:
        await told.wait(1)
        made = await player.add(script("at: 1h, link: [a, b], loss: 1%, oneway: true").faults)
        assert [str(change) for change in made] == [
            "a -> b: 10Mbit/s, 5ms one way, jitter 0s, loss 1%"
        ]
        assert stage.done[-1] == str(made[0])
        assert told[-1].change == made[0]
        assert await player.add(script("at: 0s, heal: [b, c]").faults) == ()
        assert len(await player.add(script("at: 0s, heal: all").faults)) == 1
        assert stage.done[-1] == "a -> b: healed"

    played(script("at: 0s, link: [a, b], rate: 10Mbit/s, oneway: true"), scene)


def test_it_ends_with_the_emulation_and_nobody_waits_for_ever() -> None:
    async def scene(player: FaultPlayer, stage: Stage, told: Told) -> None:
        await asyncio.sleep(0)
        stage.is_gone = True
        for _ in range(2):  # the first one notices, the second one must not say that it is done
            with pytest.raises(EmulatorError, match="it has ended"):
                await player.add(script("at: 0s, cut: [a, b]").faults)
        assert (stage.done, told) == ([], [])

    played(script("at: 1h, cut: [a, c]"), scene)


def test_there_is_an_end_to_adding() -> None:
    async def scene(player: FaultPlayer, stage: Stage, told: Told) -> None:
        many = script("at: 0s, cut: [a, c]").faults * (MAX_FAULTS + 1)
        with pytest.raises(ConfigError, match="start the emulation again"):
            await player.add(many)

    played(script("at: 1h, cut: [a, c]"), scene)


def test_which_faults_need_what() -> None:
    plain = script("at: 1s, cut: [a, b]").faults
    assert (needs_relay(plain), needs_run(plain)) == (None, None)
    assert "reset" in (needs_relay(script("at: 1s, reset: [a, b]").faults) or "")
    assert "b has no processes" in (needs_run(script("at: 1s, pause: b, for: 1s").faults) or "")
