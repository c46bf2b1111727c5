"""What a launch says of a job's files: commit, digest, and what has changed since which run."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from isthmus.orchestrator.api import code as job_code
from isthmus.orchestrator.api.code import JobCode
from isthmus.orchestrator.documents import load_pair
from isthmus.orchestrator.run_folder.home import claim_run_folder
from isthmus.topology.spec.errors import ConfigError


@pytest.fixture
def job(files: Path) -> Path:
    path = files / "job.yaml"
    path.write_text(path.read_text().replace("# entrypoint", "entrypoint"))
    (files / "train.py").write_text("one\nrate = 0.1\n")
    return path


def code_of(
    job: Path, home: Path, run_id: str, *, is_remote: bool = True, resumed: str | None = None
) -> JobCode:
    """Pack a job's files, as a launch does, and remember them as those of a run."""
    code = JobCode(load_pair(job), home, run_id, is_remote=is_remote, resumed=resumed)
    folder, _ = claim_run_folder(home, run_id, "name: test")
    code.remember(folder, home)
    return code


def test_a_changed_line_is_named_since_the_run_before_or_the_resumed_one(
    job: Path, home: Path
) -> None:
    first = code_of(job, home, "r1").message
    assert (first.since, list(first.changes), first.is_carried) == ("", [], True)
    (job.parent / "train.py").write_text("one\nrate = 0.2\n")
    second = code_of(job, home, "r2", is_remote=False).message
    lines = ["train.py: changed", "  line 2: -rate = 0.1", "  line 2: +rate = 0.2"]
    assert (second.since, list(second.changes), second.is_carried) == ("r1", lines, False)
    assert second.digest != first.digest
    third = code_of(job, home, "r3").message
    assert (third.since, list(third.changes), third.digest) == ("r2", [], second.digest)
    resumed = code_of(job, home, "r4", resumed="r1").message
    assert (resumed.since, list(resumed.changes)) == ("r1", lines)


def test_the_commit_is_told_and_whether_files_have_changed_since(job: Path, home: Path) -> None:
    git = ["git", "-C", str(job.parent), "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "first"]):
        subprocess.run([*git, *words], check=True)
    head = subprocess.check_output([*git, "rev-parse", "HEAD"], text=True).strip()
    message = code_of(job, home, "r1").message
    assert (message.commit, message.is_changed) == (head, False)
    (job.parent / "train.py").write_text("other")
    assert code_of(job, home, "r2").message.is_changed


def test_what_cannot_be_carried_is_told_at_its_line(
    job: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (job.parent / ".gitignore").write_text("*.py\n")
    with pytest.raises(ConfigError, match=r"job\.yaml:\d+:\d+: error: .*train\.py is left out"):
        code_of(job, home, "r1")
    (job.parent / ".gitignore").unlink()
    (job.parent / "data").symlink_to("/")
    with pytest.raises(ConfigError, match=r"job\.yaml:\d+:\d+: error: .*data: the link leads out"):
        code_of(job, home, "r2")
    here = code_of(job, home, "r3", is_remote=False).message
    assert (here.digest, here.source) == ("", str(job.parent)), "where it lies nothing is refused"


def test_sites_that_have_the_files_are_given_none(job: Path, home: Path) -> None:
    pair = load_pair(job)
    first, *others = (replace(site, job_folder="/data") for site in pair.topology.sites)
    all_have = replace(pair, topology=replace(pair.topology, sites=(first, *others)))
    assert not JobCode(all_have, home, "r1", is_remote=True).message.is_carried
    lacking = replace(first, job_folder="")
    one_lacks = replace(pair, topology=replace(pair.topology, sites=(lacking, *others)))
    assert JobCode(one_lacks, home, "r1", is_remote=True).message.is_carried


def test_a_trainer_without_files_has_no_code(files: Path, home: Path) -> None:
    code = JobCode(load_pair(files / "job.yaml"), home, "r1", is_remote=True)
    assert (code.packed, code.message.source) == (None, "")
    assert job_code.root_of(load_pair(files / "job.yaml")) == files
