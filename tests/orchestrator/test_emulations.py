"""Folders of emulations: claimed by a lock, found while it is held, cleaned when it is not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from isthmus.orchestrator.emulator.backend import EmulatorError
from isthmus.orchestrator.emulator.emulations import (
    STATE,
    EmulationNotFoundError,
    Leftover,
    claimed,
    clean,
    find,
    folders,
    is_up,
    named_emulator,
)
from isthmus.orchestrator.emulator.standing import Answer, read_answer
from isthmus.protos.errors import StateConflictError
from isthmus.topology.spec.errors import ConfigError
from isthmus.topology.spec.json_lines import line_of


def test_a_name_is_claimed_by_one_and_free_again(tmp_path: Path) -> None:
    with claimed(tmp_path, None, "wan") as first, claimed(tmp_path, None, "wan") as second:
        assert (first.name, second.name) == ("wan", "wan-2")
        assert is_up(first)
        assert clean(tmp_path) == [], "both are up"
        with (
            pytest.raises(StateConflictError, match="wan is up already"),
            claimed(tmp_path, "wan", "x"),
        ):
            pass
    assert folders(tmp_path) == []
    assert not is_up(first), "nor does it come back by asking"
    with claimed(tmp_path, None, "a name with spaces") as folder:
        assert folder.name == "emulation"


def test_only_what_is_up_is_found(tmp_path: Path) -> None:
    with claimed(tmp_path, "w1", "x") as folder:
        (folder / STATE).write_text('{"name": "w1"}')
        assert find(tmp_path, "w1") == {"name": "w1"}
        with pytest.raises(EmulationNotFoundError, match="no emulation 'w2'; up are: w1"):
            find(tmp_path, "w2")
    for name in ("w1", "../w1", ""):
        with pytest.raises(EmulationNotFoundError, match="up are: none"):
            find(tmp_path, name)


@pytest.mark.multiprocess
def test_leftovers_are_removed_and_an_emulator_that_outlived_its_owner_ended(
    tmp_path: Path,
) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        created_s = psutil.Process(child.pid).create_time()
        for name, state in {
            "dead": {"emulator": {"pid": child.pid, "created_s": created_s}},
            "reused": {"emulator": {"pid": child.pid, "created_s": created_s - 60}},
            "odd": {"emulator": []},
        }.items():
            folder = tmp_path / "emulations" / name
            folder.mkdir(parents=True)
            (folder / STATE).write_text(json.dumps(state))
        with claimed(tmp_path, "living", "x"):
            assert clean(tmp_path) == [
                Leftover("dead", (child.pid,)),
                Leftover("odd", ()),
                Leftover("reused", ()),
            ]
            assert [folder.name for folder in folders(tmp_path)] == ["living"]
        assert not psutil.pid_exists(child.pid)
    finally:
        child.kill()
        child.communicate()


@pytest.mark.parametrize(
    ("named", "expected"),
    [
        ({"pid": 77, "created_s": 1.5}, (77, 1.5)),
        ({"pid": 77, "created_s": float("nan")}, None),
        ({"pid": 77, "created_s": 10**400}, None),
        ({"pid": 0, "created_s": 1.5}, None),
        ({"pid": -1, "created_s": 1.5}, None),
        ({"pid": True, "created_s": 1.5}, None),
        ({"pid": 10**30, "created_s": 1.5}, None),
        ({"pid": "77", "created_s": 1.5}, None),
        ([], None),
    ],
)
def test_only_what_surely_names_a_process_is_ever_ended(
    named: object, expected: tuple[int, float] | None
) -> None:
    """A time that is no number would be equal to that of any process."""
    assert named_emulator({"emulator": named}) == expected


@pytest.mark.parametrize(
    ("answer", "kind", "told"),
    [
        (b"", EmulatorError, "emulation to command: the line is not JSON"),
        (b"[" * 100_000, EmulatorError, "the line is not JSON"),
        (b"7", EmulatorError, "want an object with one of the ops answer"),
        (b'{"op": "answer", "changes": 7}', EmulatorError, r"answer\.changes: want a list"),
        (b'{"op": "answer", "failed": "gone"}', EmulatorError, "not done: gone"),
        (b'{"op": "answer", "wrong": "no such link"}', ConfigError, "no such link"),
    ],
)
def test_an_answer_that_is_none_is_told(answer: bytes, kind: type[Exception], told: str) -> None:
    with pytest.raises(kind, match=told):
        read_answer(answer)
    assert read_answer(line_of(Answer(changes=("a to b: cut",)))) == ("a to b: cut",)
