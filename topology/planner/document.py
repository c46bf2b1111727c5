"""Reads and writes the plan file: decisions, their job and topology, and the reasons.

Only `decisions` affects a run. They may be edited, and are checked like the job. The rest is for
people, and for programs that compare plans.
"""

from __future__ import annotations

from typing import Any

import yaml

from isthmus.topology.planner.document_models import PlanFileModel
from isthmus.topology.spec.errors import ConfigError, Problem
from isthmus.topology.spec.plan_decisions import JOB_PATHS, overrides_of
from isthmus.topology.text.validation import validate
from isthmus.topology.text.yaml_document import (
    Document,
    ScalarError,
    read_plain,
)


class PlanFile:
    """A parsed plan, with the places of its values."""

    def __init__(self, document: Document) -> None:
        """Check a plan.

        Raises:
            ConfigError: with every mistake, each at its line and column.
        """
        self._document = document
        model = validate(self._document, PlanFileModel)
        self._document.raise_problems()
        assert model is not None, "a model that is not valid has problems"
        self.model = model
        self.plain: dict[str, Any] = {**self._document.mapping()}
        """The plan's plain values, as written."""

    @property
    def source(self) -> str:
        """The name by which messages call the plan."""
        return self._document.source

    def overrides(self) -> list[str]:
        """Return the decisions as overrides of a job."""
        return overrides_of(self.plain["decisions"])

    def check_made_for(self, hashes: tuple[str, str], job: str, topology: str) -> None:
        """Refuse another job, or another topology, than the plan was made for.

        Args:
            hashes: isthmus.topology.spec.hashing.plan_hashes of the run.
            job: Name of the job in messages.
            topology: Likewise.

        Raises:
            ConfigError: at the plan's line.
        """
        made_for = self.model.made_for
        for key, ours, theirs, name in (
            ("job", hashes[0], made_for.job, job),
            ("topology", hashes[1], made_for.topology, topology),
        ):
            if ours != theirs:
                self._document.add(
                    ("made_for", key),
                    f"made for another {key} than {name} ({theirs[:12]}, and this is {ours[:12]}): "
                    f"make it again with `isthmus plan {job} --out {self.source}`",
                )
        self._document.raise_problems()

    def blamed(self, error: ConfigError) -> ConfigError:
        """Return an error of the combined job, with problems at the plan's lines."""
        own = Document(self.source, "")
        for problem in error.problems:
            path = _path_in_plan(problem)
            if path is None:
                own.problems.append(problem)
            else:
                place = self._document.place(path)
                self._document.add_at(place, problem.message, path)
        return ConfigError([*self._document.problems, *own.problems])


def _path_in_plan(problem: Problem) -> tuple[str | int, ...] | None:
    """Return the path of the decision that a problem of the job is about; None: none."""
    for path, in_job in JOB_PATHS.items():
        if problem.path == in_job or problem.path.startswith(f"{in_job}."):
            rest = problem.path[len(in_job) :].strip(".")
            parts = [*path.split("."), *(rest.split(".") if rest else [])]
            return ("decisions", *(int(part) if part.isdecimal() else part for part in parts))
    return None


class _Dumper(yaml.SafeDumper):
    """A dumper that quotes texts that our YAML 1.2 reader would not take for texts."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    try:
        is_plain = read_plain(text) == text
    except ScalarError:
        is_plain = False
    style = None if is_plain else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)


def plan_text(plain: dict[str, Any]) -> str:
    """Return the text of a plan's file, without None values, as our YAML has no null."""
    body: str = yaml.dump(
        _without_null(plain), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110
    )
    return f"# Made by `isthmus plan`. Edit the decisions if you like: `isthmus launch JOB --plan FILE`.\n{body}"


def _without_null(value: object) -> object:
    if isinstance(value, dict):
        return {key: _without_null(each) for key, each in value.items() if each is not None}
    if isinstance(value, list):
        return [_without_null(each) for each in value]
    return value
