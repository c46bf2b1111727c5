"""`isthmus bench recovery`: how long training stands still when a site fails."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import click

from isthmus.orchestrator.cli.bench_folder import tell_outcome
from isthmus.orchestrator.cli.command_errors import CommandError
from isthmus.orchestrator.cli.options import (
    DURATION,
    home_option,
    job_argument,
    json_option,
    name_option,
    set_option,
    timeout_option,
)
from isthmus.orchestrator.cli.output import Output
from isthmus.orchestrator.cli.whole_run import run_to_end
from isthmus.orchestrator.documents import Pair, load_pair
from isthmus.orchestrator.evidence.bench.bench_tables import RecoveryTables
from isthmus.orchestrator.evidence.bench.recovery import (
    KINDS,
    RECOVERY,
    Recovery,
    RecoveryBench,
    RecoveryRuns,
)
from isthmus.orchestrator.evidence.bench.scaling import Ended
from isthmus.orchestrator.evidence.view import formats
from isthmus.orchestrator.interruption import INTERRUPTION
from isthmus.orchestrator.run_folder.home import home_folder, new_run_id


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
@json_option
@click.pass_obj
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
    folder = home_folder(home) / "bench" / name
    if (folder / RECOVERY).is_file():
        why = f"there is a benchmark {name!r} already: choose another --name"
        raise CommandError("REFUSED", why, {"bench": str(folder / RECOVERY)})
    bench = RecoveryBench(
        name=name,
        job=str(pair.job_path.absolute()),
        topology=str(pair.topology_path.absolute()),
        site=site or names[-1],
        at_s=at_s,
        outage_s=outage_s,
        detect_within_s=pair.topology.failure.detect_within_s,
    )

    def launch(pair: Pair, home: Path, run_id: str, faults: Sequence[str]) -> Ended:
        return run_to_end(
            pair, home, run_id, timeout_s=timeout_s, show=lambda _: None, faults=faults
        )

    def tell(kind: str, made: Recovery | None) -> None:
        if made is None:
            return
        if made.failed is not None:
            outcome = f"FAILED, {made.failed.code}: {formats.words(made.failed.message)}"
        else:
            assert made.stalled_s is not None
            outcome = f"stalled for {formats.duration(made.stalled_s)}"
            if made.away_s is not None:
                outcome += f", back after {formats.duration(made.away_s)}"
        output.note(f"{kind}: {outcome}")

    runs = RecoveryRuns(
        folder=folder,
        bench=bench,
        pair=pair,
        kinds=tuple(dict.fromkeys(kinds)) or KINDS,
        launch=launch,
        tell=tell,
        new_run_id=new_run_id,
    )
    return _measure(output, runs)


def _measure(output: Output, runs: RecoveryRuns) -> int:
    interrupted = None
    with INTERRUPTION.holding():
        try:
            runs.run()
        except KeyboardInterrupt as error:
            interrupted = INTERRUPTION.answer(error)
    failed = {
        each.run_id: f"{each.kind}: {each.failed.code}: {each.failed.message}"
        for each in runs.bench.failures
        if each.failed is not None
    }
    tables, data = RecoveryTables(runs.bench), dataclasses.asdict(runs.bench)
    return tell_outcome(output, tables, runs.folder / RECOVERY, data, failed, interrupted)
