"""`isthmus launch`: submits a job and follows it."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from isthmus.orchestrator.api.launching import job_of_script, prepared
from isthmus.orchestrator.cli.display import finish, progress
from isthmus.orchestrator.cli.options import (
    FILE,
    RUN_NAME,
    coordinator_option,
    emulation_options,
    faults_option,
    home_option,
    job_argument,
    seed_option,
    set_option,
    timeout_option,
    topology_option,
    with_output,
)
from isthmus.orchestrator.cli.output import Output
from isthmus.orchestrator.cli.run_dashboard import RunDashboard, require_dashboard, run_dashboard
from isthmus.orchestrator.client.run_reader import reading
from isthmus.orchestrator.documents import Pair
from isthmus.orchestrator.interruption import INTERRUPTION
from isthmus.orchestrator.run_folder.home import RunChoice, RunFolder, home_folder
from isthmus.protos.control.v1 import control_pb2

LOGS = "Print what rank 0 of the first site prints, on stderr. [on a terminal]"


class _ScriptCommand(click.Command):
    """A command of which all that comes after `--` is for a script."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Keep the script's words from the command's own parser."""
        place = args.index("--") if "--" in args else len(args)
        rest = super().parse_args(ctx, args[:place])
        ctx.params["arguments"] = tuple(args[place + 1 :])
        return rest

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        """Show in the usage what may come last."""
        return [*super().collect_usage_pieces(ctx), "[-- ARGUMENTS...]"]


@click.command("launch", cls=_ScriptCommand)
@job_argument
@coordinator_option(
    "Submit to this coordinator. [$ISTHMUS_COORDINATOR, else that of `isthmus up`, else one is "
    "started here]"
)
@set_option
@topology_option
@click.option("--plan", "plan_path", type=FILE, help="Do what this plan of `isthmus plan` decides.")
@click.option(
    "--resume",
    is_flag=False,
    flag_value="",
    metavar="[RUN|PATH]",
    help="Go on from the newest good checkpoint of this run, by default the latest, or from "
    "exactly this one.",
)
@click.option("--detach", is_flag=True, help="Return as soon as the run is submitted.")
@click.option(
    "--allow-cpu",
    is_flag=True,
    help="Train on CPUs where the topology says an accelerator and a machine has none.",
)
@emulation_options
@faults_option
@seed_option
@click.option(
    "--run-id", type=RUN_NAME, help="Name of the run; the same again gives the same run. [made up]"
)
@click.option(
    "--priority",
    type=click.IntRange(-1000, 1000),
    default=0,
    help="Of runs that wait for the same sites, the highest begins first.",
)
@click.option(
    "--logs/--no-logs",
    "wants_logs",
    default=None,
    show_default=False,
    help=LOGS,
)
@click.option(
    "--dashboard",
    "wants_dashboard",
    is_flag=True,
    help="Show the run in a browser, too; the first line is the address. It stays while the run "
    "goes on or somebody looks.",
)
@timeout_option(None, "Stop following after this long, as 90s; the run goes on.")
@home_option
@with_output
def command(
    output: Output,
    job: Path,
    arguments: tuple[str, ...],
    coordinator: str | None,
    overrides: tuple[str, ...],
    topology_path: Path | None,
    plan_path: Path | None,
    resume: str | None,
    detach: bool,
    allow_cpu: bool,
    faults_path: Path | None,
    seed: int | None,
    run_id: str | None,
    priority: int,
    wants_logs: bool | None,
    wants_dashboard: bool,
    timeout_s: float | None,
    home: Path | None,
) -> int:
    """Start JOB at all sites and follow it to its end.

    ARGUMENTS come after those that the job gives its script.

    Without --coordinator it goes to what `isthmus up` has started for the same topology, else
    everything runs on this machine. Ctrl-C detaches: the run goes on.
    """
    deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
    if wants_dashboard:
        require_dashboard()
    launch = prepared(
        job,
        home_folder(home),
        output.note,
        topology=topology_path,
        overrides=overrides,
        arguments=arguments,
        coordinator=coordinator,
        plan=plan_path,
        resume=resume,
        allow_cpu=allow_cpu,
        run_id=run_id,
    )
    if priority and launch.coordinator is None:
        raise click.UsageError("--priority: nothing waits at a coordinator that is started here")
    faults = _faults(launch.pair, faults_path, seed, launch.coordinator)
    with INTERRUPTION.holding(), contextlib.ExitStack() as held:
        # It holds: whoever interrupts it is told whether there is a run.
        dashboard = (
            held.enter_context(run_dashboard(launch.home, launch.run_id))
            if wants_dashboard
            else None
        )
        folder = launch.submit(output.note, faults, priority)
        logs_of = launch.first_site if _has_logs(wants_logs) else None
        try:
            if dashboard is not None:
                _show(output, dashboard, folder)
            return _tell(output, folder, home, deadline_s, logs_of, detach=detach)
        except KeyboardInterrupt as error:
            exit_code = INTERRUPTION.answer(error)
            output.note(
                f"detached; the run goes on. Follow it: isthmus status {folder.run_id} --watch. "
                f"Stop it: isthmus cancel {folder.run_id}"
            )
            data = {"run_id": folder.run_id, "detached": True}
            return output.result(data, exit_code=exit_code)


@click.command("run", cls=_ScriptCommand)
@click.argument("script", type=FILE)
@click.option("--sites", type=click.IntRange(1, 16), default=2, help="Sites on this machine.")
@click.option("--ranks", type=click.IntRange(1, 128), default=1, help="Ranks of each site.")
@click.option("--detach", is_flag=True, help="Return as soon as the run is submitted.")
@click.option("--logs/--no-logs", "wants_logs", default=None, show_default=False, help=LOGS)
@timeout_option(None, "Stop following after this long, as 90s; the run goes on.")
@home_option
@with_output
def run(
    output: Output, script: Path, sites: int, ranks: int, home: Path | None, **options: object
) -> int:
    """Train SCRIPT at several sites on this machine, without YAML.

    ARGUMENTS are the script's. The topology and the job that are written can be launched, and
    changed, as any other.
    """
    job = job_of_script(script, home_folder(home), sites=sites, ranks=ranks)
    output.note(f"written: {job}, and topology.yaml beside it")
    code: int = click.get_current_context().invoke(command, job=job, home=home, **options)
    return code


def _faults(
    pair: Pair, path: Path | None, seed: int | None, coordinator: str | None
) -> Sequence[str]:
    """Check a fault script; return the arguments that give it to an embedded coordinator."""
    if path is None:
        if seed is not None:
            raise click.UsageError("--seed: is a fault script's; give --faults too")
        return []
    if coordinator is not None:
        raise click.UsageError("--faults: only where the run is embedded, without --coordinator")
    if not pair.topology.emulate:
        raise click.UsageError("--faults: the WAN is not emulated here; give --emulate too")
    from isthmus.orchestrator.emulator.fault_files import load_faults_file

    load_faults_file(path, pair.topology)
    return ["--faults", str(path.absolute()), *([] if seed is None else ["--seed", str(seed)])]


def _has_logs(wants_logs: bool | None) -> bool:
    return sys.stderr.isatty() if wants_logs is None else wants_logs


def _show(output: Output, dashboard: RunDashboard, folder: RunFolder) -> None:
    """Have the run shown in a browser, and say where."""
    if dashboard.begin(folder):
        output.note(f"dashboard: {dashboard.url}")
    else:
        output.note(
            f"warning: no dashboard here: the run's journal is where its coordinator is, at "
            f"{folder.remote_address}; there: isthmus dashboard --state FOLDER"
        )


def _tell(
    output: Output,
    folder: RunFolder,
    home: Path | None,
    deadline_s: float | None,
    logs_of: str | None,
    *,
    detach: bool,
) -> int:
    """Print the run's id, and follow the run unless it is to be left alone."""
    output.text(folder.run_id)
    if not detach:
        return _follow(output, folder, home, deadline_s, logs_of)
    output.note(f"follow it: isthmus status {folder.run_id} --watch")
    data = {"run_id": folder.run_id, "folder": str(folder.path), "detached": True}
    return output.result(data)


def _follow(
    output: Output,
    folder: RunFolder,
    home: Path | None,
    deadline_s: float | None,
    logs_of: str | None,
) -> int:
    """Show a run to its end; with `logs_of`, what rank 0 of that site prints, too."""
    with reading(RunChoice(run_id=folder.run_id, home=home)) as reader:
        with progress() as show:
            run = control_pb2.Run()
            items: Iterator[control_pb2.Run | control_pb2.LogLine] = reader.watch(deadline_s)
            if logs_of is not None:
                items = reader.watch_with_logs(site=logs_of, rank=0, deadline_s=deadline_s)
            for each in items:
                show(each)
                run = each if isinstance(each, control_pb2.Run) else run
        return finish(output, run, reader)
