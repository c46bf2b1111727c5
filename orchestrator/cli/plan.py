"""`isthmus plan`: where a job runs and how its gradients cross, decided and explained."""

from __future__ import annotations

from pathlib import Path

import click

from orchestrator.cli.options import job_argument, json_option, set_option, topology_option
from orchestrator.cli.output import Output
from orchestrator.documents import load_pair
from orchestrator.plans import plan_of, read_plan
from orchestrator.run_folder.run_files import write_atomically


@click.command("plan")
@job_argument
@set_option
@topology_option
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write the plan here, for `isthmus launch JOB --plan FILE`.",
)
@click.option(
    "--diff",
    "other",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Say how the plan differs from this one.",
)
@json_option
@click.pass_obj
def command(
    output: Output,
    job: Path,
    overrides: tuple[str, ...],
    topology_path: Path | None,
    out: Path | None,
    other: Path | None,
) -> int:
    """Decide which sites run JOB, what each computes, and how gradients cross; and say why.

    Nothing is started. The job's `plan` section says what may be decided.
    """
    from orchestrator.evidence.view.plan_view import difference, shown
    from topology.planner.document import plan_text

    pair = load_pair(job, overrides, topology_path, to_plan=True)
    before = None if other is None else read_plan(other)
    plan = plan_of(pair)
    if out is not None:
        write_atomically(out, plan_text(plan))
        output.note(f"written: {out}; execute it: isthmus launch {job} --plan {out}")
    data = {"plan": plan, "out": None if out is None else str(out)}
    if before is None:
        return output.result(data, "" if output.as_json else shown(plan))
    changes = difference(before.plain, plan)
    lines = [f"{each['path']}: {each['before']} → {each['after']}" for each in changes]
    text = "\n".join(lines) if lines else f"no difference to {other}"
    return output.result({**data, "changes": changes}, text)
