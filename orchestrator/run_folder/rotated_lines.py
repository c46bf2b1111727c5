"""Line files that grow for weeks, written in parts of which the newest are kept.

The first part has the file's own name, later ones append the number of their first line:
`rank0.log`, `rank0.log.84120`. Files are never renamed, and a part is complete once there is a
later one. So a concurrent reader needs no lock: it lists the parts, then reads them.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a file: `num_parts` are kept, including the current one."""

    part_bytes: int
    """Size from which a part is full; lines are not cut."""
    num_parts: int


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a file, parsed from its name."""

    first: int
    """Number of the part's first line in the whole file, from 0."""
    path: Path


class PartWriter:
    """Appends lines to one file. One writer at a time; a new one continues after the last."""

    def __init__(self, path: Path, limits: Limits) -> None:
        """Write nothing yet; the folder of `path` must exist by the first `append`."""
        self._path = path
        self._limits = limits
        self._num_lines = 0
        self._part: Part | None = None

    def append(self, lines: list[str]) -> None:
        """Append lines, each with its line break; all of them or none.

        Raises:
            OSError: the disk refuses.
        """
        if self._part is None:
            self._part = self._go_on()
        data = memoryview("".join(lines).encode(errors="replace"))
        with self._part.path.open("ab", buffering=0) as file:
            began_bytes = file.tell()
            try:
                while data:
                    data = data[file.write(data) :]
            except OSError:
                with contextlib.suppress(OSError):
                    file.truncate(began_bytes)  # so that a retry begins at a line
                raise
            num_bytes = file.tell()
        self._num_lines += len(lines)
        if num_bytes >= self._limits.part_bytes:
            self._begin_part()

    def _go_on(self) -> Part:
        """Return the last part, with its number of lines; close one that ends within a line."""
        part = parts_of(self._path)[-1]
        self._num_lines = part.first
        if part.path.is_file():
            is_cut = False
            with part.path.open("rb") as file:
                for line in file:
                    self._num_lines += 1
                    is_cut = not line.endswith(b"\n")
            if is_cut:
                with part.path.open("ab") as file:
                    file.write(b"\n")
        return part

    def _begin_part(self) -> None:
        """Begin a new part, and remove the oldest ones beyond the limit."""
        path = self._path.with_name(f"{self._path.name}.{self._num_lines}")
        self._part = Part(self._num_lines, path)
        self._part.path.touch()
        for part in parts_of(self._path)[: -self._limits.num_parts]:
            part.path.unlink(missing_ok=True)


def parts_of(path: Path) -> list[Part]:
    """Return the existing parts of a file, in order.

    For a missing file, its first part.
    """
    parts = []
    for each in path.parent.glob(f"{path.name}.*"):
        number = each.name.removeprefix(f"{path.name}.")
        if number.isascii() and number.isdecimal():
            parts.append(Part(int(number), each))
    if path.is_file() or not parts:
        parts.append(Part(0, path))
    return sorted(parts, key=lambda part: part.first)
