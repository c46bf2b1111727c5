"""Launches jobs: what `isthmus launch`, `isthmus run` and `isthmus.launch` do alike."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import click
import yaml

from isthmus.orchestrator.api.checkpoint_choice import newest_good_checkpoint
from isthmus.orchestrator.api.errors import CommandError
from isthmus.orchestrator.api.submission import submit
from isthmus.orchestrator.doctor.document_checks import (
    light_problems,
    placed_findings,
    regime_problems,
)
from isthmus.orchestrator.doctor.examination import examined_of, quick_findings
from isthmus.orchestrator.doctor.findings import Finding, Severity
from isthmus.orchestrator.documents import Pair, load_pair
from isthmus.orchestrator.exporters.libraries import exporter_problems
from isthmus.orchestrator.launchers.standing import coordinator_of
from isthmus.orchestrator.plans import as_launched, with_plan
from isthmus.orchestrator.run_folder.home import RunFolder, new_run_id
from isthmus.topology.spec.errors import ConfigError

Say = Callable[[str], object]
SCRIPTS = "scripts"
"""Folder of HOME with the documents that were written for scripts without any."""
COLOURS = {Severity.ERROR: "red", Severity.WARNING: "yellow", Severity.NOTE: "cyan"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A job that may be submitted: read, checked and planned."""

    pair: Pair
    home: Path
    run_id: str
    coordinator: str | None
    """Address; None: one is started here, with all sites."""
    resumed: str | None
    """The run whose checkpoint it goes on from."""

    @property
    def first_site(self) -> str:
        """The site whose rank 0 speaks for the run."""
        placed = [each.site for each in self.pair.job.placement]
        return (placed or [site.name for site in self.pair.topology.sites])[0]

    def submit(self, say: Say, faults: Sequence[str] = (), priority: int = 0) -> RunFolder:
        """Submit it; errors as of orchestrator/api/submission.py."""
        return submit(
            self.pair,
            self.home,
            self.run_id,
            self.coordinator,
            faults,
            priority,
            resumed=self.resumed,
            say=say,
        )


def prepared(
    job: Path,
    home: Path,
    say: Say,
    *,
    topology: Path | None = None,
    overrides: Sequence[str] = (),
    arguments: Sequence[str] = (),
    coordinator: str | None = None,
    plan: Path | None = None,
    resume: str | None = None,
    allow_cpu: bool = False,
    run_id: str | None = None,
) -> Launch:
    """Read a job, check it, and make its plan.

    Args:
        job: Its file.
        home: Where runs are kept.
        say: Called with warnings, and with what was decided.
        topology: Its file; None: the one that the job names.
        overrides: `path=value` of either document.
        arguments: More for the script.
        coordinator: Its address; None: that of `isthmus up` for the same topology, else one is
            started here.
        plan: File of a plan to carry out; None: one is made if the job asks for it.
        resume: The run (empty: the latest) or checkpoint to go on from; None: it begins anew.
        allow_cpu: Train on CPUs where the topology has an accelerator and a machine has none.
        run_id: Names the run; None: a new name.

    Raises:
        ConfigError: documents, or the files that they name, are wrong.
        CommandError: PREFLIGHT_FAILED; the machine cannot run it.
        IsthmusError: there is no good checkpoint to resume from.
    """
    resumed = None
    if allow_cpu:
        overrides = (*overrides, "allow_cpu=true")
    if resume is not None:
        place, manifest = newest_good_checkpoint(say, resume, home)
        say(f"resumes {manifest.run} after step {manifest.step}: {place}")
        if manifest.missing:
            sites = ", ".join(manifest.missing)
            say(f"warning: it lacks what ranks of {sites} had of their own")
        resumed, overrides = manifest.run, (*overrides, f"checkpoint.resume={json.dumps(place)}")
    pair = load_pair(job, overrides, topology, arguments=arguments, to_plan=plan is not None)
    if coordinator is None:
        coordinator = coordinator_of(home, pair.described)
        if coordinator is not None:
            say(f"submitting to what is up: coordinator {coordinator}")
    _check(say, pair, home, is_here=coordinator is None)
    if plan is not None:
        pair = with_plan(pair, plan)
    else:
        pair, chosen = as_launched(pair)
        if chosen is not None:
            say(f"plan: {chosen}")
    return Launch(
        pair=pair,
        home=home,
        run_id=run_id or new_run_id(),
        coordinator=coordinator,
        resumed=resumed,
    )


def job_of_script(script: Path, home: Path, *, sites: int, ranks: int) -> Path:
    """Write a topology of sites on this machine, and a job that runs a script there.

    Returns the job's path. The same script and numbers have the same files, to begin with.

    Raises:
        ConfigError: there is no such script.
        OSError: HOME cannot be written.
    """
    script = Path(os.path.abspath(script))  # noqa: PTH100 - a link stays as written
    if not script.is_file():
        raise ConfigError(f"{script}: there is no such script")
    names = [f"site-{number}" for number in range(1, sites + 1)]
    shape = {"nodes": 1, "accelerators_per_node": ranks, "accelerator": "cpu"}
    links = [
        {"between": [one, other], "bandwidth": "10Gbit/s", "rtt": "1ms"}
        for place, one in enumerate(names)
        for other in names[place + 1 :]
    ]
    named = script.stem if script.stem.isidentifier() else "script"
    topology = {
        "version": 1,
        "name": named,
        "sites": [{"name": name, **shape} for name in names],
        "links": links,
        "security": {"mode": "insecure"},
    }
    job = {
        "version": 1,
        "name": named,
        "topology": "topology.yaml",
        "entrypoint": str(script),
        "working_folder": str(script.parent),
    }
    key = hashlib.sha256(f"{script} {sites} {ranks}".encode()).hexdigest()[:8]
    folder = home / SCRIPTS / f"{named}-{key}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for name, content in (("topology", topology), ("job", job)):
        text = yaml.safe_dump(content, sort_keys=False)
        (folder / f"{name}.yaml").write_text(text, encoding="utf-8")
    return folder / "job.yaml"


def _check(say: Say, pair: Pair, home: Path, *, is_here: bool) -> None:
    """Refuse what would fail the run, before anything is started.

    Raises:
        ConfigError: the documents, or the files that they name, are wrong.
        CommandError: PREFLIGHT_FAILED; the machine cannot run it, where all is here (`is_here`).
    """
    problems = [*light_problems(pair), *regime_problems(pair)]
    if is_here:
        problems += exporter_problems(pair.job, pair.job_document, os.environ)
    findings = quick_findings(examined_of(pair, home)) if is_here else []
    problems += placed_findings(pair, [each for each in findings if each.path])
    for warning in (each for each in problems if each.is_warning):
        say(str(warning))
    for each in findings:
        if each.severity is Severity.WARNING and not each.path:
            say(f"warning: {each.found}: {each.why}; {each.cure}")
    mistakes = [each for each in problems if not each.is_warning]
    if mistakes:
        raise ConfigError(mistakes)
    errors = [each for each in findings if each.severity is Severity.ERROR]
    if errors:
        raise preflight_failed(errors, errors)


def preflight_failed(findings: list[Finding], errors: list[Finding]) -> CommandError:
    """Return the error of a run that would fail: of its `errors` it names the first, and its cure.

    It carries all findings, for programs and above the message for people.
    """
    more = f", and {len(errors) - 1} more" if len(errors) > 1 else ""
    at = f"{errors[0].site}: " if errors[0].site else ""
    return CommandError(
        "PREFLIGHT_FAILED",
        f"{at}{errors[0].found}{more}",
        {"findings": [each.to_json() for each in findings]},
        details="\n\n".join(map(shown, findings)),
        hint="" if len(errors) > 1 else errors[0].cure,
        brief=f"{len(errors)} problems would fail a run" if len(errors) > 1 else "a run would fail",
    )


def shown(finding: Finding) -> str:
    """Return one finding in three lines."""
    severity = click.style(f"{finding.severity}:", fg=COLOURS[finding.severity], bold=True)
    at = f"{finding.site}: " if finding.site else ""
    return (
        f"{severity} {at}{finding.found}  [{finding.kind}]\n"
        f"    why: {finding.why}\n"
        f"    cure: {finding.cure}"
    )
