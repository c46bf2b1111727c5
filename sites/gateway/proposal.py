"""A plan that all sites may switch to while a run goes on.

docs/architecture.md, "Other trees while a run goes on".
"""

from __future__ import annotations

from dataclasses import dataclass

from topology.hashing import reduction_hash
from topology.trees.trees import ReductionPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """A plan that all sites may switch to, as the agent passes it on."""

    epoch: int
    """Rises from proposal to proposal."""
    from_round: int
    plan: ReductionPlan
    codecs: tuple[str, ...]

    @property
    def hash(self) -> str:
        """Of trees and codecs: what all sites must have understood alike."""
        return reduction_hash(self.plan, self.codecs)
