"""One reduction with its codecs, tried with spreads of the batch and sizes of chunks and buckets.

Sizes differ by little, and a spread costs many steps of many cuts. So each spread is tried with the
quickest size first, and with another one only if that could gain as much as is lacking.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from topology.job import Job
from topology.planner.choice import Rank, Sizing, better, money, rank_of
from topology.planner.codings import Coding
from topology.planner.cut_choice import CutChoice, fastest_cuts
from topology.planner.joint_crossings import JointCrossings
from topology.planner.joint_step import JointModel
from topology.planner.shares import Split
from topology.planner.site_cuts import SiteCuts
from topology.planner.ways import Way
from topology.world import Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class Sized:
    """Chunks and buckets of one size."""

    sizing: Sizing
    place: int
    """In the order in which sizes are preferred."""
    together: int
    """Layers whose gradients leave together."""


class CutTrial:
    """What one reduction with its codecs comes to."""

    def __init__(
        self,
        job: Job,
        topology: Topology,
        cuts: Sequence[SiteCuts],
        how: tuple[Way, Coding],
        sizes: Sequence[Sized],
        bound: tuple[float, tuple[float, ...]],
    ) -> None:
        """Work out nothing yet.

        Args:
            job: Without a placement.
            topology: Of the sites that take part.
            cuts: Of each of them.
            how: The reduction and its codecs.
            sizes: That come to something else.
            bound: Seconds that no step is shorter than, and what decides between equal choices.
        """
        self.way, self.coding = how
        self._topology, self._cuts, self._sizes = topology, cuts, sizes
        self._least_s, self._places = bound
        self._objective = "throughput" if job.plan is None else job.plan.objective
        self._micro_batch = job.trainer.micro_batch
        exchange = self.coding.of(job.exchange)
        self._jobs = [dataclasses.replace(job, exchange=each.sizing.of(exchange)) for each in sizes]
        self._money: dict[int, tuple[float, float]] = {}

    def with_spread(
        self, split: Split, best: CutChoice | None, least_s: float = 0.0
    ) -> CutChoice | None:
        """Return the best choice with this spread, of all sizes and cuts, or `best`.

        Args:
            split: The spread of the batch.
            best: What is known.
            least_s: That no step with this spread is shorter than, as far as that is known.
        """
        alone_s = max(cuts.alone_s(count) for cuts, count in zip(self._cuts, split, strict=True))
        least_s = max(self._least_s, alone_s, least_s)
        if math.isinf(least_s):
            return best
        known: dict[int, tuple[int, float]] = {}
        for size in self._order if best is None or self._could_beat(best, least_s) else ():
            sized, model = self._sizes[size], self._models[size]
            bound_s = max(least_s, model.links_s)
            if sized.together in known:
                other, other_s = known[sized.together]
                bound_s = max(bound_s, other_s - model.gain_s(self._models[other]))
            if best is not None and self._rank(size, bound_s) >= best.rank:
                continue
            fronts = [
                cuts.timings(count, sized.together)
                for cuts, count in zip(self._cuts, split, strict=True)
            ]
            timings, step_s = fastest_cuts(model, fronts)
            known.setdefault(sized.together, (size, step_s))
            per_s, egress = self._money_of(size)
            choice = CutChoice(
                sites=tuple(site.name for site in self._topology.sites),
                sequences=split,
                way=self.way,
                coding=self.coding,
                sizing=sized.sizing,
                micro_batch=self._micro_batch,
                step_s=step_s,
                usd_per_step=per_s * step_s + egress,
                rank=self._rank(size, step_s),
                timings=timings,
            )
            best = better(best, choice)
        return best

    def may_beat(self, best: CutChoice) -> bool:
        """Return whether some spread may be better, by what bounds say of all."""
        return self._could_beat(best, self._least_s)

    def is_of(self, choice: CutChoice) -> bool:
        """Return whether a choice is one of these."""
        return choice.way is self.way and choice.coding is self.coding

    def _could_beat(self, best: CutChoice, least_s: float) -> bool:
        """Return whether a step of so many seconds would be better with some size."""
        sizes = range(len(self._sizes))
        return any(self._rank(size, least_s) < best.rank for size in sizes)

    def _rank(self, size: int, step_s: float) -> Rank:
        usd = 0.0
        if self._objective == "cost":
            per_s, egress = self._money_of(size)
            usd = per_s * step_s + egress
        rest = (len(self._cuts), *self._places, self._sizes[size].place)
        return rank_of(self._objective, step_s, usd, *rest)

    @functools.cached_property
    def _models(self) -> list[JointModel]:
        crossings = JointCrossings(self._jobs, self._topology, self.way.plan)
        return [
            JointModel(job, self._topology, self.way.plan, crossings, size)
            for size, job in enumerate(self._jobs)
        ]

    @functools.cached_property
    def _order(self) -> list[int]:
        """Sizes, those first of which least leaves together, then the quickest."""
        if len(self._sizes) == 1:
            return [0]
        return sorted(
            range(len(self._sizes)),
            key=lambda size: (self._sizes[size].together, self._models[size].crossing_s, size),
        )

    def _money_of(self, size: int) -> tuple[float, float]:
        if size not in self._money:
            self._money[size] = money(self._jobs[size], self._topology, self.way)
        return self._money[size]
