"""Reads a node's log files from their beginnings, within a byte budget.

The files on disk are the buffer: a caller has shipped all earlier lines before it reads more. A
source that writes faster is read with gaps, each with the number of lines left out.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path

from isthmus.protos.disk import Beginning
from isthmus.protos.limits import LOG_LINE_BYTES

LAG_BYTES = 1 << 20
"""Unread bytes of a file beyond which lines are left out."""
KEEP_BYTES = 128 << 10
"""Bytes at the end of the file that are kept in that case."""
_COUNT_BYTES = 1 << 20

Lines = Sequence[tuple[str, Sequence[str]]]
"""Lines by their source, as `rank0`."""


class LogFiles:
    """Reads all of a node's log files."""

    def __init__(self, find: Callable[[], Iterable[tuple[str, Path]]]) -> None:
        """`find` returns names and files of the sources that exist; called at each read."""
        self._find = find
        self._tails: dict[Path, tuple[str, Tail]] = {}

    def read(self, budget_bytes: int) -> tuple[Lines, int]:
        """Return new lines, a fair share of each source, and the number of bytes read."""
        self._discover()
        new_lines: list[tuple[str, list[str]]] = []
        left_bytes = budget_bytes
        for place, (source, tail) in enumerate(self._tails.values()):
            share = left_bytes // (len(self._tails) - place)
            if share >= 1:
                tail.free()  # earlier lines have been shipped
                lines, read_bytes = tail.read(share)
                left_bytes -= read_bytes
                new_lines.append((source, lines))
        return new_lines, budget_bytes - left_bytes

    def read_ends(self, first: Collection[str]) -> Lines:
        """Return the last lines of every source, sources in `first` before others."""
        self._discover()
        tails = sorted(self._tails.values(), key=lambda each: each[0] not in first)
        return [(source, tail.finish()) for source, tail in tails]

    def _discover(self) -> None:
        for source, path in self._find():
            self._tails.setdefault(path, (source, Tail(path)))


class Tail:
    """Reads one file from its beginning, within a byte budget per call."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0
        self._rest = b""
        self._cut_bytes = 0
        self._is_flood = False
        """Whether the unfinished line exceeds the limit, so that its buffer is overwritten."""
        self._beginning = Beginning(path)

    def free(self) -> None:
        """Free the disk space of lines read long ago: processes write for weeks."""
        self._beginning.free(self._offset)

    def read(self, budget_bytes: int) -> tuple[list[str], int]:
        """Return the complete lines in the next `budget_bytes` bytes, and the bytes read.

        A missing file has no lines.
        """
        try:
            with self.path.open("rb") as file:
                skipped = self._catch_up(file.fileno(), LAG_BYTES)
                data = os.pread(file.fileno(), budget_bytes, self._offset)
        except OSError:
            return [], 0
        self._offset += len(data)
        return skipped + self._lines(data), len(data)

    def finish(self) -> list[str]:
        """Return the remaining lines, at most KEEP_BYTES, with an unfinished line."""
        try:
            with self.path.open("rb") as file:
                skipped = self._catch_up(file.fileno(), KEEP_BYTES)
        except OSError:
            return []
        lines, _ = self.read(KEEP_BYTES)
        rest = [self._text(self._rest)] if self._rest else []
        self._rest = b""
        return skipped + lines + rest

    def _catch_up(self, descriptor: int, lag_bytes: int) -> list[str]:
        """Skip to a line near the end if too much is unread; return a note on skipped lines."""
        end = os.fstat(descriptor).st_size
        if end - self._offset <= lag_bytes:
            return []
        dropped = 0
        target = end - KEEP_BYTES
        while self._offset < target:
            data = os.pread(descriptor, min(_COUNT_BYTES, target - self._offset), self._offset)
            if not data:
                break
            self._offset += len(data)
            dropped += data.count(b"\n")
        # The first line after the jump is incomplete: skip its rest, too.
        data = os.pread(descriptor, KEEP_BYTES, self._offset)
        self._offset += data.find(b"\n") + 1
        self._begin_line()
        return [f"… {dropped + 1} lines dropped"]

    def _lines(self, data: bytes) -> list[str]:
        """Return the lines that `data` completes; keep the unfinished one, in bounded space."""
        *complete, rest = data.split(b"\n")
        lines = []
        for piece in complete:
            self._keep(piece)
            lines.append(self._text(self._rest))
            self._begin_line()
        self._keep(rest)
        return lines

    def _begin_line(self) -> None:
        self._rest, self._cut_bytes, self._is_flood = b"", 0, False

    def _keep(self, piece: bytes) -> None:
        line = self._rest + piece
        if self._is_flood or len(line) > LOG_LINE_BYTES:
            # A progress bar overwrites itself: only its last state counts.
            begin = line.rstrip(b"\r").rfind(b"\r") + 1
            if begin > 0:
                line, self._cut_bytes, self._is_flood = line[begin:], 0, True
        self._rest = line[:LOG_LINE_BYTES]
        self._cut_bytes += len(line) - len(self._rest)

    def _text(self, line: bytes) -> str:
        text = line.decode(errors="replace").rstrip("\r")
        return f"{text}… [{self._cut_bytes} bytes cut]" if self._cut_bytes else text
