"""What every benchmark does: makes runs one after the other, and keeps its record after each."""

from __future__ import annotations

import dataclasses
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, Generic, Protocol, TypeVar

from isthmus.orchestrator.documents import Pair
from isthmus.orchestrator.evidence.record.bench_record import Failed, Made, Record, write_bench
from isthmus.orchestrator.evidence.record.measured_steps import MeasurementError
from isthmus.orchestrator.run_folder.home import new_run_id
from isthmus.orchestrator.run_folder.run_files import METRICS, MetricsError, read_metrics

FiguresT = TypeVar("FiguresT")
RecordT = TypeVar("RecordT", bound=Record[Any, Any])

RUNS = "runs"
"""A benchmark's folder is the home of its runs."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How one run ended."""

    emulator: str
    """`netns`, `relay`, or `none`."""
    failed: Failed | None = None


class Launch(Protocol):
    """Makes one run from submission to end. What it raises ends the benchmark."""

    def __call__(self, pair: Pair, home: Path, run_id: str, *, faults: Sequence[str] = ()) -> Ended:
        """Return once the run has ended, and its processes too; one that failed is no error.

        `faults` is what names its fault script.
        """


class Watch(Protocol):
    """Is told how the benchmark goes on."""

    def started(self, name: str, number: int, total: int, left_s: float | None) -> None:
        """Part `number` of `total` begins; all that are left may take `left_s`, where known."""

    def ended(self, outcome: str | Failed) -> None:
        """It has ended, with this in words."""


@dataclass(frozen=True, slots=True)
class Part:
    """One thing to measure."""

    key: str
    """Equal where a part is not worth a try once another has failed."""
    name: str
    make: Callable[[], tuple[str, str | Failed]]
    """Makes and keeps it; returns its run's id, empty if it was none, and what came of it."""


@dataclass(slots=True, kw_only=True)
class Experiment(ABC, Generic[RecordT]):
    """One benchmark. Pure bookkeeping around `launch`."""

    folder: Path
    """Where the record is, and the home of the runs."""
    file: str
    """The record's name there."""
    bench: RecordT
    """As far as it is now."""
    launch: Launch
    watch: Watch
    new_run_id: Callable[[], str] = new_run_id
    now_s: Callable[[], float] = time.monotonic
    failed: dict[str, str] = field(default_factory=dict)
    """Why parts failed, by their runs' ids; the key is empty where it was no run."""
    runs_s: list[float] = field(default_factory=list)
    """How long each run took."""

    def run(self) -> None:
        """Make every part. After one that failed, its like are not tried again.

        Raises:
            OSError: the disk refuses the record.
        """
        self.keep()
        parts = self.parts()
        failed: set[str] = set()
        for index, part in enumerate(parts):
            if part.key in failed:
                continue
            left_s = fmean(self.runs_s) * (len(parts) - index) if self.runs_s else None
            self.watch.started(part.name, index + 1, len(parts), left_s)
            run_id, outcome = part.make()
            if isinstance(outcome, Failed):
                failed.add(part.key)
                run = f"run {run_id} of " if run_id else ""
                self.failed[run_id] = f"{run}{part.name}: {outcome.code}: {outcome.message}"
            self.watch.ended(outcome)

    @abstractmethod
    def parts(self) -> Sequence[Part]:
        """Return what is to be measured."""

    def keep(self, **changes: object) -> None:
        """Change the record, and write it."""
        fields: Any = changes
        self.bench = dataclasses.replace(self.bench, **fields)
        write_bench(self.folder / self.file, self.bench)

    def made(
        self,
        pair: Pair,
        measure: Callable[[Iterable[Mapping[str, Any]], Made], FiguresT],
        faults: Sequence[str] = (),
    ) -> tuple[Made, FiguresT | None]:
        """Make a run; return how it ended, and what `measure` makes of its metrics, if it can."""
        run_id, began_s = self.new_run_id(), self.now_s()
        ended = self.launch(pair, self.folder, run_id, faults=faults)
        self.runs_s.append(self.now_s() - began_s)
        made = Made(run_id=run_id, emulator=ended.emulator, failed=ended.failed)
        if made.failed is not None:
            return made, None
        try:
            return made, measure(read_metrics(self.folder / RUNS / run_id / METRICS), made)
        except (MeasurementError, MetricsError) as error:
            failed = Failed(code="BENCHMARK_INCOMPLETE", message=str(error))
            return dataclasses.replace(made, failed=failed), None
