"""Makes a running job's plan again, in a process of its own.

Planning keeps a processor busy for seconds.

stdin has one line, `Question`; stdout has SwitchPlanned as soon as it is known, then
RelaunchPlanned; or PlanningFailed.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Sequence

from isthmus.orchestrator.coordinator.replan_question import Question
from isthmus.orchestrator.core.replan_machine import (
    PlanningFailed,
    RelaunchPlanned,
    SwitchPlanned,
)
from isthmus.topology.documents.placement import restricted
from isthmus.topology.documents.run_decisions import decide_reduction
from isthmus.topology.planner.reductions import named
from isthmus.topology.planner.switch import (
    as_fast_as_measured,
    best_switch,
    on_best_rung,
    relaunched_s,
)
from isthmus.topology.spec.codec_names import rungs
from isthmus.topology.spec.epoch import Epoch
from isthmus.topology.spec.errors import ConfigError
from isthmus.topology.spec.job import Job, Placed, Reduction
from isthmus.topology.spec.json_fields import Message
from isthmus.topology.spec.json_lines import Kinds, line_of
from isthmus.topology.spec.measured_links import with_measured
from isthmus.topology.spec.reduction_plan import among, has_same_turns
from isthmus.topology.spec.run_spec import CodedPlan, RunSpec
from isthmus.topology.spec.shares import parts_of
from isthmus.topology.spec.world import Topology
from isthmus.topology.trees.codec_costs import RELATIVE_ERRORS

_NICE = 10
"""It may share its machine with ranks."""
_QUESTIONS: Kinds[Question] = Kinds("coordinator to replanning", Question)


def main() -> int:
    """Answer the question on stdin. 0 if both lines could be written."""
    os.nice(_NICE)
    asked = _QUESTIONS.read(sys.stdin.buffer.readline())
    spec, epoch = asked.spec, asked.epoch
    figures = {(each.source, each.target): each.figures for each in asked.drifted}
    measured = with_measured(asked.described, figures, asked.at)
    own, least = spec.job.exchange.codec, None if spec.replan is None else spec.replan.least_exact
    present = own if least is None else epoch.reduction.codecs[0]
    job = dataclasses.replace(
        _with_codec(spec.job, present),
        reduction=named(epoch.reduction.plan, list(spec.site_names)),
    )
    present_parts = parts_of(spec, epoch.members, epoch.shares)
    job = _with_parts(job, epoch.members, present_parts)
    here = _around(restricted(measured, epoch.members), asked.dead_links)
    try:
        allows = _same_codecs(spec, epoch) if asked.keeps_codecs else _any
        if asked.division is not None:
            compute_s = dict(zip(epoch.members, asked.division.compute_s, strict=True))
            here = as_fast_as_measured(job, here, spec.chunk_bytes, compute_s)
        switch, divides = best_switch(job, here, spec.chunk_bytes, allows), False
        if asked.division is not None and asked.division.parts != present_parts:
            divided = _with_parts(job, epoch.members, asked.division.parts)
            other = best_switch(divided, here, spec.chunk_bytes, allows)
            gain = 0.0 if spec.replan is None else spec.replan.gain
            if other.after_s <= (1 - gain) * switch.after_s:
                other = dataclasses.replace(other, before_s=switch.before_s)
                job, switch, divides = divided, other, True
        if least is not None and not asked.keeps_codecs:
            switch = on_best_rung(job, here, spec.chunk_bytes, switch, rungs(own, least))
        _say(
            SwitchPlanned(
                form=switch.form,
                reduction=_decided(spec, epoch, switch.reduction, switch.codec),
                before_s=switch.before_s,
                after_s=switch.after_s,
                other_codec=switch.codec if switch.codec != present else "",
                divides=divides,
                is_more_exact=RELATIVE_ERRORS[switch.codec] < RELATIVE_ERRORS[present],
            )
        )
        if epoch.members == spec.site_names:
            _say(RelaunchPlanned(step_s=relaunched_s(job, measured)))
    except ConfigError as error:
        _say(PlanningFailed(why=error.problems[0].message))
        return 1
    return 0


def _around(topology: Topology, dead: Sequence[tuple[str, str]]) -> Topology:
    """Return a topology without the links between some sites."""
    pairs = {frozenset(each) for each in dead}
    links = tuple(
        link for link in topology.links if frozenset((link.source, link.target)) not in pairs
    )
    return dataclasses.replace(topology, links=links)


def _with_parts(job: Job, names: Sequence[str], parts: Sequence[int]) -> Job:
    """Return a job of these sites, with these parts of the batch."""
    placed = {each.site: each for each in job.placement}
    placement = tuple(
        dataclasses.replace(placed.get(name, Placed(site=name, sequences=part)), sequences=part)
        for name, part in zip(names, parts, strict=True)
    )
    return dataclasses.replace(job, placement=placement)


def _any(_reduction: Reduction) -> bool:
    return True


def _same_codecs(spec: RunSpec, epoch: Epoch) -> Callable[[Reduction], bool]:
    """Return what tells whether a reduction leaves every chunk the codec of the run's beginning."""
    began = (spec.reduction.plan, spec.reduction.codecs)

    def is_same(reduction: Reduction) -> bool:
        other = _decided(spec, epoch, reduction, spec.job.exchange.codec)
        return has_same_turns(began, (other.plan, other.codecs))

    return is_same


def _decided(spec: RunSpec, epoch: Epoch, reduction: Reduction, codec: str) -> CodedPlan:
    """Return what a reduction comes to on the links as described: codecs follow from those."""
    here = restricted(spec.topology, epoch.members)
    job = dataclasses.replace(_with_codec(spec.job, codec), reduction=reduction)
    decided = decide_reduction(job, here)
    places = [spec.site_names.index(name) for name in epoch.members]
    return dataclasses.replace(decided, plan=among(decided.plan, len(spec.site_names), places))


def _with_codec(job: Job, codec: str) -> Job:
    return dataclasses.replace(job, exchange=dataclasses.replace(job.exchange, codec=codec))


def _say(message: Message) -> None:
    sys.stdout.buffer.write(line_of(message))
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    sys.exit(main())
