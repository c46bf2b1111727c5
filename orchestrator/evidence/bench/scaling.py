"""Makes the runs of a benchmark one after the other, and writes each down as it ends."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from orchestrator.documents import Pair
from orchestrator.evidence.bench.figures import result_of
from orchestrator.evidence.bench.measurement import MeasurementError, measure
from orchestrator.evidence.bench.plan import Planned, Point, planned_runs
from orchestrator.evidence.bench.record import BENCH, Bench, Failed, Measured, Run, write_bench
from orchestrator.run_folder.run_files import METRICS, MetricsError, read_metrics

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

    def __call__(self, pair: Pair, home: Path, run_id: str) -> Ended:
        """Return once the run has ended, and its processes too; one that failed is no error."""


class Watch(Protocol):
    """Is told how the benchmark goes on."""

    def started(self, planned: Planned, number: int, total: int, left_s: float | None) -> None:
        """Run `number` of `total` begins; all that are left may take `left_s`, where known."""

    def ended(self, planned: Planned, run: Run) -> None:
        """It has ended."""


class Scaling:
    """One benchmark. Pure bookkeeping around `launch`: what is done is not done again."""

    def __init__(
        self,
        folder: Path,
        bench: Bench,
        points: Sequence[Point],
        *,
        launch: Launch,
        watch: Watch,
        new_run_id: Callable[[], str],
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """Take a benchmark up where `bench` is.

        Args:
            folder: That bench.json is written to.
            bench: New, or as an interruption left it; its failed runs are made again.
            points: One for each of its settings, in their order.
            launch: Makes a run.
            watch: Is told of each.
            new_run_id: Names a run.
            now_s: A monotonic clock.
        """
        self._folder = folder
        self._points = points
        self._launch = launch
        self._watch = watch
        self._new_run_id = new_run_id
        self._now_s = now_s
        self.bench = dataclasses.replace(
            bench,
            settings=tuple(
                dataclasses.replace(each, runs=tuple(run for run in each.runs if run.measured))
                for each in bench.settings
            ),
        )
        """As far as it is now."""

    def run(self) -> None:
        """Make every run that is missing. After one that failed, its like are not tried again.

        Raises:
            OSError: the disk refuses bench.json.
        """
        write_bench(self._folder / BENCH, self.bench)
        missing = [each for each in self._planned() if not self._is_made(each)]
        failed: set[tuple[str | None, str | int]] = set()
        spent_s: list[float] = []
        for index, planned in enumerate(missing):
            if self._kind_of(planned) in failed:
                continue
            left_s = sum(spent_s) / len(spent_s) * (len(missing) - index) if spent_s else None
            self._watch.started(planned, index + 1, len(missing), left_s)
            run = self._make(planned)
            spent_s.append(run.wall_s)
            if run.failed is not None:
                failed.add(self._kind_of(planned))
            self._keep(planned, run)
            self._watch.ended(planned, run)

    def _planned(self) -> Iterator[Planned]:
        return planned_runs(self._points, self.bench.question.repeats)

    def _kind_of(self, planned: Planned) -> tuple[str | None, str | int]:
        """Return what runs have in common that are repeats of each other."""
        if planned.site is None:
            return None, planned.setting
        return planned.site, self._points[planned.setting].solo_keys[planned.site]

    def _sharing(self, planned: Planned) -> list[int]:
        """Return the settings that a run belongs to."""
        if planned.site is None:
            return [planned.setting]
        key = self._points[planned.setting].solo_keys[planned.site]
        return [
            index
            for index, point in enumerate(self._points)
            if point.solo_keys.get(planned.site) == key
        ]

    def _is_made(self, planned: Planned) -> bool:
        return any(
            (run.site, run.repeat) == (planned.site, planned.repeat)
            for run in self.bench.settings[planned.setting].runs
        )

    def _make(self, planned: Planned) -> Run:
        point = self._points[planned.setting]
        pair = point.together if planned.site is None else point.solo[planned.site]
        run_id, began_s = self._new_run_id(), self._now_s()
        ended = self._launch(pair, self._folder, run_id)
        wall_s = self._now_s() - began_s
        failed, measured = ended.failed, None
        if failed is None:
            try:
                measured = self._measure(pair, run_id)
            except (MeasurementError, MetricsError) as error:
                failed = Failed(code="BENCHMARK_INCOMPLETE", message=str(error))
        return Run(
            kind="all" if planned.site is None else "solo",
            site=planned.site,
            repeat=planned.repeat,
            run_id=run_id,
            folder=f"{RUNS}/{run_id}",
            emulator=ended.emulator,
            wall_s=wall_s,
            measured=measured,
            failed=failed,
        )

    def _measure(self, pair: Pair, run_id: str) -> Measured:
        question = self.bench.question
        return measure(
            read_metrics(self._folder / RUNS / run_id / METRICS),
            pair.topology,
            warmup_steps=question.warmup_steps,
            steps=question.steps,
        )

    def _keep(self, planned: Planned, run: Run) -> None:
        settings = list(self.bench.settings)
        for index in self._sharing(planned):
            runs = (*settings[index].runs, run)
            together = self._points[index].together
            settings[index] = dataclasses.replace(
                settings[index],
                runs=runs,
                result=result_of(together.job, together.topology, runs),
            )
        self.bench = dataclasses.replace(self.bench, settings=tuple(settings))
        write_bench(self._folder / BENCH, self.bench)
