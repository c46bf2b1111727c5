"""Plans of a job: made, read, and put into its documents as overrides."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from isthmus.orchestrator.documents import AppliedPlan, Pair, mistaken, read_file, with_overrides
from isthmus.topology.planner.document import PlanFile
from isthmus.topology.planner.plan import make_plan
from isthmus.topology.spec.errors import ConfigError, Problem
from isthmus.topology.spec.hashing import plan_hashes
from isthmus.topology.spec.job import Job
from isthmus.topology.spec.plan_decisions import NUM_TOLD_ALTERNATIVES, overrides_of


def plan_of(pair: Pair) -> dict[str, Any]:
    """Return a plan for a job, as its file has it.

    Raises:
        ConfigError: there is none, told at the job's line.
    """
    try:
        _require_training(pair.job)
        return make_plan(pair.job, pair.described)
    except ConfigError as error:
        document = pair.job_document
        problems = [
            document.problem(tuple(each.path.split(".")), each.message) for each in error.problems
        ]
        raise ConfigError(problems) from error


def _require_training(job: Job) -> None:
    if job.probe is not None:
        message = "measures links and trains nothing: there is nothing to plan"
        raise ConfigError([Problem("job", 0, 0, message, "probe")])


def as_launched(pair: Pair) -> tuple[Pair, str | None]:
    """Return the documents as a run has them: with a plan made for them, if the job asks for one.

    Returns:
        The documents, and what the plan chose in a line; None: there is no plan.

    Raises:
        ConfigError: as `plan_of`.
    """
    if not pair.job.is_to_plan:
        return pair, None
    plan = plan_of(pair)
    return _with(pair, plan), plan["why"][0]


def read_plan(path: Path) -> PlanFile:
    """Return the plan in a file; ConfigError with every mistake."""
    document = read_file(path)
    try:
        return PlanFile(document)
    except ConfigError as error:
        raise mistaken(error, document, "plan") from error


def with_plan(pair: Pair, path: Path) -> Pair:
    """Return the documents with what a plan file decides.

    Raises:
        ConfigError: the file has mistakes, its decisions do not fit, or it was made for others.
    """
    plan = read_plan(path)
    hashes = plan_hashes(pair.job, pair.described)
    plan.check_made_for(hashes, str(pair.job_path), str(pair.topology_path))
    try:
        return _with(pair, plan.plain)
    except ConfigError as error:
        raise plan.blamed(error) from error


def _with(pair: Pair, plan: dict[str, Any]) -> Pair:
    decisions = plan["decisions"]
    decided = with_overrides(pair, overrides_of(decisions))
    told = {
        "why": plan["why"],
        "predicted": plan["predicted"],
        "alternatives": plan["alternatives"][:NUM_TOLD_ALTERNATIVES],
    }
    return dataclasses.replace(
        decided, plan=AppliedPlan(decisions, pair.job_document.overrides, told)
    )
