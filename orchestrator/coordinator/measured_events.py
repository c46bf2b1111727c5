"""Turns a site's measurements into events for the run's core."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from isthmus.orchestrator.core import run_events
from isthmus.orchestrator.core.event_kinds import EventKind
from isthmus.orchestrator.core.run import Run
from isthmus.protos import metrics
from isthmus.protos.control.v1 import control_pb2
from isthmus.protos.failure import one_line
from isthmus.topology.spec.run_spec import RunSpec

STEPPED_ALONE = (
    "has taken an optimizer step, and has averaged nothing with the other sites yet: it trains by "
    "itself until its script calls `site.attach(model, optimizer)`"
)
_STORAGE_KINDS = {
    metrics.CHECKPOINT_FAILED: EventKind.CHECKPOINT_FAILED,
    metrics.STORE_FAILED: EventKind.STORE_FAILED,
    metrics.CHECKPOINT_STAYS: EventKind.CHECKPOINT_STAYS,
    metrics.STATE_FAILED: EventKind.STATE_FAILED,
}


def events_of(
    site: str,
    metric: control_pb2.Metric,
    values: Mapping[str, float],
    labels: Mapping[str, str],
    spec: RunSpec,
    run: Run,
) -> Iterator[run_events.Event]:
    """Yield the events of one measurement; each is to be handled before the next is asked for."""
    reason, data = (one_line(labels.get(name, "")) for name in (metrics.REASON, metrics.DATA))
    if metric.kind in {metrics.STEP, metrics.FIRST_AVERAGE} and run.awaits_step_of(site):
        yield run_events.StepTaken(site)
    if kind := _STORAGE_KINDS.get(metric.kind):
        yield run_events.StorageFailed(kind, site, metric.step, reason)
    match metric.kind:
        case metrics.LINK if run.has_done_sites:
            yield run_events.RoundBegun(site, metric.step)
        case metrics.STATE:
            yield run_events.StateOffered(site)
        case metrics.TROUBLE:
            yield run_events.SiteNoted(EventKind.SITE_TROUBLE, site, f"site {site}: {reason}")
        case metrics.STEPPED_ALONE:
            note = f"site {site} {STEPPED_ALONE}"
            yield run_events.SiteNoted(EventKind.SITE_STEPPED_ALONE, site, note)
        case metrics.DEVICE_DIFFERS:
            note = (
                f"ranks of site {site} compute on {one_line(labels.get(metrics.FOUND, ''))}, and "
                f"the topology says {spec.topology.site(site).accelerator.name}: plans and "
                "predictions do not hold"
            )
            yield run_events.SiteNoted(EventKind.SITE_DEVICE_DIFFERS, site, note)
        case metrics.SAMPLER:
            yield run_events.SamplerMade(site, metric.rank, data)
        case metrics.SITE_SAMPLER:
            yield run_events.SiteSampled(site, data)
        case metrics.NON_FINITE:
            rank = -1 if values.get(metrics.AVERAGED) else metric.rank
            tensor = one_line(labels.get(metrics.TENSOR, ""))
            yield run_events.NonFiniteReported(site, rank, metric.step, tensor, reason)
        case metrics.STEP if 0 <= (last_round := values.get(metrics.ROUND, -1.0)) < math.inf:
            yield run_events.StepEnded(site, metric.rank, metric.step, int(last_round))
        case metrics.CHECKPOINT:
            yield run_events.CheckpointWritten(site, metric.step)
    own = [values.get(name, 0.0) for name in (metrics.GRADIENT_HASH, metrics.INPUT_HASH)]
    if spec.job.exchange.schedule != "off" and any(own) and all(map(math.isfinite, own)):
        gradient, inputs = map(int, own)
        yield run_events.GradientReported(site, metric.step, gradient, inputs)
