"""Loads fault scripts from files, and makes them of link traces."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from isthmus.orchestrator.documents import mistaken, read_file, read_text
from isthmus.topology.faults.link_trace import fault_script, read_trace
from isthmus.topology.faults.loading import faults_of
from isthmus.topology.faults.script import FaultScript
from isthmus.topology.spec.errors import ConfigError, Problem
from isthmus.topology.spec.world import Topology

TRACE_BYTES = 256 << 20
"""Limit on a link trace: a run's metrics may be long."""


def load_link_trace(path: Path, topology: Topology, used: Sequence[Topology]) -> str:
    """Read a link trace; return the fault script that plays it, as YAML.

    Args:
        path: Of the trace.
        topology: Whose links it may name.
        used: Those of runs, which may leave out sites; only links of all of them are played.

    Raises:
        ConfigError: with every mistake, each at its line.
    """
    samples = [
        each
        for each in read_trace(read_text(path, TRACE_BYTES), str(path), topology)
        if all(one.link(*each.pair) is not None for one in used)
    ]
    if not samples:
        message = "names no link between sites that take part in every setting"
        raise ConfigError([Problem(str(path), 0, 0, message, "")])
    return fault_script(samples, str(path))


def load_faults_file(path: Path, topology: Topology) -> FaultScript:
    """Read and load a fault script for a topology; ConfigError with every mistake."""
    document = read_file(path)
    try:
        return faults_of(document, topology)
    except ConfigError as error:
        raise mistaken(error, document, "faults") from error
