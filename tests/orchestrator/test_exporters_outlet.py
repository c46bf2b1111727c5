"""A tool that is slow, broken or gone costs one line, and nothing else."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

from isthmus.orchestrator.exporters.outlet import Outlet
from isthmus.orchestrator.exporters.tool import Update
from tests.fakes.waiting import wait_for

UPDATE = Update(samples=())
LAST = Update(samples=(), is_last=True)
NOTHING = Update(samples=(), state="with nothing to send")


@dataclass
class FakeTool:
    """Fails or waits as it is told."""

    fails: bool = False
    cannot_open: bool = False
    waits: threading.Event = field(default_factory=threading.Event)
    sent: list[Update] = field(default_factory=list)
    num_opened: int = 0
    is_closed: bool = False

    def __post_init__(self) -> None:
        self.waits.set()

    def open(self) -> str:
        self.num_opened += 1
        if self.cannot_open:
            raise OSError("no such place as this")
        return "http://there"

    def send(self, update: Update) -> bool:
        self.waits.wait(10)
        if update is NOTHING:
            return False
        if self.fails:
            raise ConnectionError("nobody answers there")
        self.sent.append(update)
        return True

    def close(self) -> None:
        self.is_closed = True


def finish(outlet: Outlet, within_s: float = 10.0) -> None:
    outlet.end()
    outlet.wait(time.monotonic() + within_s)


@dataclass
class Said:
    lines: list[tuple[str, bool]] = field(default_factory=list)

    def __call__(self, text: str, is_warning: bool) -> None:
        self.lines.append((text, is_warning))

    @property
    def warnings(self) -> list[str]:
        return [text for text, is_warning in self.lines if is_warning]


def test_all_is_handed_over_in_order_and_closed() -> None:
    tool, said = FakeTool(), Said()
    outlet = Outlet("tool", tool, said)
    outlet.start()
    updates = [Update(samples=(), state=str(number)) for number in range(50)]
    for each in updates:
        outlet.put(each)
    finish(outlet)
    assert tool.sent == updates
    assert tool.is_closed
    assert said.lines == [("tool: http://there", False)]


def test_one_that_always_fails_is_told_once_and_counted_at_the_end() -> None:
    tool, said = FakeTool(fails=True), Said()
    outlet = Outlet("tool", tool, said)
    outlet.start()
    for _ in range(20):
        outlet.put(UPDATE)
        outlet.put(NOTHING)
    finish(outlet)
    assert said.warnings == [
        "tool gets no data: ConnectionError: nobody answers there; the run continues without it",
        "tool has missed 20 updates",
    ]


def test_one_that_works_again_is_told() -> None:
    tool, said = FakeTool(fails=True), Said()
    outlet = Outlet("tool", tool, said)
    outlet.start()
    outlet.put(UPDATE)
    wait_for(lambda: len(said.warnings) == 1)
    tool.fails = False
    outlet.put(UPDATE)
    finish(outlet)
    assert ("tool gets data again", False) in said.lines
    assert tool.sent == [UPDATE]


def test_one_that_fails_now_and_then_does_not_fill_the_runs_notes() -> None:
    tool, said = FakeTool(), Said()
    outlet = Outlet("tool", tool, said)
    outlet.start()
    for number in range(20):
        tool.fails = True
        outlet.put(UPDATE)
        wait_for(lambda number=number: outlet._num_missed == number + 1)  # type: ignore[misc]
        tool.fails = False
        outlet.put(UPDATE)
        wait_for(lambda number=number: len(tool.sent) == number + 1)  # type: ignore[misc]
    finish(outlet)
    assert len(said.warnings) == 6
    assert said.warnings[4].endswith("the run continues without it; not told again")
    assert said.warnings[5] == "tool has missed 20 updates"


def test_one_that_cannot_be_opened_is_tried_again_later_and_at_the_end() -> None:
    tool, said, now_s = FakeTool(cannot_open=True), Said(), [100.0]
    outlet = Outlet("tool", tool, said, now_s=lambda: now_s[0])
    outlet.start()
    for _ in range(5):
        outlet.put(UPDATE)
    wait_for(lambda: outlet._num_missed == 5)
    assert tool.num_opened == 1
    now_s[0] += 11
    outlet.put(UPDATE)
    wait_for(lambda: tool.num_opened == 2)
    tool.cannot_open = False
    outlet.put(LAST)
    outlet.end()
    outlet.wait(now_s[0] + 10)
    assert tool.num_opened == 3
    assert tool.sent == [LAST]
    assert len(said.warnings) == 2


def test_a_slow_one_never_makes_others_wait() -> None:
    tool, said = FakeTool(), Said()
    tool.waits.clear()
    outlet = Outlet("tool", tool, said, max_waiting=4)
    outlet.start()
    began_s = time.monotonic()
    for _ in range(100):
        outlet.put(UPDATE)
    assert time.monotonic() - began_s < 1
    assert said.warnings == ["tool does not keep up; what it cannot take is dropped"]
    tool.waits.set()
    finish(outlet)
    assert len(tool.sent) in {4, 5}
    assert said.warnings[1] == f"tool has missed {100 - len(tool.sent)} updates"


def test_one_that_never_ends_is_left_behind() -> None:
    tool, said = FakeTool(), Said()
    tool.waits.clear()
    outlet = Outlet("tool", tool, said)
    outlet.start()
    for _ in range(3):
        outlet.put(UPDATE)
    wait_for(lambda: bool(said.lines))
    finish(outlet, 0.05)
    assert said.warnings == ["tool has missed 0 updates, and was not done at the end"]
    tool.waits.set()
