"""What happens to a run's plan, and what the coordinator does about it.

Frozen facts, no behaviour.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from orchestrator.core import events
from orchestrator.core.events import RecordEvent
from orchestrator.core.plan_switch import ReductionPrepared
from topology.job import Reduction
from topology.measured.measured_links import LinkFigures, Pair


@dataclass(frozen=True, slots=True)
class LinkReported:
    """A gateway's totals of a directed link, and its latest round."""

    source: str
    target: str
    node: str
    round: int
    values: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchPlanned:
    """The best reduction over the links as they are."""

    form: str
    reduction: Reduction
    plan_hash: str
    """What sites answer that have understood it."""
    before_s: float
    """Predicted seconds of a step with the reduction that the run has."""
    after_s: float


@dataclass(frozen=True, slots=True)
class RelaunchPlanned:
    """The predicted seconds of a step if everything were decided anew."""

    step_s: float


@dataclass(frozen=True, slots=True)
class PlanningFailed:
    """There is no plan."""

    why: str


@dataclass(frozen=True, slots=True)
class ReductionBegun:
    """A site's ranks have got to the first round of another plan."""

    site: str
    epoch: int
    round: int


Event = (
    LinkReported
    | SwitchPlanned
    | RelaunchPlanned
    | PlanningFailed
    | ReductionPrepared
    | ReductionBegun
    | events.SiteEnded
    | events.SiteLost
    | events.Ticked
)


@dataclass(frozen=True, slots=True)
class PlanAgain:
    """Make a plan; SwitchPlanned and RelaunchPlanned, or PlanningFailed, answer."""

    reduction: Reduction | None
    """That the run has; None: its job's."""
    figures: Mapping[Pair, LinkFigures]
    """Of links that are not as the topology says."""
    keeps_codecs: bool = False
    """Every chunk has to keep the codec that it had when the run began."""


@dataclass(frozen=True, slots=True)
class SendPrepareReduction:
    """Ask a site's agent whether it can switch."""

    site: str
    epoch: int
    from_round: int
    reduction: Reduction


@dataclass(frozen=True, slots=True)
class SendDecideReduction:
    """Tell a site's agent what came of it."""

    site: str
    epoch: int
    commit: bool


Action = PlanAgain | SendPrepareReduction | SendDecideReduction | RecordEvent
