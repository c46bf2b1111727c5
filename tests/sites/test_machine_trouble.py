"""What a machine lacks is told by name: memory after SIGKILL, and room on the disk."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import NamedTuple

import pytest

from isthmus.sites.node import machine_trouble
from isthmus.sites.node.failures import describe_end
from isthmus.sites.node.kernel_kills import KernelKills
from isthmus.sites.node.machine_trouble import MachineTrouble

MIB = 1 << 20


def counter(root: Path, name: str, count: int) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"low 0\noom_kill {count}\nmax 7\n")


@pytest.mark.parametrize(
    ("membership", "name", "where"),
    [
        ("0::/jobs/7\n", "sys/fs/cgroup/jobs/7/memory.events", "container or machine"),
        ("0::/host/path\n", "sys/fs/cgroup/memory.events", "container or machine"),
        ("4:memory:/api/7\n1:cpu:/\n", "sys/fs/cgroup/memory/api/7/memory.oom_control",
         "container or machine"),
        ("1:cpu:/\n", "proc/vmstat", "machine"),
    ],
    ids=["version 2", "a container's", "version 1", "the machine's"],
)  # fmt: skip
def test_the_oom_killer_is_named_where_its_count_has_risen(
    tmp_path: Path, membership: str, name: str, where: str
) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/self").mkdir()
    (tmp_path / "proc/self/cgroup").write_text(membership)
    counter(tmp_path, name, 3)
    kills = KernelKills(tmp_path)
    assert kills.explain(-9) == "", "somebody's kill"
    counter(tmp_path, name, 5)
    told = describe_end(-9, kills.explain(-9))
    assert told.startswith("was killed by SIGKILL: the kernel's OOM killer has killed 2 of its")
    assert told.endswith(f"the {where} has no memory left")
    assert kills.explain(-15) == ""
    assert kills.explain(1) == ""


def test_a_machine_that_counts_nothing_explains_nothing(tmp_path: Path) -> None:
    kills = KernelKills(tmp_path)
    assert kills.explain(-9) == ""
    assert describe_end(-9) == "was killed by SIGKILL"


class Usage(NamedTuple):
    total: int
    used: int
    free: int


def test_a_disk_is_told_once_when_it_is_full_and_when_it_has_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    trouble = MachineTrouble(tmp_path, told.append)
    for free in (500, 10, 0, 40, 100, 100):
        usage = Usage(1000 * MIB, 0, free * MIB)
        monkeypatch.setattr(shutil, "disk_usage", lambda _, usage=usage: usage)
        trouble.look()
    assert told == [
        f"the disk of {tmp_path} is full, or nearly: 10MiB of 1000MiB are left",
        f"the disk of {tmp_path} has room again: 100MiB of 1000MiB are left",
    ]


def test_a_folder_that_is_gone_is_told_by_whoever_uses_it(tmp_path: Path) -> None:
    told: list[str] = []
    MachineTrouble(tmp_path / "gone", told.append).look()
    assert told == []
    assert machine_trouble.LOOK_S <= 5
