"""The logs of a run: RUN/logs/SITE/SOURCE.log, as agents ship them, in the order of the lines.

A line begins with its time at the site, in UTC. The coordinator's own log is
RUN/logs/coordinator.log. The newest parts of each source are kept (rotated_lines.py).
"""

from __future__ import annotations

import contextlib
import heapq
import re
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from isthmus.orchestrator.run_folder.rotated_lines import Limits, Part, PartWriter, parts_of
from isthmus.protos.control.v1 import control_pb2
from isthmus.protos.errors import RemoteProtocolError
from isthmus.protos.limits import LOG_LINE_BYTES

FOLDER = "logs"
OWN = "coordinator"
"""Source name of the coordinator's own log."""
LIMITS = Limits(part_bytes=16 << 20, num_parts=4)
"""Limits on the kept log of one source."""
CHUNK_BYTES = 256 << 10
"""Bytes read at once."""
_LAST_BYTES = 4096
SOURCES_MAX = 20_000
"""Limit on a run's sources, each of which is a file; the largest runs have fewer."""
MERGE_BYTES = 16 << 20
"""Bytes that are read ahead of all sources together, to put their lines in order."""
_LEAST_CHUNK_BYTES = 4096
_STAMP = re.compile(rb"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z) ")
_LAST_WALL_S = 2.5e11
"""The year 9892: later times cannot be written."""
_SOURCE = re.compile(r"[a-z][a-z_]{0,31}[0-9]{0,9}")
"""`rank0`, `gateway0`, `agent`: it becomes a file's name."""


class LogWriter:
    """Appends lines that agents ship. A repeated line is written once."""

    def __init__(self, run_folder: Path) -> None:
        self._folder = run_folder / FOLDER
        self._next: dict[tuple[str, str], int] = {}
        """Next expected sequence number by (site, source)."""
        self._writers: dict[tuple[str, str], PartWriter] = {}
        self._own = PartWriter(self._folder / f"{OWN}.log", LIMITS)

    def append(self, site: str, lines: Iterable[control_pb2.LogLine]) -> None:
        """Write the new ones of these lines; lines of a source are in sequence.

        Raises:
            RemoteProtocolError: a line belongs to another site, or its source name is not valid.
            OSError: the disk refuses.
        """
        texts: dict[str, list[str]] = {}
        sequences = dict(self._next)
        for line in lines:
            if line.site != site or not _SOURCE.fullmatch(line.source):
                raise RemoteProtocolError(f"site {site}: a log line of {line.site}/{line.source!r}")
            if (site, line.source) not in sequences and len(sequences) >= SOURCES_MAX:
                raise RemoteProtocolError(f"site {site}: more than {SOURCES_MAX} log sources")
            sequences.setdefault((site, line.source), 0)
            if line.sequence >= sequences.get((site, line.source), 0):
                sequences[site, line.source] = line.sequence + 1
                texts.setdefault(line.source, []).append(_stamped(line.wall_s, line.text))
        (self._folder / site).mkdir(parents=True, exist_ok=True)
        for source, written in texts.items():
            self._writer(site, source).append(written)
            self._next[site, source] = sequences[site, source]

    def append_own(self, lines: Iterable[str]) -> None:
        """Write the coordinator's own lines; for any thread, one at a time.

        Raises:
            OSError: the disk refuses.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        wall_s = time.time()
        self._own.append([_stamped(wall_s, line) for line in lines])

    def _writer(self, site: str, source: str) -> PartWriter:
        writer = self._writers.get((site, source))
        if writer is None:
            path = self._folder / site / f"{source}.log"
            writer = self._writers[site, source] = PartWriter(path, LIMITS)
        return writer


@dataclass(slots=True)
class _File:
    """The read position in one source."""

    path: Path
    """Path of the first part, which names the source."""
    part: Part
    offset: int = 0
    """Position in `part`, in bytes."""
    num_lines: int = 0
    """Lines before `offset`, counted over all parts since the beginning."""
    latest_wall_s: float = 0.0
    """The latest time of those lines; 0: none has one."""


class LogReader:
    """Reads the lines of a run; each call continues after the previous one."""

    def __init__(self, run_folder: Path, *, site: str, rank: int) -> None:
        """An empty `site` means all sites and the coordinator; `rank` -1: all."""
        self._folder = run_folder / FOLDER
        self._site = site
        self._source = f"rank{rank}" if rank >= 0 else ""
        self._files: dict[Path, _File] = {}

    def skip_to_tail(self, num_lines: int) -> None:
        """Skip to the last `num_lines` of each source."""
        for file in self._discover():
            ends = deque([(file.part, file.offset, file.num_lines)], maxlen=num_lines + 1)
            for _ in _new_lines(file, CHUNK_BYTES):
                ends.append((file.part, file.offset, file.num_lines))
            file.part, file.offset, file.num_lines = ends[0]

    def read(self) -> Iterator[control_pb2.LogLine]:
        """Yield complete lines written since the previous call, by their times.

        Lines of one source stay in order, whatever its clock does; one without a time follows the
        line before it.
        """
        files = self._discover()
        chunk_bytes = max(_LEAST_CHUNK_BYTES, MERGE_BYTES // max(1, len(files)))
        sources = [self._lines_of(file, min(chunk_bytes, CHUNK_BYTES)) for file in files]
        for _, line in heapq.merge(*sources, key=lambda each: each[0]):
            yield line

    def _lines_of(
        self, file: _File, chunk_bytes: int
    ) -> Iterator[tuple[float, control_pb2.LogLine]]:
        """Yield a source's further lines, each with the time by which it is put among others."""
        for text in _new_lines(file, chunk_bytes):
            wall_s, said = _unstamped(text)
            file.latest_wall_s = max(file.latest_wall_s, wall_s)
            yield (
                file.latest_wall_s,
                control_pb2.LogLine(
                    site=self._site_of(file.path),
                    source=file.path.stem,
                    sequence=file.num_lines - 1,
                    wall_s=wall_s,
                    text=said.decode(errors="replace").rstrip("\n"),
                ),
            )

    def _discover(self) -> list[_File]:
        for found in sorted((*self._folder.glob(f"{OWN}.log*"), *self._folder.glob("*/*.log*"))):
            path = found.with_name(f"{found.name.partition('.')[0]}.log")
            is_wanted = self._source in {"", path.stem} and self._site in {"", self._site_of(path)}
            if is_wanted and path not in self._files:
                self._files[path] = _File(path, Part(0, path))
        return list(self._files.values())

    def _site_of(self, path: Path) -> str:
        return "" if path.parent == self._folder else path.parent.name


def last_line(log: Path) -> str:
    """Return a log's last non-empty line, cut to a reasonable length."""
    with contextlib.suppress(OSError), log.open("rb") as file:
        file.seek(0, 2)
        file.seek(max(0, file.tell() - _LAST_BYTES))
        lines = file.read().decode(errors="replace").split("\n")
        for line in reversed(lines):
            if line.strip() and not line.startswith("hint: "):
                return line.strip()[:500]
    return "its log is empty"


def _new_lines(file: _File, chunk_bytes: int) -> Iterator[bytes]:
    """Yield a source's further complete lines; the position is updated before each yield."""
    for part in parts_of(file.path):
        if part.first < file.part.first:
            continue
        if part.first > file.part.first:
            file.part, file.offset, file.num_lines = part, 0, part.first
        with contextlib.suppress(FileNotFoundError):  # the oldest part was removed meanwhile
            for line in _complete_lines(part.path, file.offset, chunk_bytes):
                file.offset += len(line)
                file.num_lines += 1
                yield line


def _complete_lines(path: Path, offset: int, chunk_bytes: int) -> Iterator[bytes]:
    """Yield a part's lines from an offset to its current last line break.

    The file is open only while a chunk is read: of a large run thousands are read side by side.
    """
    rest = b""
    while True:
        with path.open("rb") as opened:
            opened.seek(offset)
            chunk = opened.read(chunk_bytes)
        if not chunk:
            return
        offset += len(chunk)
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield line + b"\n"


def _stamped(wall_s: float, text: str) -> str:
    """Return text as one line that begins with its time, if that is known."""
    if not 0 < wall_s < _LAST_WALL_S:
        return _one_line(text)
    at = datetime.fromtimestamp(wall_s, UTC).isoformat(timespec="milliseconds")
    return f"{at.removesuffix('+00:00')}Z {_one_line(text)}"


def _unstamped(line: bytes) -> tuple[float, bytes]:
    """Return a line's time, 0 where it has none, and what it says."""
    if (stamp := _STAMP.match(line)) is None:
        return 0.0, line
    try:
        at = datetime.fromisoformat(stamp[1].decode())
    except ValueError:  # no such day
        return 0.0, line
    return at.timestamp(), line[stamp.end() :]


def _one_line(text: str) -> str:
    """Return text as one line of limited length, with a line break."""
    encoded = text.replace("\n", " ").encode(errors="replace")
    if len(encoded) > LOG_LINE_BYTES:
        kept = encoded[:LOG_LINE_BYTES].decode(errors="ignore")
        return f"{kept} [cut: {len(encoded)} bytes]\n"
    return text.replace("\n", " ") + "\n"
