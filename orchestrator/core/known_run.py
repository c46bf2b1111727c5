"""What the parts of one run decide by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from isthmus.orchestrator.core.journaled_run import JournaledRun
from isthmus.orchestrator.core.members import Contact
from isthmus.topology.spec.timeouts import Timeouts
from isthmus.topology.spec.world import Detection, Topology


@dataclass(frozen=True, slots=True)
class KnownRun:
    """One run, as its document, its journal and this coordinator's ears have it."""

    topology: Topology
    timeouts: Timeouts
    record: JournaledRun
    """Changed by whoever writes down what is decided; nobody else changes it."""
    contacts: Mapping[str, Contact]

    @property
    def rules(self) -> Detection:
        """What counts as a failure, and what is survived."""
        return self.topology.failure
