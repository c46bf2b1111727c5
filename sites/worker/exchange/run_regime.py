"""The regime that a run has by now, at one rank."""

from __future__ import annotations

from isthmus.topology.spec.regime import Regime, Rung
from isthmus.topology.spec.run_spec import RunSpec


class RunRegime:
    """Changes after the same step at all ranks of all sites. For the training thread."""

    def __init__(self, spec: RunSpec) -> None:
        """Begin with the job's regime."""
        self._spec = spec
        self.now: Regime = spec.job.regime
        """The regime of the next step."""
        self.wanted = self.now
        """The regime to go over to, as soon as the present one has come to its end."""

    def stay(self) -> None:
        """Keep the job's regime for good."""
        self.now = self.wanted = self._spec.job.regime

    @property
    def may_change(self) -> bool:
        """Whether the job permits another regime."""
        return bool(self._spec.rungs)

    @property
    def place(self) -> int:
        """The place of the present one among those that the run may have; 0: the job's."""
        kinds = [each.kind for each in self._spec.ladder]
        return kinds.index(self.now.kind) if self.now.kind in kinds else 0

    @property
    def longest(self) -> Regime:
        """The regime with the longest rounds of those that the run may have."""
        return self._spec.longest_regime

    def at(self, rung: Rung) -> Regime:
        """Return the regime of a rung."""
        return self._spec.regime_at(rung)
