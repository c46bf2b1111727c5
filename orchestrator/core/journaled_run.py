"""All that the journal says of a run: the one fold of its events.

Nothing else changes it. A coordinator decides by it, writes an event down, applies it, and only
then decides on (run.py); one that is started again folds the same events. `status` shows it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from isthmus.orchestrator.core.certificate_watch import EXPIRED, KIND, Certificate
from isthmus.orchestrator.core.epoch_record import EpochRecord
from isthmus.orchestrator.core.event_kinds import (
    STORAGE_FAILURES,
    EventKind,
    kind_named,
    seen_of,
    text_of,
)
from isthmus.orchestrator.core.failures import Failures
from isthmus.orchestrator.core.first_failure import failure_of, first_failure
from isthmus.orchestrator.core.members import Absence, Member, Stage, Standing, Wish
from isthmus.orchestrator.core.rank_reports import Progress
from isthmus.orchestrator.core.run_events import (
    Endpoint,
    RunState,
    SiteState,
    StorageFailed,
)
from isthmus.protos.failure import Failure
from isthmus.topology.spec.epoch import Epoch
from isthmus.topology.spec.reduction_plan import ReductionPlan
from isthmus.topology.spec.run_spec import CodedPlan

_LOST = frozenset({SiteState.LOST, SiteState.DROPPED})
_KEPT = frozenset({SiteState.ENDED, *_LOST})
"""An agent that comes or goes afterwards does not change what became of its site in this run."""

_UP = frozenset({SiteState.PREPARED, SiteState.STARTING, SiteState.RUNNING, SiteState.RETURNING})
"""Something of the run is at the site."""
_COMING_UP = frozenset(
    {
        EventKind.SITE_JOINED,
        EventKind.SITE_PREPARED,
        EventKind.SITE_STARTING,
        EventKind.SITE_RUNNING,
    }
)
"""A site that is started again stays RETURNING until it takes part."""

_NO_TREES = CodedPlan(ReductionPlan(0, (), ""), ())
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

    @property
    def text(self) -> str:
        """A line for people."""
        return text_of(self.kind, self.site, self.detail, self.run_id)

    def to_json(self) -> dict[str, Any]:
        """Return what --json and the API show."""
        return {
            "sequence": self.sequence,
            "wall_s": self.wall_s,
            "run_id": self.run_id,
            "generation": self.generation,
            "kind": self.kind,
            "site": self.site,
            "text": self.text,
            "detail": dict(self.detail),
        }


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
    """What people see of one site of a run."""

    state: SiteState = SiteState.ABSENT
    host: str = ""


@dataclass(slots=True)
class JournaledRun:
    """What has become of a run by some event of its journal.

    Metrics are not part of it: orchestrator/core/run_metrics.py.
    """

    run_id: str
    names: tuple[str, ...] = ()
    """Its sites, in its order; empty: the journal says."""
    first: Epoch | None = None
    """With which the run begins; None: who only looks at it needs no trees."""
    state: RunState = RunState.FORMING
    about: Mapping[str, Any] = field(default_factory=dict)
    """What it was submitted with: `name`, `folder`, `links`, `priority` and more."""
    generation: int = 0
    end: Mapping[str, Any] = field(default_factory=dict)
    """`reason_code`, `reason`, `failure` and more, once it has ended."""
    created_wall_s: float = 0.0
    ended_wall_s: float = 0.0
    sites: dict[str, SiteView] = field(default_factory=dict)
    members: dict[str, Member] = field(default_factory=dict)
    noted: tuple[Note, ...] = ()
    """What people should know of it beside its state."""
    epochs: EpochRecord = field(init=False)
    progress: Progress = field(default_factory=Progress)
    failures: Failures = field(init=False)
    active_s: float | None = None
    """When it became active."""
    is_rolling_back: bool = False
    """A site was lost while the run was forming: nothing is started until all have ended."""
    has_begun_again: bool = False
    certificates: dict[str, Certificate] = field(default_factory=dict)
    """What is known of the deployment's certificates, by the names of their files."""

    def __post_init__(self) -> None:
        self._begin_with(self.names)

    def _begin_with(self, names: Iterable[str]) -> None:
        """Begin with sites of which some take part from the start."""
        epoch = self.first or Epoch(0, self.begin_with, _NO_TREES, 0)
        self.epochs = EpochRecord(epoch, epoch.number)
        self.sites = {name: SiteView() for name in names}
        self.members = begin_members(names, epoch.members)
        self.failures = Failures(self.members, self.progress)

    # ------------------------------------------------------------ what people see

    @property
    def name(self) -> str:
        """What the run is called."""
        return str(self.about.get("name", ""))

    @property
    def folder(self) -> str:
        """Where its files are."""
        return str(self.about.get("folder", ""))

    @property
    def priority(self) -> int:
        """By which it waits in the queue."""
        return int(self.about.get("priority", 0))

    @property
    def links(self) -> tuple[Mapping[str, Any], ...]:
        """`source`, `target`, `bytes_per_s`, `rtt_s` and `egress_usd_per_byte` of each."""
        return tuple(self.about.get("links", ()))

    @property
    def num_steps(self) -> int:
        """How many steps it makes; 0: its script decides."""
        return int(self.about.get("num_steps", 0))

    @property
    def codec(self) -> str:
        """The codec with which it began; empty: links have their own."""
        return str(self.about.get("codec", ""))

    @property
    def regime(self) -> str:
        """The kind of regime that it went over to; empty: it has its job's."""
        return self.epochs.epoch.rung.kind

    @property
    def begin_with(self) -> tuple[str, ...]:
        """The sites that the run begins with."""
        return tuple(self.about.get("begin_with", self.about.get("sites", ())))

    @property
    def reason_code(self) -> str:
        """Why it ended, for programs."""
        return str(self.end.get("reason_code", ""))

    @property
    def reason(self) -> str:
        """Why it ended."""
        return str(self.end.get("reason", ""))

    @property
    def failure(self) -> Failure | None:
        """What broke first."""
        failure = self.end.get("failure")
        return failure_of(failure) if failure else None

    @property
    def taking_part(self) -> tuple[str, ...]:
        """Sites that take part in the latest epoch; none before the run is active."""
        return () if self.active_s is None else self.epochs.epoch.members

    @property
    def epoch(self) -> int:
        """The number of the latest."""
        return self.epochs.epoch.number

    @property
    def notes(self) -> list[str]:
        """What is noted, a line each."""
        return [each.text for each in self.noted]

    @property
    def counted(self) -> frozenset[str]:
        """The sites whose part counts: members that do not only catch up."""
        members = self.taking_part or self.begin_with
        return frozenset(members).difference(self.epochs.epoch.follows)

    # ------------------------------------------------------------ who takes part

    @property
    def present(self) -> list[Member]:
        """The sites whose part the run waits for."""
        return [site for site in self.members.values() if not site.is_outside]

    @property
    def are_all_done(self) -> bool:
        """Whether the ranks of all sites that take part are done with the job."""
        present = self.present
        return bool(present) and all(site.is_done or site.has_finished for site in present)

    # ------------------------------------------------------------ the fold

    def apply(self, event: RecordedEvent, at_s: float | None = None) -> None:
        """Take the next event of this run.

        `at_s`: when it was, by the clock of whoever goes on with the run; None: by the event's own.
        """
        at_s = event.wall_s if at_s is None else at_s
        self._note(event)
        if event.kind.startswith(KIND):
            self._take_certificate(event)
        self._apply_to_run(event, at_s)
        if event.site in self.sites:
            self._show_site(self.sites[event.site], event)
            self._apply_to_site(self.members[event.site], event, at_s)

    def _take_certificate(self, event: RecordedEvent) -> None:
        """Take what is news of a certificate; the coordinator's own concerns every site."""
        name, stage = event.detail["certificate"], event.kind.removeprefix(KIND)
        self.certificates[name] = Certificate(event.detail["ends_wall_s"], stage)
        for site in self.members.values():
            if site.name == event.site or not event.site:
                (site.expired.add if stage == EXPIRED else site.expired.discard)(name)

    def _note(self, event: RecordedEvent) -> None:
        if not seen_of(event.kind).is_note or "note" not in event.detail:
            return
        note = Note(
            sequence=event.sequence,
            wall_s=event.wall_s,
            kind=event.kind,
            site=event.site,
            text=event.detail["note"],
        )
        kept = list(self.noted)
        if (
            event.kind == EventKind.CHECKPOINT_WRITTEN
        ):  # only the latest: they crowd out what is rarer
            kept = [each for each in kept if each.kind != event.kind]
        self.noted = (*kept, note)[-MAX_NOTES:]

    def _apply_to_run(self, event: RecordedEvent, at_s: float) -> None:
        detail, progress = event.detail, self.progress
        match event.kind:
            case EventKind.RUN_SUBMITTED:
                self.about, self.generation = detail, event.generation
                self.created_wall_s = event.wall_s
                self._begin_with(detail["sites"])
                if detail.get("is_queued"):
                    self.state = RunState.QUEUED
            case EventKind.RUN_DEQUEUED:
                self.state, self.generation = RunState.FORMING, event.generation
            case EventKind.RUN_PREPARING:
                for site in self.members.values():
                    if not site.is_outside and self.is_rolling_back:
                        site.begin_again()
                    if not site.is_outside:
                        site.stage = Stage.PREPARING
                self.has_begun_again |= self.is_rolling_back
                self.is_rolling_back = False
            case EventKind.RUN_ACTIVE:
                self.state, self.active_s = RunState.ACTIVE, at_s
                self.failures.is_active = True
                for site in self.members.values():
                    if site.stage.is_over and site.absence is None:
                        losses = site.losses
                        why = first_failure(losses).reason if losses else "it has ended"
                        site.become_absent(Absence.GONE, why)
            case EventKind.RUN_STATE_OFFERED:
                progress.has_state = True
            case EventKind.RUN_FIRST_STEP:
                progress.has_steps = progress.may_lose = True
            case EventKind.CHECKPOINT_WRITTEN:
                progress.saved_step = max(progress.saved_step, detail["step"])
            case kind if kind in STORAGE_FAILURES:
                failed = StorageFailed(
                    kind_named(kind), event.site, detail["step"], detail["reason"]
                )
                progress.note_unsaved(failed)
            case EventKind.FAILURE_REPORTED | EventKind.RUN_FAILING:
                self.failures.apply(event.kind, detail, at_s)
            case EventKind.EPOCH_BEGUN:
                self._begin_epoch(detail)
            case EventKind.EPOCH_PROPOSED | EventKind.EPOCH_ENTERING | EventKind.EPOCH_CANCELLED:
                self.epochs.apply(event.kind, detail, self.members)
            case EventKind.RUN_CANCEL_REQUESTED:
                self.failures.ending.cancel(detail["message"])
            case EventKind.RUN_STOPPING:
                self._stop(str(detail["reason"]), at_s)
            case EventKind.RUN_ENDED:
                self.end, self.state = detail, RunState(detail["state"])
                self.ended_wall_s, self.failures.is_active = event.wall_s, False
                if self.failures.ending.stopped_s is None:
                    self.failures.ending.stopped_s = at_s
                if self.reason_code == "COORDINATOR_LOST":  # nobody is left to tell of their ends
                    for shown in self.sites.values():
                        shown.state = SiteState.LOST if shown.state in _UP else shown.state

    def _begin_epoch(self, detail: Mapping[str, Any]) -> None:
        for name in detail.get("leaves", ()):
            self.members[name].become_leaving()
        self.epochs.apply(EventKind.EPOCH_BEGUN, detail, self.members)

    def _stop(self, reason: str, at_s: float) -> None:
        """All sites were told to stop: perhaps for what had befallen some of them."""
        self.state, self.failures.is_active = RunState.STOPPING, False
        ending = self.failures.ending
        if not ending.has_begun:
            ending.fail(Failure(code="SITE_LOST", message=reason, at_s=at_s), at_s, is_last=True)
        ending.stopped_s = at_s

    def _show_site(self, site: SiteView, event: RecordedEvent) -> None:
        state = seen_of(event.kind).site
        if state is None:
            return
        if event.kind == EventKind.SITE_JOINED:
            site.host = event.detail["host"]
        is_final = site.state in _KEPT and event.kind in {
            EventKind.SITE_JOINED,
            EventKind.SITE_LEFT,
        }
        is_final |= site.state in _LOST and event.kind == EventKind.SITE_ENDED
        is_final |= site.state is SiteState.RETURNING and event.kind in _COMING_UP
        if not is_final:
            site.state = state

    def _apply_to_site(self, site: Member, event: RecordedEvent, at_s: float) -> None:
        detail = event.detail
        match event.kind:
            case EventKind.SITE_JOINED if site.stage is Stage.NO_AGENT:
                site.stage = Stage.JOINED
            case EventKind.SITE_JOINED:
                site.stage = Stage.LOST
                if self.failures.is_going_on and not site.is_outside:
                    site.losses.clear()  # it was only silent
            case EventKind.AGENT_RETURNED:
                has_run = detail.get("has_run", True)
                is_gone = not has_run and site.stage not in {Stage.JOINED, Stage.PREPARING}
                if site.is_outside and (is_gone or not site.is_returning):
                    site.stage = Stage.LOST
                    site.become_outside_again()
                elif self.failures.is_going_on:
                    site.losses.clear()  # it was only silent
            case EventKind.SITE_LEFT:
                site.become_outside_again()
                site.stage = Stage.NO_AGENT if site.stage is Stage.JOINED else site.stage
            case EventKind.SITE_SILENT:
                if site.stage is not Stage.RUNNING:
                    site.become_outside_again()
            case EventKind.SITE_STEPPED:
                self.progress.stepped.add(site.name)
                self.progress.has_steps = True
            case EventKind.SITE_PREPARED:
                site.stage = Stage.PREPARED
                places = (each.rpartition(":") for each in detail["gateways"])
                site.endpoints = tuple(
                    Endpoint(site.name, number, host, int(port))
                    for number, (host, _, port) in enumerate(places)
                )
            case EventKind.SITE_STARTING:
                site.stage = Stage.STARTING
            case EventKind.SITE_RUNNING:
                site.stage = Stage.RUNNING
                if site.is_returning and site.name not in self.epochs.epoch.members:
                    site.begin_anew()
            case EventKind.SITE_DONE:
                site.last_round = int(detail.get("round", -1))
                self.progress.stepped.add(site.name)
            case EventKind.SITE_RETURNING:
                site.become_outside()
                site.become_returning(at_s)
                self.epochs.lost.pop(site.name, None)
            case EventKind.RUN_ROLLED_BACK:
                site.stage, self.is_rolling_back = Stage.LOST, True
                site.restarts.at_s.append(at_s)
            case EventKind.NODE_KEPT_OUT:
                site.kept_out = str(detail["note"])
                if site.wish is Wish.IN:  # which was said before this was known
                    site.wish = Wish.NONE
            case EventKind.SITE_ENDED:
                site.stage = Stage.ENDED
                if "fault" in detail:
                    site.add_fault(failure_of(detail["fault"]))
                site.become_outside_again()
                if not detail["succeeded"]:
                    site.become_absent(Absence.GONE, str(detail.get("why", "it has ended")))
                elif site.name in self.epochs.epoch.members:
                    site.become_absent(Absence.FINISHED)
                else:
                    self.epochs.leaving.discard(site.name)
                    site.become_absent(Absence.LEFT, "it has left")
            case EventKind.SITE_DROP_REQUESTED:
                site.wish, site.why_dropped = Wish.OUT, str(detail["message"])
            case EventKind.SITE_ADD_REQUESTED:
                site.wish, site.kept_out = Wish.IN, ""
                site.faults.clear()
            case EventKind.SITE_DROP_REFUSED:
                site.wish = Wish.NONE
            case EventKind.SITE_RETURNED:
                site.become_taking_part()
            case EventKind.SITE_ENDED_EARLY:
                site.has_ended_early = True
            case (
                EventKind.SITE_LOST
                | EventKind.SITE_GONE
                | EventKind.SITE_DROPPED
                | EventKind.SITE_LET_GO
            ):
                self._lose(site, event)

    def _lose(self, site: Member, event: RecordedEvent) -> None:
        """Take what became of a site without which the run goes on, or may."""
        detail, why = event.detail, str(event.detail.get("message", "it has ended"))
        site.lose(why, Stage[detail.get("state", Stage.LOST.name)])
        if detail.get("is_out"):
            site.become_outside()
            site.why_out = why
        if event.kind != EventKind.SITE_GONE:
            self.epochs.leaving.discard(site.name)
            self.epochs.lost.pop(site.name, None)


def begin_members(sites: Iterable[str], first: Iterable[str]) -> dict[str, Member]:
    """Return the sites of a run that nobody has heard of; the first ones take part."""
    begun = {name: Member(name) for name in sites}
    for name in begun.keys() - {*first}:
        begun[name].standing, begun[name].has_taken_part = Standing.OUTSIDE, False
    return begun


def coordinator_lost(view: JournaledRun) -> dict[str, Any]:
    """Return the detail of `run.ended` for a run whose coordinator went before it."""
    return {
        "state": RunState.FAILED.value,
        "reason_code": "COORDINATOR_LOST",
        "reason": f"the coordinator ended while the run was {view.state.lower()}",
        "failure": None,
    }


def fold(run_id: str, events: Iterable[RecordedEvent]) -> JournaledRun:
    """Return the record of a run after all of its events."""
    record = JournaledRun(run_id)
    for event in events:
        record.apply(event)
    return record
