"""`isthmus validate` and `plan`: the mistakes of files, and what is decided of them."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from isthmus.orchestrator.cli.command_errors import where
from isthmus.orchestrator.cli.options import (
    FILE,
    PATH,
    job_argument,
    out_option,
    set_option,
    topology_option,
    with_output,
)
from isthmus.orchestrator.cli.output import Output
from isthmus.orchestrator.doctor.document_checks import is_all_here, pair_problems
from isthmus.orchestrator.documents import load_pair, read_file
from isthmus.orchestrator.plans import plan_of, read_plan
from isthmus.orchestrator.run_folder.run_files import write_atomically
from isthmus.topology.documents.light import too_quick_links
from isthmus.topology.documents.load import document_kind, split_overrides, topology_of
from isthmus.topology.documents.placement import restricted
from isthmus.topology.faults.loading import check_faults
from isthmus.topology.schemas.schema import SCHEMAS, schema_text
from isthmus.topology.spec.errors import ConfigError, Problem
from isthmus.topology.spec.lanes import bounds_of_lanes
from isthmus.topology.spec.measured_links import drifts
from isthmus.topology.spec.world import Topology
from isthmus.topology.text.yaml_document import apply_overrides


@click.command("validate")
@click.argument("files", nargs=-1, metavar="FILE...", type=PATH)
@click.option(
    "--schema",
    type=click.Choice(list(SCHEMAS)),
    help="Print the JSON Schema of this kind of file instead.",
)
@set_option
@with_output
def validate(
    output: Output, files: tuple[Path, ...], schema: str | None, overrides: tuple[str, ...]
) -> int:
    """Check topologies, jobs, fault scripts and plans, which are told apart by what is in them.

    A job is checked together with the topology that it names, a fault script with the topology (or
    a job's) among the files; without one, whether its sites and links exist is not checked.
    """
    if schema is not None:
        if files:
            raise click.UsageError("--schema takes no files")
        text = schema_text(schema)
        return output.result({"schema": json.loads(text)}, text.rstrip())
    if not files:
        raise click.UsageError("want at least one FILE, or --schema")
    checked, problems = [], []
    topology = _topology_among(files, overrides)
    for path in files:
        try:
            checked.append(_check(path, overrides, topology))
        except ConfigError as error:
            problems += [problem for problem in error.problems if problem not in problems]
    if problems:
        raise ConfigError(problems)
    entries = [entry for entry, _, _ in checked]
    for warning in dict.fromkeys(each for _, _, warnings in checked for each in warnings):
        output.note(warning)
    lines = [f"{entry['file']}: {told}" for entry, told, _ in checked]
    return output.result({"files": entries}, "\n".join(lines))


def _topology_among(files: Sequence[Path], overrides: Sequence[str]) -> Topology | None:
    """Return the first topology that one of the files is or names, if it is valid."""
    for path in files:
        with contextlib.suppress(ConfigError):  # told when the file itself is checked
            match document_kind(document := read_file(path)):
                case "topology":
                    apply_overrides(document, split_overrides(overrides)[0])
                    return topology_of(document)
                case "job":
                    return load_pair(path, overrides).topology
    return None


def _check(
    path: Path, overrides: Sequence[str], topology: Topology | None
) -> tuple[dict[str, Any], str, list[str]]:
    """Return what was found valid, for programs and in a line for people, and warnings for them.

    A fault script is checked against `topology`, where there is one.

    Raises:
        ConfigError: the mistakes of this file, and for a job those of its topology.
    """
    document = read_file(path)
    kind = document_kind(document)
    entry: dict[str, Any] = {"file": str(path), "kind": kind}
    if kind == "job":
        pair = load_pair(path, overrides)
        problems = pair_problems(pair, is_here=is_all_here(pair.topology))
        entry |= {"name": pair.job.name, "topology": str(pair.topology_path)}
        warnings = _warnings(entry, pair.topology, problems)
        return entry, f"job {pair.job.name!r} is valid, with {pair.topology_path}", warnings
    if kind == "plan":
        read_plan(path)
        return entry, "plan is valid; that it fits its job is checked by launch --plan", []
    if kind == "faults":
        num_faults = check_faults(document, topology)
        entry |= {"faults": num_faults, "topology": None if topology is None else topology.name}
        told = (
            "but its sites and links were not checked: name the topology too"
            if topology is None
            else f"for topology {topology.name!r}"
        )
        faults = f"{num_faults} fault" + ("s" if num_faults != 1 else "")
        return entry, f"fault script with {faults} is valid, {told}", []
    apply_overrides(document, split_overrides(overrides)[0])
    topology = topology_of(document)
    entry |= {
        "name": topology.name,
        "sites": len(topology.sites),
        "ranks": topology.num_ranks,
        "links": len(topology.links),
    }
    problems = too_quick_links(document, topology)
    warnings = _warnings(entry, topology, problems)
    counted = f"{entry['sites']} sites, {entry['ranks']} ranks, {entry['links']} directed links"
    return entry, f"topology {topology.name!r} is valid: {counted}", warnings


def _warnings(entry: dict[str, Any], topology: Topology, problems: Sequence[Problem]) -> list[str]:
    """Put into `entry` what is valid, and yet should be looked at; return it for people.

    Raises:
        ConfigError: some of the problems are mistakes.
    """
    mistakes = [each for each in problems if not each.is_warning]
    if mistakes:
        raise ConfigError(mistakes)
    told = [str(drift) for drift in drifts(topology)]
    entry["warnings"] = [*told, *(each.message for each in problems)]
    entry["warnings_at"] = [where(each) for each in problems]
    return [*(f"warning: {each}" for each in told), *map(str, problems)]


@click.command("plan")
@job_argument
@set_option
@topology_option
@out_option("Write the plan here, for `isthmus launch JOB --plan FILE`.")
@click.option("--diff", "other", type=FILE, help="Say how the plan differs from this one.")
@with_output
def plan(
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
    from isthmus.orchestrator.evidence.view.plan_view import difference, shown, shown_lanes
    from isthmus.topology.planner.document import plan_text

    pair = load_pair(job, overrides, topology_path, to_plan=True)
    before = None if other is None else read_plan(other)
    plan = plan_of(pair)
    if out is not None:
        write_atomically(out, plan_text(plan))
        output.note(f"written: {out}; execute it: isthmus launch {job} --plan {out}")
    topology = restricted(pair.topology, [each["site"] for each in plan["decisions"]["placement"]])
    lanes = bounds_of_lanes(topology)
    data = {
        "plan": plan,
        "gateways_per_node": {name: dataclasses.asdict(each) for name, each in lanes.items()},
        "out": None if out is None else str(out),
    }
    if before is None:
        text = "" if output.as_json else f"{shown(plan)}\n\n{shown_lanes(topology, lanes)}"
        return output.result(data, text)
    changes = difference(before.plain, plan)
    lines = [f"{each['path']}: {each['before']} → {each['after']}" for each in changes]
    text = "\n".join(lines) if lines else f"no difference to {other}"
    return output.result({**data, "changes": changes}, text)
