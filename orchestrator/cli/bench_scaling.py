"""`isthmus bench scaling`: how much faster all sites together are than one, and why not more."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import click
from rich.text import Text

from isthmus.orchestrator.cli.bench_folder import new_bench, note_plans, opened_bench, tell_outcome
from isthmus.orchestrator.cli.display import live_on_stderr
from isthmus.orchestrator.cli.options import (
    all_of,
    home_option,
    job_argument,
    json_option,
    name_option,
    set_option,
    sweep_option,
    timeout_option,
)
from isthmus.orchestrator.cli.output import Output
from isthmus.orchestrator.cli.whole_run import run_to_end
from isthmus.orchestrator.documents import Pair, load_pair
from isthmus.orchestrator.evidence.bench.bench_tables import BenchTables
from isthmus.orchestrator.evidence.bench.scaling import Ended, Scaling
from isthmus.orchestrator.evidence.bench.sweep_settings import (
    Planned,
    Point,
    load_points,
    parse_sweeps,
)
from isthmus.orchestrator.evidence.record.bench_record import BENCH, Bench, Question, Run
from isthmus.orchestrator.evidence.view import formats
from isthmus.orchestrator.interruption import INTERRUPTION
from isthmus.orchestrator.run_folder.home import home_folder, new_run_id
from isthmus.protos.control.v1 import control_pb2
from isthmus.topology.spec.hashing import config_hash
from isthmus.topology.spec.job import COMPUTES
from isthmus.topology.spec.world import EMULATORS


class BenchProgress:
    """Is told of runs as they begin, go on and end."""

    def __init__(self, points: Sequence[Point]) -> None:
        self._points = points
        self._heading = ""
        self._live = live_on_stderr()

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def started(self, planned: Planned, number: int, total: int, left_s: float | None) -> None:
        """Remember what to call the run, and how much is left."""
        left = "" if left_s is None else f", about {formats.duration(left_s)} left"
        self._heading = f"[{number}/{total}{left}] {self._name(planned)}"
        self._update("starting")

    def show(self, run: control_pb2.Run) -> None:
        """Show how far the run is."""
        step = max((site.step for site in run.sites), default=0)
        self._update(f"{formats.run_state(run).lower()}, step {step}")

    def ended(self, planned: Planned, run: Run) -> None:
        """Print in one line what the run came to."""
        if run.measured is not None:
            speed = formats.count(run.measured.tokens_per_s)
            outcome = f"{speed} tokens/s, {formats.duration(run.measured.step_s)} a step"
        else:
            assert run.failed is not None
            outcome = f"FAILED, {run.failed.code}: {formats.words(run.failed.message)}"
        self._line(f"{self._heading}: {outcome}")

    def _name(self, planned: Planned) -> str:
        overrides = self._points[planned.setting].overrides
        # A solo run is shared by settings: naming one of them would say too much.
        swept = "" if planned.site else " ".join(f"{k}={v}" for k, v in overrides.items())
        what = f"{planned.site} alone" if planned.site else "all sites"
        parts = [f"repeat {planned.repeat + 1}", formats.words(swept), formats.words(what)]
        return ", ".join(part for part in parts if part)

    def _update(self, state: str) -> None:
        if self._live is not None:
            self._live.update(Text(f"{self._heading}: {state}"), refresh=True)

    def _line(self, text: str) -> None:
        if self._live is not None:
            self._live.console.print(Text(text))
        else:
            click.echo(text, err=True)
            sys.stderr.flush()


_question_options = all_of(
    set_option,
    sweep_option,
    click.option(
        "--steps",
        type=click.IntRange(2, 100_000),
        default=20,
        help="Steps of each run that are measured: an even number.",
    ),
    click.option(
        "--warmup",
        type=click.IntRange(0, 100_000),
        default=5,
        help="Steps of each run before the first that is measured.",
    ),
    click.option(
        "--repeats", type=click.IntRange(1, 1000), default=5, help="How often each run is made."
    ),
    click.option(
        "--compute",
        type=click.Choice(COMPUTES),
        default="modelled",
        help="modelled: a rank waits for as long as its accelerator would compute; real: it computes.",
    ),
    click.option(
        "--no-exchange",
        is_flag=True,
        help="Send nothing between sites: the time that remains is not the WAN's.",
    ),
    click.option(
        "--no-overlap",
        is_flag=True,
        help="Send nothing between sites before the backward pass has ended.",
    ),
    click.option(
        "--emulator",
        type=click.Choice(EMULATORS),
        help="What emulates the WAN between the sites. [as the topology says]",
    ),
)
"""What makes the question: resuming needs the same again."""


@click.command("scaling")
@job_argument
@_question_options
@name_option
@click.option("--resume", is_flag=True, help="Go on with the benchmark of that --name.")
@timeout_option("30min", "A single run that takes longer has failed.")
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
    repeats: int,
    compute: str,
    no_exchange: bool,
    no_overlap: bool,
    emulator: str | None,
    name: str | None,
    resume: bool,
    timeout_s: float,
    home: Path | None,
) -> int:
    """Measure JOB's scaling efficiency: tokens/s of all sites, over the sum of each by itself.

    Every run is an ordinary one on this machine. Ctrl-C keeps what is measured; --resume goes on.
    """
    if no_exchange and no_overlap:
        raise click.UsageError("--no-overlap has no use with --no-exchange: nothing crosses")
    if steps % 2:
        raise click.UsageError(
            f"--steps: want an even number, got {steps}: where sites wait for each other, longer "
            "and shorter steps take turns, and only pairs of them have the mean"
        )
    if resume and name is None:
        raise click.UsageError("--resume needs the --name of the benchmark")
    base = load_pair(job, overrides)
    question = Question(
        config_hash=config_hash(base.job, base.topology),
        overrides=overrides,
        compute="modelled" if compute == "modelled" else "real",
        schedule="off" if no_exchange else "serial" if no_overlap else None,
        emulator=emulator,
        warmup_steps=warmup,
        steps=steps,
        repeats=repeats,
        sweeps=parse_sweeps(sweeps),
    )
    points = load_points(question, job, None)
    note_plans(output, points)
    name = name or f"{base.job.name}-{new_run_id()}"[-64:]
    bench = new_bench(name, base, question, points)
    with opened_bench(home_folder(home) / "bench" / name, bench, resume=resume) as (folder, bench):
        return _measure(output, folder, bench, points, timeout_s)


def _measure(
    output: Output, folder: Path, bench: Bench, points: Sequence[Point], timeout_s: float
) -> int:
    """Make the runs, and tell what they came to."""
    exit_code = None
    with INTERRUPTION.holding(), BenchProgress(points) as progress:

        def launch(pair: Pair, home: Path, run_id: str) -> Ended:
            return run_to_end(pair, home, run_id, timeout_s=timeout_s, show=progress.show)

        scaling = Scaling(
            folder=folder,
            bench=bench,
            points=points,
            launch=launch,
            watch=progress,
            new_run_id=new_run_id,
        )
        try:
            scaling.run()
        except KeyboardInterrupt as error:
            exit_code = INTERRUPTION.answer(error)
    if exit_code is not None:
        output.note(f"interrupted. Go on: the same command with --name {bench.name} --resume")
    bench = scaling.bench
    failed: dict[str, str] = {}
    for run in (run for setting in bench.settings for run in setting.runs):
        if run.failed is not None:
            why = f"{run.failed.code}: {run.failed.message}"
            failed[run.run_id] = f"run {run.run_id} of {run.site or 'all sites'}: {why}"
    tables, data = BenchTables(bench), dataclasses.asdict(bench)
    return tell_outcome(output, tables, folder / BENCH, data, failed, exit_code)
