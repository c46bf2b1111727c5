"""Keeps a running job's plan fit for its links and sites: watch, plan again, want another plan.

Pure: events in, actions out. It plans what a run can change while it goes on: which site sums what,
and where, and how many samples of a step each site takes. It plans again when links have drifted,
when the sites' speeds have (`speed_watch.py`), and when other sites take part: their trees were
made in haste (topology/trees/member_plans.py). A switch has to save `gain` of the predicted step.
After a switch the plan stays for `gap_s`, so that plans do not follow a link that goes up and down.

Where the job permits less exact codecs, a run goes over to one as its links narrow, and back as
they widen; the way back needs no gain. So it is with regimes that wait less (`regime_watch.py`): if
other trees do not spare the run that wait, it goes over to one. Each such change makes the next
rest longer for an hour.

The next drift counts from the figures that the present plan was made with. Links that trees have
left are tried again, ever more seldom (`link_watch.py`).

How all sites go over to other trees, `epochs.py` decides.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from isthmus.orchestrator.core import run_events
from isthmus.orchestrator.core.event_kinds import EventKind
from isthmus.orchestrator.core.link_watch import LinkChange, LinkWatch
from isthmus.orchestrator.core.reach import Pair
from isthmus.orchestrator.core.regime_watch import Move, RegimeWatch
from isthmus.orchestrator.core.run_events import EpochBegun, RecordEvent, TreesEnded, TreesWanted
from isthmus.orchestrator.core.speed_watch import Division, SpeedWatch
from isthmus.protos import metrics
from isthmus.topology.spec.epoch import Epoch
from isthmus.topology.spec.json_fields import Message
from isthmus.topology.spec.measured_links import LinkFigures
from isthmus.topology.spec.run_spec import CodedPlan, RunSpec
from isthmus.topology.spec.units import format_duration

ATTEMPTS = 3
"""Plans in a row that sites could not go over to, before what they were made for is let be."""
MOVES_S = 3600.0
"""How long a change of the codec, or of the regime, counts."""
LONGER = 3
"""By how much each of them lengthens the rest after the next one."""
RELAUNCH_GAIN = 0.1
"""Part of a step that a relaunch has to save before people are told of it."""


@dataclass(frozen=True, slots=True)
class LinkReported:
    """A gateway's totals of a directed link."""

    source: str
    target: str
    gateway: str
    values: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class SiteStepped:
    """What a site says of one of its steps."""

    site: str
    values: Mapping[str, float]


class SwitchPlanned(Message):
    """The best reduction over the links as they are."""

    form: str
    reduction: CodedPlan
    before_s: float
    """Predicted seconds of a step with the reduction that the run has."""
    after_s: float
    other_codec: str = ""
    """The codec that all trees get, where it is another; empty: codecs follow from the links."""
    is_more_exact: bool = False
    """That codec loses less than the present one; a step is about as quick."""
    divides: bool = False
    """The batch is divided as was asked; else as it is."""


class RelaunchPlanned(Message):
    """The predicted seconds of a step if everything were decided anew."""

    step_s: float


class PlanningFailed(Message):
    """There is no plan."""

    why: str


Event = (
    LinkReported
    | SiteStepped
    | SwitchPlanned
    | RelaunchPlanned
    | PlanningFailed
    | EpochBegun
    | TreesEnded
    | run_events.Ticked
)


@dataclass(frozen=True, slots=True)
class PlanAgain:
    """Make a plan; SwitchPlanned and RelaunchPlanned, or PlanningFailed, answer."""

    epoch: Epoch
    """What the run has by now."""
    figures: Mapping[Pair, LinkFigures]
    """Figures of the links that are not as the topology says."""
    keeps_codecs: bool = False
    """Every chunk has to keep the codec that it had when the run began."""
    dead_links: frozenset[Pair] = frozenset()
    """Links between members that cannot be used."""
    division: Division | None = None
    """The division of the batch to compare with the present one, and how fast sites are."""


Action = PlanAgain | TreesWanted | RecordEvent


@dataclass(frozen=True, slots=True)
class _Cause:
    """Why a plan is made."""

    why: str
    links: Sequence[LinkChange] = ()
    """The farthest drift first; with none of these, other sites take part."""
    division: Division | None = None
    """Another division of the batch that may be better."""
    move: Move | None = None
    """Another regime, unless other trees will do."""


@dataclass(frozen=True, slots=True)
class _Candidate:
    """What sites are asked to go over to: one of both at least."""

    cause: _Cause
    planned: SwitchPlanned | None
    """A plan; None: theirs stays."""
    move: Move | None = None
    """A regime; None: theirs stays."""


class ReplanMachine:
    """Decides when an active run's plan is made again, and whether its sites shall have it."""

    def __init__(self, spec: RunSpec, epoch: Epoch) -> None:
        """Begin to watch a run whose spec says that its plan may be made again.

        `epoch` is the one that it has.
        """
        if spec.replan is None:
            raise ValueError("the run keeps its plan")
        self._settings = spec.replan
        self._epoch = epoch
        self._dead_links: frozenset[Pair] = frozenset()
        self._watch = LinkWatch(spec.topology, spec.replan)
        self._speeds = SpeedWatch(spec, spec.replan)
        self._regimes = RegimeWatch(spec, spec.replan)
        self._has_told_fixed = spec.replan.shares == "fixed"
        """Nobody needs to hear, or has heard, that sites keep their parts of the batch."""
        self._earliest_s = -math.inf
        """When a plan may be made again."""
        self._planning: _Cause | None = None
        """Why a plan is being made; None: none is."""
        self._is_new = False
        """Other sites take part, or other links are dead, than what the trees were planned for."""
        self._candidate: _Candidate | None = None
        """Set while sites are asked. Without this and `_planning` links are watched."""
        self._num_refused = 0
        """Plans in a row that sites could not go over to."""
        self._figures: Mapping[Pair, LinkFigures] = {}
        """What the plan was made with that is being made or gone over to."""
        self._step_s: float | None = None
        """Predicted, of the present plan; None before anything was planned again."""
        self._moves_s: list[float] = []
        """When the codec was changed, or the regime."""
        self._keeps_codecs = False
        """A site has said that its ranks encode: then every plan has to keep each chunk's codec."""

    def handle(self, event: Event, now_s: float) -> list[Action]:
        """Apply one event. Late, repeated and impossible ones change nothing.

        `now_s` is the coordinator's monotonic clock, never less than in the call before.
        """
        actions: list[Action] = []
        match event:
            case LinkReported():
                self._watch.add((event.source, event.target), event.gateway, event.values, now_s)
            case SiteStepped():
                self._regimes.add(event.site, event.values)
                if self._settings.shares == "follow":
                    actions += self._stepped(event)
            case run_events.Ticked():
                self._look(now_s)
            case SwitchPlanned() if self._planning is not None:
                actions += self._planned_again(self._planning, event, now_s)
            case PlanningFailed() if self._planning is not None:
                actions += self._not_planned(self._planning, event, now_s)
            case RelaunchPlanned():
                actions += self._relaunch(event)
            case EpochBegun():
                self._begin(event)
                self._look(now_s)
            case TreesEnded() if self._candidate is not None:
                actions += self._ended(self._candidate, event, now_s)
        return [*actions, *self._go_on(now_s)]

    def _look(self, now_s: float) -> None:
        self._speeds.look(self._epoch, now_s)
        self._regimes.look(self._epoch, now_s)

    def _stepped(self, stepped: SiteStepped) -> list[Action]:
        """Take a site's step; say once that the script has the batch in its own hands."""
        self._speeds.add(stepped.site, stepped.values)
        is_counted = stepped.values.get(metrics.SITE_TOKENS, 0.0) > 0
        if metrics.SITE_SAMPLES in stepped.values or self._has_told_fixed or not is_counted:
            return []
        self._has_told_fixed = True
        note = (
            "sites keep their parts of the batch, however fast they are: the script divides its "
            "data itself, without site.sampler or with a global_batch of its own"
        )
        return [RecordEvent(EventKind.SHARES_FIXED, detail={"note": note})]

    # ------------------------------------------------------------ planning

    def _go_on(self, now_s: float) -> list[Action]:
        """Plan again if it is time for it."""
        if self._planning is not None or self._candidate is not None:
            return []
        move = self._regimes.due
        if move is not None and move.is_forced and not self._num_refused:
            return [self._want(_Candidate(_Cause(move.why), None, move))]
        if now_s < self._earliest_s:
            return []
        forgotten, drifts = self._watch.forget(now_s), self._watch.drifts()
        members = set(self._epoch.members)
        causes = [each for each in (*drifts, *forgotten) if {each.source, each.target} <= members]
        division = self._speeds.found if self._is_new else self._speeds.due
        if not causes and division is None and move is None and not self._is_new:
            return []
        self._figures = self._watch.figures()
        recorded = [
            RecordEvent(
                EventKind.LINK_FORGOTTEN if each.is_forgotten else EventKind.LINK_DRIFTED,
                detail={"note": str(each), **each.to_json()},
            )
            for each in causes
        ]
        if division is not None and not self._is_new:
            detail = {"note": str(division), "compute_s": dict(division.compute_s)}
            recorded.append(RecordEvent(EventKind.SITES_UNEVEN, detail=detail))
        told = ", ".join(self._epoch.members)
        whys = [*map(str, causes[:1]), f"sites {told} take part by now"]
        if not (causes or self._is_new):
            whys = [str(division) if move is None else move.why]
        return [*recorded, self._plan_again(_Cause(whys[0], causes, division, move))]

    def _plan_again(self, cause: _Cause) -> PlanAgain:
        self._planning, self._candidate, self._is_new = cause, None, False
        asked = self._epoch, self._figures, self._keeps_codecs, self._dead_links
        return PlanAgain(*asked, cause.division)

    def _begin(self, begun: EpochBegun) -> None:
        """Other sites take part, or other links are dead: what was planned is void."""
        self._epoch, before = begun.epoch, self._epoch
        if before.members == self._epoch.members and begun.dead_links == self._dead_links:
            return
        self._dead_links = begun.dead_links
        self._planning, self._candidate = None, None
        self._is_new = len(self._epoch.members) > 1
        self._earliest_s, self._num_refused = -math.inf, 0

    def _planned_again(self, cause: _Cause, planned: SwitchPlanned, now_s: float) -> list[Action]:
        """Ask for other trees, if that is worth it."""
        self._planning, self._step_s = None, planned.before_s
        saved = 1 - planned.after_s / planned.before_s
        has_trees = saved >= self._settings.gain or planned.is_more_exact
        move = cause.move or self._regimes.due
        if move is not None and has_trees and move.after_s < move.step_s:
            # The measured step with these trees may do without another regime.
            is_enough = move.step_s * (1 - saved) <= (1 + self._settings.gain) * move.busy_s
            move = None if is_enough else move
        if has_trees or move is not None:
            return [self._want(_Candidate(cause, planned if has_trees else None, move))]
        why = (
            f"the best other plan, {_named(planned, cause)}, would save {saved:.1%} of a step: "
            f"less than {self._settings.gain:.0%}"
            if saved > 0
            else "no other trees, and no other parts, are predicted to be faster"
            if cause.division
            else "no other trees are predicted to be faster"
        )
        figures = {"before_s": planned.before_s, "after_s": planned.after_s, "plan": planned.form}
        return self._give_up({"why": why, **figures}, now_s)

    def _want(self, candidate: _Candidate) -> TreesWanted:
        """Ask all sites to go over to a plan, or to another regime."""
        self._candidate = candidate
        cause, planned, move = candidate.cause, candidate.planned, candidate.move
        reduction = self._epoch.reduction
        parts: tuple[int, ...] = ()
        names = []
        if planned is not None:
            reduction = planned.reduction
            parts = cause.division.parts if planned.divides and cause.division else ()
            names.append(f"{_named(planned, cause)}: predicted {_gain(planned)}")
        if move is not None:
            self._regimes.let_be()
            names.append(f"regime {move.kind}")
        return TreesWanted(
            self._epoch.members,
            reduction,
            f"{', '.join(names)}, for {cause.why}",
            parts,
            None if move is None else move.kind,
        )

    def _not_planned(self, cause: _Cause, failed: PlanningFailed, now_s: float) -> list[Action]:
        """Keep the trees; another regime needs no plan."""
        if (move := cause.move or self._regimes.due) is None:
            return self._give_up({"why": f"no plan can be made: {failed.why}"}, now_s)
        self._planning = None
        return [self._want(_Candidate(cause, None, move))]

    def _give_up(self, detail: Mapping[str, object], now_s: float) -> list[Action]:
        """Keep the plan; it counts on what was measured from now on."""
        self._rest(now_s, self._settings.lasting_s)
        return [_kept(detail)]

    def _rest(self, now_s: float, for_s: float) -> None:
        """Watch again, and plan nothing for a while."""
        self._planning, self._candidate, self._num_refused = None, None, 0
        self._earliest_s = now_s + for_s
        self._watch.assume(self._figures)
        self._speeds.let_be()

    def _relaunch(self, planned: RelaunchPlanned) -> list[Action]:
        """Tell people what only another launch could change, if that is much."""
        planned_now = None if self._candidate is None else self._candidate.planned
        present_s = self._step_s if planned_now is None else planned_now.after_s
        if present_s is None or planned.step_s > (1 - RELAUNCH_GAIN) * present_s:
            return []
        note = (
            f"relaunching with a new plan would give {_time(planned.step_s)} a step "
            f"instead of {_time(present_s)}"
        )
        detail = {"note": note, "step_s": planned.step_s, "present_s": present_s}
        return [RecordEvent(EventKind.PLAN_RELAUNCH, detail=detail)]

    # ------------------------------------------------------------ switching

    def _ended(self, candidate: _Candidate, ended: TreesEnded, now_s: float) -> list[Action]:
        """Sites have other trees, or could not go over to them."""
        if ended.epoch is not None:
            return self._replanned(candidate, ended.epoch, now_s)
        if ended.must_keep_codecs and not self._keeps_codecs:
            self._keeps_codecs = True
            return [self._plan_again(candidate.cause)]
        who = f"site {ended.site}: " if ended.site else ""
        why = {"why": f"not all sites could switch: {who}{ended.why}"}
        self._num_refused += 1
        if self._num_refused >= ATTEMPTS:
            return self._give_up(why, now_s)
        # What it was for has not changed, so a plan is made again after a while.
        self._is_new = not (candidate.cause.links or candidate.cause.move)
        self._candidate, self._earliest_s = None, now_s + self._settings.lasting_s
        return [_kept(why)]

    def _replanned(self, candidate: _Candidate, epoch: Epoch, now_s: float) -> list[Action]:
        """Tell what the run has by now, and rest."""
        planned, cause, move = candidate.planned, candidate.cause, candidate.move
        self._epoch, has_codec, is_trial = epoch, False, False
        told: list[Action] = []
        if planned is not None:
            self._step_s, has_codec = planned.after_s, bool(planned.other_codec)
            # A plan that only tries links again is soon taken back, if it was tried in vain.
            is_trial = bool(cause.links) and all(each.is_forgotten for each in cause.links)
            is_trial &= not planned.divides
            told.append(_replanned(planned, cause, epoch))
        if move is not None:
            told.append(_moved(move, epoch))
        gap_s = self._settings.lasting_s if is_trial else self._settings.gap_s
        if has_codec or move is not None:
            self._moves_s = [each for each in self._moves_s if each > now_s - MOVES_S]
            gap_s = self._settings.gap_s * LONGER ** len(self._moves_s)
            self._moves_s.append(now_s)
        self._rest(now_s, gap_s)
        self._regimes.let_be()
        return told


def _replanned(planned: SwitchPlanned, cause: _Cause, epoch: Epoch) -> RecordEvent:
    note = (
        f"from round {epoch.from_round} on the run has another plan, "
        f"{_named(planned, cause)}: predicted {_gain(planned)}, for {cause.why}"
    )
    detail = {
        "note": note,
        "epoch": epoch.number,
        "from_round": epoch.from_round,
        "plan": planned.form,
        "codec": planned.other_codec,
        "before_s": planned.before_s,
        "after_s": planned.after_s,
        "links": [each.to_json() for each in cause.links],
        "parts": dict(cause.division.members) if planned.divides and cause.division else {},
    }
    return RecordEvent(EventKind.RUN_REPLANNED, detail=detail)


def _moved(move: Move, epoch: Epoch) -> RecordEvent:
    expected = f"; expected {_time(move.after_s)} a step instead of {_time(move.step_s)}"
    if move.is_forced:
        expected = ""
    detail = {
        "note": f"from round {epoch.from_round} on the regime is {move.kind}: {move.why}{expected}",
        "regime": move.kind,
        "why": move.why,
        "epoch": epoch.number,
        "from_round": epoch.from_round,
        "before_s": move.step_s,
        "after_s": move.after_s,
    }
    return RecordEvent(EventKind.RUN_REGIME, detail=detail)


def _kept(detail: Mapping[str, object]) -> RecordEvent:
    note = f"the plan is kept: {detail['why']}"
    return RecordEvent(EventKind.PLAN_KEPT, detail={"note": note, **detail})


def _named(planned: SwitchPlanned, cause: _Cause) -> str:
    names = [planned.form, *([f"as {planned.other_codec}"] if planned.other_codec else [])]
    if planned.divides and cause.division is not None:
        parts = ", ".join(f"{name} {part}" for name, part in cause.division.members.items())
        names.append(f"with other parts of the batch ({parts})")
    return ", ".join(names)


def _gain(planned: SwitchPlanned) -> str:
    return f"{_time(planned.after_s)} a step instead of {_time(planned.before_s)}"


def _time(duration_s: float) -> str:
    return format_duration(float(f"{duration_s:.3g}"))
