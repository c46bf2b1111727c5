"""What people see of a run, folded from its events.

The same live, from the journal, and after a crash.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from isthmus.orchestrator.core.run_events import RunState, SiteState
from isthmus.protos.failure import Failure

_SITE_STATES = {
    "site.joined": SiteState.JOINED,
    "site.left": SiteState.ABSENT,
    "run.rolled_back": SiteState.ABSENT,
    "site.prepared": SiteState.PREPARED,
    "site.starting": SiteState.STARTING,
    "site.running": SiteState.RUNNING,
    "site.ended": SiteState.ENDED,
    "site.lost": SiteState.LOST,
    "site.dropped": SiteState.DROPPED,
    "site.let_go": SiteState.ENDED,
    "site.returning": SiteState.RETURNING,
    "site.returned": SiteState.RUNNING,
}
_NOTED = frozenset(
    {
        "wan.fallback",
        "run.simulated",
        "run.replanned",
        "plan.relaunch",
        "rank.stalled",
        "data.same",
        "gradient.non_finite",
        "site.stepped_alone",
        "site.device_differs",
        "site.trouble",
        "site.lost",
        "site.dropped",
        "site.drop_refused",
        "site.ended_early",
        "site.returning",
        "site.returned",
        "site.ended",
        "checkpoint.written",
        "checkpoint.failed",
        "checkpoint.stays",
        "state.failed",
        "run.state_missing",
        "run.rolled_back",
        "run.waiting",
        "run.went_on",
        "run.ended",
        "clock.stepped",
    }
)
"""Kinds of events whose `note` people see beside the run's state."""
_GONE = frozenset({SiteState.LOST, SiteState.DROPPED})
_KEPT = frozenset({SiteState.ENDED, *_GONE})
"""An agent that comes or goes afterwards does not change what became of its site in this run."""

_UP = frozenset({SiteState.PREPARED, SiteState.STARTING, SiteState.RUNNING, SiteState.RETURNING})
"""Something of the run is at the site."""
_COMING_UP = frozenset({"site.joined", "site.prepared", "site.starting", "site.running"})
"""A site that is started again stays RETURNING until it takes part."""

MAX_NOTES = 20
"""The newest: a run of months may be planned again many times."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedEvent:
    """One line of the journal."""

    sequence: int
    wall_s: float
    run_id: str
    """Empty: the event is about no run in particular."""
    generation: int
    kind: str
    site: str
    detail: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """What people should know of a run beside its state, in a line."""

    sequence: int
    """Sequence number of its event."""
    wall_s: float
    kind: str
    site: str
    text: str


@dataclass(slots=True)
class SiteView:
    """One site of a run."""

    state: SiteState = SiteState.ABSENT
    host: str = ""


@dataclass(slots=True)
class RunView:
    """A run's state. Metrics are not part of it: orchestrator/core/run_metrics.py."""

    run_id: str
    name: str = ""
    generation: int = 0
    folder: str = ""
    state: RunState = RunState.FORMING
    priority: int = 0
    reason_code: str = ""
    reason: str = ""
    failure: Failure | None = None
    sites: dict[str, SiteView] = field(default_factory=dict)
    begin_with: tuple[str, ...] = ()
    """The sites that the run begins with."""
    members: tuple[str, ...] = ()
    """Sites that take part in the latest epoch."""
    follows: tuple[str, ...] = ()
    """The members whose part does not count yet."""
    epoch: int = 0
    links: tuple[Mapping[str, Any], ...] = ()
    """`source`, `target`, `bytes_per_s` and `rtt_s` of each, as configured."""
    noted: tuple[Note, ...] = ()
    """What people should know of it beside its state."""
    created_wall_s: float = 0.0
    ended_wall_s: float = 0.0

    @property
    def notes(self) -> list[str]:
        """What is noted, a line each."""
        return [each.text for each in self.noted]

    @property
    def counted(self) -> frozenset[str]:
        """The sites whose part counts: members that do not only follow."""
        return frozenset(self.members or self.begin_with).difference(self.follows)

    def apply(self, event: RecordedEvent) -> None:
        """Take the next event of this run."""
        detail = event.detail
        if event.kind in _NOTED and "note" in detail:
            note = Note(
                sequence=event.sequence,
                wall_s=event.wall_s,
                kind=event.kind,
                site=event.site,
                text=detail["note"],
            )
            kept = list(self.noted)
            if event.kind == "checkpoint.written":  # only the latest: they crowd out what is rarer
                kept = [each for each in kept if each.kind != event.kind]
            self.noted = (*kept, note)[-MAX_NOTES:]
        match event.kind:
            case "run.submitted":
                self.name, self.folder = detail["name"], detail["folder"]
                self.generation, self.created_wall_s = event.generation, event.wall_s
                self.sites = {name: SiteView() for name in detail["sites"]}
                self.begin_with = tuple(detail.get("begin_with", detail["sites"]))
                self.links = tuple(detail["links"])
                self.priority = detail.get("priority", 0)
                if detail.get("is_queued"):
                    self.state = RunState.QUEUED
            case "run.dequeued":
                self.state, self.generation = RunState.FORMING, event.generation
            case "run.active":
                self.state, self.members = RunState.ACTIVE, self.begin_with
            case "epoch.begun":
                self.members, self.epoch = tuple(detail["members"]), int(detail["epoch"])
                self.follows = tuple(detail.get("record", {}).get("follows", ()))
            case "run.stopping":
                self.state = RunState.STOPPING
            case "run.ended":
                self.state = RunState(detail["state"])
                self.reason_code, self.reason = detail["reason_code"], detail["reason"]
                failure = detail["failure"]
                self.failure = Failure.from_json(failure) if failure else None
                self.ended_wall_s = event.wall_s
                if self.reason_code == "COORDINATOR_LOST":  # nobody is left to tell of their ends
                    for site in self.sites.values():
                        site.state = SiteState.LOST if site.state in _UP else site.state
        self._apply_to_site(event)

    def _apply_to_site(self, event: RecordedEvent) -> None:
        site = self.sites.get(event.site)
        state = _SITE_STATES.get(event.kind)
        if site is None or state is None:
            return
        if event.kind == "site.joined":
            site.host = event.detail["host"]
        is_settled = site.state in _KEPT and event.kind in {"site.joined", "site.left"}
        is_settled |= site.state in _GONE and event.kind == "site.ended"
        is_settled |= site.state is SiteState.RETURNING and event.kind in _COMING_UP
        if not is_settled:
            site.state = state


def coordinator_lost(view: RunView) -> dict[str, Any]:
    """Return the detail of `run.ended` for a run whose coordinator went before it."""
    return {
        "state": RunState.FAILED.value,
        "reason_code": "COORDINATOR_LOST",
        "reason": f"the coordinator ended while the run was {view.state.lower()}",
        "failure": None,
    }


def fold(run_id: str, events: Iterable[RecordedEvent]) -> RunView:
    """Return the view after all of a run's events."""
    view = RunView(run_id)
    for event in events:
        view.apply(event)
    return view
