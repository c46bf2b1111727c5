"""What is said of input that no command can use.

The file is named, and nothing of it is our bug.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import pytest

from isthmus.orchestrator.cli.command_errors import describe
from isthmus.protos.checkpoint.manifest import Manifest
from tests.cli.conftest import Isthmus
from tests.fakes.worlds import topology_text

READERS = (
    ("validate",),
    ("plan",),
    ("simulate",),
    ("launch",),
    ("bench",),
    ("topology", "show"),
    ("probe",),
    ("emulate",),
)


@pytest.mark.parametrize("command", READERS, ids=" ".join)
@pytest.mark.parametrize(
    ("content", "word"),
    [
        (None, "Is a directory"),
        (b"", "empty"),
        (b"name: \xff", "not UTF-8"),
        (b"\x00", "U+0000"),
        (b"5", "mapping"),
        (b"[1, 2", "but got"),
        (b" " * (2 << 20), "larger than 1 MiB"),
    ],
    ids=["folder", "empty", "latin", "binary", "number", "open", "large"],
)
def test_a_file_that_is_no_document_is_told_by_name(
    isthmus: Isthmus, tmp_path: Path, command: tuple[str, ...], content: bytes | None, word: str
) -> None:
    path = tmp_path / "it.yaml"
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content)
    done = isthmus(*command, path, "--json")
    assert done.code == 2, done.err
    assert str(path) in done.err
    assert word in done.err
    assert "Traceback" not in done.err
    error = done.envelope["error"]
    assert error["code"] == "INVALID_CONFIG"
    assert error["where"][0]["file"] == str(path)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("plan", "topology.yaml"), "this is a topology: want a job here"),
        (("simulate", "topology.yaml"), "this is a topology: want a job here"),
        (("plan", "job.yaml", "--topology", "job.yaml"), "this is a job: want a topology here"),
        (("topology", "show", "job.yaml"), "this is a job: want a topology here"),
        (("probe", "job.yaml"), "this is a job: want a topology here"),
        (("launch", "job.yaml", "--plan", "job.yaml"), "this is a job: want a plan here"),
        (("plan", "job.yaml", "--diff", "topology.yaml"), "this is a topology: want a plan here"),
        (("simulate", "job.yaml", "--faults", "job.yaml"), "want a fault script here"),
    ],
    ids=" ".join,
)
def test_a_document_of_another_kind_is_one_mistake(
    isthmus: Isthmus, files: Path, arguments: tuple[str, ...], told: str
) -> None:
    named = [files / each if each.endswith(".yaml") else each for each in arguments]
    done = isthmus(*named, "--json")
    assert done.code == 2, done.err
    assert len(done.envelope["error"]["where"]) == 1
    assert told in done.envelope["error"]["message"]


def test_a_mistake_of_a_whole_file_names_it_in_the_message(
    isthmus: Isthmus, tmp_path: Path
) -> None:
    message = isthmus("validate", tmp_path, "--json").envelope["error"]["message"]
    assert message == f"1 mistake: {tmp_path}: Is a directory"


def test_a_device_where_a_folder_should_be_is_no_bug_of_ours(isthmus: Isthmus, files: Path) -> None:
    done = isthmus("simulate", files / "job.yaml", "--out", "/dev/full", "--json")
    assert done.envelope["error"]["code"] == "FILE_ERROR"
    assert done.envelope["error"]["message"].startswith("/dev/full: ")


@pytest.mark.parametrize(
    "arguments",
    [
        ("logs", "--tail", "9" * 20),
        ("simulate", "job.yaml", "--local-steps", "9" * 20),
        ("simulate", "job.yaml", "--local-steps", "300", "--fragments", "257"),
        ("simulate", "job.yaml", "--steps", "1e3"),
        ("wait", "--timeout", "9"),
    ],
)
def test_numbers_beyond_their_range_are_usage(isthmus: Isthmus, arguments: tuple[str, ...]) -> None:
    assert isthmus(*arguments, "--json").envelope["error"]["code"] == "USAGE"


@pytest.mark.parametrize("option", ["--coordinator", "--node"])
def test_a_port_that_cannot_be_dialled_is_usage(
    isthmus: Isthmus, files: Path, tmp_path: Path, option: str
) -> None:
    """The command refuses it: the process that the command becomes knows no envelope."""
    addresses = {"--coordinator": "127.0.0.1:1", "--node": "127.0.0.1:1", option: "127.0.0.1:0"}
    given = [word for pair in addresses.items() for word in pair]
    place = ("--topology", files / "topology.yaml", "--state", tmp_path / "state")
    error = isthmus("agent", "--site", "a", *place, *given, "--json").envelope["error"]
    assert error["code"] == "USAGE"
    assert "nobody listens on port 0; got '127.0.0.1:0'" in error["message"]


def test_arguments_that_are_no_text_are_refused_and_shown(isthmus: Isthmus, files: Path) -> None:
    """As a shell gives them that was typed another encoding than UTF-8."""
    strange = os.fsdecode(b"\xff\xfe")
    done = isthmus("validate", files / "job.yaml", "--set", f"{strange}=1", "--json")
    assert done.envelope["error"]["code"] == "INVALID_CONFIG"
    assert "want path=value" in done.envelope["error"]["message"]
    missing = isthmus("validate", files / strange)
    assert missing.code == 2
    assert "No such file" in missing.err


def test_a_bug_is_told_even_where_its_traceback_cannot_be_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "absent"))
    failure = describe(ZeroDivisionError("one by none"))
    assert failure.code == "INTERNAL"
    assert "ZeroDivisionError: one by none; the traceback could not be kept" in failure.args[0]
    assert "ZeroDivisionError" in failure.details


@pytest.mark.parametrize(
    ("place", "code", "word"),
    [("/nowhere/at/all", "NO_CHECKPOINT", "nothing is there"), ("no://b/c", "FILE_ERROR", "known")],
)
@pytest.mark.parametrize("action", ["list", "verify", "export"])
def test_checkpoints_at_a_place_that_is_none(
    isthmus: Isthmus, action: str, place: str, code: str, word: str
) -> None:
    done = isthmus("checkpoints", action, place, "--json")
    assert done.envelope["error"]["code"] == code
    assert word in done.envelope["error"]["message"]


def test_an_export_that_fails_says_why_once(
    isthmus: Isthmus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "step-00000001"
    place.mkdir()
    manifest = Manifest(run="run", job="job", step=1, written_s=0.0, ranks={})
    (place / "manifest.json").write_bytes(manifest.to_bytes())
    failing = tmp_path / "python"
    failing.write_text("#!/bin/sh\necho a traceback >&2\necho no space >&2\nexit 1\n")
    failing.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(failing))
    done = isthmus("checkpoints", "export", str(place), "--out", str(tmp_path / "x"))
    assert done.err.count("no space") == 1
    assert "a traceback\n" in done.err


def test_a_damaged_checkpoint_is_not_to_be_verified_again(isthmus: Isthmus, tmp_path: Path) -> None:
    place = tmp_path / "step-00000001"
    place.mkdir()
    (place / "manifest.json").write_text("cut sho")
    done = isthmus("checkpoints", "verify", str(place), "--json")
    assert done.envelope["error"]["code"] == "BAD_CHECKPOINT"
    assert "verify" not in done.envelope["error"]["hint"]


@pytest.mark.parametrize(
    ("words", "mistake"),
    [
        (("slurm",), "coordinator.bind: a port has to be named"),
        (("slurm", "--coordinator", "127.0.0.1:7443"), "no site has `launcher: {kind: slurm}`"),
        (("kubernetes", "--image", "i"), "coordinator.bind: a port has to be named"),
    ],
)
def test_what_cannot_be_rendered_names_the_topology(
    isthmus: Isthmus, tmp_path: Path, words: tuple[str, ...], mistake: str
) -> None:
    path = tmp_path / "topology.yaml"
    path.write_text(topology_text())
    kind, *options = words
    done = isthmus("render", kind, path, *options)
    assert done.code == 2, done.err
    assert done.err.startswith(f"{path}: error: {mistake}")
