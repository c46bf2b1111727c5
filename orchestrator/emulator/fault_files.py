"""Loads fault scripts from files."""

from __future__ import annotations

from pathlib import Path

from isthmus.orchestrator.documents import mistaken, read_text
from isthmus.topology.faults.loading import load_faults
from isthmus.topology.faults.script import FaultScript
from isthmus.topology.spec.errors import ConfigError
from isthmus.topology.spec.world import Topology


def load_faults_file(path: Path, topology: Topology) -> FaultScript:
    """Read and load a fault script for a topology; ConfigError with every mistake."""
    text = read_text(path)
    try:
        return load_faults(text, str(path), topology)
    except ConfigError as error:
        raise mistaken(error, text, path, "faults") from error
