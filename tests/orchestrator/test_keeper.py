"""What keeps the parts of `isthmus up`: nothing ends its care but `stop`."""

from __future__ import annotations

import asyncio
import errno
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from isthmus.orchestrator.launchers import keeper as keeper_module
from isthmus.orchestrator.launchers.keeper import Keeper, Kept
from isthmus.orchestrator.launchers.launcher import LaunchError
from isthmus.orchestrator.launchers.restarts import Restarts
from isthmus.orchestrator.launchers.standing import FAILED, RESTARTING, STARTING, UP, Standing, read
from isthmus.protos.versions import (
    CONTROL_PROTOCOL_MAX,
    CONTROL_PROTOCOL_MIN,
    EXCHANGE_PROTOCOL_MAX,
    EXCHANGE_PROTOCOL_MIN,
)
from isthmus.topology.spec.json_lines import line_of
from isthmus.topology.spec.tether_messages import GREETING, Spec, Versions
from tests.fakes.waiting import until

DEADLINE_S = 20.0
VERSIONS = Versions(
    build="test",
    control=(CONTROL_PROTOCOL_MIN, CONTROL_PROTOCOL_MAX),
    exchange=(EXCHANGE_PROTOCOL_MIN, EXCHANGE_PROTOCOL_MAX),
)


class FakeStream:
    """A process that has greeted; it says what the test has it say."""

    def __init__(self) -> None:
        self.lines: asyncio.Queue[bytes] = asyncio.Queue()
        self.say(GREETING + line_of(VERSIONS).decode().rstrip())
        self._status = 0

    def say(self, line: str) -> None:
        self.lines.put_nowait(line.encode() + b"\n")

    def end(self, status: int) -> None:
        self._status = status
        self.lines.put_nowait(b"")

    async def write(self, data: bytes) -> None:
        pass

    async def readline(self) -> bytes:
        return await self.lines.get()

    async def close(self) -> None:
        self.end(143)

    async def wait(self) -> int | None:
        return self._status

    async def abandon(self) -> None:
        pass


class FakeLauncher:
    """Starts a FakeStream each time, or says why not."""

    python = "python3"

    def __init__(self) -> None:
        self.streams: list[FakeStream] = []
        self.error: LaunchError | None = None
        self.num_tried = 0

    async def start(self, command: Sequence[str]) -> FakeStream:
        self.num_tried += 1
        if self.error is not None:
            raise self.error
        self.streams.append(FakeStream())
        return self.streams[-1]


class World:
    """A keeper of one part, whose pauses are asked for and then over at once."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.launcher = FakeLauncher()
        self.standing = Standing(pid=1, topology_hash="0")
        self.pauses_s: list[float] = []
        self.keeper = Keeper(self.standing, folder)
        self.kept = Kept(
            name="coordinator",
            launcher=self.launcher,
            make_spec=lambda: Spec(folder="~", command=(), files={}, env={}, silence_s=60.0),
            ready=re.compile("joined"),
            greet_s=DEADLINE_S,
            log_path=folder / "part.log",
        )
        monkeypatch.setattr(Restarts, "next_wait_s", self._next_wait_s)
        monkeypatch.setattr(keeper_module, "WRITE_AGAIN_S", 0.0)

    def _next_wait_s(self, now_s: float) -> float:
        self.pauses_s.append(now_s)
        return 0.0

    async def is_so(self, condition: Callable[[], bool]) -> None:
        await until(condition, lambda: f"it: {self.kept.part}", DEADLINE_S)

    async def come_up(self, number: int) -> None:
        """Have the part's so-manieth start print that it is up."""
        await self.is_so(lambda: len(self.launcher.streams) == number)
        self.launcher.streams[-1].say("joined")
        await self.is_so(lambda: self.kept.part.state == UP)


async def test_a_disk_that_is_full_ends_no_care(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, is_full = Standing.write, False

    def refuse(standing: Standing, folder: Path) -> None:
        if is_full:
            raise OSError(errno.ENOSPC, "No space left on device", str(folder))
        write(standing, folder)

    monkeypatch.setattr(Standing, "write", refuse)
    world = World(tmp_path, monkeypatch)
    world.keeper.keep(world.kept)
    await world.come_up(1)
    is_full = True
    world.launcher.streams[-1].end(8)
    await world.come_up(2)  # its line that it is up is read, too
    found = read(tmp_path)
    assert found is not None
    assert found.parts["coordinator"].restarts == 0, "nothing could be written"
    is_full = False
    await world.is_so(lambda: _restarts(tmp_path) == 1)
    await world.keeper.stop()


def _restarts(folder: Path) -> int:
    found = read(folder)
    return -1 if found is None else found.parts["coordinator"].restarts


async def test_a_part_that_was_up_is_never_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path, monkeypatch)
    world.keeper.keep(world.kept)
    await world.come_up(1)
    world.launcher.error = LaunchError("host_unreachable", "no route", "see the network")
    world.launcher.streams[-1].end(1)
    await world.is_so(lambda: world.launcher.num_tried > 20)
    part = world.kept.part
    assert (part.state, part.reason, part.cure) == (
        *(RESTARTING, "host_unreachable", "see the network"),
    )
    world.launcher.error = None
    await world.come_up(2)
    assert (part.reason, part.message, part.cure) == ("", "", "")
    await world.keeper.stop()


async def test_a_part_that_was_never_up_waits_until_it_is_woken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path, monkeypatch)
    world.launcher.error = LaunchError("python_missing", "no python", "install it")
    world.keeper.keep(world.kept)
    assert world.kept.part.state == STARTING
    await world.is_so(lambda: world.kept.part.state == FAILED)
    assert world.pauses_s == []
    world.launcher.error = None
    world.keeper.wake()
    await world.come_up(1)
    await world.keeper.stop()


async def test_a_secret_that_cannot_be_read_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path, monkeypatch)
    world.keeper.keep(world.kept)
    await world.come_up(1)
    make_spec, num_asked = world.kept.make_spec, 0

    def refuse_once() -> Spec:
        nonlocal num_asked
        num_asked += 1
        if num_asked == 1:
            raise PermissionError(errno.EACCES, "Permission denied", "ca.pem")
        return make_spec()

    world.kept.make_spec = refuse_once
    world.launcher.streams[-1].end(1)
    await world.come_up(2)
    assert num_asked == 2
    await world.keeper.stop()
