"""The figures of a run's steps, taken from its metric records. Pure.

Only steps after the warm-up count: the first ones pay for connections, windows and caches that
grow. A step begins where the one before it ended, so the times of the steps add up to the wall
time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from isthmus.orchestrator.core.link_totals import LinkTotals
from isthmus.orchestrator.evidence.record.bench_record import LinkBytes, Measured, Split
from isthmus.protos import metrics
from isthmus.topology.spec.world import Topology

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

    `records` are lines of metrics.jsonl.

    Raises:
        MeasurementError: a site lacks one of them, or a record lacks a figure.
    """
    by_site: dict[str, Steps] = {site.name: {} for site in topology.sites}
    sent_bytes = dict.fromkeys(by_site, 0.0)
    totals = LinkTotals()
    window = range(warmup_steps + 1, warmup_steps + steps + 1)
    for record in records:
        kind, site, values = record.get("kind"), record.get("site"), record.get("values")
        if site not in by_site or not isinstance(values, Mapping):
            continue
        if kind == metrics.STEP:
            sent_bytes[site] += values.get(metrics.WIRE_BYTES) or 0.0
            if record.get("step") in window:
                by_site[site][record["step"]] = values
        elif kind == metrics.LINK:
            totals.add(site, values, record.get("labels") or {})
    for site, found in by_site.items():
        missing = [step for step in window if step not in found]
        if missing:
            raise MeasurementError(
                f"site {site} has no record of step {missing[0]}, of {window.stop - 1} that the "
                "run was to make"
            )
    # The first rank's records tell how a site's bytes spread over its steps: links have totals
    # only.
    shares = {
        site: _mean(steps, metrics.WIRE_BYTES) / (sent_bytes[site] or 1.0)
        for site, steps in by_site.items()
    }
    sent = totals.all()
    return _figures(by_site, _links(shares, sent, topology), wire_ratio(sent))


def _figures(
    by_site: Mapping[str, Steps], links: tuple[LinkBytes, ...], wire_ratio: float | None
) -> Measured:
    step_s = {site: _mean(steps, metrics.STEP_S) for site, steps in by_site.items()}
    tokens = {site: _mean(steps, metrics.SITE_TOKENS) for site, steps in by_site.items()}
    if min(step_s.values()) <= 0:
        raise MeasurementError("a step took no time at all")
    num_sites = len(by_site)
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
        wire_ratio=wire_ratio,
    )


def wire_ratio(links: Mapping[tuple[str, str], Mapping[str, float]]) -> float | None:
    """Return bytes sent for each byte of float32, over all links; None where nothing was sent."""
    sent_bytes = math.fsum(each[metrics.SENT_BYTES] for each in links.values())
    raw_bytes = math.fsum(each[metrics.RAW_BYTES] for each in links.values())
    return sent_bytes / raw_bytes if raw_bytes > 0 else None


def _links(
    shares: Mapping[str, float],
    sent: Mapping[tuple[str, str], Mapping[str, float]],
    topology: Topology,
) -> tuple[LinkBytes, ...]:
    """Return each link's bytes of a step, of all ranks and gateways.

    What crossed before the first step counts as if steps had sent it: it is little, for sites that
    begin with equal models exchange only a hash.

    `shares` are, of all that a site sent, what it sent in a measured step.
    """
    found = []
    for link in topology.links:
        total = sent.get((link.source, link.target), {}).get(metrics.SENT_BYTES, 0.0)
        found.append(
            LinkBytes(
                source=link.source,
                target=link.target,
                bytes_per_step=total * shares[link.source],
            )
        )
    return tuple(found)


def _mean(steps: Steps, key: str) -> float:
    values = [each.get(key) for each in steps.values()]
    known = [float(value) for value in values if isinstance(value, int | float)]
    if len(known) < len(values):
        raise MeasurementError(f"a step's record has no {key}")
    return math.fsum(known) / len(known)
