"""`isthmus bench recovery`: how long training stands still when a site fails."""

from __future__ import annotations

from pathlib import Path

import click

from isthmus.orchestrator.cli.bench_folder import (
    Progress,
    bench_folder,
    measured,
    new_folder,
    sources,
)
from isthmus.orchestrator.cli.options import (
    DURATION,
    home_option,
    job_argument,
    name_option,
    set_option,
    timeout_option,
    with_output,
)
from isthmus.orchestrator.cli.output import Output
from isthmus.orchestrator.documents import load_pair
from isthmus.orchestrator.evidence.bench.bench_tables import recovery_tables
from isthmus.orchestrator.evidence.bench.recovery import (
    KINDS,
    RECOVERY,
    Question,
    RecoveryBench,
    RecoveryRuns,
)
from isthmus.orchestrator.run_folder.home import new_run_id


@click.command("recovery")
@job_argument
@set_option
@click.option(
    "--kind",
    "kinds",
    type=click.Choice(KINDS),
    multiple=True,
    help="What fails. May be repeated. [each kind in turn]",
)
@click.option("--site", help="The site that fails. [the last one]")
@click.option(
    "--at",
    "at_s",
    type=DURATION,
    default="8s",
    help="When it fails, counted from when the run is active.",
)
@click.option(
    "--outage",
    "outage_s",
    type=DURATION,
    default="20s",
    help="How long an outage between all sites lasts.",
)
@name_option
@timeout_option("10min", "A single run that takes longer has failed.")
@home_option
@with_output
def command(
    output: Output,
    job: Path,
    overrides: tuple[str, ...],
    kinds: tuple[str, ...],
    site: str | None,
    at_s: float,
    outage_s: float,
    name: str | None,
    timeout_s: float,
    home: Path | None,
) -> int:
    """Let a site of JOB fail in each way, in a run of its own, and time how long the others stall.

    Every run is an ordinary one on this machine.
    """
    pair = load_pair(job, ("failure.allow_losses=true", *overrides))  # sites are to be lost
    names = [each.name for each in pair.topology.sites]
    if len(names) < 2:
        raise click.UsageError("a run of one site has no survivors: want two sites or more")
    if not pair.topology.emulate:
        raise click.UsageError("failures are played on an emulated WAN: want `emulate: true`")
    if site is not None and site not in names:
        raise click.UsageError(f"--site: {site!r} is none of {', '.join(names)}")
    name = name or f"recovery-{new_run_id()}"
    path = bench_folder(home, name) / RECOVERY
    question = Question(
        site=site or names[-1],
        at_s=at_s,
        outage_s=outage_s,
        detect_within_s=pair.topology.failure.detect_within_s,
    )
    with new_folder(path):
        progress = Progress(timeout_s)
        runs = RecoveryRuns(
            folder=path.parent,
            bench=RecoveryBench(name=name, **sources(pair), question=question, settings=()),
            pair=pair,
            kinds=tuple(dict.fromkeys(kinds)) or KINDS,
            launch=progress.launch,
            watch=progress,
        )
        return measured(output, progress, runs, recovery_tables)
