"""The files that a job names: the script and the data, as a machine of a site has them. Pure."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Iterator, Sequence

from isthmus.orchestrator.doctor.findings import Finding
from isthmus.orchestrator.doctor.kinds import finding
from isthmus.topology.spec.job import Job
from isthmus.topology.spec.machine_facts import Facts, Matches, Script


def job_findings(facts: Facts, job: Job, site: str | None = None) -> list[Finding]:
    """Return what is wrong with a job's files on one machine.

    `site` names the machine's; None: this machine, whichever sites it has.
    """
    found = [] if facts.script is None else list(_script(facts.script, job, facts.user, site))
    if facts.working_folder_error is not None:
        named, error = job.working_folder, facts.working_folder_error
        name = "working-folder-missing" if named is None else "working-folder-missing/named"
        path = ("entrypoint",) if named is None else ("working_folder",)
        problem = finding(name, site, folder=named, error=error)
        found.append(dataclasses.replace(problem, path=path))
    return [*found, *_data(facts.globs, job.trainer.data.files, facts.user, site)]


def _script(script: Script, job: Job, user: str, site: str | None) -> Iterator[Finding]:
    name, line = "", None
    if script.error is not None:
        name = "script-unreadable/denied" if "denied" in script.error else "script-unreadable"
        if script.line > 0:
            name, line = "script-syntax", (script.path, script.line, script.column)
    elif not script.joins:
        name = "script-never-joins"
    elif not script.averages:
        name = "script-never-attaches"
    elif script.uses_own and job.regime.is_local:
        name = "script-uses-own"
    if name:
        facts = {
            "script": script.path,
            "error": script.error,
            "quoted": shlex.quote(script.path),
            "call": script.uses_own,
            "regime": job.regime.kind,
        }
        problem = finding(name, site, user=user, **facts)
        yield dataclasses.replace(problem, path=("entrypoint",), line=line)


def _data(
    globs: Sequence[Matches], written: Sequence[str], user: str, site: str | None
) -> Iterator[Finding]:
    """Yield the patterns that come to nothing; `globs` are those that are `written`, anchored."""
    for index, (matches, pattern) in enumerate(zip(globs, written, strict=False)):
        is_there = matches.num_files > 0 or not matches.is_complete
        if is_there and matches.error is None:
            continue
        problem = finding(
            "data-unreadable" if is_there else "data-missing",
            site,
            pattern=matches.pattern,
            written=pattern,
            reason=f": {matches.error}" if matches.error else "",
            error=matches.error,
            user=user,
            parent=shlex.quote(matches.pattern).rpartition("/")[0],
        )
        yield dataclasses.replace(problem, path=("trainer", "data", "files", index))
