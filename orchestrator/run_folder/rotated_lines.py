"""Files of lines that grow for weeks: written in parts, of which the newest are kept.

The first part has the file's own name, later ones the number of their first line behind it:
`rank0.log`, `rank0.log.84120`. Nothing is ever renamed, and a part is complete when there is a
later one, so who reads while somebody writes needs no lock: list the parts, then read them.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Limits:
    """How much of a file is kept: `num_parts`, the one that is being written included."""

    part_bytes: int
    """A part is full from here on; lines are not cut."""
    num_parts: int


@dataclass(frozen=True, slots=True)
class Part:
    """One part, as its name says."""

    first: int
    """Number of its first line in the whole file, from 0."""
    path: Path


class PartWriter:
    """Appends lines to one file. One writer for each at a time; it goes on where another ended."""

    def __init__(self, path: Path, limits: Limits) -> None:
        """Write nothing yet; the folder of `path` has to be there by the first `append`."""
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
                    file.truncate(began_bytes)  # who tries again begins at a line
                raise
            num_bytes = file.tell()
        self._num_lines += len(lines)
        if num_bytes >= self._limits.part_bytes:
            self._begin_part()

    def _go_on(self) -> Part:
        """Return the last part that there is, and count its lines; one that was cut is closed."""
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
        """Let the next lines go to a new part, and the oldest parts go."""
        path = self._path.with_name(f"{self._path.name}.{self._num_lines}")
        self._part = Part(self._num_lines, path)
        self._part.path.touch()
        for part in parts_of(self._path)[: -self._limits.num_parts]:
            part.path.unlink(missing_ok=True)


def parts_of(path: Path) -> list[Part]:
    """Return the parts that there are of a file, in their order.

    Of one that is not there, its first.
    """
    found = []
    for each in path.parent.glob(f"{path.name}.*"):
        number = each.name.removeprefix(f"{path.name}.")
        if number.isascii() and number.isdecimal():
            found.append(Part(int(number), each))
    if path.is_file() or not found:
        found.append(Part(0, path))
    return sorted(found, key=lambda part: part.first)
