"""`isthmus simulate`: what a job would reach on its topology, by a discrete-event simulation."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.text import Text

from orchestrator.cli.bench_folder import note_plans, opened_bench
from orchestrator.cli.failure import CommandError
from orchestrator.cli.options import (
    RunName,
    faults_option,
    home_option,
    job_argument,
    json_option,
    set_option,
)
from orchestrator.cli.output import Output
from orchestrator.cli.simulate_options import Asked, simulation_options
from orchestrator.documents import load_faults_file, load_pair
from orchestrator.evidence.bench.record import BENCH, Bench, Question, Setting, Source, write_bench
from orchestrator.evidence.bench.sweep import parse_sweeps
from orchestrator.evidence.bench.table import BenchTables
from orchestrator.evidence.simulate.figures import result, setting_runs
from orchestrator.evidence.simulate.folder import write_run
from orchestrator.evidence.simulate.question import Point, load_settings
from orchestrator.evidence.simulate.tables import further_tables, inside_data
from orchestrator.run_folder.home import home_folder, new_run_id
from topology.faults.script import TimedChange, expand
from topology.hashing import config_hash
from topology.simulator.engine import SimulationError
from topology.simulator.run import SimulatedRun, simulate, simulate_alone
from topology.simulator.settings import Settings


@click.command("simulate")
@job_argument
@set_option
@click.option(
    "--sweep",
    "sweeps",
    metavar="PATH=V1,V2",
    multiple=True,
    help="Simulate with each of these values, as links.*.rtt=5ms,20ms; "
    "of several, every combination.",
)
@simulation_options
@faults_option
@click.option("--name", type=RunName(), help="Of the simulation and its folder. [made up]")
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    help="Its folder. [HOME/bench/NAME]",
)
@home_option
@json_option
@click.pass_obj
def command(
    output: Output,
    job: Path,
    overrides: tuple[str, ...],
    sweeps: tuple[str, ...],
    faults_path: Path | None,
    name: str | None,
    out: Path | None,
    home: Path | None,
    asked: Asked,
) -> int:
    """Simulate JOB on its topology: step time, efficiency, what links carry, what failures cost.

    Nothing runs. `isthmus report` and `isthmus trace` draw what is kept like a real run.
    """
    if asked.mtbf_s is not None and faults_path is not None:
        raise click.UsageError("--mtbf has no use with --faults: sites fail, or links")
    settings, warmup = asked.settings()
    base = load_pair(job, overrides)
    parsed = parse_sweeps(sweeps)
    points = load_settings(base, overrides, parsed)
    note_plans(output, points)
    scripts = [_changes(faults_path, point, asked.seed) for point in points]
    name = name or f"{base.job.name}-{new_run_id()}"[-64:]
    bench = Bench(
        name=name,
        job=Source(name=base.job.name, path=str(base.job_path.absolute())),
        topology=Source(name=base.topology.name, path=str(base.topology_path.absolute())),
        question=Question(
            config_hash=config_hash(base.job, base.topology),
            overrides=overrides,
            compute="modelled",
            schedule=None,
            emulator=None,
            warmup_steps=warmup,
            steps=settings.steps - warmup,
            repeats=1,
            sweeps=parsed,
        ),
        settings=tuple(Setting(overrides=point.overrides) for point in points),
    )
    folder = out.absolute() if out is not None else home_folder(home) / "bench" / name
    with opened_bench(folder, bench, resume=None) as (folder, bench):
        return _simulate(output, folder, bench, list(zip(points, scripts, strict=True)), settings)


def _simulate(
    output: Output,
    folder: Path,
    bench: Bench,
    asked: list[tuple[Point, tuple[TimedChange, ...]]],
    settings: Settings,
) -> int:
    """Simulate every setting, keep it, and tell what it came to."""
    made: list[SimulatedRun] = []
    points = [point for point, _ in asked]
    for index, (point, changes) in enumerate(asked):
        settings = dataclasses.replace(settings, changes=changes)
        run_id = f"{bench.name}-{index}"[-64:].lstrip("._-")
        began_s = time.monotonic()
        try:
            run = simulate(point.pair.job, point.pair.topology, settings)
        except SimulationError as error:
            blamed = "--faults" if changes else "--mtbf, --checkpoint-every"
            raise CommandError("USAGE", f"{_told(point)}{error}: {blamed}") from error
        alone = simulate_alone(point.pair.job, point.pair.topology, settings)
        took_s = time.monotonic() - began_s
        write_run(folder, run_id, point.pair, run, time.time(), told=settings.in_words())
        warmup = bench.question.warmup_steps
        runs = setting_runs(run, alone, run_id, f"runs/{run_id}", took_s, warmup)
        setting = Setting(
            overrides=point.overrides,
            runs=runs,
            result=result(point.pair, runs, run, alone),
        )
        kept = [*bench.settings[:index], setting, *bench.settings[index + 1 :]]
        bench = dataclasses.replace(bench, settings=tuple(kept))
        write_bench(folder / BENCH, bench)
        made.append(run)
        output.note(f"[{index + 1}/{len(points)}] {_told(point)}simulated in {took_s:.2f} s")
    if not output.as_json:
        console = Console()
        console.print(BenchTables(bench))
        if settings.in_words():
            console.print(Text(f"\nsimulated with {'; '.join(settings.in_words())}"))
        rows = list(zip(points, made, strict=True))
        for table in further_tables(rows, fails=settings.outages is not None):
            console.print(table)
    output.note(f"kept in {folder / BENCH}; runs, for report and trace: --home {folder}")
    data = {
        **dataclasses.asdict(bench),
        "folder": str(folder),
        "simulated": [_data(run) for run in made],
    }
    return output.result(data)


def _changes(path: Path | None, point: Point, seed: int | None) -> tuple[TimedChange, ...]:
    """Return what a fault script does to a setting's links; ConfigError for mistakes in it."""
    if path is None:
        return ()
    return expand(load_faults_file(path, point.pair.topology), seed)


def _told(point: Point) -> str:
    said = " ".join(f"{path}={value}" for path, value in point.overrides.items())
    return f"{said}: " if said else ""


def _data(run: SimulatedRun) -> dict[str, Any]:
    return {
        "wall_s": run.wall_s,
        "goodput": run.goodput,
        "outages": [dataclasses.asdict(each) for each in run.outages],
        "steps_s": [
            max(site.end_s for site in step) - min(site.begin_s for site in step)
            for step in run.steps
        ],
        "actions": run.num_actions,
        "inside": [inside_data(each) for each in run.work.inside],
    }
