"""What the coordinator writes into a run's folder, beside the logs."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from isthmus.orchestrator.run_folder.home import JOB, SPEC, SUMMARY, TOPOLOGY
from isthmus.orchestrator.run_folder.rotated_lines import Limits, PartWriter, parts_of
from isthmus.protos.envelope import finite

METRICS = "metrics.jsonl"
METRICS_LIMITS = Limits(part_bytes=64 << 20, num_parts=16)
"""A run of three sites writes about 10 kB/s: a day."""

log = logging.getLogger(__name__)


class MetricsError(ValueError):
    """What a run measured cannot be read."""


class RunFiles:
    """One run's documents, metrics and summary."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._failing = Failing(folder / METRICS)
        self._metrics = PartWriter(folder / METRICS, METRICS_LIMITS)

    def write_documents(self, topology: str, job: str) -> None:
        """Keep both documents as they were submitted; the client may have written them already.

        Raises:
            OSError: the disk refuses.
        """
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name, text in ((TOPOLOGY, topology), (JOB, job)):
            path = self.folder / name
            if not path.is_file() or path.read_text(encoding="utf-8") != text:
                write_atomically(path, text)

    def write_spec(self, written: bytes) -> None:
        """Keep what the run is: with it another coordinator can go on.

        Raises:
            OSError: the disk refuses.
        """
        write_atomically(self.folder / SPEC, written.decode("utf-8"))

    def read_documents(self) -> tuple[str, str]:
        """Return the job and the topology as they were submitted.

        Raises:
            OSError: they are not there.
        """
        job, topology = (
            (self.folder / name).read_text(encoding="utf-8") for name in (JOB, TOPOLOGY)
        )
        return job, topology

    def read_spec(self) -> bytes:
        """Return what `write_spec` wrote.

        Raises:
            OSError: it is not there.
        """
        return (self.folder / SPEC).read_bytes()

    def append_metrics(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Append one JSON object a line.

        A disk that refuses does not end the run: it is told once, and tried again later.
        """
        lines = [f"{strict_json(record)}\n" for record in records]
        with self._failing.told():
            self.folder.mkdir(parents=True, exist_ok=True)
            self._metrics.append(lines)

    @property
    def trouble(self) -> str:
        """Why metrics cannot be written now; empty: they can."""
        return self._failing.trouble

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write what the run came to; like metrics, it is not worth failing for."""
        try:
            write_atomically(self.folder / SUMMARY, strict_json(summary, indent=1) + "\n")
        except OSError as error:
            log.error("%s: %s", self.folder / SUMMARY, error)  # noqa: TRY400 - it says why


class Failing:
    """Writing that may fail while the run goes on: its error is told once, until all is well."""

    def __init__(self, what: object) -> None:
        self._what = what
        self.trouble = ""
        """What people are to know for as long as it fails, in a line; empty: all is well."""

    @property
    def is_failing(self) -> bool:
        """Whether the last attempt failed."""
        return bool(self.trouble)

    @contextlib.contextmanager
    def told(self, *others: type[Exception]) -> Iterator[None]:
        """Carry on after an OSError in the block, or one of these."""
        caught: tuple[type[Exception], ...] = (OSError, *others)
        try:
            yield
        except caught as error:
            trouble = f"{self._what} cannot be written: {_reason(error)}; the run goes on without"
            if not self.is_failing:
                log.warning("%s", trouble)
            self.trouble = trouble
        else:
            if self.is_failing:
                log.info("%s: written again", self._what)
            self.trouble = ""


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def read_metrics(
    path: Path, on_damaged: Callable[[str], None] | None = None
) -> Iterator[Mapping[str, Any]]:
    """Yield the records of a metrics.jsonl, of all its parts, one after the other.

    Args:
        path: its own, or that of its first part.
        on_damaged: is told of each line that is no JSON object, as one that was cut when its writer
            was killed, and of what ends a part; None: the first one raises.

    Raises:
        MetricsError: it is not there, or a line is no JSON object, and nobody is told.
    """

    def damaged(where: str, error: Exception) -> None:
        if on_damaged is None:
            raise MetricsError(f"{where}: {error}") from error
        on_damaged(f"{where}: {error}")

    for part in parts_of(path):
        line_number = 0
        try:
            with part.path.open("rb") as file:
                for line_number, line in enumerate(file, 1):
                    try:
                        record = _object_of(line)
                    except (ValueError, RecursionError) as error:
                        damaged(f"{part.path}:{line_number}", error)
                    else:
                        yield record
        except OSError as error:
            damaged(f"{part.path}:{line_number}", error)


def _object_of(line: bytes) -> dict[str, Any]:
    """Return a line's JSON object.

    Raises:
        ValueError, RecursionError: it is none.
    """
    record = json.loads(line)
    if not isinstance(record, dict):
        raise ValueError("want a JSON object")  # noqa: TRY004 - it is about what was read
    return record


def write_atomically(path: Path, text: str) -> None:
    """Write a file that is there as a whole or not at all, also after a power cut.

    One that was there before keeps its mode.

    Raises:
        OSError: naming `path`.
    """
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with scratch.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileNotFoundError):
            shutil.copymode(path, scratch)
        scratch.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            scratch.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from error
    folder = os.open(path.parent, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def strict_json(value: object, indent: int | None = None) -> str:
    """Return JSON that every parser reads: a loss that is not finite becomes null."""
    return json.dumps(finite(value), allow_nan=False, indent=indent)
