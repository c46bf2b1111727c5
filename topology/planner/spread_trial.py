"""A reduction, its codecs and sizes, tried with spreads of the batch: for the shipped trainer."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from topology.job import Job
from topology.model.step_model import StepModel
from topology.plan_wishes import PlanWishes
from topology.planner.choice import Choice, Rank, Sizing, money, rank_of
from topology.planner.codings import Coding
from topology.planner.shares import Split, busiest, improved
from topology.planner.ways import Way
from topology.world import Topology

How = tuple[Way, Coding, Sizing]
"""All that is decided before the batch is spread."""


class SpreadTrial:
    """What is decided for some sites, with the spread that suits it."""

    def __init__(self, job: Job, topology: Topology, begin: Split, *, is_complete: bool) -> None:
        """Try these sites only.

        Args:
            job: Without a placement.
            topology: Of the sites that take part.
            begin: The batch, spread so that the slowest site is fastest.
            is_complete: As of `SiteSet`.
        """
        self._job, self._topology, self._begin = job, topology, begin
        self._is_complete = is_complete
        self._objective = (job.plan or PlanWishes()).objective
        self._ranks = [site.num_ranks for site in topology.sites]

    def choice(
        self,
        how: How,
        places: tuple[int, ...],
        least_s: float,
        best: Choice | None,
        *,
        is_split: bool,
    ) -> Choice | None:
        """Return the best spread of the batch with all else decided; None if `best` is better.

        Args:
            how: What is decided.
            places: What decides between equal choices that lose equally much.
            least_s: No step is shorter.
            best: Known.
            is_split: Other spreads are tried, too.
        """
        way, coding, sizing = how
        draft = Choice(
            sites=tuple(site.name for site in self._topology.sites),
            sequences=self._begin,
            way=way,
            coding=coding,
            sizing=sizing,
            micro_batch=self._job.trainer.micro_batch,
            step_s=math.inf,
            usd_per_step=math.inf,
            rank=(math.inf,),
        )
        job = draft.job(self._job)
        per_s, egress = money(job, self._topology, way)

        def rank(step_s: float) -> Rank:
            usd = per_s * step_s + egress
            return rank_of(self._objective, step_s, usd, len(draft.sites), coding.loss, *places)

        if best is not None and rank(least_s) >= best.rank:
            return None
        model = StepModel(job, self._topology, way.plan)
        # Of no spread is the step shorter than with a single sequence in each rank.
        shortest_s = max(least_s, model.floor_s, model.step_s([1] * len(self._ranks)))
        if best is not None and rank(shortest_s) >= best.rank:
            return None
        split, step_s = self._spread(model, shortest_s if is_split else math.inf)
        return dataclasses.replace(
            draft,
            sequences=split,
            step_s=step_s,
            usd_per_step=per_s * step_s + egress,
            rank=rank(step_s),
        )

    def _spread(self, model: StepModel, shortest_s: float) -> tuple[Split, float]:
        """Return a spread of the batch and its step: better than the first, if that is longer."""
        begun = busiest(self._begin, self._ranks)
        # Of many sites there are many spreads: TCP's windows are taken for those of the first one.
        like = None if self._is_complete else begun

        def steps_s(splits: Sequence[Split]) -> list[float]:
            return model.steps_s([busiest(split, self._ranks) for split in splits], like)

        begun_s = model.step_s(begun)
        if begun_s <= shortest_s:
            return self._begin, begun_s
        split, _ = improved(self._begin, self._ranks, self._job.trainer.micro_batch, steps_s)
        step_s = model.step_s(busiest(split, self._ranks))
        return (split, step_s) if step_s < begun_s else (self._begin, begun_s)
