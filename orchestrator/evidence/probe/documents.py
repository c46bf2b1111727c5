"""The job that measures instead of training, and the topology that it is to measure."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from orchestrator.documents import Pair, loaded_topology, read_text
from topology.documents.load import load_job
from topology.job import Probe
from topology.units import format_duration
from topology.world import Topology

JOB_NAME = "probe"
_DIRECTION_S = 90.0
"""For one direction and number of connections, at the very worst."""


def probing_pair(path: Path, overrides: Sequence[str], probe: Probe) -> Pair:
    """Return the documents of a run that measures the links of a topology.

    Args:
        path: The topology's file.
        overrides: Of it.
        probe: What to measure.

    Raises:
        ConfigError: the topology has mistakes.
    """
    text = read_text(path)
    topology = loaded_topology(text, path, overrides)
    job_path = path.with_name(f"{JOB_NAME}.yaml")
    job_text = (
        f"# Measures the links of {path.name} and trains nothing.\n"
        f"version: 1\nname: {JOB_NAME}\ntopology: {_quoted(path.name)}\n"
        f"probe: {{connections: {list(probe.connections)}, echoes: {probe.echoes}, "
        f"window: {format_duration(probe.window_s)}}}\n"
    )
    return Pair(
        job_path=job_path,
        job_text=job_text,
        job_overrides=[],
        job=load_job(job_text, str(job_path)),
        topology_path=path,
        topology_text=text,
        topology_overrides=list(overrides),
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
