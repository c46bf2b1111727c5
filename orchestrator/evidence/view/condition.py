"""What is wrong with a run now: since when, why, and what happens next. Pure."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from isthmus.orchestrator.core.event_kinds import EventKind
from isthmus.orchestrator.core.journaled_run import JournaledRun, RecordedEvent
from isthmus.orchestrator.core.members import Member, Stage
from isthmus.orchestrator.core.policy import may_restart, next_restart_s, waits_for_operator
from isthmus.orchestrator.core.rank_reports import NO_STATE
from isthmus.orchestrator.core.run_events import RunState
from isthmus.orchestrator.evidence.view import formats
from isthmus.orchestrator.evidence.view.alike import and_others, told_once
from isthmus.protos.control.v1 import control_pb2
from isthmus.topology.spec.world import Detection

BAD, FAIR = "bad", "fair"
"""Grades: it costs the run something now; it is being recovered from, or costs little."""
_MAX_RETURNS = 50
_GOING = frozenset(
    {
        EventKind.SITE_DROPPED,
        EventKind.SITE_GONE,
        EventKind.SITE_LOST,
        EventKind.SITE_SILENT,
        EventKind.RUN_ROLLED_BACK,
    }
)
_HEARD = frozenset({EventKind.AGENT_RETURNED, EventKind.SESSION_RESUMED})


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """Something that is wrong now."""

    grade: str
    """BAD or FAIR."""
    what: str
    since_wall_s: float | None = None
    why: str = ""
    next: str = ""
    """What happens next, and how long that takes."""


@dataclass(slots=True)
class _Absence:
    since_wall_s: float
    why: str = ""
    started_wall_s: float | None = None
    """When it was started again."""


@dataclass(slots=True)
class Absences:
    """Since when sites are out, and how long it took those that came back."""

    open: dict[str, _Absence] = field(default_factory=dict)
    """By site."""
    took_s: list[float] = field(default_factory=list)
    """From a site's start to its return, of the latest returns."""
    outage: RecordedEvent | None = None
    """The run waits for sites to reach each other."""
    saved_wall_s: float | None = None
    """When the last checkpoint was written."""

    def take(self, event: RecordedEvent, view: JournaledRun) -> None:
        """Take the next event, which `view` has taken."""
        site, wall_s = event.site, event.wall_s
        if event.kind in _GOING:
            absence = self.open.setdefault(site, _Absence(wall_s))
            absence.why = str(event.detail.get("message", "")) or absence.why
            absence.started_wall_s = None
        elif event.kind in _HEARD and site in view.members and not view.members[site].is_outside:
            self.open.pop(site, None)
        elif event.kind == EventKind.SITE_RETURNING:
            self.open.setdefault(site, _Absence(wall_s)).started_wall_s = wall_s
        elif event.kind == EventKind.SITE_RETURNED:
            back = self.open.pop(site, None)
            if back is not None and back.started_wall_s is not None:
                self.took_s = [*self.took_s, wall_s - back.started_wall_s][-_MAX_RETURNS:]
        elif event.kind == EventKind.RUN_WAITING:
            self.outage = self.outage or event
        elif event.kind == EventKind.RUN_WENT_ON:
            self.outage = None
        elif event.kind == EventKind.RUN_ACTIVE:
            self.open.clear()
        elif event.kind == EventKind.CHECKPOINT_WRITTEN:
            self.saved_wall_s = wall_s


def troubles(
    run: control_pb2.Run,
    view: JournaledRun,
    absences: Absences,
    *,
    rules: Detection | None,
    now_wall_s: float,
    stalled_wall_s: float | None = None,
    slow: Sequence[str] = (),
) -> list[Trouble]:
    """Return what is wrong with a run, the worst first; empty: nothing is.

    Args:
        run: As it is shown: it has failed where its own coordinator is gone.
        view: What its journal says.
        absences: Taken from the same events.
        rules: Of the topology; None: not known.
        now_wall_s: The time.
        stalled_wall_s: Since when no step was completed, where that is too long; None: it is not.
        slow: Who keeps others waiting, a sentence each.
    """
    if run.ended_wall_s or run.reason_code:
        return list(_ended(run, view.progress.saved_step))
    found = [*_of_sites(view, absences, rules, now_wall_s)]
    if view.state is RunState.STOPPING:
        ending = view.failures.ending
        stopping = Trouble(
            grade=FAIR,
            what="All sites are being stopped",
            since_wall_s=ending.stopped_s,
            why=ending.verdict.reason if ending.has_begun else "",
            next="The run ends once nothing of it is left at any site.",
        )
        found.append(stopping)
    elif absences.outage is not None:
        found.append(_outage(absences.outage, rules))
    elif stalled_wall_s is not None and not any(each.grade == BAD for each in found):
        found.append(_stalled(stalled_wall_s, rules))
    if problem := view.progress.checkpoint_problem(is_wanted=False):
        next_ = "Training goes on, and the next checkpoint is attempted as usual."
        found.append(Trouble(grade=FAIR, what="No new checkpoint", why=problem, next=next_))
    found += (Trouble(grade=FAIR, what="Slow, not hung", why=each) for each in slow)
    return sorted(found, key=lambda each: each.grade != BAD)


def _ended(run: control_pb2.Run, saved_step: int) -> Iterator[Trouble]:
    """Yield why a run did not end well."""
    if not run.reason_code:
        return
    state = formats.run_state(run)
    words = {"FAILED": "The run failed", "CANCELLED": "The run was cancelled"}
    resume = (
        f"`isthmus launch JOB --resume {run.run_id}` continues from the checkpoint of step "
        f"{saved_step}."
        if saved_step >= 0
        else "It wrote no checkpoint, so it cannot be resumed."
    )
    yield Trouble(
        grade=BAD if state == "FAILED" else FAIR,
        what=f"{words.get(state, 'The run succeeded with losses')} ({run.reason_code})",
        since_wall_s=run.ended_wall_s or None,
        why=run.reason,
        next=resume if state in words else "",
    )


def _of_sites(
    view: JournaledRun, absences: Absences, rules: Detection | None, now_wall_s: float
) -> Iterator[Trouble]:
    """Yield which sites are out; sites in the same trouble together."""
    found = []
    for name, absence in absences.open.items():
        site = view.members.get(name)
        if site is None or site.has_finished or site.has_ended_early:
            continue
        grade, what, then = _story(site, view, absences, rules, now_wall_s)
        present = sorted(view.counted - absences.open.keys())
        go_on = f"The other {len(present)} sites keep training. " if len(present) > 1 else ""
        go_on = f"Site {present[0]} keeps training. " if len(present) == 1 else go_on
        found.append(
            Trouble(
                grade=grade,
                what=f"Site {name} {what}",
                since_wall_s=absence.since_wall_s,
                why=absence.why,
                next=f"{go_on}{then}".strip(),
            )
        )
    for trouble, num_others in told_once(
        found, lambda each: f"{each.what} {each.why} {each.next}", list(view.sites)
    ):
        yield dataclasses.replace(trouble, what=and_others(trouble.what, num_others))


def _story(
    site: Member,
    view: JournaledRun,
    absences: Absences,
    rules: Detection | None,
    now_wall_s: float,
) -> tuple[str, str, str]:
    """Return the grade, what is wrong with a site, and what becomes of it."""
    usual = _usual(absences.took_s)
    if not site.is_outside:
        return BAD, "does not answer", "Unless it answers first, the next step is without it."
    if site.is_returning and site.stage is Stage.RUNNING:
        back = "It takes part again once it has caught up with the step of the others."
        return FAIR, "is catching up", f"{back} {usual}"
    if site.is_returning:
        limit = formats.duration(rules.start_within_s) if rules else ""
        within = f"Its ranks have to be up within {limit}. " if limit else ""
        return FAIR, "is starting again", f"{within}{usual}"
    what = "was dropped" if site.is_dropped else "is lost"
    return BAD, what, _way_back(site, view, rules, now_wall_s, usual)


def _way_back(
    site: Member, view: JournaledRun, rules: Detection | None, now_wall_s: float, usual: str
) -> str:
    """Return how a site that is out comes back."""
    command = f"`isthmus sites add {view.run_id} {site.name}` starts it again."
    if view.progress.lacks_state:
        return f"It cannot come back: {NO_STATE}."
    if site.kept_out:
        return f"It does not come back by itself: {site.kept_out}."
    if waits_for_operator(site):
        return f"It does not come back by itself: {command}"
    if rules is None:
        return f"It is started again once its agent answers. {usual}"
    if not may_restart(site, rules, now_wall_s):
        most = f"`failure.max_restarts` ({rules.max_restarts} an hour) is used up"
        return f"It does not come back by itself: {most}. {command}"
    starts_s, within = next_restart_s(site, rules), formats.duration(rules.start_within_s)
    is_later = site.restarts.num_vain and starts_s > now_wall_s
    when = f"at {formats.clock(starts_s)}" if is_later else "as soon as its agent answers"
    return f"It is started again {when}. {usual or f'Starting takes at most {within}.'}"


def _usual(took_s: Sequence[float]) -> str:
    if not took_s:
        return ""
    number, usual = len(took_s), formats.duration(statistics.median(took_s))
    returns = "The last return" if number == 1 else f"The last {number} returns"
    return f"{returns} took {usual}{'' if number == 1 else ' (median)'}."


def _outage(waiting: RecordedEvent, rules: Detection | None) -> Trouble:
    limit = f" for up to {formats.duration(rules.ride_out_s)}" if rules else ""
    return Trouble(
        grade=BAD,
        what="Training is paused",
        since_wall_s=waiting.wall_s,
        why=waiting.text,
        next=f"Training waits{limit} for the sites to reach each other; then the run fails.",
    )


def _stalled(since_wall_s: float, rules: Detection | None) -> Trouble:
    within_s = None if rules is None else rules.stall_within_s or rules.detect_within_s
    bound = "" if within_s is None else f" {formats.duration(within_s)}, or five steps,"
    return Trouble(
        grade=BAD,
        what="Training has stalled",
        since_wall_s=since_wall_s,
        why="No step has completed since then, and steps usually take far less time.",
        next=f"A rank that others wait for longer than{bound} is named, and its site is restarted."
        if bound
        else "",
    )
