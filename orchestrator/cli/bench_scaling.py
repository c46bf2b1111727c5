"""`isthmus bench scaling`: how much faster all sites together are than one, and why not more."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from pathlib import Path

import click

from isthmus.orchestrator.cli.bench_folder import (
    Progress,
    bench_folder,
    measured,
    new_bench,
    new_folder,
    note_plans,
    resumed_folder,
)
from isthmus.orchestrator.cli.options import (
    Parsed,
    all_of,
    emulator_option,
    home_option,
    job_argument,
    name_option,
    set_option,
    sweep_option,
    timeout_option,
    whole_rounds,
    with_output,
)
from isthmus.orchestrator.cli.output import Output
from isthmus.orchestrator.documents import load_pair, read_text
from isthmus.orchestrator.emulator.fault_files import TRACE_BYTES, load_link_trace
from isthmus.orchestrator.evidence.bench.bench_tables import scaling_tables
from isthmus.orchestrator.evidence.bench.requirements import (
    EXAMPLES,
    Requirement,
    parse_requirement,
)
from isthmus.orchestrator.evidence.bench.scaling import Scaling
from isthmus.orchestrator.evidence.bench.sweep_settings import load_points, parse_sweeps
from isthmus.orchestrator.evidence.record.bench_record import BENCH, Question
from isthmus.orchestrator.run_folder.home import new_run_id
from isthmus.topology.spec.hashing import config_hash
from isthmus.topology.spec.job import COMPUTES

LINK_TRACE = "link-trace.yaml"
"""The fault script that a trace becomes, in the benchmark's folder."""
_STEPS = 20
_WARMUP_STEPS = 5
_ROUNDS = 2
"""Least number of rounds that are measured."""
_question_options = all_of(
    set_option,
    sweep_option,
    click.option(
        "--steps",
        type=click.IntRange(2, 100_000),
        help=f"Steps of each run that are measured, an even number. [{_STEPS}; with rounds of several steps {_ROUNDS} of them at least]",
    ),
    click.option(
        "--warmup",
        type=click.IntRange(0, 100_000),
        help=f"Steps of each run before the first that is measured. [{_WARMUP_STEPS}; with rounds of several steps whole ones]",
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
    emulator_option("What emulates the WAN between the sites. [as the topology says]"),
    click.option(
        "--link-trace",
        "trace_path",
        type=click.Path(path_type=Path),
        help="Links change as in this recording: CSV or JSON lines of time_s, source, target, bytes_per_s, rtt_s, jitter_s, loss, or the metrics.jsonl of a run.",
    ),
)
"""What makes the question: resuming needs the same again."""


@click.command("scaling")
@job_argument
@_question_options
@name_option
@click.option("--resume", is_flag=True, help="Go on with the benchmark of that --name.")
@click.option(
    "--require",
    "requirements",
    type=Parsed("requirement", parse_requirement),
    multiple=True,
    help=f"End with 9 where a setting does not reach this, as {EXAMPLES}. May be repeated.",
)
@timeout_option("30min", "A single run that takes longer has failed.")
@home_option
@with_output
def command(
    output: Output,
    job: Path,
    overrides: tuple[str, ...],
    sweeps: tuple[str, ...],
    steps: int | None,
    warmup: int | None,
    repeats: int,
    compute: str,
    no_exchange: bool,
    no_overlap: bool,
    emulator: str | None,
    trace_path: Path | None,
    name: str | None,
    resume: bool,
    requirements: tuple[Requirement, ...],
    timeout_s: float,
    home: Path | None,
) -> int:
    """Measure JOB's scaling efficiency: tokens/s of all sites, over the sum of each by itself.

    Every run is an ordinary one on this machine. Ctrl-C keeps what is measured; --resume goes on.
    """
    if no_exchange and no_overlap:
        raise click.UsageError("--no-overlap has no use with --no-exchange: nothing crosses")
    if no_exchange and trace_path is not None:
        raise click.UsageError("--link-trace has no use with --no-exchange: nothing crosses")
    if steps is not None and steps % 2:
        raise click.UsageError(
            f"--steps: want an even number, got {steps}: where sites wait for each other, longer "
            "and shorter steps take turns, and only pairs of them have the mean"
        )
    if resume and name is None:
        raise click.UsageError("--resume needs the --name of the benchmark")
    base = load_pair(job, overrides)
    is_priced = any(link.egress_usd_per_byte for link in base.topology.links)
    for each in requirements:
        if each.is_of_money and not is_priced:
            raise click.UsageError(
                f"--require {each.text}: no link of {base.topology_path} has a price: give links "
                "their `egress`, as 0.02USD/GB"
            )
    question = Question(
        config_hash=config_hash(base.job, base.topology),
        overrides=overrides,
        compute="modelled" if compute == "modelled" else "real",
        schedule="off" if no_exchange else "serial" if no_overlap else None,
        emulator=emulator,
        warmup_steps=_WARMUP_STEPS if warmup is None else warmup,
        steps=_STEPS if steps is None else steps,
        repeats=repeats,
        sweeps=parse_sweeps(sweeps),
        link_trace="" if trace_path is None else _hash_of(trace_path),
    )
    points = load_points(question, job, None)
    round_steps = math.lcm(*(point.together.job.regime.sync_every for point in points))
    if round_steps > 1:
        # Part of a round would count as the whole: all that crosses does so at its end.
        usual = max(_STEPS, _ROUNDS * round_steps)
        question = dataclasses.replace(
            question,
            warmup_steps=whole_rounds("--warmup", warmup, _WARMUP_STEPS, round_steps),
            steps=whole_rounds("--steps", steps, usual, math.lcm(2, round_steps)),
        )
        points = load_points(question, job, None)
    trace = ""
    if trace_path is not None:
        used = [point.together.topology for point in points]
        trace = load_link_trace(trace_path, base.topology, used)
    note_plans(output, points)
    name = name or f"{base.job.name}-{new_run_id()}"[-64:]
    path = bench_folder(home, name) / BENCH
    new = new_bench(name, base, question, points)
    opened = (
        resumed_folder(path, new)
        if resume
        else new_folder(path, "add --resume, or choose another --name")
    )
    with opened as begun:
        script = path.parent / LINK_TRACE
        if trace:
            script.write_text(trace, encoding="utf-8")
        progress = Progress(timeout_s)
        scaling = Scaling(
            folder=path.parent,
            bench=begun or new,
            points=points,
            faults=("--faults", str(script.absolute())) if trace else (),
            launch=progress.launch,
            watch=progress,
        )
        again = f"the same command with --name {name} --resume"
        return measured(
            output,
            progress,
            scaling,
            scaling_tables,
            resume=again,
            unmet=lambda bench: [said for each in requirements for said in each.unmet(bench)],
        )


def _hash_of(path: Path) -> str:
    return hashlib.sha256(read_text(path, TRACE_BYTES).encode()).hexdigest()
