"""The job that measures links instead of training, its figures, and the file that they go into."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isthmus.orchestrator.documents import Pair, loaded_topology, read_file
from isthmus.orchestrator.evidence.record.measured_steps import MeasurementError
from isthmus.orchestrator.run_folder.run_files import write_atomically
from isthmus.protos import metrics
from isthmus.topology.documents.load import job_of
from isthmus.topology.spec.job import Probe
from isthmus.topology.spec.units import format_duration, format_fraction, format_rate
from isthmus.topology.spec.world import Link, Topology
from isthmus.topology.text.yaml_document import Document, read_with_overrides

JOB_NAME = "probe"
_DIRECTION_S = 90.0
"""Time for one direction and number of connections, at the very worst."""


def probing_pair(path: Path, overrides: Sequence[str], probe: Probe) -> Pair:
    """Return the documents of a run that measures the links of a topology.

    Raises:
        ConfigError: the topology has mistakes.
    """
    document = read_file(path, overrides)
    topology = loaded_topology(document)
    job_path = path.with_name(f"{JOB_NAME}.yaml")
    job_text = (
        f"# Measures the links of {path.name} and trains nothing.\n"
        f"version: 1\nname: {JOB_NAME}\ntopology: {_quoted(path.name)}\n"
        f"probe: {{connections: {list(probe.connections)}, echoes: {probe.echoes}, "
        f"window: {format_duration(probe.window_s)}}}\n"
    )
    job_document = read_with_overrides(job_text, str(job_path), ())
    return Pair(
        job_path=job_path,
        job_document=job_document,
        job=job_of(job_document),
        topology_path=path,
        topology_document=document,
        topology=topology,
        described=topology,
    )


def directions(topology: Topology) -> list[tuple[str, str]]:
    """Return the directed links that can be measured: those that have one back."""
    return [
        (link.source, link.target)
        for link in topology.links
        if topology.link(link.target, link.source) is not None
    ]


def estimate_s(topology: Topology, probe: Probe) -> float:
    """Return about how long it takes, if no two links are measured at the same time."""
    total_s = 0.0
    for source, target in directions(topology):
        link = topology.link(source, target)
        assert link is not None
        piece_s = max(min(0.25, probe.window_s / 4), 6 * link.rtt_s)
        echoes_s = min(4.0, probe.echoes * link.rtt_s)
        total_s += echoes_s + (len(probe.connections) + 1) * (
            9 * piece_s + max(probe.window_s, 2 * piece_s)
        )
    return total_s


def longest_s(topology: Topology, probe: Probe) -> float:
    """Return after how long it must have ended, or something is wrong."""
    count = len(directions(topology)) * (len(probe.connections) + 1)
    return topology.failure.start_within_s + count * (_DIRECTION_S + probe.window_s)


def _quoted(name: str) -> str:
    return "'" + name.replace("'", "''") + "'"


LOST_MIN = 5
"""Fewer lost segments say too little of how often they are lost."""
_RATE = f"{metrics.BYTES_PER_S}_"
_CONNECTIONS = re.compile("[0-9]{1,4}")
_MOST = 1e18
"""Bytes a second, seconds, segments: what is more is no measurement."""
NONE_LOST_OF = 20_000
"""So many without a loss count as none lost: a share below 0.015 %, with 95 % probability."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Direction:
    """One direction of a link: configured, and as it was measured."""

    source: str
    target: str
    configured_bytes_per_s: float
    """The rate of the whole link; where the WAN is emulated, what the emulator was told."""
    configured_rtt_s: float
    configured_loss: float
    rtt_s_p50: float
    rtt_s_p99: float
    jitter_s: float
    bytes_per_s: Mapping[int, float]
    """Payload, by the number of connections."""
    segments: int | None
    """Sent while the link was far from full; None where nobody can tell what was lost of them."""
    lost_segments: int

    @property
    def bandwidth_bytes_per_s(self) -> float:
        """The most that came through, over however many connections."""
        return max(self.bytes_per_s.values())

    @property
    def loss(self) -> float | None:
        """Share of the segments that were lost; None if too few were sent to say."""
        if self.segments and (self.lost_segments >= LOST_MIN or self.segments >= NONE_LOST_OF):
            return self.lost_segments / self.segments
        return None


def read_directions(
    records: Iterable[Any],
    topology: Topology,
    pairs: Sequence[tuple[str, str]],
    emulator: str | None,
) -> list[Direction]:
    """Return the figures of each pair of sites.

    `records` are lines of metrics.jsonl. `emulator` is None where the WAN is real.

    Raises:
        MeasurementError: one was not measured, or its figures are none.
    """
    found: dict[tuple[str, str], Mapping[str, float]] = {}
    for record in records:
        match record:
            case {
                "kind": metrics.PROBE,
                "labels": {"source": str(source), "target": str(target)},
                "values": dict(values),
            }:
                found[source, target] = values
    links = {(link.source, link.target): link for link in topology.links}
    directions = []
    for source, target in pairs:
        if (source, target) not in found:
            raise MeasurementError(f"the run has no figures of the link from {source} to {target}")
        try:
            _require_measured(found[source, target])
        except MeasurementError as error:
            raise MeasurementError(f"the link from {source} to {target}: {error}") from error
        directions.append(_direction(links[source, target], found[source, target], emulator))
    return directions


def _require_measured(values: Mapping[str, Any]) -> None:
    """Refuse figures of which one is missing, or is no amount."""
    for name in (metrics.RTT_S_P50, metrics.RTT_S_P99, metrics.JITTER_S):
        if name not in values:
            raise MeasurementError(f"{name} is missing")
    for name, value in values.items():
        if type(value) not in (int, float) or not 0 <= value < _MOST:
            raise MeasurementError(f"{name} is no amount: {value!r:.40}")
    rates = [name for name in values if name.startswith(_RATE)]
    for name in rates:
        if not _CONNECTIONS.fullmatch(name.removeprefix(_RATE)):
            raise MeasurementError(f"{name:.40} is no rate over a number of connections")
    if not any(values[name] for name in rates):
        raise MeasurementError("nothing came through")


def _direction(link: Link, values: Mapping[str, float], emulator: str | None) -> Direction:
    rates = {
        int(key.removeprefix(_RATE)): value
        for key, value in values.items()
        if key.startswith(_RATE)
    }
    described_bytes_per_s = link.described_bytes_per_s or link.bytes_per_s
    # TCP ends at the relay: what gateways send again says nothing of the link behind it.
    can_tell = emulator != "relay" and metrics.SEGMENTS in values
    return Direction(
        source=link.source,
        target=link.target,
        configured_bytes_per_s=link.bytes_per_s if emulator else described_bytes_per_s / link.share,
        configured_rtt_s=link.rtt_s if emulator else link.described_rtt_s or link.rtt_s,
        configured_loss=link.loss,
        rtt_s_p50=values[metrics.RTT_S_P50],
        rtt_s_p99=values[metrics.RTT_S_P99],
        jitter_s=values[metrics.JITTER_S],
        bytes_per_s=dict(sorted(rates.items())),
        segments=int(values[metrics.SEGMENTS]) if can_tell else None,
        lost_segments=int(values.get(metrics.LOST_SEGMENTS, 0)),
    )


def link_figures(
    document: Document,
    topology: Topology,
    measured: Iterable[Direction],
    *,
    at: str,
    is_emulated: bool,
) -> dict[int, dict[str, str]]:
    """Return what to write as `measured` of each link of the file, by its position.

    A link of both directions has the lower bandwidth, the mean round trip and the higher loss of
    the two.

    `at` is when, in ISO 8601. An emulated link is as narrow as its share, a real one is not.
    """
    by_pair = {(each.source, each.target): each for each in measured}
    figures: dict[int, dict[str, str]] = {}
    for index in range(len(document.sequence("links"))):
        source = document.text("links", index, "between", 0) or ""
        target = document.text("links", index, "between", 1) or ""
        pairs = [(source, target)]
        if document.get("links", index, "oneway") is not True:
            pairs.append((target, source))
        found = [by_pair[pair] for pair in pairs if pair in by_pair]
        link = topology.link(source, target)
        if found and link is not None:
            figures[index] = _written(found, link.share if is_emulated else 1.0, at)
    return figures


def _written(found: Sequence[Direction], share: float, at: str) -> dict[str, str]:
    losses = [each.loss for each in found if each.loss is not None]
    written = {
        "bandwidth": format_rate(min(each.bandwidth_bytes_per_s for each in found) / share),
        "rtt": format_duration(sum(each.rtt_s_p50 for each in found) / len(found)),
        "jitter": format_duration(max(0.0, *(each.jitter_s for each in found))),
    }
    if losses:
        written["loss"] = format_fraction(max(losses))
    return {**written, "at": at}


class FileChangedError(Exception):
    """The file is not what it was."""


def replace_text(path: Path, found: bytes, text: str) -> None:
    """Put `text` in a file's place, as a whole or not at all.

    The file's mode and an editor's byte order mark stay, and a symbolic link stays one.

    `found` is what it was found to hold; `text` is without the mark.

    Raises:
        FileChangedError: somebody else has written it; it is left alone.
        OSError: it cannot be written.
    """
    path = path.resolve()
    if path.read_bytes() != found:
        raise FileChangedError(f"{path} was changed meanwhile")
    mark = "\ufeff" if found.startswith(codecs.BOM_UTF8) else ""
    write_atomically(path, mark + text)
