"""Keeps an active run's plan fit for its links.

Carries out what orchestrator/core/replan_machine.py decides.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from orchestrator.coordinator.replanner import Replanner
from orchestrator.core import replan_machine
from orchestrator.core.replan_machine import ReductionPrepared, ReplanMachine
from orchestrator.core.run_events import RecordEvent
from protos import metrics
from protos.control.v1 import control_pb2
from topology.run_spec import RunSpec
from topology.trees.trees import ReductionPlan

SendTo = Callable[[str, control_pb2.CoordinatorMessage], None]
MAX_WHY = 500
"""Characters of a site's reason that are kept."""
Record = Callable[[str, str, dict[str, Any]], None]
"""Writes an event: kind, site, detail."""


class Replanning:
    """Watches one run's links and switches its plan, from when it is active until `close`."""

    def __init__(
        self,
        name: Mapping[str, Any],
        spec: RunSpec,
        planner: Replanner,
        *,
        send: SendTo,
        record: Record,
    ) -> None:
        """Begin to watch.

        Args:
            name: `run_id` and `generation`, for every message.
            spec: The run; its plan may be made again.
            planner: Tells `handle`; closed with this.
            send: To a site's agent.
            record: In the journal.
        """
        self._name = name
        self._sites = spec.site_names
        self._machine = ReplanMachine(spec)
        self._planner = planner
        self._send = send
        self._record = record

    def handle(self, event: replan_machine.Event) -> None:
        """Let the core decide on an event, and do what it says.

        Raises:
            JournalError: it cannot be written down.
        """
        for action in self._machine.handle(event, time.monotonic()):
            self._do(action)

    async def close(self) -> None:
        """End what plans. Idempotent."""
        await self._planner.close()

    def _do(self, action: replan_machine.Action) -> None:
        match action:
            case RecordEvent():
                self._record(action.kind, action.site, dict(action.detail))
            case replan_machine.PlanAgain():
                self._planner.plan(action)
            case replan_machine.SendPrepareReduction():
                prepare = control_pb2.PrepareReduction(
                    **self._name,
                    epoch=action.epoch,
                    from_round=action.from_round,
                    trees=tree_messages(action.reduction.plan, self._sites),
                    codecs=action.reduction.codecs,
                )
                self._send(action.site, control_pb2.CoordinatorMessage(prepare_reduction=prepare))
            case replan_machine.SendDecideReduction():
                decide = control_pb2.DecideReduction(
                    **self._name, epoch=action.epoch, commit=action.commit
                )
                self._send(action.site, control_pb2.CoordinatorMessage(decide_reduction=decide))


def link_reported(site: str, metric: control_pb2.Metric) -> replan_machine.LinkReported | None:
    """Return what a site's metric says of one of its links; None if it is of another kind."""
    labels = metric.labels
    if metric.kind != metrics.LINK or labels.get("source") != site:
        return None
    target, node = labels.get("target", ""), labels.get("node", "")
    return replan_machine.LinkReported(site, target, node, metric.step, dict(metric.values))


def tree_messages(plan: ReductionPlan, sites: Sequence[str]) -> list[control_pb2.ReductionTree]:
    """Return a plan's trees with sites by name; none are a gather."""
    return [
        control_pb2.ReductionTree(
            root=sites[tree.root],
            parents={sites[child]: sites[parent] for child, parent in tree.parent.items()},
            weight=tree.weight,
        )
        for tree in plan.trees
    ]


def prepared_from(site: str, message: control_pb2.ReductionPrepared) -> ReductionPrepared:
    """Return a site's answer to a proposal."""
    return ReductionPrepared(
        site=site,
        epoch=message.epoch,
        is_accepted=message.accepted,
        plan_hash=message.plan_hash,
        round=message.round,
        is_late=message.late,
        why=" ".join(message.why.split())[:MAX_WHY],
        must_keep_codecs=message.codecs_fixed,
    )
