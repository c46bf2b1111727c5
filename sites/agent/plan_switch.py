"""The site's part in switching plans: all its gateways are asked, and answer as one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from protos.control.v1.control_pb2 import (
    DecideReduction,
    PrepareReduction,
    ReductionBegun,
    ReductionPrepared,
    ReductionTree,
)
from sites.gateway.proposal import Proposal
from topology.errors import ConfigError
from topology.job import Job, NamedTree, Reduction
from topology.model.reduction_plans import plan_reduction
from topology.trees.link_codecs import plan_codecs
from topology.world import Topology

Tell = Callable[[Mapping[str, Any]], None]
"""Sends one line to all of the site's gateways."""
Put = Callable[[ReductionPrepared | ReductionBegun], None]
"""Sends a message to the coordinator; run and generation are filled in on the way."""


class PlanSwitch:
    """One run's, at one site."""

    def __init__(
        self, job: Job, topology: Topology, num_gateways: int, tell: Tell, put: Put
    ) -> None:
        """Say nothing yet.

        Args:
            job: Of the run.
            topology: Of the sites that take part.
            num_gateways: Of this site.
            tell: All of them.
            put: The coordinator.
        """
        self._job, self._topology = job, topology
        self._num_gateways = num_gateways
        self._tell, self._put = tell, put
        self._epoch = 0
        self._answers: list[Mapping[str, Any]] = []
        self._begun_epoch = 0

    def prepare(self, message: PrepareReduction) -> None:
        """Ask the gateways whether they can use a plan; a mistake in it is the answer at once."""
        self._epoch, self._answers = message.epoch, []
        reduction = reduction_of(message.trees)
        try:
            job = dataclasses.replace(self._job, reduction=reduction)
            plan = plan_reduction(job, self._topology)
        except ConfigError as error:
            why = error.problems[0].message
            self._put(ReductionPrepared(epoch=message.epoch, round=-1, why=why))
            return
        proposal = Proposal(
            epoch=message.epoch,
            from_round=message.from_round,
            plan=plan,
            codecs=plan_codecs(job, self._topology, plan),
        )
        self._tell({"op": "prepare_plan", **dataclasses.asdict(proposal)})

    def decide(self, message: DecideReduction) -> None:
        """Pass on what came of it."""
        self._tell({"op": "decide_plan", "epoch": message.epoch, "commit": message.commit})

    def prepared(self, answer: Mapping[str, Any]) -> None:
        """A gateway answers `prepare_plan`; once all have, the site does."""
        if answer["epoch"] != self._epoch:
            return
        self._answers.append(answer)
        if len(self._answers) < self._num_gateways:
            return
        refusals = [each for each in self._answers if not each["accepted"]]
        hashes = {str(each["hash"]) for each in self._answers}
        why = str(refusals[0]["why"]) if refusals else ""
        if not refusals and len(hashes) > 1:
            why = "its gateways understood different plans"
        self._put(
            ReductionPrepared(
                epoch=self._epoch,
                accepted=not why,
                plan_hash=min(hashes),
                round=max(int(each["round"]) for each in self._answers),
                late=bool(refusals) and all(each["late"] for each in refusals),
                why=why,
                codecs_fixed=any(each["codecs_fixed"] for each in refusals),
            )
        )

    def begun(self, message: Mapping[str, Any]) -> None:
        """A gateway has got to the first round of a plan.

        The first one of the site to say so counts.
        """
        if message["epoch"] > self._begun_epoch:
            self._begun_epoch = message["epoch"]
            self._put(ReductionBegun(epoch=message["epoch"], round=message["round"]))


def reduction_of(trees: Iterable[ReductionTree]) -> Reduction:
    """Return trees as a job writes them; none are a gather."""
    named = tuple(
        NamedTree(root=tree.root, parents=dict(tree.parents), weight=tree.weight) for tree in trees
    )
    return Reduction(trees=named) if named else Reduction(tree="gather")
