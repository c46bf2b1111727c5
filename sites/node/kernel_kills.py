"""Detects kills by the kernel's OOM killer, which leave no message in the killed process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from signal import SIGKILL

_COUNTERS = ("memory.events", "memory.oom_control")
"""Files of a cgroup (version 2, version 1) with a line `oom_kill N`."""


class KernelKills:
    """Counts OOM kills since its creation, in this cgroup and its ancestors.

    Without a cgroup counter, it counts those of the machine.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._before = self._counts()

    def explain(self, exit_code: int) -> str:
        """Return a line about OOM kills if a process ended by SIGKILL; else an empty string."""
        if exit_code != -SIGKILL:
            return ""
        for path, count in self._counts().items():
            num_killed = count - self._before.get(path, count)
            if num_killed > 0:
                where = "machine" if path.name == "vmstat" else "container or machine"
                return (
                    f"the kernel's OOM killer has killed {num_killed} of its processes since the "
                    f"start, as {path} counts: the {where} has no memory left"
                )
        return ""

    def _counts(self) -> dict[Path, int]:
        """Return the value of each existing counter, the nearest cgroup's first."""
        counts = {}
        for path in self._paths():
            try:
                words = [line.split() for line in path.read_text().splitlines()]
                counts[path] = next(int(line[1]) for line in words if line[:1] == ["oom_kill"])
            except (OSError, ValueError, IndexError, StopIteration):
                continue
        return counts

    def _paths(self) -> Iterator[Path]:
        try:
            lines = (self._root / "proc/self/cgroup").read_text().splitlines()
        except OSError:
            lines = []
        for line in lines:
            _, _, rest = line.partition(":")
            controllers, _, inside = rest.partition(":")
            if controllers not in {"", "memory"}:
                continue
            top = self._root / "sys/fs/cgroup" / controllers
            # In a container the path may be the host's, and the mount the container's own.
            for folder in (top / inside.lstrip("/"), top):
                yield from (folder / name for name in _COUNTERS)
        yield self._root / "proc/vmstat"
