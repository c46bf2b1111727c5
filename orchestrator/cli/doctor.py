"""`isthmus doctor`: what would fail a run here, or slow it down, each with its cure."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from isthmus.orchestrator.api.launching import preflight_failed, shown
from isthmus.orchestrator.cli.options import (
    DURATION,
    FILE,
    home_option,
    set_option,
    topology_argument,
    with_output,
)
from isthmus.orchestrator.cli.output import Output
from isthmus.orchestrator.doctor.examination import Examined, all_findings, examined_of
from isthmus.orchestrator.doctor.findings import Finding, Severity
from isthmus.orchestrator.documents import load_pair, loaded_topology, protect, read_file
from isthmus.orchestrator.run_folder.home import home_folder
from isthmus.protos.failure import text_of
from isthmus.topology.documents.light import too_quick_links
from isthmus.topology.documents.load import split_overrides
from isthmus.topology.spec.suggest import did_you_mean, one_of


@click.command("doctor")
@topology_argument
@click.option("--job", type=FILE, help="Look at this job's files, too: script, data, checkpoints.")
@click.option("--site", help="Take this machine for this site. [the sites whose addresses it has]")
@click.option(
    "--at",
    "reached",
    metavar="SITE=COMMAND",
    multiple=True,
    help="Look at SITE elsewhere: COMMAND is Python there, as a='ssh a.example python'. "
    "May be repeated.",
)
@click.option(
    "--burn-in",
    "burn_in_s",
    type=DURATION,
    default=0.0,
    metavar="DURATION",
    help="Load the devices of each machine for as long, as 60s, and look whether they compute, copy "
    "and add up rightly. Not while a run trains there.",
)
@set_option
@home_option
@with_output
def command(
    output: Output,
    topology_path: Path,
    job: Path | None,
    site: str | None,
    reached: tuple[str, ...],
    burn_in_s: float,
    overrides: tuple[str, ...],
    home: Path | None,
) -> int:
    """Find what would make a run on TOPOLOGY fail or slow down, and how to fix it.

    Looks at this machine, at the sites whose addresses it has; at those that --at leads to; and at
    the ways between them all.
    """
    examined = _examined(topology_path, job, overrides, home_folder(home))
    protect(examined.topology, topology_path)
    commands = dict(_command(each) for each in reached)
    names = [each.name for each in examined.topology.sites]
    for option, name in [("--site", site), *(("--at", each) for each in commands)]:
        if name is not None and name not in names:
            hint = did_you_mean(name, names)
            raise click.UsageError(
                f"{option}: {topology_path} has no site {name!r}{hint}; want {one_of(names)}"
            )
    return tell(output, all_findings(examined, site, commands, burn_in_s=burn_in_s))


def _command(text: str) -> tuple[str, list[str]]:
    """Return a site, and the command that is Python at it."""
    site, _, command = text.partition("=")
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise click.UsageError(f"--at: {text!r}: {text_of(error)}") from error
    if not site or not words:
        raise click.UsageError(
            f"--at: want SITE=COMMAND, as a='ssh a.example python'; got {text!r}"
        )
    return site, words


def _examined(file: Path, job: Path | None, overrides: tuple[str, ...], home: Path) -> Examined:
    if job is not None:
        return examined_of(load_pair(job, overrides, file), home)
    document = read_file(file, split_overrides(overrides)[0])
    topology = loaded_topology(document)
    return Examined(
        topology=topology,
        job=None,
        job_path=None,
        home=home,
        too_quick=tuple(too_quick_links(document, topology)),
    )


def tell(output: Output, findings: list[Finding]) -> int:
    """Print the findings; return the exit status.

    Raises:
        CommandError: PREFLIGHT_FAILED, where a run would fail.
    """
    errors = [each for each in findings if each.severity is Severity.ERROR]
    text = "\n\n".join(map(shown, findings))
    if errors:
        raise preflight_failed(findings, errors)
    plain = [each.to_json() for each in findings]
    counted = "no problems found" if not findings else "a run would not fail on these"
    return output.result({"findings": plain}, "\n\n".join(filter(None, [text, counted])))
