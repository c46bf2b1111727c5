"""Makes a running job's plan again, in a process of its own.

Planning keeps a processor busy for seconds.

stdin has one JSON object, `Question`; stdout has a line for the best other trees as soon as they
are known, and one for what a launch with a new plan would give.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from topology.errors import ConfigError
from topology.job import Reduction
from topology.json_fields import read_json, to_json
from topology.measured.measured_links import LinkFigures, with_measured
from topology.planner.reductions import named
from topology.planner.switch import best_switch, relaunched_s
from topology.run_decisions import decide_reduction
from topology.run_spec import CodedPlan, RunSpec
from topology.trees.trees import has_same_turns
from topology.world import Topology

_NICE = 10
"""It may share its machine with ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drifted:
    """A directed link that is not as the topology says."""

    source: str
    target: str
    figures: LinkFigures


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What a plan is made of."""

    spec: RunSpec
    described: Topology
    """All sites, those that take no part included: a new launch may choose among them."""
    reduction: CodedPlan
    """What the run has by now."""
    drifted: tuple[Drifted, ...]
    keeps_codecs: bool
    """Every chunk has to keep the codec that it had when the run began."""
    at: str
    """When it was measured, in ISO 8601."""


def main() -> int:
    """Answer the question on stdin. 0 if both lines could be written."""
    os.nice(_NICE)
    asked = read_json(Question, json.loads(sys.stdin.readline()))
    spec = asked.spec
    job = dataclasses.replace(
        spec.job, reduction=named(asked.reduction.plan, list(spec.site_names))
    )
    figures = {(each.source, each.target): each.figures for each in asked.drifted}
    measured = with_measured(asked.described, figures, asked.at)
    try:
        allows = _same_codecs(spec) if asked.keeps_codecs else _any
        switch = best_switch(job, measured, spec.chunk_bytes, allows)
        _say(
            {
                "op": "switch",
                "form": switch.form,
                "reduction": to_json(_decided(spec, switch.reduction)),
                "before_s": switch.before_s,
                "after_s": switch.after_s,
            }
        )
        _say({"op": "relaunch", "step_s": relaunched_s(job, measured)})
    except ConfigError as error:
        _say({"op": "failed", "why": error.problems[0].message})
        return 1
    return 0


def _any(_reduction: Reduction) -> bool:
    return True


def _same_codecs(spec: RunSpec) -> Callable[[Reduction], bool]:
    """Return what tells whether a reduction leaves every chunk the codec of the run's beginning."""
    began = (spec.reduction.plan, spec.reduction.codecs)

    def is_same(reduction: Reduction) -> bool:
        other = _decided(spec, reduction)
        return has_same_turns(began, (other.plan, other.codecs))

    return is_same


def _decided(spec: RunSpec, reduction: Reduction) -> CodedPlan:
    """Return what a reduction comes to on the links as described: codecs follow from those."""
    return decide_reduction(dataclasses.replace(spec.job, reduction=reduction), spec.topology)


def _say(message: Mapping[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
