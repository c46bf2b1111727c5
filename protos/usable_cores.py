"""How many processor cores this process may use, which can be fewer than the machine has.

Containers and batch systems limit a process by a set of cores (`sched_setaffinity`), or by a share
of their time (cgroup's `cpu.max`, as Kubernetes' `limits.cpu` sets it).
"""

from __future__ import annotations

import math
import os
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")


def usable_cores(cgroups: Path = _CGROUPS, own: Path = _OWN) -> int:
    """Return the number of cores that this process may keep busy, at least 1.

    Args:
        cgroups: folder of the cgroups, of version 2.
        own: file that names this process's cgroup.
    """
    cores = len(os.sched_getaffinity(0))
    return max(1, math.ceil(min([cores, *_quotas(cgroups, own)])))


def _quotas(cgroups: Path, own: Path) -> list[float]:
    """Return the limits of this process's cgroup and all that hold it, in cores."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return []
    names = [line[3:] for line in lines if line.startswith("0::/")]
    folders = [cgroups / name.lstrip("/") for name in names]
    found = []
    for folder in {parent for each in folders for parent in (each, *each.parents)}:
        if folder != cgroups and cgroups not in folder.parents:
            continue
        try:
            quota, period = (folder / "cpu.max").read_text().split()
        except (OSError, ValueError):
            continue
        if quota.isdecimal() and period.isdecimal() and int(period):
            found.append(int(quota) / int(period))
    return found
