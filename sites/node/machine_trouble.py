"""Reports a shortage of disk space or memory on a node while it lasts."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path
from signal import SIGKILL

from isthmus.sites.node.kernel_kills import KernelKills
from isthmus.topology.spec.units import format_size

LOOK_S = 2.0
"""Interval between two checks."""
LEAST_FREE_BYTES = 32 << 20
"""Free disk space below which logs and state are about to be cut off."""


class MachineTrouble:
    """Checks the disk space and memory of a node."""

    def __init__(self, folder: Path, tell: Callable[[str], None]) -> None:
        """`folder` is where the node's processes write. `tell` gets a line for each change."""
        self._folder = folder
        self._tell = tell
        self._kernel_kills = KernelKills()
        self._has_room = True
        self._killed = ""

    async def watch(self) -> None:
        """Check periodically. Never returns."""
        while True:
            await asyncio.to_thread(self.look)
            await asyncio.sleep(LOOK_S)

    def look(self) -> None:
        """Report changes since the last check."""
        try:
            disk = shutil.disk_usage(self._folder)
        except OSError:
            return  # gone, or a hanging disk: its users report that
        least = LEAST_FREE_BYTES if self._has_room else 2 * LEAST_FREE_BYTES
        has_room = disk.free >= min(least, disk.total // 2)
        if has_room != self._has_room:
            self._has_room = has_room
            left = f"{format_size(disk.free)} of {format_size(disk.total)}"
            told = "has room again" if has_room else "is full, or nearly"
            self._tell(f"the disk of {self._folder} {told}: {left} are left")
        killed = self._kernel_kills.explain(-SIGKILL)
        if killed and killed != self._killed:
            self._killed = killed
            self._tell(killed)
