"""`isthmus simulate`: what a job would reach on its topology, by a discrete-event simulation."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.text import Text

from isthmus.orchestrator.api.errors import CommandError
from isthmus.orchestrator.cli.bench_folder import bench_folder, new_bench, new_folder, note_plans
from isthmus.orchestrator.cli.options import (
    DURATION,
    FOLDER,
    Parsed,
    all_of,
    faults_option,
    home_option,
    job_argument,
    name_option,
    set_option,
    sweep_option,
    whole_rounds,
    with_output,
)
from isthmus.orchestrator.cli.output import Output
from isthmus.orchestrator.documents import load_pair
from isthmus.orchestrator.emulator.fault_files import load_faults_file
from isthmus.orchestrator.evidence.bench.bench_tables import scaling_tables
from isthmus.orchestrator.evidence.bench.sweep_settings import (
    Point,
    load_simulated_points,
    parse_sweeps,
)
from isthmus.orchestrator.evidence.record.bench_record import (
    BENCH,
    Bench,
    Question,
    Setting,
    write_bench,
)
from isthmus.orchestrator.evidence.simulate.simulated_result import (
    further_tables,
    inside_data,
    result,
    setting_runs,
)
from isthmus.orchestrator.evidence.simulate.simulated_run import write_run
from isthmus.orchestrator.run_folder.home import new_run_id
from isthmus.topology.faults.script import TimedChange, expand
from isthmus.topology.model.buckets import BUCKETS_MAX
from isthmus.topology.planner.memory_fit import too_large
from isthmus.topology.simulator.engine import SimulationError
from isthmus.topology.simulator.settings import (
    DISTRIBUTIONS,
    SHARINGS,
    Outages,
    Rounds,
    Settings,
    Stragglers,
)
from isthmus.topology.simulator.simulation import SimulatedRun, simulate, simulate_alone
from isthmus.topology.spec.hashing import config_hash
from isthmus.topology.spec.regime import Regime
from isthmus.topology.spec.units import UnitError, parse_fraction

STEPS, WARMUP_STEPS, CHECKPOINT_EVERY = 20, 5, 100
"""Steps where no option says how many. With rounds, as many whole ones as hold these steps."""
_ROUNDS_MIN = 2
"""The fewest rounds that are measured: of one, what comes and goes at its ends says little."""
_STEPS_MAX = 100_000
_ROUND_STEPS_MAX = 10_000
_FRAGMENTS_MAX = BUCKETS_MAX


def _stragglers(text: str) -> Stragglers:
    distribution, _, spread = text.partition(":")
    if distribution not in DISTRIBUTIONS:
        wanted = ", ".join(DISTRIBUTIONS)
        raise ValueError(f"want one of {wanted}, as exponential:5%; got {text!r}")
    try:
        return Stragglers(distribution, parse_fraction(spread))
    except UnitError as error:
        raise ValueError(f"{error}, as {distribution}:5%") from error


_simulation_options = all_of(
    click.option(
        "--steps",
        type=click.IntRange(1, _STEPS_MAX),
        help=f"Steps that are measured. [{STEPS}; with rounds of several steps {_ROUNDS_MIN} of them at least]",
    ),
    click.option(
        "--warmup",
        type=click.IntRange(0, _STEPS_MAX),
        help=f"Steps before the first that is measured. [{WARMUP_STEPS}; with rounds of several steps whole ones]",
    ),
    click.option(
        "--seed",
        type=int,
        help="Seed of stragglers and failures [0], and of a fault script's times [the script's].",
    ),
    click.option(
        "--sharing",
        type=click.Choice(SHARINGS),
        default=SHARINGS[0],
        help="How a link serves what waits for it: bucket by bucket, "
        "or a few at once in equal shares.",
    ),
    click.option(
        "--slow-start/--no-slow-start",
        "slow_start",
        default=None,
        help="Whether TCP starts slowly after a pause. [yes, but with `emulator: relay` no]",
    ),
    click.option(
        "--local-steps",
        type=click.IntRange(1, _ROUND_STEPS_MAX),
        help="DiLoCo: sites train by themselves for this many steps, then exchange their parameters. "
        "[as the job's regime]",
    ),
    click.option(
        "--fragments",
        type=click.IntRange(1, _FRAGMENTS_MAX),
        help="Streaming: this many parts of the model are exchanged one after another in a round. "
        "[1]",
    ),
    click.option(
        "--overlap-steps",
        type=click.IntRange(0, _ROUND_STEPS_MAX),
        help="Streaming: a part's exchange goes on during this many further steps. [0]",
    ),
    click.option(
        "--stragglers",
        type=Parsed("distribution:spread", _stragglers),
        help=f"How much slower ranks are, drawn anew each step: {', '.join(DISTRIBUTIONS)}, and a "
        "share, as exponential:5%.",
    ),
    click.option(
        "--mtbf",
        "mtbf_s",
        type=DURATION,
        help="Mean time between failures of one site. [none fails]",
    ),
    click.option(
        "--recovery",
        "recovery_s",
        type=DURATION,
        default="5min",
        help="Time from a failure until all sites compute again.",
    ),
    click.option(
        "--checkpoint-every",
        type=click.IntRange(1, 1_000_000),
        help="Steps between checkpoints: after a failure those since the last one are made again. "
        f"[{CHECKPOINT_EVERY}; with rounds of several steps whole ones]",
    ),
)
"""What `_settings` takes."""


def _settings(
    regime: Regime,
    *,
    steps: int | None,
    warmup: int | None,
    seed: int | None,
    local_steps: int | None,
    fragments: int | None,
    overlap_steps: int | None,
    mtbf_s: float | None,
    recovery_s: float,
    checkpoint_every: int | None,
    **others: Any,  # noqa: ANN401 - fields of Settings
) -> tuple[Settings, int]:
    """Return how a job of that regime is simulated, and the steps of it that do not count.

    Raises:
        UsageError: the options do not fit each other.
    """
    rounds = _rounds(local_steps, fragments, overlap_steps) or _rounds_of(regime)
    round_steps = rounds.steps if rounds else 1
    least = _ROUNDS_MIN * round_steps if rounds else 0
    warmup = whole_rounds("--warmup", warmup, WARMUP_STEPS, round_steps)
    steps = whole_rounds("--steps", steps, max(STEPS, least), round_steps)
    outages = None
    if mtbf_s is not None:
        if mtbf_s <= 0:
            raise click.UsageError("--mtbf: want more than 0")
        every = whole_rounds("--checkpoint-every", checkpoint_every, CHECKPOINT_EVERY, round_steps)
        outages = Outages(mtbf_s=mtbf_s, recovery_s=recovery_s, checkpoint_every=every)
    settings = Settings(
        steps=warmup + steps, seed=seed or 0, outages=outages, rounds=rounds, **others
    )
    return settings, warmup


def _rounds(
    local_steps: int | None, fragments: int | None, overlap_steps: int | None
) -> Rounds | None:
    given = {"--fragments": fragments, "--overlap-steps": overlap_steps}
    for name, value in given.items():
        if value is None:
            continue
        if local_steps is None:
            raise click.UsageError(f"{name} has no use without --local-steps, its round")
        if value > local_steps:
            raise click.UsageError(
                f"{name}: want at most {local_steps}, the steps of a round; got {value}"
            )
    if local_steps is None:
        return None
    return Rounds(steps=local_steps, fragments=fragments or 1, overlap_steps=overlap_steps or 0)


def _rounds_of(regime: Regime) -> Rounds | None:
    """Return the rounds of a job's own regime; None: it exchanges gradients."""
    if not regime.is_local:
        return None
    return Rounds(
        steps=regime.sync_every,
        fragments=regime.fragments,
        overlap_steps=regime.delay,
        min_steps=regime.min_steps,
    )


def _refuse_other_rounds(points: Sequence[Point], regime: Regime) -> None:
    """Refuse a sweep over rounds: each of its settings would have other steps.

    Raises:
        UsageError: some settings have other rounds than the job.
    """
    for point in points:
        if _rounds_of(point.together.job.regime) != _rounds_of(regime):
            raise click.UsageError(
                f"{point.said}it has other rounds than the job: simulate it by itself, with --set"
            )


@click.command("simulate")
@job_argument
@set_option
@sweep_option
@_simulation_options
@faults_option
@name_option
@click.option("--out", type=FOLDER, help="Folder of what is kept. [HOME/bench/NAME]")
@home_option
@with_output
def command(
    output: Output,
    /,
    job: Path,
    overrides: tuple[str, ...],
    sweeps: tuple[str, ...],
    faults_path: Path | None,
    name: str | None,
    out: Path | None,
    home: Path | None,
    **options: Any,  # noqa: ANN401 - values of _simulation_options
) -> int:
    """Simulate JOB on its topology: step time, efficiency, what links carry, what failures cost.

    Nothing runs. `isthmus report` and `isthmus trace` draw what is kept like a real run.
    """
    if options["mtbf_s"] is not None and faults_path is not None:
        raise click.UsageError("--mtbf has no use with --faults: sites fail, or links")
    base = load_pair(job, overrides)
    settings, warmup = _settings(base.job.regime, **options)
    parsed = parse_sweeps(sweeps)
    points = load_simulated_points(base, overrides, parsed)
    if options["local_steps"] is None:
        _refuse_other_rounds(points, base.job.regime)
    note_plans(output, points)
    scripts = [_changes(faults_path, point, options["seed"]) for point in points]
    name = name or f"{base.job.name}-{new_run_id()}"[-64:]
    question = Question(
        config_hash=config_hash(base.job, base.topology),
        overrides=overrides,
        compute="modelled",
        schedule=None,
        emulator=None,
        warmup_steps=warmup,
        steps=settings.steps - warmup,
        repeats=1,
        sweeps=parsed,
    )
    bench = new_bench(name, base, question, points)
    folder = out.absolute() if out is not None else bench_folder(home, name)
    with new_folder(folder / BENCH):
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
        for warning in too_large(point.together.job, point.together.topology):
            output.note(f"warning: {point.said}{warning}")
        run_id = f"{bench.name}-{index}"[-64:].lstrip("._-")
        began_s = time.monotonic()
        try:
            run = simulate(point.together.job, point.together.topology, settings)
        except SimulationError as error:
            blamed = "--faults" if changes else "--mtbf, --checkpoint-every"
            raise CommandError("USAGE", f"{point.said}{error}: {blamed}") from error
        alone = simulate_alone(point.together.job, point.together.topology, settings)
        took_s = time.monotonic() - began_s
        write_run(folder, run_id, point.together, run, time.time(), told=settings.in_words())
        warmup = bench.question.warmup_steps
        runs = setting_runs(run, alone, run_id, took_s, warmup)
        setting = Setting(
            overrides=point.overrides,
            runs=runs,
            result=result(point.together, runs, run, alone),
        )
        kept = [*bench.settings[:index], setting, *bench.settings[index + 1 :]]
        bench = dataclasses.replace(bench, settings=tuple(kept))
        write_bench(folder / BENCH, bench)
        made.append(run)
        output.note(f"[{index + 1}/{len(points)}] {point.said}simulated in {took_s:.2f} s")
    if not output.as_json:
        console = Console()
        console.print(scaling_tables(bench))
        if settings.in_words():
            console.print(Text(f"\nsimulated with {'; '.join(settings.in_words())}"))
        rows = list(zip(points, made, strict=True))
        for section in further_tables(rows, fails=settings.outages is not None):
            console.print(section)
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
    return expand(load_faults_file(path, point.together.topology), seed)


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
