"""What `validate` and `launch` find beyond the documents' text: files, light's speed, rounds."""

from __future__ import annotations

import os
from pathlib import Path, PurePath

from isthmus.orchestrator.doctor.examiner import NoAnswerError, examined_here
from isthmus.orchestrator.doctor.findings import Finding, Severity
from isthmus.orchestrator.doctor.job_checks import job_findings
from isthmus.orchestrator.documents import Pair
from isthmus.topology.documents.light import too_quick_links
from isthmus.topology.documents.round_lengths import round_problems
from isthmus.topology.spec.addresses import is_loopback
from isthmus.topology.spec.errors import Problem
from isthmus.topology.spec.job import Job
from isthmus.topology.spec.job_paths import anchored, moved
from isthmus.topology.spec.machine_facts import Wanted
from isthmus.topology.spec.world import Topology


def pair_problems(pair: Pair, *, is_here: bool) -> list[Problem]:
    """Return what is wrong with a job and its topology, or may be, at its places.

    The files that the job names are looked for where they are (`is_here`): on this machine.
    """
    files = _file_problems(pair) if is_here else []
    return [*light_problems(pair), *regime_problems(pair), *files]


def light_problems(pair: Pair) -> list[Problem]:
    """Return the links of a job's topology that are quicker than light."""
    return too_quick_links(pair.topology_document, pair.described)


def regime_problems(pair: Pair) -> list[Problem]:
    """Return warnings of a job's rounds."""
    return round_problems(pair.job_document, pair.job)


def is_all_here(topology: Topology) -> bool:
    """Whether each site is on this machine, for it is nowhere that others could reach it."""
    return all(
        site.launcher.kind == "local" and is_loopback(site.dialled) for site in topology.sites
    )


def wanted_files(job: Job, job_path: Path, job_folder: str = "") -> Wanted:
    """Return the files that a job's ranks will read, with absolute paths.

    They are those of a site where the job's files lie in `job_folder`; empty: as they do here.
    """
    if job.probe is not None:
        return Wanted()
    here = PurePath(os.path.abspath(job_path.parent))  # noqa: PTH100 - a link stays as written
    there = PurePath(job_folder) if job_folder else here
    placed = moved(anchored(job, here), here, there)
    if placed.entrypoint is None:
        return Wanted(globs=placed.trainer.data.files, working_folder=placed.working_folder)
    return Wanted(
        script=placed.entrypoint, working_folder=placed.working_folder or os.fspath(there)
    )


def placed_findings(pair: Pair, findings: list[Finding]) -> list[Problem]:
    """Return the findings about a job's files at their places, in the job or in the script."""
    document = pair.job_document
    problems = []
    for each in findings:
        is_warning = each.severity is not Severity.ERROR
        told = f"{each.found}; {each.cure}" if is_warning else each.found
        if each.line is None:
            problems.append(document.problem(each.path, told, is_warning=is_warning))
        else:
            problems.append(Problem(*each.line, message=told, path="", is_warning=is_warning))
    return problems


def _file_problems(pair: Pair) -> list[Problem]:
    wanted = wanted_files(pair.job, pair.job_path)
    if wanted == Wanted():
        return []
    try:
        facts = examined_here(wanted)
    except NoAnswerError as error:
        told = f"its files were not looked at: {error}"
        return [Problem(str(pair.job_path), 1, 1, told, "", is_warning=True)]
    return placed_findings(pair, job_findings(facts, pair.job))
