"""`isthmus simulate`: what a job would reach on its topology, by a discrete-event simulation."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.text import Text

from orchestrator.bench.record import BENCH, Bench, Question, Setting, Source, write_bench
from orchestrator.bench.sweep import parse_sweeps
from orchestrator.bench.table import BenchTables
from orchestrator.cli.bench_folder import opened_bench
from orchestrator.cli.failure import CommandError
from orchestrator.cli.options import Duration, faults_option, home_option, json_option, set_option
from orchestrator.cli.output import Output
from orchestrator.documents import load_faults_file, load_pair
from orchestrator.home import home_folder, is_run_id, new_run_id
from orchestrator.simulate.figures import result, setting_runs
from orchestrator.simulate.folder import write_run
from orchestrator.simulate.question import Point, load_settings
from orchestrator.view import figures
from orchestrator.view.tables import Column, FittingTable
from topology.faults import TimedChange, expand
from topology.hashing import config_hash
from topology.simulator.chance import DISTRIBUTIONS, Stragglers
from topology.simulator.engine import SimulationError
from topology.simulator.outages import Outages
from topology.simulator.run import SimulatedRun, simulate, simulate_alone
from topology.simulator.settings import SHARINGS, Settings
from topology.units import UnitError, parse_fraction


class StragglersType(click.ParamType[Stragglers]):
    """DISTRIBUTION:SPREAD, as exponential:5%."""

    name = "distribution:spread"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> Stragglers:
        """Check both parts."""
        if isinstance(value, Stragglers):
            return value
        distribution, _, spread = str(value).partition(":")
        if distribution not in DISTRIBUTIONS:
            wanted = ", ".join(DISTRIBUTIONS)
            self.fail(f"want one of {wanted}, as exponential:5%; got {value!r}", param, ctx)
        try:
            return Stragglers(distribution, parse_fraction(spread))
        except UnitError as error:
            self.fail(f"{error}, as {distribution}:5%", param, ctx)


@click.command("simulate")
@click.argument("job", type=click.Path(path_type=Path))
@set_option
@click.option(
    "--sweep",
    "sweeps",
    metavar="PATH=V1,V2",
    multiple=True,
    help="Simulate with each of these values, as links.*.rtt=5ms,20ms; of several, every combination.",
)
@click.option(
    "--steps",
    type=click.IntRange(1, 100_000),
    default=20,
    show_default=True,
    help="That count.",
)
@click.option(
    "--warmup",
    type=click.IntRange(0, 100_000),
    default=5,
    show_default=True,
    help="Steps before those.",
)
@click.option(
    "--seed", type=int, help="Of stragglers and failures, and a fault script's times. [0; its own]"
)
@click.option(
    "--sharing",
    type=click.Choice(SHARINGS),
    default=SHARINGS[0],
    show_default=True,
    help="How a link serves what waits for it: bucket by bucket, or a few at once in equal shares.",
)
@click.option(
    "--slow-start/--no-slow-start",
    "slow_start",
    default=None,
    help="TCP starts slowly after a pause. [where packets cross: not with the relay]",
)
@click.option(
    "--stragglers",
    type=StragglersType(),
    help=f"By how much ranks are slower, step by step: {', '.join(DISTRIBUTIONS)}, and a share.",
)
@click.option(
    "--mtbf", "mtbf_s", type=Duration(), help="Mean time between failures of one site. [none fails]"
)
@click.option(
    "--recovery",
    "recovery_s",
    type=Duration(),
    default="5min",
    show_default=True,
    help="From a failure until all sites compute again.",
)
@click.option(
    "--checkpoint-every",
    type=click.IntRange(1, 1_000_000),
    default=100,
    show_default=True,
    help="Steps; what was done since is done again after a failure.",
)
@faults_option
@click.option("--name", help="Of the simulation and its folder. [made up]")
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
    steps: int,
    warmup: int,
    seed: int | None,
    sharing: str,
    slow_start: bool | None,
    stragglers: Stragglers | None,
    mtbf_s: float | None,
    recovery_s: float,
    checkpoint_every: int,
    faults_path: Path | None,
    name: str | None,
    out: Path | None,
    home: Path | None,
) -> int:
    """Simulate JOB on its topology: step time, efficiency, what each link carries, what failures cost.

    Nothing runs. `isthmus report` and `isthmus trace` draw what is kept like a real run.
    """
    if name is not None and not is_run_id(name):
        raise click.UsageError("--name: want letters, digits, '.', '_' and '-', at most 64")
    if mtbf_s is not None and faults_path is not None:
        raise click.UsageError("--mtbf has no use with --faults: sites fail, or links")
    if mtbf_s is not None and mtbf_s <= 0:
        raise click.UsageError("--mtbf: want more than 0")
    outages = None
    if mtbf_s is not None:
        outages = Outages(mtbf_s=mtbf_s, recovery_s=recovery_s, checkpoint_every=checkpoint_every)
    settings = Settings(
        steps=warmup + steps,
        seed=seed or 0,
        sharing=sharing,
        slow_start=slow_start,
        stragglers=stragglers,
        outages=outages,
    )
    base = load_pair(job, overrides)
    parsed = parse_sweeps(sweeps)
    points = load_settings(base, overrides, parsed)
    scripts = [_changes(faults_path, point, seed) for point in points]
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
            steps=steps,
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
            options = "--faults" if changes else "--mtbf, --checkpoint-every"
            raise CommandError("USAGE", f"{_told(point)}{error}: {options}") from error
        alone = simulate_alone(point.pair.job, point.pair.topology, settings)
        took_s = time.monotonic() - began_s
        write_run(folder, run_id, point.pair, run, time.time())
        warmup = bench.question.warmup_steps
        runs = setting_runs(run, alone, run_id, f"runs/{run_id}", took_s, warmup)
        setting = Setting(
            overrides=point.overrides,
            runs=runs,
            result=result(point.pair, runs, run.ratio),
        )
        kept = [*bench.settings[:index], setting, *bench.settings[index + 1 :]]
        bench = dataclasses.replace(bench, settings=tuple(kept))
        write_bench(folder / BENCH, bench)
        made.append(run)
        output.note(f"[{index + 1}/{len(points)}] {_told(point)}simulated in {took_s:.2f} s")
    if not output.as_json:
        console = Console()
        console.print(BenchTables(bench))
        if settings.outages is not None:
            console.print(Text("\nfailures", style="bold"))
            console.print(_goodput(points, made))
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


def _goodput(points: list[Point], made: list[SimulatedRun]) -> FittingTable:
    paths = list(points[0].overrides)
    return FittingTable(
        [
            *(
                Column(
                    figures.words(path),
                    [figures.words(point.overrides[path]) for point in points],
                    is_text=True,
                )
                for path in paths
            ),
            Column("wall time", [figures.duration(run.wall_s) for run in made]),
            Column("failures", [str(len(run.outages)) for run in made]),
            Column(
                "steps lost", [str(sum(each.lost_steps for each in run.outages)) for run in made]
            ),
            Column("goodput", [f"{run.goodput:.1%}" for run in made]),
        ]
    )


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
    }
