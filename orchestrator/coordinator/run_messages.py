"""What agents say of a run, as the facts that it decides on."""

from __future__ import annotations

import time
from collections.abc import Sequence

from orchestrator.coordinator.active_run import ActiveRun
from orchestrator.coordinator.messages import endpoints_from, failure_from
from orchestrator.coordinator.replanning import prepared_from
from orchestrator.core import run_events
from orchestrator.core.replan_machine import ReductionBegun
from protos.control.v1 import control_pb2

OF_RUN = frozenset(
    {
        "prepared",
        "running",
        "ended",
        "metrics",
        "digest",
        "reduction_prepared",
        "reduction_begun",
    }
)
"""Kinds of an agent's messages that are about a run, and name it."""


def take(
    run: ActiveRun, site: str, message: control_pb2.AgentMessage, sites: Sequence[str]
) -> None:
    """Hand a run what a site says.

    Args:
        run: That the message names.
        site: Whose agent sent it.
        message: Of a kind in OF_RUN.
        sites: All that there are.

    Raises:
        RemoteProtocolError: it says something that cannot be.
    """
    match message.WhichOneof("kind"):
        case "prepared":
            endpoints = endpoints_from(message.prepared.endpoints, site)
            run.handle(run_events.SitePrepared(site, endpoints))
        case "running":
            run.handle(run_events.SiteRunning(site))
        case "ended":
            now_s = time.monotonic()
            failures = tuple(
                failure_from(each, site, sites, now_s) for each in message.ended.failures
            )
            run.handle(run_events.SiteEnded(site, message.ended.succeeded, failures))
        case "metrics":
            run.add_metrics(site, message.metrics)
        case "digest":
            run.handle(_digest(site, message.digest))
        case "reduction_prepared":
            run.replan(prepared_from(site, message.reduction_prepared))
        case "reduction_begun":
            begun = message.reduction_begun
            run.replan(ReductionBegun(site, begun.epoch, begun.round))


def _digest(site: str, digest: control_pb2.Digest) -> run_events.DigestReported:
    return run_events.DigestReported(
        site=site,
        rank=digest.rank,
        step=digest.step,
        combined=digest.combined,
        tensors=tuple(digest.tensors),
        names=tuple(digest.names),
    )
