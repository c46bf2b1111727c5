"""What a rank says of its machine: versions, and the commit of its script, if there is one."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from isthmus.protos import metrics
from isthmus.protos.errors import PeerLostError
from isthmus.sites.worker.api.own_machine import (
    Labels,
    commit_labels,
    machine_labels,
    report_machine,
)

needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="needs git")


def git(folder: Path, *arguments: str) -> None:
    who = ["-c", "user.name=n", "-c", "user.email=e@example.com", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *who, *arguments], cwd=folder, check=True, capture_output=True)


@needs_git
def test_the_commit_and_whether_files_were_changed_since(tmp_path: Path) -> None:
    script = tmp_path / "code" / "train.py"
    script.parent.mkdir()
    script.write_text("a = 1\n")
    assert commit_labels(script.parent) == {}  # no repository
    git(tmp_path, "init", "--quiet")
    assert commit_labels(script.parent) == {}  # no commit
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "-m", "first")
    labels = commit_labels(script.parent)
    assert len(labels[metrics.COMMIT]) >= 40
    assert labels[metrics.CHANGED] == "0"
    (tmp_path / "untracked").write_text("x")
    assert commit_labels(script.parent) == labels
    script.write_text("a = 2\n")
    assert commit_labels(script.parent) == labels | {metrics.CHANGED: "1"}


def test_without_git_there_is_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert commit_labels(tmp_path) == {}
    assert commit_labels(tmp_path / "missing") == {}


def test_versions_are_told() -> None:
    labels = machine_labels(torch.device("cpu"))
    assert labels[metrics.TORCH] == torch.__version__
    assert labels[metrics.CORES].isdecimal()
    assert labels[metrics.BOOT] == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert metrics.CUDA not in labels
    assert all(labels.values())


def test_it_is_sent_once_even_to_a_gateway_that_has_gone() -> None:
    sent: list[Labels] = []

    def send(labels: Labels) -> None:
        sent.append(labels)
        raise PeerLostError("the gateway ended")

    report_machine(torch.device("cpu"), None, send).join()
    [labels] = sent
    assert metrics.HOST in labels
    assert metrics.COMMIT not in labels
