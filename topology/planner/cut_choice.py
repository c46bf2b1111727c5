"""A choice for sites that cut a model, and the cuts that make its step shortest."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from topology.job import Job, Placed
from topology.planner.choice import Choice
from topology.planner.cuts import Timing
from topology.planner.joint_step import JointModel
from topology.planner.parallelism import parallel_of
from topology.world import Topology

EVERY_CUTS_MAX = 512
"""Combinations of the sites' cuts that are all tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CutChoice(Choice):
    """A choice with the cut of each site."""

    timings: tuple[Timing, ...]

    def job(self, job: Job) -> Job:
        """Return `job` with these decisions in it."""
        decided = Choice.job(self, job)
        placement = tuple(
            Placed(
                site=each.site,
                sequences=each.sequences,
                parallel=parallel_of(timing.cut.degrees),
            )
            for each, timing in zip(decided.placement, self.timings, strict=True)
        )
        return dataclasses.replace(decided, placement=placement)

    def joint(self, job: Job, topology: Topology) -> JointModel:
        """Return the model of this choice's steps; `topology` is described in full."""
        return JointModel(self.job(job), self.topology(topology), self.way.plan)


def fastest_cuts(
    model: JointModel, fronts: Sequence[tuple[Timing, ...]]
) -> tuple[tuple[Timing, ...], float]:
    """Return the cuts that make a step shortest, and its seconds.

    Args:
        model: Of the step.
        fronts: What each site has to choose from, the fastest by itself first.
    """
    if math.prod(map(len, fronts)) <= EVERY_CUTS_MAX:
        timed = [(model.step_s(each), each) for each in itertools.product(*fronts)]
        step_s, best = min(timed, key=lambda each: each[0])
        return best, step_s
    # Equal sites with as many sequences choose from the same cuts, and change them together.
    best = tuple(front[0] for front in fronts)
    step_s = model.step_s(best)
    for front in {id(each): each for each in fronts}.values():
        for timing in front[1:]:
            other = tuple(
                timing if mine is front else now for mine, now in zip(fronts, best, strict=True)
            )
            other_s = model.step_s(other)
            if other_s < step_s:
                best, step_s = other, other_s
    return best, step_s
