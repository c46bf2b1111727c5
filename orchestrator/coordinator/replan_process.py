"""Makes a running job's plan again, in a process of its own.

Planning keeps a processor busy for seconds.

stdin has one JSON object, `Request`; stdout has a line for the best other trees as soon as they are
known, and one for what a launch with a new plan would give.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

from orchestrator.coordinator.reduction_json import reduction_from, reduction_to
from topology.documents.placement import placed
from topology.documents.run_documents import DocumentText, RunDocuments, load_run
from topology.errors import ConfigError
from topology.hashing import reduction_hash
from topology.job import Reduction
from topology.measured.measured_links import LinkFigures, with_measured
from topology.model.reduction_plans import plan_reduction
from topology.model.wire_load import chunk_bytes_of
from topology.planner.switch import Switch, best_switch, relaunched_s
from topology.planner.ways import named
from topology.trees.codec_turns import has_same_turns
from topology.trees.link_codecs import plan_codecs
from topology.trees.trees import ReductionPlan

_NICE = 10
"""It may share its machine with ranks."""


def main() -> int:
    """Answer the request on stdin. 0 if both lines could be written."""
    os.nice(_NICE)
    request = json.loads(sys.stdin.readline())
    run = load_run(DocumentText(**request["job"]), DocumentText(**request["topology"]))
    here = placed(run.job, run.described)
    if request["reduction"] is None:
        # The trees that it began with: over links as they are now, its job might mean others.
        reduction = named(plan_reduction(run.job, here), [site.name for site in here.sites])
    else:
        reduction = reduction_from(request["reduction"])
    job = dataclasses.replace(run.job, reduction=reduction)
    figures = {
        (each["source"], each["target"]): LinkFigures(
            bytes_per_s=each["bytes_per_s"], rtt_s=each["rtt_s"]
        )
        for each in request["figures"]
    }
    measured = with_measured(run.described, figures, request["at"])
    try:
        allows = _same_codecs(run) if request["keeps_codecs"] else _any
        switch = best_switch(job, measured, chunk_bytes_of(run.job, here), allows)
        _say({"op": "switch", **_to_json(run, switch)})
        _say({"op": "relaunch", "step_s": relaunched_s(job, measured)})
    except ConfigError as error:
        _say({"op": "failed", "why": error.problems[0].message})
        return 1
    return 0


def _any(_reduction: Reduction) -> bool:
    return True


def _same_codecs(run: RunDocuments) -> Callable[[Reduction], bool]:
    """Return what tells whether a reduction leaves every chunk the codec of the run's beginning."""
    began = _executed(run, run.job.reduction)
    return lambda reduction: has_same_turns(began, _executed(run, reduction))


def _executed(run: RunDocuments, reduction: Reduction) -> tuple[ReductionPlan, tuple[str, ...]]:
    """Return what sites make of a reduction: its plan, and the codec of each tree."""
    here = placed(run.job, run.described)
    job = dataclasses.replace(run.job, reduction=reduction)
    plan = plan_reduction(job, here)
    return plan, plan_codecs(job, here, plan)


def _to_json(run: RunDocuments, switch: Switch) -> dict[str, Any]:
    """Return a switch, with the hash of what sites will make of it."""
    plan, codecs = _executed(run, switch.reduction)
    return {
        "form": switch.form,
        "reduction": reduction_to(switch.reduction),
        "plan_hash": reduction_hash(plan, codecs),
        "before_s": switch.before_s,
        "after_s": switch.after_s,
    }


def _say(message: Mapping[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
