"""From the metric records of a run of the all-reduce script to its figures. Pure.

The bound is `topology/timing/wire_time.py`'s time for the bytes that were sent, on links that lose
to packet headers what TCP must (3.5 % of the rate where packets are emulated) but never start
slowly: connections are warm. In a gather that is bytes ÷ (0.965 · rate) + RTT/2 of the slowest
link.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from orchestrator.evidence.bench.allreduce_record import Figures, LinkUse, Times
from orchestrator.evidence.bench.measurement import MeasurementError
from protos import metrics
from topology.job import Job
from topology.timing.wire_time import exchange_time_s
from topology.world import Topology

PAYLOAD_SHARE = 0.965
"""1448 of 1500 bytes: what TCP with time stamps can use of a link of packets."""
GB = 1e9

Place = tuple[str, int]
"""A site, and a rank inside it."""
Repeats = dict[int, dict[Place, Mapping[str, Any]]]
"""Records of kind `allreduce`, by repetition and rank."""


@dataclasses.dataclass(frozen=True, slots=True)
class Asked:
    """What the run was to do."""

    job: Job
    topology: Topology
    size_bytes: int
    warmup: int
    repeats: int
    emulator: str
    """What emulated the WAN: `netns`, `relay` or `none`."""

    @property
    def count(self) -> int:
        """Repetitions, the warm-up included."""
        return self.warmup + self.repeats


def figures_of(records: Iterable[Mapping[str, Any]], asked: Asked) -> Figures:
    """Return what a run's metrics.jsonl says.

    Raises:
        MeasurementError: a rank lacks a repetition, or the results of two ranks differ.
    """
    repeats, links = _sorted_out(records)
    _check_complete(repeats, asked)
    _check_identical(repeats)
    times = _times(repeats, asked)
    sent = {pair: values[metrics.SENT_BYTES] / asked.count for pair, values in links.items()}
    bound_s = _bound_s(links, asked)
    site_sent: dict[str, float] = defaultdict(float)
    for (source, _), num_bytes in sent.items():
        site_sent[source] += num_bytes
    error = _values(repeats[asked.count - 1][asked.topology.sites[0].name, 0])
    return Figures(
        times=times,
        algorithm_bytes_per_s=asked.size_bytes / times.median_s,
        links=_links(sent, times, asked),
        site_sent_bytes=max(site_sent.values(), default=0.0),
        bound_s=bound_s,
        over_bound=times.median_s / bound_s if bound_s else None,
        gateways_cpu_s_per_gb=_cpu_s_per_gb(repeats, asked, metrics.GATEWAYS_CPU_S),
        ranks_cpu_s_per_gb=_cpu_s_per_gb(repeats, asked, metrics.RANK_CPU_S),
        relative_error=float(error.get(metrics.RELATIVE_ERROR, 0.0)),
    )


def times_of(spans: Iterable[Iterable[tuple[float, float]]], warmup: int) -> Times:
    """Return how long repetitions took.

    Args:
        spans: when each site began and ended, on one clock; of each repetition.
        warmup: repetitions that do not count.
    """
    all_s = []
    for each in spans:
        begins, ends = zip(*each, strict=True)
        all_s.append(max(ends) - max(begins))
    return Times(cold_s=all_s[0], all_s=tuple(all_s[warmup:]))


def _sorted_out(
    records: Iterable[Mapping[str, Any]],
) -> tuple[Repeats, dict[tuple[str, str], dict[str, float]]]:
    """Return the repetitions, and each directed link's last totals, of all gateways together."""
    repeats: Repeats = defaultdict(dict)
    totals: dict[tuple[str, str, str], Mapping[str, float]] = {}
    for record in records:
        labels = record.get("labels") or {}
        if record.get("kind") == metrics.ALLREDUCE:
            repeats[record["step"]][record["site"], record["rank"]] = record
        elif record.get("kind") == metrics.LINK:
            totals[record["site"], labels["target"], labels["node"]] = record["values"]
    links: dict[tuple[str, str], dict[str, float]] = {}
    for (source, target, _), values in totals.items():
        link = links.setdefault((source, target), defaultdict(float))
        for name in (metrics.SENT_BYTES, metrics.RAW_BYTES):
            link[name] += values.get(name, 0.0)
    return repeats, links


def _check_complete(repeats: Repeats, asked: Asked) -> None:
    ranks = {(site.name, rank) for site in asked.topology.sites for rank in range(site.num_ranks)}
    for repeat in range(asked.count):
        missing = sorted(ranks - repeats.get(repeat, {}).keys())
        if missing:
            site, rank = missing[0]
            raise MeasurementError(
                f"rank {rank} of {site} has no record of repetition {repeat + 1} of {asked.count}"
            )


def _check_identical(repeats: Repeats) -> None:
    """Refuse results that are not equal bit for bit at all ranks of all sites."""
    for repeat, records in repeats.items():
        digests = {place: each["labels"][metrics.DIGEST] for place, each in records.items()}
        (first, expected), *others = sorted(digests.items())
        for place, digest in others:
            if digest != expected:
                raise MeasurementError(
                    f"repetition {repeat + 1}: the results of rank {first[1]} of {first[0]} and "
                    f"rank {place[1]} of {place[0]} differ: {expected} and {digest}"
                )


def _times(repeats: Repeats, asked: Asked) -> Times:
    return times_of(
        (
            [
                (_values(each)[metrics.BEGIN_S], _values(each)[metrics.END_S])
                for each in repeats[repeat].values()
            ]
            for repeat in range(asked.count)
        ),
        asked.warmup,
    )


def _links(
    sent: Mapping[tuple[str, str], float], times: Times, asked: Asked
) -> tuple[LinkUse, ...]:
    uses = []
    for link in asked.topology.links:
        num_bytes = sent.get((link.source, link.target), 0.0)
        share = num_bytes / (link.bytes_per_s * times.median_s)
        uses.append(
            LinkUse(
                source=link.source,
                target=link.target,
                sent_bytes=num_bytes,
                share=None if asked.emulator == "none" else share,
            )
        )
    return tuple(uses)


def _bound_s(links: Mapping[tuple[str, str], Mapping[str, float]], asked: Asked) -> float | None:
    """Return what the links allow; None where none is emulated, or nothing was sent."""
    raw_bytes = sum(each[metrics.RAW_BYTES] for each in links.values())
    if asked.emulator == "none" or raw_bytes == 0:
        return None
    ratio = sum(each[metrics.SENT_BYTES] for each in links.values()) / raw_bytes
    share = PAYLOAD_SHARE if asked.emulator == "netns" else 1.0
    usable = tuple(
        dataclasses.replace(link, bytes_per_s=share * link.bytes_per_s)
        for link in asked.topology.links
    )
    # The relay's prediction is the one without packets' headers, which are in `usable`, and without
    # slow start.
    topology = dataclasses.replace(asked.topology, links=usable, emulate=True, emulator="relay")
    return exchange_time_s(asked.job, topology, asked.size_bytes, ratio)


def _cpu_s_per_gb(repeats: Repeats, asked: Asked, name: str) -> float:
    """Return the mean over sites of what all repetitions after the warm-up used."""
    used_s = sum(
        _values(record)[name]
        for repeat in range(asked.warmup, asked.count)
        for record in repeats[repeat].values()
    )
    num_bytes = asked.repeats * asked.size_bytes * len(asked.topology.sites)
    return used_s / (num_bytes / GB)


def _values(record: Mapping[str, Any]) -> Mapping[str, float]:
    values: Mapping[str, float] = record["values"]
    return values
