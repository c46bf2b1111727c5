"""HOME/bench/NAME: one experiment's folder, used by one process at a time, and what fills it."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self, TypeVar

import click
from rich.console import Console
from rich.text import Text

from isthmus.orchestrator.api.errors import CommandError
from isthmus.orchestrator.cli.display import live_on_stderr
from isthmus.orchestrator.cli.output import Output
from isthmus.orchestrator.cli.whole_run import run_to_end
from isthmus.orchestrator.documents import Pair
from isthmus.orchestrator.evidence.bench.bench_tables import BenchTables
from isthmus.orchestrator.evidence.bench.experiment import RUNS, Ended, Experiment
from isthmus.orchestrator.evidence.bench.sweep_settings import Point
from isthmus.orchestrator.evidence.record.bench_record import (
    Bench,
    Failed,
    Question,
    Record,
    Setting,
    Source,
    read_bench,
)
from isthmus.orchestrator.evidence.view import formats
from isthmus.orchestrator.interruption import INTERRUPTION
from isthmus.orchestrator.run_folder.home import home_folder
from isthmus.orchestrator.run_folder.state_lock import LOCK, StateLockedError, lock
from isthmus.protos.control.v1 import control_pb2
from isthmus.topology.spec.errors import ConfigError, Problem

RecordT = TypeVar("RecordT", bound=Record[Any, Any])


def sources(pair: Pair) -> dict[str, Any]:
    """Return the documents of an experiment, as its record names them."""
    return {
        "job": Source(name=pair.job.name, path=str(pair.job_path.absolute())),
        "topology": Source(name=pair.topology.name, path=str(pair.topology_path.absolute())),
    }


def new_bench(name: str, pair: Pair, question: Question, points: Sequence[Point]) -> Bench:
    """Return a benchmark of which nothing is measured yet."""
    settings = tuple(Setting(overrides=point.overrides) for point in points)
    return Bench(name=name, **sources(pair), question=question, settings=settings)


def bench_folder(home: Path | None, name: str) -> Path:
    """Return where the experiment of a name is kept."""
    return home_folder(home) / "bench" / name


def note_plans(output: Output, points: Sequence[Point]) -> None:
    """Print the plan of each setting, where the job asks for plans."""
    for point in points:
        if point.plan is not None:
            output.note(f"{point.said}plan: {point.plan}")


class Progress:
    """Says on stderr what is measured, and what it came to; makes the runs, and follows them."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._heading = ""
        self._live = live_on_stderr()

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def started(self, name: str, number: int, total: int, left_s: float | None) -> None:
        """Remember what to call it, and how much is left."""
        left = "" if left_s is None else f", about {formats.duration(left_s)} left"
        self._heading = f"[{number}/{total}{left}] {formats.words(name)}"
        self._update("starting")

    def launch(self, pair: Pair, home: Path, run_id: str, *, faults: Sequence[str] = ()) -> Ended:
        """Make one run."""
        timeout_s = self._timeout_s
        return run_to_end(pair, home, run_id, timeout_s=timeout_s, show=self._show, faults=faults)

    def ended(self, outcome: str | Failed) -> None:
        """Print in one line what it came to."""
        if isinstance(outcome, Failed):
            outcome = f"FAILED, {outcome.code}: {formats.words(outcome.message)}"
        text = f"{self._heading}: {outcome}"
        if self._live is not None:
            self._live.console.print(Text(text))
        else:
            click.echo(text, err=True)
            sys.stderr.flush()

    def _show(self, run: control_pb2.Run) -> None:
        step = max((site.step for site in run.sites), default=0)
        self._update(f"{formats.run_state(run).lower()}, step {step}")

    def _update(self, state: str) -> None:
        if self._live is not None:
            self._live.update(Text(f"{self._heading}: {state}"), refresh=True)


def measured(
    output: Output,
    progress: Progress,
    experiment: Experiment[RecordT],
    tables: Callable[[RecordT], BenchTables],
    *,
    resume: str = "",
    unmet: Callable[[RecordT], Sequence[str]] = lambda _: (),
) -> int:
    """Measure, and print an experiment's tables or its envelope; return the exit status.

    `resume` says how to go on after a signal, where that can be. `unmet` says what was required and
    is not so.

    Raises:
        CommandError: a run failed, or what is required is not met.
    """
    interrupted = None
    with INTERRUPTION.holding(), progress:
        try:
            experiment.run()
        except KeyboardInterrupt as error:
            interrupted = INTERRUPTION.answer(error)
    if interrupted is not None and resume:
        output.note(f"interrupted. Go on: {resume}")
    path = experiment.folder / experiment.file
    if not output.as_json:
        Console().print(tables(experiment.bench))
    output.note(f"kept in {path}")
    data = {**dataclasses.asdict(experiment.bench), "folder": str(path.parent)}
    if interrupted is not None:
        return output.result({**data, "interrupted": True}, exit_code=interrupted)
    for run_id, why in experiment.failed.items():
        others = len(experiment.failed) - 1
        where = {"bench": str(path)}
        if run_id:
            where |= {"run_id": run_id, "folder": str(path.parent / RUNS / run_id)}
        more = f", and {others} more" if others else ""
        raise CommandError("BENCHMARK_INCOMPLETE", f"{why}{more}", where)
    if missed := unmet(experiment.bench):
        raise CommandError(
            "REQUIREMENT_NOT_MET", "; ".join(missed), {"bench": str(path), "unmet": list(missed)}
        )
    return output.result(data)


@contextmanager
def held_folder(path: Path) -> Iterator[None]:
    """Make the folder of an experiment's record, and hold it.

    Raises:
        CommandError: another process is at it.
        OSError: it cannot be made.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        held = lock(path.parent / LOCK)
    except StateLockedError:
        why = f"another process is measuring in {path.parent}"
        raise CommandError("REFUSED", why, {"bench": str(path)}) from None
    try:
        yield
    finally:
        os.close(held)


@contextmanager
def new_folder(path: Path, cure: str = "choose another --name") -> Iterator[None]:
    """Hold the folder of an experiment of which there is no record yet; errors as above."""
    with held_folder(path):
        if path.is_file():
            why = f"there is a benchmark {path.parent.name!r} already: {cure}"
            raise CommandError("REFUSED", why, {"bench": str(path)})
        yield


@contextmanager
def resumed_folder(path: Path, asked: Bench) -> Iterator[Bench]:
    """Hold the folder of a benchmark that was begun, and give it.

    Raises:
        CommandError: there is none, or its question is another, or another process is at it.
        ConfigError: its bench.json is none.
    """
    if not path.is_file():
        why = f"there is no benchmark to resume: {path} is not there"
        raise CommandError("REFUSED", why, {"bench": str(path)})
    with held_folder(path):
        yield _resumed(read_bench(path), asked, path)


def _resumed(kept: Bench, asked: Bench, path: Path) -> Bench:
    fields = [
        field.name
        for field in dataclasses.fields(Question)
        if getattr(kept.question, field.name) != getattr(asked.question, field.name)
    ]
    if fields:
        raise CommandError(
            "REFUSED",
            f"{path} asks another question: {', '.join(map(_word, fields))} differ. Repeat its own "
            "options and files, or choose another --name",
            {"bench": str(path), "differs": fields},
        )
    if [each.overrides for each in kept.settings] != [each.overrides for each in asked.settings]:
        problem = Problem(str(path), 0, 0, "not those that its question makes", "settings")
        raise ConfigError([problem])
    return kept


def _word(field: str) -> str:
    """Return what people call a field of the question."""
    return {
        "config_hash": "job or topology",
        "overrides": "--set",
        "schedule": "--no-exchange or --no-overlap",
        "warmup_steps": "--warmup",
        "sweeps": "--sweep",
    }.get(field, f"--{field}")
