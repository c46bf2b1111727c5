"""The files that the coordinator writes into a run's folder, beside the logs."""

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
from isthmus.protos.failure import text_of

METRICS = "metrics.jsonl"
METRICS_LIMITS = Limits(part_bytes=64 << 20, num_parts=16)
"""Limits of metrics.jsonl: about a day of a run of three sites, at 10 kB/s."""

log = logging.getLogger(__name__)


class MetricsError(ValueError):
    """A run's metrics cannot be read."""


class RunFiles:
    """Reads and writes a run's documents, metrics and summary."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._failing = Failing(folder / METRICS)
        self._metrics = PartWriter(folder / METRICS, METRICS_LIMITS)

    def write_documents(self, topology: str, job: str) -> None:
        """Write both documents as submitted; the client may have done so already.

        Raises:
            OSError: the disk refuses.
        """
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name, text in ((TOPOLOGY, topology), (JOB, job)):
            path = self.folder / name
            if not path.is_file() or path.read_text(encoding="utf-8") != text:
                write_atomically(path, text)

    def write_spec(self, written: bytes) -> None:
        """Write the run's spec, with which another coordinator can go on.

        Raises:
            OSError: the disk refuses.
        """
        write_atomically(self.folder / SPEC, written.decode("utf-8"))

    @property
    def is_whole(self) -> bool:
        """Whether all is there that `write_documents` and `write_spec` wrote."""
        return all((self.folder / name).is_file() for name in (JOB, TOPOLOGY, SPEC))

    def read_documents(self) -> tuple[str, str]:
        """Return the job and the topology as submitted.

        Raises:
            OSError: they are missing.
        """
        job, topology = (
            (self.folder / name).read_text(encoding="utf-8") for name in (JOB, TOPOLOGY)
        )
        return job, topology

    def read_spec(self) -> bytes:
        """Return the spec that `write_spec` wrote.

        Raises:
            OSError: it is missing.
        """
        return (self.folder / SPEC).read_bytes()

    def append_metrics(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Append records as JSON objects, one per line.

        A disk error does not end the run: it is reported once, and writing is retried later.
        """
        lines = [f"{strict_json(record)}\n" for record in records]
        with self._failing.reported():
            self.folder.mkdir(parents=True, exist_ok=True)
            self._metrics.append(lines)

    @property
    def trouble(self) -> str:
        """Why metrics cannot be written at present; empty: they can."""
        return self._failing.trouble

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write the run's summary; like for metrics, an error is only logged."""
        try:
            write_atomically(self.folder / SUMMARY, strict_json(summary, indent=1) + "\n")
        except OSError as error:
            log.error("%s: %s", self.folder / SUMMARY, text_of(error))  # noqa: TRY400 - the message suffices


class Failing:
    """Reports repeated errors of writing only once, until writing succeeds again."""

    def __init__(self, what: object) -> None:
        self._what = what
        self.trouble = ""
        """The current error in one line; empty: none."""

    @property
    def is_failing(self) -> bool:
        """Whether the last attempt failed."""
        return bool(self.trouble)

    @contextlib.contextmanager
    def reported(self, *others: type[Exception]) -> Iterator[None]:
        """Swallow and report an OSError, or one of `others`, in the block."""
        caught: tuple[type[Exception], ...] = (OSError, *others)
        try:
            yield
        except caught as error:
            trouble = f"{self._what} cannot be written: {_reason(error)}; the run continues without"
            if not self.is_failing:
                log.warning("%s", trouble)
            self.trouble = trouble
        else:
            if self.is_failing:
                log.info("%s: can be written again", self._what)
            self.trouble = ""


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or text_of(error)


def read_metrics(
    path: Path, on_damaged: Callable[[str], None] | None = None
) -> Iterator[Mapping[str, Any]]:
    """Yield the records of a metrics.jsonl with all its parts, in order.

    Args:
        path: path of the file, which is that of its first part.
        on_damaged: called for each damaged line, such as one cut when its writer was killed, and
            for an error that ends a part; None: the first one raises.

    Raises:
        MetricsError: the file is missing; or a line is damaged and `on_damaged` is None.
    """

    def damaged(where: str, error: Exception) -> None:
        if on_damaged is None:
            raise MetricsError(f"{where}: {text_of(error)}") from error
        on_damaged(f"{where}: {text_of(error)}")

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
        ValueError, RecursionError: the line is no JSON object.
    """
    record = json.loads(line)
    if not isinstance(record, dict):
        raise ValueError("want a JSON object")  # noqa: TRY004 - it is about what was read
    return record


def write_atomically(path: Path, text: str) -> None:
    """Write a file atomically, also with respect to a power cut.

    An existing file keeps its mode.

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
    """Return JSON that every parser reads: NaN and infinity become null."""
    return json.dumps(finite(value), allow_nan=False, indent=indent)
