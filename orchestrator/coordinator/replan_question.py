"""What a running job's plan is made from again, as the coordinator asks its planning process."""

from __future__ import annotations

from dataclasses import dataclass

from isthmus.topology.spec.epoch import Epoch
from isthmus.topology.spec.json_fields import Message
from isthmus.topology.spec.measured_links import LinkFigures
from isthmus.topology.spec.run_spec import RunSpec
from isthmus.topology.spec.world import Topology


@dataclass(frozen=True, slots=True, kw_only=True)
class Drifted:
    """A directed link that is not as the topology says."""

    source: str
    target: str
    figures: LinkFigures


@dataclass(frozen=True, slots=True, kw_only=True)
class Divided:
    """A division of the batch, with what sites need for the present one."""

    parts: tuple[int, ...]
    """Samples of each member, in the epoch's order."""
    compute_s: tuple[float, ...]
    """Measured seconds that each of them computes for its present part of a step."""


class Question(Message):
    """What a plan is made of."""

    spec: RunSpec
    described: Topology
    """All sites, those that take no part included: a new launch may choose among them."""
    epoch: Epoch
    """What the run has by now: who takes part, and by which trees."""
    division: Divided | None
    """Another division of the batch to compare with the present one."""
    dead_links: tuple[tuple[str, str], ...]
    """Members that do not reach each other."""
    drifted: tuple[Drifted, ...]
    keeps_codecs: bool
    """Every chunk has to keep the codec that it had when the run began."""
    at: str
    """When it was measured, in ISO 8601."""
