"""Keeps a running job's plan fit for its links: watch, plan again, switch all sites at one round.

Pure: events in, actions out. What is planned again is what a run can change while it goes on: which
site sums what, and where. A switch has to save `gain` of the predicted step. After a switch the
plan stays for `gap_s`, so that plans do not follow a link that goes up and down. The next drift
counts from the figures that the present plan was made with. Links that trees have left are tried
again, ever more seldom (`link_watch.py`).

All sites switch at one round, or none does. Every site answers once whether it can, with the hash
of what it understood. The first refusal, another hash, a site that goes away or a deadline mean
that nobody switches. An outcome is final: what comes later changes nothing, so no two sites hear
different outcomes.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from orchestrator.core import run_events
from orchestrator.core.link_watch import LinkChange, LinkWatch
from orchestrator.core.run_events import RecordEvent
from topology.measured.measured_links import LinkFigures, Pair
from topology.run_spec import CodedPlan, RunSpec
from topology.units import format_duration

ATTEMPTS = 6
"""At one switch. Each proposes a round twice as far ahead as the attempt before."""
_AHEAD_OF_SILENCE = 2.0
"""How much farther ahead after a site did not answer, in deadlines for an answer.

Fewer rounds were made while ranks waited than will be.
"""
_AHEAD_S = 1.0
"""How far ahead at least: reports are half a second old, and agents take their turns."""
_AHEAD_ROUND_TRIPS = 8
"""And for each round trip of the farthest link: a proposal, its answers, new links' greetings."""
_AGAIN_S = 1.0
"""Between two attempts."""
RELAUNCH_GAIN = 0.1
"""Part of a step that a relaunch has to save before people are told of it."""
_LOOK_BACK_S = 30.0
"""The span over which rounds a second are counted."""
ROUND_MAX = 1 << 40
"""No run gets so far; a message could not even name what comes after a much larger number."""


@dataclass(frozen=True, slots=True)
class ReductionPrepared:
    """A site's answer to a proposal."""

    site: str
    epoch: int
    is_accepted: bool
    plan_hash: str
    round: int
    """The latest that it has begun."""
    is_late: bool
    """It had begun the proposal's first round, so a later one may do."""
    why: str
    must_keep_codecs: bool = False
    """Its ranks encode: every chunk has to keep its codec."""


@dataclass(frozen=True, slots=True)
class LinkReported:
    """A gateway's totals of a directed link, and its latest round."""

    source: str
    target: str
    gateway: str
    round: int
    values: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchPlanned:
    """The best reduction over the links as they are."""

    form: str
    reduction: CodedPlan
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
    | run_events.SiteEnded
    | run_events.SiteLost
    | run_events.Ticked
)


@dataclass(frozen=True, slots=True)
class PlanAgain:
    """Make a plan; SwitchPlanned and RelaunchPlanned, or PlanningFailed, answer."""

    reduction: CodedPlan
    """What the run uses by now."""
    figures: Mapping[Pair, LinkFigures]
    """Figures of the links that are not as the topology says."""
    keeps_codecs: bool = False
    """Every chunk has to keep the codec that it had when the run began."""


@dataclass(frozen=True, slots=True)
class SendPrepareReduction:
    """Ask a site's agent whether it can switch."""

    site: str
    epoch: int
    from_round: int
    reduction: CodedPlan


@dataclass(frozen=True, slots=True)
class SendDecideReduction:
    """Tell a site's agent what came of it."""

    site: str
    epoch: int
    commit: bool


Action = PlanAgain | SendPrepareReduction | SendDecideReduction | RecordEvent


@dataclass(slots=True)
class _Candidate:
    """A plan that sites are asked to switch to, attempt by attempt."""

    planned: SwitchPlanned
    causes: Sequence[LinkChange]
    """Why it was made, the farthest drift first."""
    attempts: int = 0
    """Made so far."""
    from_round: int = 0
    """The first round of the plan, by the latest attempt."""
    switch: PlanSwitch | None = None
    """The proposal that is open; None between two attempts."""
    was_silent: bool = False
    """A site did not answer, and ranks waited for it: they shall not a second time."""


class ReplanMachine:
    """Decides when an active run's plan is made again, and whether its sites switch to it."""

    def __init__(self, spec: RunSpec, next_epoch: Callable[[], int] | None = None) -> None:
        """Begin to watch a run whose spec says that its plan may be made again.

        `next_epoch` gives a number that no proposal of the run has had; None: it counts from 1.
        """
        if spec.replan is None:
            raise ValueError("the run keeps its plan")
        topology = spec.topology
        self._settings = spec.replan
        self._sites = spec.site_names
        self._watch = LinkWatch(topology, spec.replan)
        self._clock = RoundClock()
        farthest_s = max((link.rtt_s for link in topology.links), default=0.0)
        self._ahead_s = _AHEAD_S + _AHEAD_ROUND_TRIPS * farthest_s
        self._decide_within_s = spec.timeouts.peer_lost_s
        self._earliest_s = -math.inf
        """When a plan may be made again, or a switch be tried again."""
        self._planning: Sequence[LinkChange] | None = None
        """Why a plan is being made, the farthest drift first; None: none is."""
        self._candidate: _Candidate | None = None
        """Set while sites are asked to switch. Without this and `_planning` links are watched."""
        self._figures: Mapping[Pair, LinkFigures] = {}
        """What the plan was made with that is being made or switched to."""
        self._reduction: CodedPlan = spec.reduction
        self._step_s: float | None = None
        """Predicted, of the present plan; None before anything was planned again."""
        self._switched_round = 0
        """The first round that the present plan carries."""
        self._next_epoch = next_epoch or itertools.count(1).__next__
        self.switched: tuple[int, int, CodedPlan] | None = None
        """Epoch, first round and plan of the latest switch."""
        self._epoch = 0
        """The number of the latest proposal."""
        self._keeps_codecs = False
        """A site has said that its ranks encode: then every plan has to keep each chunk's codec."""

    def handle(self, event: Event, now_s: float) -> list[Action]:
        """Apply one event. Late, repeated and impossible ones change nothing.

        `now_s` is the coordinator's monotonic clock, never less than in the call before.
        """
        actions: list[Action] = []
        switch = self._candidate.switch if self._candidate is not None else None
        match event:
            case LinkReported():
                self._clock.note(event.round, now_s)
                self._watch.add((event.source, event.target), event.gateway, event.values, now_s)
            case SwitchPlanned() if self._planning is not None:
                actions += self._planned_again(self._planning, event, now_s)
            case PlanningFailed() if self._planning is not None:
                actions += self._give_up({"why": f"no plan can be made: {event.why}"}, now_s)
            case RelaunchPlanned():
                actions += self._relaunch(event)
            case ReductionPrepared():
                self._clock.note(event.round, now_s)
                if switch is not None:
                    switch.answer(event)
            case ReductionBegun():
                detail = {"epoch": event.epoch, "round": event.round}
                actions.append(RecordEvent("site.replanned", event.site, detail))
            case run_events.SiteEnded() | run_events.SiteLost() if switch is not None:
                switch.gone(event.site)
            case run_events.Ticked() if switch is not None:
                switch.tick(now_s)
        return [*actions, *self._settle(now_s), *self._go_on(now_s)]

    # ------------------------------------------------------------ planning

    def _go_on(self, now_s: float) -> list[Action]:
        """Do what it is time for: the next attempt at a switch, or another plan."""
        if now_s < self._earliest_s or self._planning is not None:
            return []
        if self._candidate is not None:
            return self._propose(self._candidate, now_s) if not self._candidate.switch else []
        forgotten, drifts = self._watch.forget(now_s), self._watch.drifts()
        causes = (*drifts, *forgotten)
        if not causes:
            return []
        self._figures = self._watch.figures()
        recorded = [
            RecordEvent(
                "link.forgotten" if each.is_forgotten else "link.drifted",
                detail={"note": str(each), **each.to_json()},
            )
            for each in causes
        ]
        return [*recorded, self._plan_again(causes)]

    def _plan_again(self, causes: Sequence[LinkChange]) -> PlanAgain:
        self._planning, self._candidate = causes, None
        return PlanAgain(self._reduction, self._figures, self._keeps_codecs)

    def _planned_again(
        self, causes: Sequence[LinkChange], planned: SwitchPlanned, now_s: float
    ) -> list[Action]:
        """Ask sites to switch, if that is worth it."""
        self._planning, self._step_s = None, planned.before_s
        saved = 1 - planned.after_s / planned.before_s
        if saved >= self._settings.gain:
            self._candidate = _Candidate(planned, causes)
            return self._propose(self._candidate, now_s)
        why = (
            f"the best other trees, {planned.form}, would save {saved:.1%} of a step: "
            f"less than {self._settings.gain:.0%}"
            if saved > 0
            else "no other trees are predicted to be faster"
        )
        figures = {"before_s": planned.before_s, "after_s": planned.after_s, "plan": planned.form}
        return self._give_up({"why": why, **figures}, now_s)

    def _give_up(self, detail: Mapping[str, object], now_s: float) -> list[Action]:
        """Keep the plan; it counts on what was measured from now on."""
        self._rest(now_s, self._settings.lasting_s)
        note = f"the plan is kept: {detail['why']}"
        return [RecordEvent("plan.kept", detail={"note": note, **detail})]

    def _rest(self, now_s: float, for_s: float) -> None:
        """Watch again, and plan nothing for a while."""
        self._planning, self._candidate = None, None
        self._earliest_s = now_s + for_s
        self._watch.assume(self._figures)

    def _relaunch(self, planned: RelaunchPlanned) -> list[Action]:
        """Tell people what only another launch could change, if that is much."""
        present_s = self._candidate.planned.after_s if self._candidate else self._step_s
        if present_s is None or planned.step_s > (1 - RELAUNCH_GAIN) * present_s:
            return []
        note = (
            f"relaunching with a new plan would give {_time(planned.step_s)} a step "
            f"instead of {_time(present_s)}"
        )
        detail = {"note": note, "step_s": planned.step_s, "present_s": present_s}
        return [RecordEvent("plan.relaunch", detail=detail)]

    # ------------------------------------------------------------ switching

    def _propose(self, candidate: _Candidate, now_s: float) -> list[Action]:
        """Ask all sites to switch at a round that none has begun, as far as anybody knows."""
        self._epoch = self._next_epoch()
        ahead_s = self._ahead_s * 2**candidate.attempts
        if candidate.was_silent:
            ahead_s += _AHEAD_OF_SILENCE * self._decide_within_s
        from_round = max(self._clock.after(ahead_s), self._switched_round + 1)
        candidate.attempts += 1
        candidate.from_round = from_round
        planned = candidate.planned
        deadline_s = now_s + self._decide_within_s
        candidate.switch = PlanSwitch(
            set(self._sites), self._epoch, planned.reduction.hash, deadline_s
        )
        detail = {"epoch": self._epoch, "from_round": from_round, "plan": planned.form}
        asked = [
            SendPrepareReduction(site, self._epoch, from_round, planned.reduction)
            for site in self._sites
        ]
        return [RecordEvent("plan.proposed", detail=detail), *asked]

    def _settle(self, now_s: float) -> list[Action]:
        """Tell all sites what came of a proposal, once that is known."""
        candidate = self._candidate
        if candidate is None or candidate.switch is None or candidate.switch.outcome is None:
            return []
        outcome, candidate.switch = candidate.switch.outcome, None
        decide = [
            SendDecideReduction(site, self._epoch, outcome.is_committed) for site in self._sites
        ]
        if outcome.is_committed:
            # Written down first: of what sites do, there is always a record.
            return [self._replanned(candidate, now_s), *decide]
        return [*decide, *self._aborted(candidate, outcome, now_s)]

    def _aborted(self, candidate: _Candidate, outcome: Outcome, now_s: float) -> list[Action]:
        detail = {"epoch": self._epoch, "why": outcome.why}
        recorded = RecordEvent("plan.aborted", outcome.site, detail)
        if outcome.may_try_again and candidate.attempts < ATTEMPTS:
            candidate.was_silent |= outcome.is_silent
            self._earliest_s = now_s + _AGAIN_S
            return [recorded]
        if outcome.must_keep_codecs and not self._keeps_codecs:
            self._keeps_codecs = True
            return [recorded, self._plan_again(candidate.causes)]
        why = f"not all sites could switch: site {outcome.site}: {outcome.why}"
        return [recorded, *self._give_up({"why": why}, now_s)]

    def _replanned(self, candidate: _Candidate, now_s: float) -> RecordEvent:
        planned, causes = candidate.planned, candidate.causes
        self._reduction, self._step_s = planned.reduction, planned.after_s
        self._switched_round = candidate.from_round
        self.switched = (self._epoch, candidate.from_round, planned.reduction)
        # A plan that only tries links again is soon taken back, if it was tried in vain.
        is_trial = all(each.is_forgotten for each in causes)
        self._rest(now_s, self._settings.lasting_s if is_trial else self._settings.gap_s)
        note = (
            f"from round {candidate.from_round} on gradients cross by another plan, "
            f"{planned.form}: predicted {_time(planned.after_s)} a step instead of "
            f"{_time(planned.before_s)}, for {causes[0]}"
        )
        detail = {
            "note": note,
            "epoch": self._epoch,
            "from_round": candidate.from_round,
            "plan": planned.form,
            "before_s": planned.before_s,
            "after_s": planned.after_s,
            "links": [each.to_json() for each in causes],
        }
        return RecordEvent("run.replanned", detail=detail)


def _time(duration_s: float) -> str:
    return format_duration(float(f"{duration_s:.3g}"))


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a proposal."""

    is_committed: bool
    site: str = ""
    """Who was the first not to; empty: nobody."""
    why: str = ""
    may_try_again: bool = False
    """Nothing is wrong with the plan: a later round may do."""
    is_silent: bool = False
    """A site said nothing, and ranks of others may have waited for it until the deadline."""
    must_keep_codecs: bool = False
    """A plan may do that leaves every chunk its codec."""


@dataclass(slots=True)
class PlanSwitch:
    """One proposal to all sites."""

    missing: set[str]
    """Sites that have not answered."""
    epoch: int
    plan_hash: str
    """What each has to answer."""
    deadline_s: float
    """When answers are due, on the coordinator's clock."""
    outcome: Outcome | None = None
    """None while it is open."""

    def answer(self, answer: ReductionPrepared) -> None:
        """A site answers. Repeated answers, and those to other proposals, change nothing."""
        if self.outcome is not None or answer.epoch != self.epoch:
            return
        if answer.site not in self.missing:
            return
        if not answer.is_accepted:
            self.outcome = Outcome(
                is_committed=False,
                site=answer.site,
                why=answer.why,
                may_try_again=answer.is_late,
                must_keep_codecs=answer.must_keep_codecs,
            )
        elif answer.plan_hash != self.plan_hash:
            self._abort(answer.site, "it understood another plan: is it of another build?")
        else:
            self.missing.remove(answer.site)
            if not self.missing:
                self.outcome = Outcome(is_committed=True)

    def gone(self, site: str) -> None:
        """A site takes part no more."""
        if self.outcome is None:
            self._abort(site, "it has ended or is lost")

    def tick(self, now_s: float) -> None:
        """Time has passed."""
        if self.outcome is None and now_s >= self.deadline_s:
            self.outcome = Outcome(
                is_committed=False,
                site=min(self.missing),
                why="it did not answer in time",
                may_try_again=True,
                is_silent=True,
            )

    def _abort(self, site: str, why: str) -> None:
        self.outcome = Outcome(is_committed=False, site=site, why=why)


class RoundClock:
    """How far a run's rounds have got, by what all its gateways report."""

    def __init__(self) -> None:
        self.newest = -1
        """The latest round that any gateway has said to have begun; -1 before the first."""
        self._seen: deque[tuple[float, int]] = deque()
        """When each newest round was heard of first, over the last while."""

    def note(self, round_: int, now_s: float) -> None:
        """A gateway says which round it is in."""
        if self.newest < round_ <= ROUND_MAX:
            self.newest = round_
            self._seen.append((now_s, round_))
        while len(self._seen) > 2 and self._seen[0][0] < now_s - _LOOK_BACK_S:
            self._seen.popleft()

    @property
    def per_s(self) -> float:
        """Rounds a second, lately; 0 while nobody knows."""
        if len(self._seen) < 2:
            return 0.0
        (first_s, first), (last_s, last) = self._seen[0], self._seen[-1]
        return (last - first) / (last_s - first_s) if last_s > first_s else 0.0

    def after(self, ahead_s: float) -> int:
        """Return a round that nobody begins within `ahead_s`, if rounds go on as they did."""
        # Reports are half a second old, so the next round may be about to begin.
        return self.newest + 2 + math.ceil(min(self.per_s * ahead_s, ROUND_MAX))
