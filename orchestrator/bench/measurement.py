"""From a run's metric records to its figures. Pure.

Only steps after the warm-up count: the first ones pay for connections, windows and caches that grow.
A step begins where the one before it ended, so the times of the steps add up to the wall time.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from orchestrator.bench.record import LinkBytes, Measured, Split
from protos import metrics
from topology.world import Topology

Steps = dict[int, Mapping[str, float]]
"""One site's step records, by step; of its first rank, the only one that sends them."""

_SPLIT = {
    "compute_s": metrics.COMPUTE_S,
    "intra_s": metrics.INTRA_S,
    "exposed_inter_s": metrics.EXPOSED_INTER_S,
    "wait_s": metrics.WAIT_S,
    "hidden_inter_s": metrics.HIDDEN_INTER_S,
    "encode_s": metrics.ENCODE_S,
    "decode_s": metrics.DECODE_S,
}


class MeasurementError(ValueError):
    """A run's records do not hold what was to be measured."""


def measure(
    records: Iterable[Mapping[str, Any]], topology: Topology, *, warmup_steps: int, steps: int
) -> Measured:
    """Return the figures of the `steps` steps after the first `warmup_steps`.

    Args:
        records: Lines of metrics.jsonl.
        topology: Of the run.
        warmup_steps: Steps that do not count.
        steps: That do, at least 1.

    Raises:
        MeasurementError: a site lacks one of them, or a record lacks a figure.
    """
    by_site: dict[str, Steps] = {site.name: {} for site in topology.sites}
    totals: dict[tuple[str, str, str], Mapping[str, float]] = {}
    window = range(warmup_steps + 1, warmup_steps + steps + 1)
    for record in records:
        kind, site, values = record.get("kind"), record.get("site"), record.get("values")
        if site not in by_site or not isinstance(values, Mapping):
            continue
        if kind == metrics.STEP and record.get("step") in window:
            by_site[site][record["step"]] = values
        elif kind == metrics.LINK:
            labels = record.get("labels") or {}
            totals[site, str(labels.get("target")), str(labels.get("node"))] = values
    for site, found in by_site.items():
        missing = [step for step in window if step not in found]
        if missing:
            raise MeasurementError(
                f"site {site} has no record of step {missing[0]}, of {window.stop - 1} that the run "
                "was to make"
            )
    return _figures(by_site, totals, topology)


def _figures(
    by_site: Mapping[str, Steps],
    totals: Mapping[tuple[str, str, str], Mapping[str, float]],
    topology: Topology,
) -> Measured:
    step_s = {site: _mean(steps, metrics.STEP_S) for site, steps in by_site.items()}
    tokens = {site: _mean(steps, metrics.SITE_TOKENS) for site, steps in by_site.items()}
    if min(step_s.values()) <= 0:
        raise MeasurementError("a step took no time at all")
    num_sites = len(by_site)
    links = _links(by_site, totals, topology)
    return Measured(
        # Where sites wait for each other, all have the same pace; where they do not, each its own.
        tokens_per_s=math.fsum(tokens[site] / step_s[site] for site in by_site),
        tokens_per_step=math.fsum(tokens.values()),
        step_s=math.fsum(step_s.values()) / num_sites,
        split=Split(
            **{
                name: math.fsum(_mean(steps, key) for steps in by_site.values()) / num_sites
                for name, key in _SPLIT.items()
            }
        ),
        links=links,
        wire_ratio=_wire_ratio(links, by_site, topology),
    )


def _links(
    by_site: Mapping[str, Steps],
    totals: Mapping[tuple[str, str, str], Mapping[str, float]],
    topology: Topology,
) -> tuple[LinkBytes, ...]:
    """Divide what each site sent in its steps over its links, as their totals are to each other.

    The totals themselves also hold what crossed before the first step, the initial state.
    """
    sent: dict[tuple[str, str], float] = defaultdict(float)
    for (source, target, _), values in totals.items():
        sent[source, target] += values.get(metrics.SENT_BYTES, 0.0)
    of_site: dict[str, float] = defaultdict(float)
    for (source, _), num_bytes in sent.items():
        of_site[source] += num_bytes
    links = []
    for link in topology.links:
        share = sent[link.source, link.target] / (of_site[link.source] or 1.0)
        # The first rank's shard is as large as the others'.
        wire_bytes = _mean(by_site[link.source], metrics.WIRE_BYTES)
        num_bytes = wire_bytes * topology.site(link.source).num_ranks * share
        links.append(LinkBytes(source=link.source, target=link.target, bytes_per_step=num_bytes))
    return tuple(links)


def _wire_ratio(
    links: Iterable[LinkBytes], by_site: Mapping[str, Steps], topology: Topology
) -> float | None:
    """Return bytes sent for each byte of float32: a link of the plan carries each gradient once."""
    sent_bytes = raw_bytes = 0.0
    for link in links:
        if link.bytes_per_step > 0:
            sent_bytes += link.bytes_per_step
            rank_bytes = _mean(by_site[link.source], metrics.RAW_BYTES)
            raw_bytes += rank_bytes * topology.site(link.source).num_ranks
    return sent_bytes / raw_bytes if raw_bytes > 0 else None


def _mean(steps: Steps, key: str) -> float:
    values = [each.get(key) for each in steps.values()]
    known = [float(value) for value in values if isinstance(value, int | float)]
    if len(known) < len(values):
        raise MeasurementError(f"a step's record has no {key}")
    return math.fsum(known) / len(known)
