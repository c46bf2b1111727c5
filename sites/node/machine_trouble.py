"""What a machine has too little of for a run: room on its disk, and memory. Told while it lasts."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path
from signal import SIGKILL

from isthmus.sites.launcher.kernel_kills import KernelKills
from isthmus.topology.spec.units import format_size

LOOK_S = 2.0
"""Between two looks."""
LEAST_FREE_BYTES = 32 << 20
"""With less room than this, logs and state are about to be cut off."""


class MachineTrouble:
    """Looks at what a node's processes need of their machine."""

    def __init__(self, folder: Path, tell: Callable[[str], None]) -> None:
        """`folder` is where they write. `tell` is called with each change, in a line."""
        self._folder = folder
        self._tell = tell
        self._kernel_kills = KernelKills()
        self._has_room = True
        self._killed = ""

    async def watch(self) -> None:
        """Look again and again. Never returns."""
        while True:
            await asyncio.to_thread(self.look)
            await asyncio.sleep(LOOK_S)

    def look(self) -> None:
        """Tell what has changed since the last look."""
        try:
            disk = shutil.disk_usage(self._folder)
        except OSError:
            return  # gone, or a disk that does not answer: whoever uses it says so
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
