"""The files that a job names: the script and the data, as a machine of a site has them. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from isthmus.orchestrator.doctor.findings import Finding, Severity
from isthmus.topology.spec.job import Job
from isthmus.topology.spec.machine_facts import Facts, Matches, Script

JOINING = "site = isthmus.join()\nsite.synchronize(model, optimizer)"
"""The two lines that make a script part of a run."""


def job_findings(facts: Facts, job: Job, site: str | None = None) -> list[Finding]:
    """Return what is wrong with a job's files on one machine.

    `site` names the machine's; None: this machine, whichever sites it has.
    """
    found = [] if facts.script is None else _script(facts.script, facts.user, site)
    if facts.working_folder_error is not None:
        found.append(_working_folder(facts.working_folder_error, job, site))
    return [*found, *_data(facts.globs, job.trainer.data.files, facts.user, site)]


def _script(script: Script, user: str, site: str | None) -> list[Finding]:
    file = shlex.quote(script.path)
    if script.error is not None:
        is_syntax = script.line > 0
        denied = "denied" in script.error
        return [
            Finding(
                severity=Severity.ERROR,
                kind="script-syntax" if is_syntax else "script-unreadable",
                site=site,
                found=f"the entrypoint {script.path}: {script.error}",
                why="each rank runs it",
                cure=f"python -m py_compile {file}"
                if is_syntax
                else f"setfacl -m u:{user}:r {file}"
                if denied
                else f"ls -l {file}, then mend `entrypoint`, which begins at the job file's folder",
                path=("entrypoint",),
                line=(script.path, script.line, script.column) if is_syntax else None,
            )
        ]
    if script.joins and script.averages:
        return []
    if script.joins:
        return [
            Finding(
                severity=Severity.WARNING,
                kind="script-never-synchronises",
                site=site,
                found=f"the entrypoint {script.path} joins, and never calls site.synchronize()",
                why="each site would train by itself, and the run fail: NEVER_SYNCHRONISED",
                cure="add to it, before the first step: site.synchronize(model, optimizer); or, if "
                "it is to average nothing: isthmus.join(averages=False)",
                path=("entrypoint",),
            )
        ]
    return [
        Finding(
            severity=Severity.WARNING,
            kind="script-never-joins",
            site=site,
            found=f"the entrypoint {script.path} never calls isthmus.join()",
            why="the run waits for each rank to join, until failure.start_within is over",
            cure="add to it: " + JOINING.replace("\n", "; "),
            path=("entrypoint",),
        )
    ]


def _working_folder(error: str, job: Job, site: str | None) -> Finding:
    named = job.working_folder
    return Finding(
        severity=Severity.ERROR,
        kind="working-folder-missing",
        site=site,
        found=f"the working folder {named or 'of the job file'}: {error}",
        why="each rank runs the script there",
        cure=f"mend `working_folder: {named}`, which begins at the job file's folder"
        if named is not None
        else "have the job's files lie there as here, or name the folder as the site's `job_folder` "
        "in the topology",
        path=("working_folder",) if named is not None else ("entrypoint",),
    )


def _data(
    globs: Sequence[Matches], written: Sequence[str], user: str, site: str | None
) -> list[Finding]:
    """Return the patterns that come to nothing; `globs` are those that are `written`, anchored."""
    found = []
    for index, (matches, pattern) in enumerate(zip(globs, written, strict=False)):
        is_there = matches.num_files > 0 or not matches.is_complete
        if is_there and matches.error is None:
            continue
        quoted = shlex.quote(matches.pattern)
        if not is_there:
            reason = f": {matches.error}" if matches.error else ""
            kind, told = "data-missing", f"no file matches {matches.pattern!r}{reason}"
            cure = f"ls {matches.pattern}, then mend {pattern!r}: it begins at the job's folder"
        else:
            kind, told = "data-unreadable", f"{matches.error}"
            cure = f"setfacl -R -m u:{user}:rX {quoted.rpartition('/')[0]}"
        found.append(
            Finding(
                severity=Severity.ERROR,
                kind=kind,
                site=site,
                found=told,
                why="the shipped trainer reads all of it at each rank before the first step",
                cure=cure,
                path=("trainer", "data", "files", index),
            )
        )
    return found
