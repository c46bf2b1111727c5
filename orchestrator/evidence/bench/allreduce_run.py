"""Makes an all-reduce benchmark's runs one after the other, and writes each down as it ends."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

from orchestrator.evidence.bench.allreduce_figures import Asked, figures_of
from orchestrator.evidence.bench.allreduce_plan import Combination, sizes_of
from orchestrator.evidence.bench.allreduce_record import AllReduceBench, Gloo, Setting, write
from orchestrator.evidence.bench.measurement import MeasurementError
from orchestrator.evidence.bench.record import Failed
from orchestrator.evidence.bench.scaling import RUNS, Launch
from orchestrator.run_folder.run_files import METRICS, MetricsError, read_metrics

MeasureGloo = Callable[[int], Gloo]
"""Of so many bytes; MeasurementError when it fails."""


class AllReduce:
    """One benchmark. Pure bookkeeping around `launch` and `gloo`."""

    def __init__(
        self,
        folder: Path,
        bench: AllReduceBench,
        found: Sequence[Combination],
        *,
        launch: Launch,
        gloo: MeasureGloo | None,
        tell: Callable[[str, Setting | Gloo | None], None],
        new_run_id: Callable[[], str],
    ) -> None:
        """Measure nothing yet.

        Args:
            folder: That allreduce.json is written to; the home of the runs.
            bench: With nothing measured.
            found: What to measure.
            launch: Makes a run.
            gloo: Measures what a size is compared with, if it is.
            tell: Is told what begins (a word for it, None), and what it came to.
            new_run_id: Names a run.
        """
        self.bench = bench
        """As far as it is now."""
        self.gloo_failed = ""
        """Why Gloo was not measured, if that failed."""
        self._folder = folder
        self._found = found
        self._launch = launch
        self._gloo = gloo
        self._tell = tell
        self._new_run_id = new_run_id

    def run(self) -> None:
        """Measure every combination, and Gloo after all of a size. One that fails stops no other.

        Raises:
            OSError: the disk refuses allreduce.json.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        write(self._folder, self.bench)
        for size_bytes in sizes_of(self._found):
            for each in self._found:
                if each.size_bytes == size_bytes:
                    self._measure(each)
            if self._gloo is not None and not self.gloo_failed:
                self._compare(size_bytes, self._gloo)

    def _measure(self, combination: Combination) -> None:
        name = f"{combination.codec}, {combination.tree}"
        self._tell(name, None)
        run_id = self._new_run_id()
        ended = self._launch(combination.pair, self._folder, run_id)
        figures, failed = None, ended.failed
        question = self.bench.question
        if failed is None:
            asked = Asked(
                combination.pair.job,
                combination.pair.topology,
                combination.size_bytes,
                question.warmup,
                question.repeats,
                ended.emulator,
            )
            try:
                records = read_metrics(self._folder / RUNS / run_id / METRICS)
                figures = figures_of(records, asked)
            except (MeasurementError, MetricsError) as error:
                failed = Failed(code="BENCHMARK_INCOMPLETE", message=str(error))
        setting = Setting(
            size_bytes=combination.size_bytes,
            codec=combination.codec,
            tree=combination.tree,
            plan=combination.plan,
            run_id=run_id,
            emulator=ended.emulator,
            figures=figures,
            failed=failed,
        )
        self._keep(settings=(*self.bench.settings, setting))
        self._tell(name, setting)

    def _compare(self, size_bytes: int, measure: MeasureGloo) -> None:
        self._tell("Gloo", None)
        try:
            gloo = measure(size_bytes)
        except MeasurementError as error:
            self.gloo_failed = str(error)
            return
        settings = [
            dataclasses.replace(each, over_gloo=gloo.times.median_s / each.figures.times.median_s)
            if each.size_bytes == size_bytes and each.figures is not None
            else each
            for each in self.bench.settings
        ]
        self._keep(settings=tuple(settings), gloo=(*self.bench.gloo, gloo))
        self._tell("Gloo", gloo)

    def _keep(self, settings: tuple[Setting, ...], gloo: tuple[Gloo, ...] | None = None) -> None:
        self.bench = dataclasses.replace(
            self.bench, settings=settings, gloo=self.bench.gloo if gloo is None else gloo
        )
        write(self._folder, self.bench)
