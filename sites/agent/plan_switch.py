"""The site's part in switching plans: all its gateways are asked, and answer as one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from protos.control.v1.control_pb2 import (
    DecideReduction,
    PrepareReduction,
    ReductionBegun,
    ReductionPrepared,
    ReductionTree,
)
from sites.gateway.config import Proposal
from topology.errors import ConfigError
from topology.trees.trees import ReductionPlan, Tree

Tell = Callable[[Mapping[str, Any]], None]
"""Sends one line to all of the site's gateways."""
Put = Callable[[ReductionPrepared | ReductionBegun], None]
"""Sends a message to the coordinator; run and generation are filled in on the way."""


class PlanSwitch:
    """Passes one run's proposals on to the gateways of this site, and their answers back."""

    def __init__(self, sites: Sequence[str], num_gateways: int, tell: Tell, put: Put) -> None:
        """Say nothing yet.

        Args:
            sites: That take part, in the run's order.
            num_gateways: Of this site.
            tell: All of them.
            put: The coordinator.
        """
        self._sites = sites
        self._num_gateways = num_gateways
        self._tell, self._put = tell, put
        self._epoch = 0
        self._answers: list[Mapping[str, Any]] = []
        self._begun_epoch = 0

    def prepare(self, message: PrepareReduction) -> None:
        """Ask the gateways whether they can use a plan; a mistake in it is the answer at once."""
        self._epoch, self._answers = message.epoch, []
        try:
            plan = plan_of(message.trees, self._sites)
        except ConfigError as error:
            why = error.problems[0].message
            self._put(ReductionPrepared(epoch=message.epoch, round=-1, why=why))
            return
        proposal = Proposal(
            epoch=message.epoch,
            from_round=message.from_round,
            plan=plan,
            codecs=tuple(message.codecs),
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


def plan_of(trees: Sequence[ReductionTree], sites: Sequence[str]) -> ReductionPlan:
    """Return the plan of trees whose sites have names; none are a gather.

    Raises:
        ConfigError: a site that takes no part, or weights that no plan has.
    """
    index = {name: at for at, name in enumerate(sites)}
    try:
        named = tuple(
            Tree(
                index[tree.root],
                {index[child]: index[parent] for child, parent in tree.parents.items()},
                tree.weight,
            )
            for tree in trees
        )
    except KeyError as error:
        raise ConfigError(f"a tree over site {error}, which takes no part") from None
    return ReductionPlan(len(sites), named, "as the coordinator says")
