"""HOME/bench/NAME: one benchmark's folder, used by one process at a time."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType

from isthmus.orchestrator.cli.command_errors import CommandError
from isthmus.orchestrator.cli.output import Output
from isthmus.orchestrator.documents import Pair
from isthmus.orchestrator.evidence.bench.sweep_settings import Point
from isthmus.orchestrator.evidence.record.bench_record import (
    BENCH,
    Bench,
    Question,
    Setting,
    Source,
    read_bench,
)
from isthmus.orchestrator.run_folder.state_lock import LOCK, StateLockedError, lock
from isthmus.topology.spec.errors import ConfigError, Problem


def new_bench(name: str, pair: Pair, question: Question, points: Sequence[Point]) -> Bench:
    """Return a benchmark of which nothing is measured yet."""
    return Bench(
        name=name,
        job=Source(name=pair.job.name, path=str(pair.job_path.absolute())),
        topology=Source(name=pair.topology.name, path=str(pair.topology_path.absolute())),
        question=question,
        settings=tuple(Setting(overrides=point.overrides) for point in points),
    )


def note_plans(output: Output, points: Sequence[Point]) -> None:
    """Print the plan of each setting, where the job asks for plans."""
    for point in points:
        if point.plan is not None:
            output.note(f"{point.said}plan: {point.plan}")


def tell_outcome(
    output: Output,
    tables: RenderableType,
    path: Path,
    data: Mapping[str, Any],
    failed: Mapping[str, str],
    interrupted: int | None,
) -> int:
    """Print a benchmark's tables or its envelope; return the exit status.

    `failed` says why by the run's id, which is empty where it was no run. `interrupted` is the exit
    status where a signal ended the benchmark.

    Raises:
        CommandError: a run failed.
    """
    if not output.as_json:
        Console().print(tables)
    output.note(f"kept in {path}")
    data = {**data, "folder": str(path.parent)}
    if interrupted is not None:
        return output.result({**data, "interrupted": True}, exit_code=interrupted)
    for run_id, why in failed.items():
        others = f", and {len(failed) - 1} more" if len(failed) > 1 else ""
        where = {"bench": str(path)}
        if run_id:
            where |= {"run_id": run_id, "folder": str(path.parent / "runs" / run_id)}
        raise CommandError("BENCHMARK_INCOMPLETE", f"{why}{others}", where)
    return output.result(data)


@contextmanager
def opened_bench(
    folder: Path, bench: Bench, *, resume: bool | None
) -> Iterator[tuple[Path, Bench]]:
    """Give the folder and the benchmark to go on with: `bench`, or with `resume` what is there.

    `resume` is None where the command has no such option.

    Raises:
        CommandError: there is one already and `resume` was not asked for, or none, or its question
            is another, or another process is at it.
        ConfigError: its bench.json is none.
        OSError: the folder cannot be made.
    """
    path = folder / BENCH
    if resume and not path.is_file():
        raise CommandError(
            "REFUSED", f"there is no benchmark to resume: {path} is not there", {"bench": str(path)}
        )
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        held = lock(folder / LOCK)
    except StateLockedError:
        why = f"another process is measuring in {folder}"
        raise CommandError("REFUSED", why, {"bench": str(path)}) from None
    try:
        if path.is_file():
            bench = _resumed(read_bench(path), bench, path, resume=resume)
        yield folder, bench
    finally:
        os.close(held)


def _resumed(found: Bench, asked: Bench, path: Path, *, resume: bool | None) -> Bench:
    if not resume:
        cure = (
            "choose another --name" if resume is None else "add --resume, or choose another --name"
        )
        raise CommandError(
            "REFUSED",
            f"there is a benchmark {found.name!r} already: {cure}",
            {"bench": str(path)},
        )
    fields = [
        field.name
        for field in dataclasses.fields(Question)
        if getattr(found.question, field.name) != getattr(asked.question, field.name)
    ]
    if fields:
        raise CommandError(
            "REFUSED",
            f"{path} asks another question: {', '.join(map(_word, fields))} differ. Repeat its own "
            "options and files, or choose another --name",
            {"bench": str(path), "differs": fields},
        )
    if [each.overrides for each in found.settings] != [each.overrides for each in asked.settings]:
        problem = Problem(str(path), 0, 0, "not those that its question makes", "settings")
        raise ConfigError([problem])
    return found


def _word(field: str) -> str:
    """Return what people call a field of the question."""
    return {
        "config_hash": "job or topology",
        "overrides": "--set",
        "schedule": "--no-exchange or --no-overlap",
        "warmup_steps": "--warmup",
        "sweeps": "--sweep",
    }.get(field, f"--{field}")
