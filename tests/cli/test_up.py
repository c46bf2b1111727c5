"""`isthmus up` waits for what its keeper says of coordinator and sites."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from isthmus.orchestrator.api.errors import CommandError
from isthmus.orchestrator.cli import up
from isthmus.orchestrator.launchers.standing import (
    COORDINATOR,
    FAILED,
    LOG,
    RESTARTING,
    UP,
    Part,
    Standing,
    part_of_site,
)
from isthmus.orchestrator.run_folder.state_lock import LOCK, lock
from isthmus.protos.catalogue import CATALOGUE
from isthmus.topology.documents.load import load_topology
from isthmus.topology.spec.hashing import topology_hash
from tests.fakes.worlds import topology_text

TIMEOUT_S = 120.0


class World:
    """A keeper's file; the clock moves when the command waits, and then the file changes."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.lock = lock(folder / LOCK)  # as its keeper has it
        self.topology = load_topology(topology_text(), "topology.yaml")
        self.now_s = 0.0
        self.said: list[str] = []
        self.then: Callable[[], None] = lambda: None
        clock = SimpleNamespace(monotonic=lambda: self.now_s, sleep=self._sleep)
        monkeypatch.setattr(up, "time", clock)

    def write(self, b: Part) -> None:
        parts = {COORDINATOR: Part(UP), part_of_site("a"): Part(UP), part_of_site("b"): b}
        own_hash = topology_hash(self.topology)
        Standing(pid=1, topology_hash=own_hash, parts=parts).write(self.folder)

    def wait(self, process: object = None) -> Standing:
        output: Any = SimpleNamespace(note=self.said.append)
        keeper: subprocess.Popen[bytes] | None = process  # type: ignore[assignment]
        return up._wait(output, self.folder, self.topology, keeper, TIMEOUT_S)

    def _sleep(self, wait_s: float) -> None:
        self.now_s += 60.0
        self.then()


BROKEN = ("python_missing", "no python", "install it")


def test_what_was_never_up_fails_the_command_that_started_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path, monkeypatch)
    world.write(Part(FAILED, *BROKEN))
    with pytest.raises(CommandError, match="site b: no python"):
        world.wait(SimpleNamespace(pid=1, poll=lambda: None))
    assert world.now_s == 0.0


def test_up_again_waits_for_what_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path, monkeypatch)
    world.write(Part(FAILED, *BROKEN))
    world.then = lambda: world.write(Part(UP, restarts=1))
    assert world.wait().sites["b"].state == UP


def test_up_again_says_what_fails_and_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(tmp_path, monkeypatch)
    world.write(Part(RESTARTING, *BROKEN))
    with pytest.raises(CommandError, match="site b: no python") as raised:
        world.wait()
    assert world.now_s > TIMEOUT_S
    assert world.said.count("site b: no python") == 1
    where: Any = raised.value.where
    (part,) = where["parts"]
    assert (part["reason"], part["cure"]) == ("python_missing", "install it")
    assert "what is running stays up" in CATALOGUE[raised.value.code].hint


def test_up_again_ends_with_the_keeper_that_it_waits_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path, monkeypatch)
    world.write(Part())
    (tmp_path / LOG).write_text("keeper: asked to end by signal 15\n")
    world.then = lambda: os.close(world.lock)
    with pytest.raises(CommandError, match="keeper: asked to end by signal 15"):
        world.wait()
    assert world.now_s < TIMEOUT_S
