"""Where a user's script runs, with which arguments and environment, on one machine and over SSH."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.sshd import Sshd, sshd
from tests.multiprocess.harness import Bench, job_yaml, topology_yaml

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

SCRIPT = Path(__file__).parent / "scripts" / "user_place.py"
SECRET = "a-secret-that-stands-nowhere-5b1f"
JOB = """\
arguments: [--data, data/text.txt, --steps, "2"]
env: {COLOUR: red}
pass_env: [TOKEN_OF_TEST]
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Sshd]:
    with sshd(tmp_path / "sshd") as made:
        yield made


def project(folder: Path, text: str) -> None:
    """Lay a script and its data into a folder."""
    (folder / "data").mkdir(parents=True)
    (folder / "data" / "text.txt").write_text(text)
    shutil.copy(SCRIPT, folder / "train.py")


def told(run: Bench) -> dict[str, dict[str, Any]]:
    """Return what the first rank of each site found."""
    logs = run.isthmus("logs", "--json").check().envelope["data"]["lines"]
    found = [json.loads(line["text"]) for line in logs if line["text"].startswith('{"site"')]
    return {each["site"]: each for each in found}


def holding_secret(folder: Path) -> list[Path]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return [path for path in files if SECRET.encode() in path.read_bytes()]


@pytest.mark.exhaustive
def test_a_script_runs_in_the_folder_of_its_job_with_arguments_and_environment(
    run: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    project(run.folder, "words")
    monkeypatch.setenv("TOKEN_OF_TEST", SECRET)
    monkeypatch.delenv("COLOUR", raising=False)
    job = run.write(topology_yaml([(1, 1)] * 2), job_yaml(entrypoint="train.py") + JOB)
    run.isthmus("launch", str(job), "--", "--steps", "3").check()
    found = told(run)
    assert [each["main"] for _, each in sorted(found.items())] == [True, False]
    for each in found.values():
        assert each["folder"] == str(run.folder)
        assert (each["text"], each["steps"], each["colour"]) == ("words", 3, "red")
        assert each["secret"] == hashlib.sha256(SECRET.encode()).hexdigest()
        assert each["shown"] == []
    assert holding_secret(run.folder) == []


@pytest.mark.exhaustive
def test_a_missing_argument_is_told_in_the_words_of_the_script(run: Bench) -> None:
    project(run.folder, "words")
    result = run.launch(topology_yaml([(1, 1)] * 2), job_yaml(entrypoint="train.py")).check(1)
    message = result.envelope["error"]["message"]
    assert "the following arguments are required: --data" in message


@pytest.mark.exhaustive
def test_over_ssh_it_runs_where_the_topology_says(
    run: Bench, server: Sshd, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Site a is given the job's files; at site b they lie already."""
    here, there = run.folder / "here", run.folder / "there"
    project(here, "of a")
    project(there, "of b")
    monkeypatch.setenv("TOKEN_OF_TEST", SECRET)
    text = topology_yaml([(1, 1)] * 2, emulate=False, addresses=["127.0.0.2", "127.0.0.3"])
    for site in "ab":
        launcher = server.launcher(sys.executable, run.folder / f"at-{site}")
        more = f"job_folder: {there}, " if site == "b" else ""
        text = text.replace(f"name: {site}, ", f"name: {site}, {more}launcher: {launcher}, ")
    (here / "topology.yaml").write_text(text)
    (here / "job.yaml").write_text(job_yaml(entrypoint="train.py") + JOB)
    run.isthmus("up", str(here / "topology.yaml")).check()
    run.isthmus("launch", str(here / "job.yaml")).check()
    found = told(run)
    assert Path(found["a"]["folder"]).is_relative_to(run.folder / "at-a")
    assert found["b"]["folder"] == str(there)
    assert {site: each["text"] for site, each in found.items()} == {"a": "of a", "b": "of b"}
    for each in found.values():
        assert each["secret"] == hashlib.sha256(SECRET.encode()).hexdigest()
        assert each["shown"] == []
    (there / "train.py").unlink()
    (there / "data" / "text.txt").unlink()
    (there / "data").rmdir()
    there.rmdir()
    failed = run.isthmus("launch", str(here / "job.yaml"), "--json").check(1)
    assert f"there is no file {there / 'train.py'} at site b" in failed.envelope["error"]["message"]
    assert "job_folder" in failed.envelope["error"]["message"]
    run.isthmus("down", str(here / "topology.yaml")).check()
    assert holding_secret(run.folder) == []
