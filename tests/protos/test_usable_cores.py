"""A process counts the cores that it may use."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from isthmus.protos.usable_cores import usable_cores


@pytest.fixture(autouse=True)
def _sixteen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(16)))


def limited(folder: Path, limits: dict[str, str], own: str) -> int:
    """Return the cores of a process in the cgroup `own`, where cgroups have limits."""
    for name, limit in limits.items():
        (folder / "cgroups" / name).mkdir(parents=True, exist_ok=True)
        (folder / "cgroups" / name / "cpu.max").write_text(limit)
    (folder / "own").write_text(f"1:cpu:/other\n0::/{own}\n")
    return usable_cores(folder / "cgroups", folder / "own")


def test_a_process_without_limits_may_use_what_its_affinity_says(tmp_path: Path) -> None:
    assert usable_cores(tmp_path, tmp_path / "none") == 16
    assert limited(tmp_path, {"pod": "max 100000\n"}, "pod") == 16


def test_the_narrowest_of_all_cgroups_around_it_counts(tmp_path: Path) -> None:
    limits = {"pod": "350000 100000\n", "pod/box": "800000 100000\n", "other": "1000 100000\n"}
    assert limited(tmp_path, limits, "pod/box") == 4, "3.5 keep four busy"


@pytest.mark.parametrize("text", ["", "fast 100000", "100 0", "1 2 3"])
def test_a_limit_that_cannot_be_read_is_none(tmp_path: Path, text: str) -> None:
    assert limited(tmp_path, {"pod": text}, "pod") == 16


def test_there_is_one_core_at_least(tmp_path: Path) -> None:
    assert limited(tmp_path, {"pod": "1000 100000"}, "pod") == 1
