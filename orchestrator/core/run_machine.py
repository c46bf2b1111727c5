"""The life of one run: all sites start together or none does, and every end has one first cause.

A site that fails once all are running is lost, and the run goes on without it, as long as enough
are left: orchestrator/core/membership.py decides that, and tells this machine.

- FORMING: Prepare goes to all sites once each has an agent. Start goes to all once all are
  prepared. Where the WAN is emulated by packets, its namespaces are opened before Prepare; a relay
  is opened after it. A site whose agent is lost now rolls all back: what was started is stopped,
  and all begin again once the agent is back, within `failure.start_within`.
- ACTIVE: all sites are running, except those that are lost, and those that the run did not begin
  with and nobody has added yet. Until all have taken a step, none may be lost: the first failure is
  the run's. So is one of the script, whenever it comes, unless the topology says otherwise.
- STOPPING: something failed (and the other sites had a moment to report theirs), or somebody
  cancelled the run. Stop went to every site that was told to prepare.
- SUCCEEDED: every site that was not lost ended by itself, well; WITH_LOSSES where one was lost and
  did not come back, or the last checkpoint was not written. FAILED. CANCELLED.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from isthmus.orchestrator.core import run_events
from isthmus.orchestrator.core.first_failure import first_failure
from isthmus.orchestrator.core.non_finite_watch import NonFiniteWatch, NotFinite
from isthmus.orchestrator.core.parameter_digests import Difference, DigestComparison
from isthmus.orchestrator.core.run_events import (
    Action,
    Endpoint,
    RecordEvent,
    RunState,
    SiteNamespace,
    SiteState,
)
from isthmus.orchestrator.core.run_view import RecordedEvent
from isthmus.orchestrator.core.same_data import SameDataWatch
from isthmus.orchestrator.core.stall_watch import StallWatch
from isthmus.orchestrator.core.step_comparison import StepComparison, StepEnd
from isthmus.protos.failure import Failure
from isthmus.topology.spec.timeouts import Timeouts
from isthmus.topology.spec.world import Topology

DROPPED = "dropped by an operator"
FALLBACK = (
    "emulating the WAN in user space: no slow start, congestion control or retransmission, because"
)
NO_STATE = (
    "the script does not call `start = site.checkpoint(model, optimizer)`, by which a site takes over "
    "the others' state"
)
STEPPED_ALONE = (
    "has taken an optimizer step, and has averaged nothing with the other sites yet: it trains by "
    "itself until its script calls `site.synchronize(model, optimizer)`"
)
_WHAT_IS_MISSING = {
    SiteState.LOST: "its agent has not come back",
    SiteState.ABSENT: "no agent has joined",
    SiteState.JOINED: "its gateways do not listen yet",
    SiteState.PREPARED: "it waits for the WAN",
    SiteState.STARTING: "its ranks have not all joined",
    SiteState.ENDED: "it has yet to be started again",
}
"""Why a site is not running, in the order in which a site comes up."""
RETURNS_WITHIN_S = 3600.0
"""Within this long a site is started again `failure.max_restarts` times at most."""
_NO_CHECKPOINT, _CHECKPOINT_STAYS = "checkpoint.failed", "checkpoint.stays"
_NO_STATE = "state.failed"
_FAILURE_NOTES = 8
"""Kinds of each that are told; ranks' logs have all."""
_GONE = frozenset({SiteState.ENDED, SiteState.LOST})
_COMING_UP = frozenset({SiteState.JOINED, SiteState.PREPARED, SiteState.STARTING})
LOSES_SITE = frozenset(
    {
        "RANK_EXITED",
        "RANK_KILLED",
        "RANK_LOST",
        "GATEWAY_EXITED",
        "NODE_LOST",
        "SITE_LOST",
        "LAUNCH_FAILED",
        "CANNOT_TRAIN",
        "PEER_LOST",
        "RANK_STALLED",
    }
)
"""Failures that an active run can survive: they befall one site. Others break promises to all."""
SCRIPT_FAILED = "SCRIPT_FAILED"
"""Befalls one site, too, but is no outage: the script does it again wherever it is started."""


@dataclass(slots=True)
class _Site:
    """One site of a run: how far it has got, and what it was told."""

    name: str
    state: SiteState = SiteState.ABSENT
    endpoints: tuple[Endpoint, ...] = ()
    is_told_to_prepare: bool = False
    is_told_to_start: bool = False
    is_told_to_stop: bool = False
    is_done: bool = False
    """Its ranks are done with the job; its gateways wait until all are."""
    last_round: int = -1
    """The last round of its ranks, once they are done; -1: not known."""
    has_ended_early: bool = False
    """It is done, and others go on, or do so no more because of that."""
    is_successful: bool = False
    is_lost_perhaps: bool = False
    """Its agent has gone or is silent, and whether the run goes on without it is not decided."""
    is_out: bool = False
    """The run goes on without it."""
    is_later: bool = False
    """The run did not begin with it, and it has taken no part yet."""
    losses: list[Failure] = field(default_factory=list)
    """What befell it while the run was active."""
    why_out: str = ""
    """Why the run goes on without it."""
    has_agent: bool = False
    is_returning: bool = False
    """It is started again, and does not take part yet."""
    returns_s: list[float] = field(default_factory=list)
    """When it was started again."""
    num_vain: int = 0
    """How many of the latest starts have not had it take part yet."""
    is_dropped: bool = False
    """An operator has it take part no more."""
    is_leaving: bool = False
    """It has its last round, and ends after it."""
    is_wanted: bool = False
    """An operator has it started again, however often it was."""
    is_begun_again: bool = False
    """It was rolled back, and started again."""

    def begin_return(self) -> None:
        """It is started while the run goes on."""
        self.state, self.is_returning, self.is_told_to_prepare = SiteState.JOINED, True, True
        self.is_wanted = self.is_done = self.has_ended_early = False
        self.last_round = -1
        self.is_told_to_start = self.is_told_to_stop = False

    def begin_again(self) -> None:
        """It is started as if for the first time, after all sites were rolled back."""
        self.state, self.endpoints, self.is_begun_again = SiteState.JOINED, (), True
        self.is_told_to_prepare = self.is_told_to_start = self.is_told_to_stop = False

    @property
    def is_new(self) -> bool:
        """Whether nothing of the run was ever there, and nobody waits for it."""
        return self.is_later and not self.is_told_to_prepare

    @property
    def may_have_processes(self) -> bool:
        """Whether something of the run may be alive there, and its agent may still say so."""
        return self.is_told_to_prepare and self.state not in _GONE


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a run came to."""

    state: RunState
    code: str = ""
    reason: str = ""
    failure: Failure | None = None


def _kind_of(site: str, reason: str) -> tuple[str, str]:
    """Return what failures on storage have in common that differ by steps and ranks only."""
    return site, re.sub(r"\d+", "", reason)


class RunMachine:
    """Leads one run to its end. Pure; messages of other generations never come here."""

    def __init__(
        self,
        topology: Topology,
        now_s: float,
        *,
        may_return: bool = False,
        refuses_same_data: bool = True,
        begin_with: Collection[str] = (),
        trains: bool = True,
        saves: bool = False,
    ) -> None:
        """Begin with no site.

        `may_return`: a site that is lost can be given the run's state. `refuses_same_data`: sites
        that train on the same data end the run. `begin_with`: the sites with which it is formed;
        none: all. `trains`: ranks take steps, else links are probed. `saves`: the job wants
        checkpoints.
        """
        self._may_return = may_return
        self.state = RunState.FORMING
        self._topology = topology
        self._timeouts = Timeouts.derive(topology.failure)
        self._sites = {site.name: _Site(site.name) for site in topology.sites}
        for site in self._all():
            site.is_out = site.is_later = bool(begin_with) and site.name not in begin_with
        self._begin_comparing()
        self._start_deadline_s = now_s + self._timeouts.start_s
        self._wan = _WanStage(topology)
        self._ending = _Ending(self._timeouts.collect_s)
        self._is_rolling_back = False
        """A site was lost while the run was forming: nothing is started until all have ended."""
        self._refuses_same_data = refuses_same_data
        self._not_finite = NonFiniteWatch(self._timeouts.collect_s)
        self._active_s: float | None = None
        self._failed_files: dict[str, set[tuple[str, str]]] = {
            _NO_CHECKPOINT: set(),
            _CHECKPOINT_STAYS: set(),
            _NO_STATE: set(),
        }
        """By event, the kinds of failures on storage that have been told, each of a site."""
        self._has_state = False
        """The script has what a site needs that comes back."""
        self._has_steps = False
        """The script has taken a step: what it calls before that, it has called."""
        self._stepped: set[str] = set()
        """The sites that have, as far as this coordinator has heard."""
        self._may_lose = not trains
        """All sites have taken a step, so the run can go on without one."""
        self._losable = LOSES_SITE
        if not topology.failure.ends_on_script_error:
            self._losable |= {SCRIPT_FAILED}
        self._saves = saves
        self._saved_step = -1
        """The step of the last checkpoint that was written."""
        self._unsaved: run_events.CheckpointFailed | None = None
        """The last that was not."""
        self._is_released = False
        """All sites are done with the job, and have been told so."""

    def _begin_comparing(self) -> None:
        """Begin with what no rank has told anything of."""
        sites = self._topology.sites
        self._digests = DigestComparison({site.name: site.num_ranks for site in sites})
        for site in self._all():
            if site.is_out:
                self._digests.drop(site.name)
        self._stalls = StallWatch()
        self._steps = StepComparison()
        self._gradients = SameDataWatch()

    @property
    def is_going_on(self) -> bool:
        """Whether the run is active, and nothing is known that will end it."""
        return self.state is RunState.ACTIVE and not self._ending.has_begun

    @property
    def successful(self) -> tuple[str, ...]:
        """The sites that are done with the job."""
        return tuple(site.name for site in self._all() if site.is_successful)

    @property
    def gone(self) -> dict[str, str]:
        """The sites of which nothing is left before the work is done, and why."""
        return {
            site.name: first_failure(site.losses).reason if site.losses else "it has ended"
            for site in self._all()
            if site.state in _GONE and not site.is_successful
        }

    @property
    def done(self) -> tuple[str, ...]:
        """The sites whose ranks are done with the job."""
        return tuple(site.name for site in self._all() if site.is_done)

    def last_round_of(self, site: str) -> int:
        """Return the last round of a site that is done; -1: it is not, or that is not known."""
        return self._sites[site].last_round

    @property
    def brings_back(self) -> bool:
        """Whether the run goes on, and a site that is lost now may come back."""
        is_open = self.is_going_on and not self._is_released
        return is_open and self._has_state and not self._return_problem

    @property
    def restarts_agents(self) -> bool:
        """Whether an agent that has ended is of use to the run once it is started again."""
        return self.brings_back or (self._is_rolling_back and not self._ending.has_begun)

    def awaits_step_of(self, site: str) -> bool:
        """Whether it is news that the site has taken a step."""
        return not self._may_lose and site not in self._stepped

    @property
    def _losses(self) -> list[Failure]:
        """What befell the sites that have taken part."""
        return [failure for site in self._all() if not site.is_later for failure in site.losses]

    @property
    def _return_problem(self) -> str:
        """Why no site comes back; empty: it may, or that is not known yet."""
        if not self._may_return:
            return "no site comes back where `exchange.schedule: off`"
        return f"no site comes back: {NO_STATE}" if self._lacks_state else ""

    @property
    def _lacks_state(self) -> bool:
        """Whether the script has taken steps, and has not what a site needs that comes back."""
        return self._has_steps and not self._has_state

    def endpoints_of(self, site: str, dialler: str) -> tuple[Endpoint, ...]:
        """Return where another site dials a site's gateways."""
        return self._wan.ways(dialler, self._sites[site].endpoints)

    def drop_problem(self, site: str) -> str:
        """Return why a site cannot be dropped; nothing if it can."""
        stay = [each for each in self._all() if not (each.is_out or each.is_dropped)]
        left = [each for each in stay if each.name != site]
        fewest = self._topology.failure.min_sites
        if not self.is_going_on:
            return f"the run is {self.state.lower()}"
        if self._sites[site].is_new and not self._sites[site].is_wanted:
            return f"site {site} takes no part yet"
        if self._sites[site].is_dropped:
            return f"site {site} is dropped already"
        if self._sites[site].is_successful:
            return f"site {site} is done"
        if not self._sites[site].is_out and len(left) < fewest:
            return f"without site {site} {len(left)} would be left, want at least {fewest}"
        return ""

    @property
    def awaits_drop(self) -> tuple[str, ...]:
        """The sites that an operator has dropped, and that have not been told when they leave."""
        return tuple(
            site.name
            for site in self._all()
            if site.is_dropped and not (site.is_out or site.is_leaving)
        )

    def add_problem(self, site: str) -> str:
        """Return why a site cannot be started while the run goes on; nothing if it can."""
        if not self.is_going_on:
            return f"the run is {self.state.lower()}"
        if self._sites[site].is_new:
            return self._new_problem(self._sites[site])
        if self._sites[site].is_leaving:
            return f"site {site} is about to leave"
        if not self._sites[site].is_out:
            return f"site {site} takes part"
        if self._sites[site].is_returning:
            return f"site {site} is coming back already"
        return self._return_problem

    def _new_problem(self, site: _Site) -> str:
        """Return why a site that the run did not begin with cannot be added; nothing if it can."""
        topology = self._topology
        present = [each.name for each in self._present()]
        if not any(topology.link(site.name, at) and topology.link(at, site.name) for at in present):
            return (
                f"the topology has no link, both ways, between site {site.name} and any that takes "
                f"part ({', '.join(present)}): add a site first to which it has one, or write one "
                "into `links` and go on with `isthmus launch --resume`"
            )
        if not site.has_agent:
            place = topology.coordinator_told or topology.coordinator
            at = f"{place.host}:{place.port}" if place.port else "HOST:PORT"
            return (
                f"site {site.name} has no agent: start one there, by `isthmus up` or `isthmus agent "
                f"--site {site.name} --coordinator {at} --topology FILE --state FOLDER`, and add "
                "the site again"
            )
        return self._return_problem

    def is_returning(self, site: str) -> bool:
        """Whether a site was started while the run goes on, and does not take part yet."""
        return self._sites[site].is_returning

    def is_coming_up(self, site: str) -> bool:
        """Whether a site was started while the run goes on, and its ranks are not there yet."""
        found = self._sites.get(site)
        return found is not None and found.is_returning and found.state in _COMING_UP

    @property
    def ready_to_enter(self) -> tuple[str, ...]:
        """The sites that do not take part yet, and whose ranks are there."""
        there = [site for site in self._all() if site.state is SiteState.RUNNING]
        return tuple(site.name for site in there if site.is_returning)

    @property
    def verified_steps(self) -> int:
        """Steps after which the parameters of all ranks of all sites were seen to be equal."""
        return self._digests.verified_steps

    def active_for_s(self, now_s: float) -> float:
        """Return for how long the run has been active, or was until it was stopped."""
        if self._active_s is None:
            return 0.0
        stopped_s = self._ending.stopped_s
        return (now_s if stopped_s is None else stopped_s) - self._active_s

    @property
    def awaited(self) -> list[str]:
        """Sites where something of the run may be alive."""
        return [site.name for site in self._all() if site.may_have_processes]

    def recall(self, event: RecordedEvent, happened_s: float, now_s: float) -> None:
        """Take what an earlier coordinator wrote down of this run; nothing follows from it yet.

        `happened_s` is when, on this coordinator's clock.
        """
        match event.kind:
            case "run.preparing":
                if self._is_rolling_back:
                    self._begin_again()
                for each in self._present():
                    each.is_told_to_prepare = True
            case "run.active":
                self.state, self._active_s = RunState.ACTIVE, happened_s
            case "failure.reported":
                told = replace(Failure.from_json(event.detail), at_s=happened_s)
                self._take((told,), happened_s)
            case "epoch.begun":
                for lost in [self._sites[name] for name in event.detail["lost"]]:
                    lost.is_out, lost.why_out = not lost.is_successful, event.detail["why"]
                    if lost.is_returning:  # it followed, or was started since: it begins anew
                        lost.state, lost.is_returning = SiteState.LOST, False
                for name in event.detail.get("leaves", ()):
                    self._sites[name].is_leaving = True
                for name in event.detail["members"]:  # else it enters, or follows
                    self._sites[name].is_returning = self._sites[name].is_out
            case "checkpoint.failed" | "checkpoint.stays" | "state.failed":
                reason = event.detail["reason"]
                self._failed_files[event.kind].add(_kind_of(event.site, reason))
                if event.kind == _NO_CHECKPOINT:
                    step = event.detail["step"]
                    self._unsaved = run_events.CheckpointFailed(event.site, step, reason)
            case "run.state_offered":
                self._has_state = True
            case "run.first_step":
                self._has_steps = self._may_lose = True
            case "checkpoint.written":
                self._saved_step = max(self._saved_step, event.detail["step"])
            case "run.cancel_requested":
                self._ending.cancel(event.detail["message"])
            case "run.stopping":
                # Sites have time anew to say that nothing is left.
                self.state, self._ending.stopped_s = RunState.STOPPING, now_s
                if not self._ending.has_begun:
                    self._recall_why(str(event.detail["reason"]), now_s)
        site = self._sites.get(event.site)
        if site is not None:
            self._recall_site(site, event)
            if event.kind in {"site.returning", "run.rolled_back"}:
                site.returns_s.append(happened_s)
            if event.kind == "site.returning":
                site.num_vain += 1
            elif event.kind == "site.returned":
                site.num_vain = 0
        for each in self._all():
            (self._digests.drop if each.is_out else self._digests.regain)(each.name)

    def _recall_why(self, reason: str, now_s: float) -> None:
        """The run was stopped for what had befallen its sites, which it might have survived."""
        self._blame_losses(now_s)
        if self._ending.has_begun:
            return
        unknown = Failure(code="SITE_LOST", message=reason, at_s=now_s)
        found = first_failure(self._losses) if self._losses else unknown
        self._ending.fail(found, now_s, is_last=True)

    def recall_verified(self, steps: int) -> None:
        """Go on counting the steps after which all ranks were seen to be equal."""
        self._digests.verified_steps = steps

    def _recall_site(self, site: _Site, event: RecordedEvent) -> None:
        match event.kind:
            case "site.joined" if site.state is SiteState.ABSENT:
                site.state = SiteState.JOINED
            case "site.left" if site.state is SiteState.JOINED:
                site.state = SiteState.ABSENT
            case "site.prepared":
                site.state = SiteState.PREPARED
                places = (each.rpartition(":") for each in event.detail["gateways"])
                site.endpoints = tuple(
                    Endpoint(site.name, number, host, int(port))
                    for number, (host, _, port) in enumerate(places)
                )
            case "site.starting":
                site.state, site.is_told_to_start = SiteState.STARTING, True
            case "site.running":
                site.state = SiteState.RUNNING
            case "site.done":
                site.is_done, site.last_round = True, int(event.detail.get("round", -1))
                self._stepped.add(site.name)
            case "site.returning":
                site.begin_return()
            case "run.rolled_back":
                site.state, self._is_rolling_back = SiteState.LOST, True
            case "site.ended":
                site.state, site.is_returning = SiteState.ENDED, False
                site.is_successful = bool(event.detail["succeeded"])
                if site.is_leaving and site.is_successful:
                    site.is_out, site.is_leaving, site.is_successful = True, False, False
            case "site.drop_requested":
                site.is_dropped, site.is_wanted = True, False
            case "site.add_requested":
                site.is_dropped, site.is_wanted = False, True
            case "site.drop_refused":
                site.is_dropped = False
            case "site.returned":
                site.state, site.is_out, site.is_returning = SiteState.RUNNING, False, False
                site.is_later = False
            case "site.lost" | "site.gone":
                site.state, site.is_returning = SiteState.LOST, False
                if event.detail.get("is_out"):
                    site.is_out, site.why_out = True, str(event.detail["message"])
                site.is_done &= not site.is_out
            case "site.ended_early":
                site.has_ended_early = True
            case "site.dropped" | "site.let_go":
                site.state = SiteState(event.detail["state"])
                site.is_out, site.is_leaving, site.is_successful = True, False, False
                site.is_returning = site.is_done = False

    def handle(
        self, event: run_events.Event, now_s: float, being_let_in: Collection[str] = ()
    ) -> list[Action]:
        """Apply one event. Late, repeated and impossible ones change nothing.

        `now_s` is the coordinator's monotonic clock, never less than in the call before. Of the
        sites `being_let_in` nothing is started until it is said that the run goes on without them:
        that would end what was started.
        """
        # An agent may be there for a site that takes no part.
        if self.state.is_terminal or getattr(event, "site", None) not in {None, *self._sites}:
            return []
        actions = self._apply(event, now_s)
        actions += self._form(now_s)
        actions += self._note_first_step()
        actions += self._bring_back(now_s, being_let_in)
        actions += self._release_if_done()
        actions += self._stop_if_due(now_s)
        actions += self._finish_if_over(now_s)
        return actions

    # ------------------------------------------------------------ facts

    def _apply(self, event: run_events.Event, now_s: float) -> list[Action]:
        """Take the event into the facts; nothing is decided here."""
        match event:
            case run_events.SiteJoined():
                return self._joined(event)
            case run_events.SiteLost():
                return self._lost(event, now_s)
            case run_events.SiteReturned():
                return self._returned(event)
            case run_events.SessionBroken():
                return [RecordEvent("session.broken", event.site, {"message": event.message})]
            case run_events.SessionResumed():
                self._sites[event.site].has_agent = True
                after = {"silent_s": round(event.silent_s, 3)}
                return [RecordEvent("session.resumed", event.site, after)]
            case run_events.AgentEnded():
                return self._agent_ended(event, now_s)
            case run_events.SitePrepared():
                return self._prepared(event)
            case run_events.SiteRunning():
                return self._running(event)
            case run_events.SiteDone():
                return self._done(event)
            case run_events.SiteEnded():
                return self._ended(event, now_s)
            case run_events.DigestReported():
                return self._compared(event, now_s)
            case run_events.StepEnded():
                return self._step_ended(event, now_s)
            case run_events.GradientReported():
                return self._same_data(event, now_s)
            case run_events.NonFiniteReported():
                found = NotFinite(
                    step=event.step,
                    site=event.site,
                    rank=event.rank,
                    tensor=event.tensor,
                    message=event.message,
                )
                return _noted_not_finite(self._not_finite.report(found, now_s))
            case run_events.StateOffered():
                is_first, self._has_state = not self._has_state, True
                return [RecordEvent("run.state_offered")] if is_first else []
            case run_events.SiteInTrouble():
                note = f"site {event.site}: {event.what}"
                return [RecordEvent("site.trouble", event.site, {"note": note})]
            case run_events.SteppedAlone():
                note = f"site {event.site} {STEPPED_ALONE}"
                return [RecordEvent("site.stepped_alone", event.site, {"note": note})]
            case run_events.DeviceDiffers():
                note = (
                    f"ranks of site {event.site} compute on {event.found}, and the topology says "
                    f"{event.expected}: plans and predictions do not hold"
                )
                return [RecordEvent("site.device_differs", event.site, {"note": note})]
            case run_events.StepTaken():
                return self._step_taken(event)
            case run_events.CheckpointWritten():
                return self._saved(event)
            case run_events.CheckpointFailed():
                self._unsaved = event
                note = f"checkpoint of step {event.step} failed at site {event.site}"
                return self._told_once(_NO_CHECKPOINT, event, note)
            case run_events.CheckpointStays():
                note = f"checkpoint of step {event.step} cannot be removed at site {event.site}"
                return self._told_once(_CHECKPOINT_STAYS, event, note)
            case run_events.StateFailed():
                note = f"site {event.site} could not write its state for a site that comes back"
                return self._told_once(_NO_STATE, event, note)
            case run_events.StallReported():
                return self._stalled(event, now_s)
            case run_events.NamespacesOpened():
                return self._wan.opened(event.namespaces)
            case run_events.NamespacesRefused():
                return self._namespaces_refused(event, now_s)
            case run_events.RelayOpened():
                return self._wan.relay_opened(event.ways)
            case run_events.EmulatorEnded():
                message = f"the WAN emulator is gone: {event.message}"
                return self._fail("LAUNCH_FAILED", message, now_s, log_path=event.log_path)
            case run_events.CancelRequested():
                return self._ending.cancel(event.message)
            case run_events.DropRequested():
                return self._drop_requested(event)
            case run_events.AddRequested():
                return self._add_requested(event)
            case run_events.SiteLeaves():
                self._sites[event.site].is_leaving = True
                return []
            case run_events.SiteDropped():
                return self._dropped(event, now_s)
            case run_events.DropRefused():
                return self._drop_refused(event)
            case run_events.SiteEndedEarly():
                return self._ended_early(event, now_s)
            case run_events.SiteEntered():
                return self._entered(event)
            case run_events.CannotGoOn():
                return self._cannot_go_on(event, now_s)
            case run_events.Ticked():
                return _noted_not_finite(self._not_finite.explained(now_s))

    def _joined(self, event: run_events.SiteJoined) -> list[Action]:
        site = self._sites[event.site]
        if self.is_going_on and not site.is_out:
            site.losses.clear()  # it was only silent
            site.is_lost_perhaps = False
        site.has_agent = True
        recorded = RecordEvent("site.joined", site.name, {"host": event.host})
        if site.state is SiteState.ABSENT:
            site.state = SiteState.JOINED
            return [recorded]
        if site.state is SiteState.LOST or (site.is_out and site.state is SiteState.ENDED):
            # The run goes on without it: whatever is left there has to go. Its answer comes after
            # all that it has yet to tell of its end.
            site.state = SiteState.LOST
            return [recorded, self._stop(site, "the site was lost")]
        return []

    def _returned(self, event: run_events.SiteReturned) -> list[Action]:
        """Tell a site again what an earlier coordinator may not have got across.

        An agent that has heard it before changes nothing.
        """
        site = self._sites[event.site]
        site.has_agent = True
        recorded = RecordEvent("agent.returned", site.name, {"host": event.host})
        is_gone = not event.has_run and site.state is not SiteState.JOINED
        if site.is_out and (is_gone or not site.is_returning):
            site.state, site.is_returning = SiteState.LOST, False
        elif self.is_going_on:
            site.losses.clear()  # it was only silent
            site.is_lost_perhaps = False
        is_over = self._ending.stopped_s is not None or self._is_rolling_back
        if site.state in _GONE or is_over:
            return [recorded, self._stop(site, "the run is not going on here")]
        if is_gone:
            # It has yet to tell its end, or has told a coordinator that died of it. The answer
            # comes after that.
            why, grace_s = "is anything left here?", self._timeouts.stop_grace_s
            return [recorded, run_events.SendStop(site.name, why, grace_s)]
        if site.state is SiteState.JOINED and site.is_returning:
            return [recorded, self._prepare_return(site)]
        if site.state is SiteState.JOINED:
            return [recorded, run_events.SendPrepare(site.name)]
        if site.state is SiteState.STARTING:
            endpoints = self._address_book().get(site.name, ())
            return [recorded, run_events.SendStart(site.name, endpoints)]
        return [recorded, *([run_events.SendRelease(site.name)] if self._is_released else [])]

    def _lost(self, event: run_events.SiteLost, now_s: float) -> list[Action]:
        site = self._sites[event.site]
        is_decided = not (self.is_going_on and self._may_lose)
        is_silent = not is_decided and not self._is_released and event.silent_s > 0
        site.has_agent = False
        # Whether one that follows does so no more is decided with its epoch.
        site.is_returning &= is_silent and site.state is SiteState.RUNNING
        if site.state is SiteState.ABSENT or site.state is SiteState.LOST:
            return []
        detail = {"message": event.message}
        if not site.may_have_processes:
            site.state = SiteState.ABSENT if site.state is SiteState.JOINED else site.state
            return [RecordEvent("site.left", site.name, detail)]
        if self._is_released:  # all are done, and it has been told to go
            site.state = SiteState.LOST
            return [RecordEvent("site.gone", site.name, detail)]
        if self._may_roll_back(site, now_s):
            return self._roll_back(site, event.message, now_s)
        site.is_lost_perhaps = not is_decided
        if not is_silent:
            site.state = SiteState.LOST
        # The failure is as old as the silence.
        failed = self._fail(
            "SITE_LOST", event.message, now_s, site=site.name, at_s=now_s - event.silent_s
        )
        kind = "site.lost" if is_decided else "site.silent" if is_silent else "site.gone"
        return [*failed, RecordEvent(kind, site.name, detail)]

    def _may_roll_back(self, lost: _Site, now_s: float) -> bool:
        """Whether all sites can begin again for one that is lost: nothing has come of the run."""
        is_begun = self._has_steps or any(
            site.is_done or site.is_successful for site in self._present()
        )
        is_forming = self.state is RunState.FORMING and not self._ending.has_begun
        return is_forming and not is_begun and self._may_restart(lost, now_s)

    def _roll_back(self, lost: _Site, why: str, now_s: float) -> list[Action]:
        """Stop what has begun of a run that is forming; all begin again once the site is back."""
        lost.state, self._is_rolling_back = SiteState.LOST, True
        lost.returns_s.append(now_s)
        left_s = max(0.0, self._start_deadline_s - now_s)
        note = f"{why}; all sites begin again if it is back within {left_s:.0f} s"
        rolled_back = RecordEvent("run.rolled_back", lost.name, {"message": why, "note": note})
        waiting = [site for site in self._present() if site.may_have_processes]
        stops = [self._stop(site, why) for site in waiting if not site.is_told_to_stop]
        return [rolled_back, *stops]

    def _agent_ended(self, event: run_events.AgentEnded, now_s: float) -> list[Action]:
        site = self._sites[event.site]
        if site.state is not SiteState.ABSENT or site.is_new or self._ending.has_begun:
            return []  # its session told, or will tell; or nobody waits for it
        return self._fail(
            "LAUNCH_FAILED", event.message, now_s, site=event.site, log_path=event.log_path
        )

    def _prepared(self, event: run_events.SitePrepared) -> list[Action]:
        """Note where a site's gateways listen: once, after it was told to prepare."""
        site = self._sites[event.site]
        if site.state in _GONE:  # it heard Prepare twice, and had ended in between
            return [self._stop(site, "the run is not going on here")]
        if site.state is not SiteState.JOINED or not site.is_told_to_prepare:
            return []
        site.state, site.endpoints = SiteState.PREPARED, event.endpoints
        listed = [f"{each.host}:{each.port}" for each in event.endpoints]
        recorded = RecordEvent("site.prepared", site.name, {"gateways": listed})
        return [recorded, *(self._wan.lead_to(site.endpoints) if site.is_returning else [])]

    def _running(self, event: run_events.SiteRunning) -> list[Action]:
        site = self._sites[event.site]
        if site.state is not SiteState.STARTING:
            return []
        site.state = SiteState.RUNNING
        return [RecordEvent("site.running", site.name)]

    def _activate(self, now_s: float) -> list[Action]:
        """Call the run active once all sites are up; a short job may have ended at some already."""
        if not all(
            site.state is SiteState.RUNNING or site.is_done or site.is_successful
            for site in self._present()
        ):
            return []
        self.state = RunState.ACTIVE
        self._active_s = now_s
        return [RecordEvent("run.active")]

    def _done(self, event: run_events.SiteDone) -> list[Action]:
        site = self._sites[event.site]
        has_part = site.is_returning or not site.is_out
        if site.is_done or not has_part or not site.may_have_processes:
            return []
        site.is_done, site.last_round = True, event.round
        self._stepped.add(site.name)  # what it has told of its steps may be lost
        return [RecordEvent("site.done", site.name, {"round": event.round})]

    def _ended_early(self, event: run_events.SiteEndedEarly, now_s: float) -> list[Action]:
        """Note that a site is done while others go on, or end the run where that is wanted."""
        site, failure = self._sites[event.site], self._topology.failure
        if not self.is_going_on:
            return []
        site.has_ended_early = True
        ended = self._steps.early_end(event.site, event.round, event.by, event.by_round)
        if failure.ends_on_early_end:
            why = f"{ended}; failure.on_early_end is end"
        elif event.num_left < failure.min_sites:
            why = f"{ended}; {event.num_left} sites would go on, want at least {failure.min_sites}"
        else:
            detail = {"round": event.round, "note": f"{ended}; the others go on without it"}
            return [RecordEvent("site.ended_early", site.name, detail)]
        return self._fail("SITE_ENDED_EARLY", why, now_s, site=site.name, is_last=True)

    def _ended(self, event: run_events.SiteEnded, now_s: float) -> list[Action]:
        site = self._sites[event.site]
        if not site.is_told_to_prepare or site.state is SiteState.ENDED:
            return []
        is_asked = event.succeeded or event.failures or site.is_told_to_stop
        is_new_start = site.is_begun_again and site.state is SiteState.JOINED
        if (site.is_returning or is_new_start) and not is_asked:
            return []  # it answers a Stop from before it was started again
        is_let_go = self._is_released or site.has_ended_early
        was_lost = site.state is SiteState.LOST and not is_let_go
        site.state = SiteState.ENDED
        has_returned, site.is_returning = site.is_returning, False
        self._stalls.forget(site.name)
        is_over = was_lost or self._is_rolling_back
        site.is_successful = event.succeeded and not event.failures and not is_over
        detail: dict[str, object] = {"succeeded": site.is_successful}
        if site.is_out and event.failures:
            # No failure of the run: what else would say why it did not come back?
            first = first_failure(event.failures)
            detail["message"] = first.message
            if has_returned:
                detail["note"] = self._no_return_note(site, first.reason, now_s)
            elif not first.is_collateral:  # others saw it go, and could not say why
                detail["note"] = f"site {site.name} ended: {first.reason}"
        ended = RecordEvent("site.ended", site.name, detail)
        if site.is_out or self._is_released or self._is_rolling_back:
            return [ended]
        if site.is_leaving and site.is_successful:
            return [ended, *self._go_on_without(site, "it has left", now_s)]
        # The next coordinator takes the end for known, and hears of no failure any more.
        failed = self._take(event.failures, now_s)
        is_explained = event.failures or was_lost or site.is_told_to_stop
        if not is_explained and not (site.is_successful and site.is_told_to_start):
            site.is_successful = False
            message = "its agent ended the site's processes without being asked to"
            failed += self._fail("SITE_LOST", message, now_s, site=site.name)
        return [*failed, ended]

    def _no_return_note(self, site: _Site, why: str, now_s: float) -> str:
        """Say why a site did not come back, and when it is started again."""
        note = f"site {site.name} did not come back: {why}"
        if not self.brings_back or site.is_dropped:
            return note
        if len(self._restarts(site, now_s)) >= self._topology.failure.max_restarts:
            return (
                f"{note}; it is not started again: `failure.max_restarts` are used up, "
                f"{len(self._restarts(site, now_s))} within an hour (`isthmus sites add` starts it)"
            )
        next_s = self._restarts(site, now_s)[-1] + self._pause_s(site) - now_s
        return f"{note}; it is started again in {max(0.0, next_s):.0f} s"

    def _pause_s(self, site: _Site) -> float:
        """How long after a start the next may be: doubled by each that came to nothing."""
        doublings = min(max(0, site.num_vain - 1), 5)
        return float(self._topology.failure.detect_within_s * 2**doublings)

    def _compared(self, event: run_events.DigestReported, now_s: float) -> list[Action]:
        # Unlike steps explain unlike parameters.
        actions = self._step_ended(event, now_s)
        if self._ending.has_begun:
            return actions
        difference = self._digests.report(
            event.site, event.rank, event.step, event.combined, event.tensors, event.names
        )
        return [] if difference is None else self._differ(difference, now_s)

    def _step_ended(
        self, event: run_events.StepEnded | run_events.DigestReported, now_s: float
    ) -> list[Action]:
        """Fail the run where a step has taken other rounds at one site than at another."""
        if self._ending.has_begun or event.round < 0 or self._sites[event.site].is_out:
            return []
        end = StepEnd(event.site, event.rank, event.step, event.round)
        difference = self._steps.report(end)
        return [] if difference is None else self._fail("STEPS_DIFFER", str(difference), now_s)

    def _same_data(self, event: run_events.GradientReported, now_s: float) -> list[Action]:
        """Warn of sites that train on the same data; end the run if they go on with it."""
        if self._ending.has_begun:
            return []
        found = self._gradients.report(event.site, event.step, event.gradient_hash)
        if found is None or (found.times > 1 and not self._refuses_same_data):
            return []
        if found.times > 1:
            return self._fail("SAME_DATA", str(found), now_s)
        return [RecordEvent("data.same", detail={"note": str(found), "step": found.step})]

    def _note_first_step(self) -> list[Action]:
        """Note once that all who take part have taken a step."""
        present = {site.name for site in self._present()}
        if self._may_lose or not self.is_going_on or not present <= self._stepped:
            return []
        self._may_lose = True
        return [RecordEvent("run.first_step")]

    def _step_taken(self, event: run_events.StepTaken) -> list[Action]:
        """Note once which awaited sites cannot be started, for lack of a state to begin with."""
        self._stepped.add(event.site)
        is_first, self._has_steps = not self._has_steps, True
        awaited = [
            site.name
            for site in self._all()
            if site.is_out and not (site.is_new or site.has_ended_early)
        ]
        awaited += [site.name for site in self._all() if site.is_new and site.is_wanted]
        if not is_first or not self._lacks_state or not awaited:
            return []
        note = f"not started: {', '.join(awaited)}: {self._return_problem}"
        return [RecordEvent("run.state_missing", detail={"note": note})]

    def _saved(self, event: run_events.CheckpointWritten) -> list[Action]:
        if event.step <= self._saved_step:
            return []
        self._saved_step = event.step
        note = f"checkpoint of step {event.step} is written"
        return [RecordEvent("checkpoint.written", event.site, {"step": event.step, "note": note})]

    def _told_once(
        self,
        what: str,
        event: run_events.CheckpointFailed | run_events.CheckpointStays | run_events.StateFailed,
        note: str,
    ) -> list[Action]:
        """Tell of what was not written, or not removed, of each kind once; nothing ends for it."""
        told, kind = self._failed_files[what], _kind_of(event.site, event.reason)
        if kind in told or len(told) >= _FAILURE_NOTES:
            return []
        told.add(kind)
        detail = {"step": event.step, "reason": event.reason, "note": f"{note}: {event.reason}"}
        return [RecordEvent(what, event.site, detail)]

    def _stalled(self, event: run_events.StallReported, now_s: float) -> list[Action]:
        """Name each rank that hangs while others wait: its site cannot go on with it."""
        actions: list[Action] = []
        if self._ending.has_begun:
            return actions
        for site, rank in self._stalls.report(
            event.site, event.absent, is_waiting=event.is_waiting
        ):
            message = (
                f"rank {rank.rank} of site {site} has not come for {rank.for_s:.1f} s, since round "
                f"{rank.round}: {rank.doing}"
            )
            detail = {
                "rank": rank.rank,
                "note": f"stalled: {message}",
                "stack_path": rank.stack_path,
            }
            actions.append(RecordEvent("rank.stalled", site, detail))
            actions += self._fail(
                "RANK_STALLED",
                message,
                now_s,
                at_s=now_s - rank.for_s,
                site=site,
                rank=rank.rank,
                log_path=rank.stack_path,
            )
            if self.is_going_on and not self._sites[site].is_told_to_stop:
                # Its end is the loss of the site: others go on when nothing of it is left.
                actions.append(self._stop(self._sites[site], message))
        return actions

    def _differ(self, difference: Difference, now_s: float) -> list[Action]:
        """Fail the run; the failure names a place only where it is certain who is wrong."""
        is_one_site = difference.is_majority and len(difference.sites) == 1
        is_one_rank = is_one_site and len(difference.replicas) == 1
        return self._fail(
            "PARAMETERS_DIFFER",
            str(difference),
            now_s,
            site=difference.sites[0] if is_one_site else "",
            rank=difference.replicas[0][1] if is_one_rank else -1,
        )

    def _namespaces_refused(
        self, event: run_events.NamespacesRefused, now_s: float
    ) -> list[Action]:
        """Fall back to the relay where the topology leaves the choice."""
        if not self._wan.awaits_namespaces:
            return []
        if self._wan.may_fall_back:
            return self._wan.fall_back(event.why)
        message = f"emulator: netns was asked for, and cannot be here: {event.why}"
        return self._fail("LAUNCH_FAILED", message, now_s)

    def _fail(
        self,
        code: str,
        message: str,
        now_s: float,
        *,
        at_s: float | None = None,
        site: str = "",
        rank: int = -1,
        log_path: str = "",
        is_last: bool = False,
    ) -> list[Action]:
        """Note a failure that the coordinator itself found: now, unless it says `at_s`."""
        failure = Failure(
            code=code,
            message=message,
            at_s=now_s if at_s is None else at_s,
            site=site,
            rank=rank,
            log_path=log_path,
        )
        return self._take((failure,), now_s, is_last=is_last)

    def _take(
        self, failures: Sequence[Failure], now_s: float, *, is_last: bool = False
    ) -> list[Action]:
        """Note failures that came together: of a site, where the run may survive them all."""
        real = [each for each in failures if not each.is_collateral]
        sites = {each.reported_by or each.site for each in failures}
        is_loss = all(each.code in self._losable and each.site for each in real)
        if self.is_going_on and self._may_lose and is_loss:
            for site in sites & self._sites.keys():
                self._sites[site].losses += failures
            return [_reported(each) for each in failures]
        actions: list[Action] = []
        if failures and not self._ending.has_begun:
            actions += self._blame_losses(now_s)
        for each in failures:
            actions += self._ending.fail(each, now_s, is_last=is_last)
        return actions

    def _blame_losses(self, now_s: float) -> list[Action]:
        """What befell sites that are not out yet may explain what ends the run."""
        actions: list[Action] = []
        for site in self._all():
            if site.is_out or not site.losses:
                continue
            for failure in site.losses:
                self._ending.fail(failure, now_s)
            if site.is_lost_perhaps:
                site.state = SiteState.LOST
                message = site.losses[0].message
                actions.append(RecordEvent("site.lost", site.name, {"message": message}))
        return actions

    def _drop_requested(self, event: run_events.DropRequested) -> list[Action]:
        """Note that a site is to take part no more, and that it is not started again."""
        site = self._sites[event.site]
        site.is_dropped, site.is_wanted = True, False
        asked = RecordEvent("site.drop_requested", site.name, {"message": event.message})
        return [asked, *(self._give_return_up(site, event.message) if site.is_out else [])]

    def _drop_refused(self, event: run_events.DropRefused) -> list[Action]:
        """Take a drop back that nobody has begun with."""
        site = self._sites[event.site]
        if site.name not in self.awaits_drop:
            return []
        site.is_dropped = False
        note = f"site {site.name} is not dropped: {event.why}"
        return [RecordEvent("site.drop_refused", site.name, {"note": note})]

    def _add_requested(self, event: run_events.AddRequested) -> list[Action]:
        """Have a site started again, whatever became of it before."""
        site = self._sites[event.site]
        site.is_dropped, site.is_wanted = False, True
        return [RecordEvent("site.add_requested", site.name)]

    def _dropped(self, event: run_events.SiteDropped, now_s: float) -> list[Action]:
        """Go on without a site; what may be left there has to go."""
        site = self._sites[event.site]
        if not self.is_going_on or site.is_successful:
            return []
        if site.is_out:
            return self._give_return_up(site, event.why)
        if not (self._may_lose or site.is_dropped or site.has_ended_early):
            return self._fail("PEER_LOST", event.why, now_s, site=site.name)
        return self._go_on_without(site, event.why, now_s)

    def _go_on_without(self, site: _Site, why: str, now_s: float) -> list[Action]:
        """End what is left of a site that was dropped, or is lost."""
        site.is_out, site.is_leaving, site.is_successful = True, False, False
        site.is_done = False
        self._stalls.forget(site.name)
        self._steps.drop(site.name)
        stop: list[Action] = []
        if site.may_have_processes:
            stop = [self._let_go(site, why)]
            site.state = SiteState.LOST
        site.why_out = first_failure(site.losses).message if site.losses else why
        note = f"the run goes on without site {site.name}: {site.why_out}"
        if self._topology.failure.max_restarts and self._return_problem:
            note += f"; {self._return_problem}"
        if site.is_dropped:
            note = f"site {site.name} was dropped, and the run goes on without it"
        detail: dict[str, object] = {"message": site.why_out, "note": note, "is_out": True}
        if site.has_ended_early and not site.is_dropped:  # that was said at once
            del detail["note"]
        actions = [self._gone(site, detail), *stop]
        difference = self._digests.drop(site.name)
        return actions if difference is None else [*actions, *self._differ(difference, now_s)]

    def _let_go(self, site: _Site, why: str) -> Action:
        """End what is left of a site; where its ranks are done, only gateways are."""
        return run_events.SendRelease(site.name) if site.has_ended_early else self._stop(site, why)

    def _give_return_up(self, site: _Site, why: str) -> list[Action]:
        if not site.is_returning or not site.may_have_processes:
            return []
        site.state, site.is_returning = SiteState.LOST, False
        return [self._gone(site, {"message": why}), self._let_go(site, why)]

    def _gone(self, site: _Site, detail: dict[str, object]) -> RecordEvent:
        kind = "site.let_go" if site.has_ended_early else "site.lost"
        kind = "site.dropped" if site.is_dropped else kind
        return RecordEvent(kind, site.name, {**detail, "state": site.state.value})

    def _entered(self, event: run_events.SiteEntered) -> list[Action]:
        """A site takes part again; where all others are done, there is nothing left to do."""
        site = self._sites[event.site]
        if not site.is_returning or self._are_all_done:
            return []
        note = f"site {site.name} takes part{'' if site.is_later else ' again'}"
        site.is_out = site.is_returning = site.is_later = False
        site.num_vain = 0
        site.losses.clear()
        self._digests.regain(site.name)
        return [RecordEvent("site.returned", site.name, {"round": event.round, "note": note})]

    def _bring_back(self, now_s: float, being_let_in: Collection[str]) -> list[Action]:
        """Start sites again that were lost, where nothing of the run is left there."""
        # An earlier coordinator may have ended between a drop and what comes of it.
        dropped = [site for site in self._all() if site.is_dropped and site.is_returning]
        actions: list[Action] = []
        for site in dropped:
            actions += self._give_return_up(site, DROPPED)
        if not self.brings_back:
            return actions
        for site in self._all():
            is_prepared = site.is_returning and site.state is SiteState.PREPARED
            if is_prepared and self._wan.leads_to(site.endpoints):
                site.state, site.is_told_to_start = SiteState.STARTING, True
                actions.append(RecordEvent("site.starting", site.name))
                book = self._address_book()
                actions.append(run_events.SendStart(site.name, book[site.name]))
                # Who comes back as well may be about to take over what lies at this site.
                actions += [
                    run_events.SendStart(each.name, book[each.name])
                    for each in self._all()
                    if each.is_returning and each.is_told_to_start and each is not site
                ]
            lately = self._restarts(site, now_s)
            is_free = site.state is (SiteState.JOINED if site.is_new else SiteState.ENDED)
            is_free &= site.name not in being_let_in
            has_paused = not lately or now_s - lately[-1] >= self._pause_s(site)
            is_due = has_paused and self._may_restart(site, now_s)
            is_due &= not (site.is_dropped or site.is_new or site.has_ended_early)
            if site.is_out and site.has_agent and is_free and (is_due or site.is_wanted):
                note = f"site {site.name} is started{'' if site.is_later else ' again'}"
                site.returns_s = [*lately, now_s]
                site.num_vain += 1
                site.begin_return()
                actions.append(RecordEvent("site.returning", site.name, {"note": note}))
                actions.append(self._prepare_return(site))
        return actions

    def _restarts(self, site: _Site, now_s: float) -> list[float]:
        """Return when a site was started again lately."""
        return [each for each in site.returns_s if now_s - each < RETURNS_WITHIN_S]

    def _may_restart(self, site: _Site, now_s: float) -> bool:
        """Whether a site was not started again too often lately."""
        return len(self._restarts(site, now_s)) < self._topology.failure.max_restarts

    def _prepare_return(self, site: _Site) -> Action:
        namespace = (self._wan.namespaces or {}).get(site.name)
        return run_events.SendPrepare(site.name, namespace, returns=True)

    def _cannot_go_on(self, event: run_events.CannotGoOn, now_s: float) -> list[Action]:
        """End the run, for the first of what befell its sites."""
        if not self.is_going_on:
            return []
        # Sites with unlike results are not explained by one that is silent.
        explains = event.code != "PARAMETERS_DIFFER"
        actions = self._blame_losses(now_s) if explains else []
        if self._ending.has_begun:
            return actions
        if self._losses and event.code == "SITE_LOST":
            return self._ending.fail(first_failure(self._losses), now_s, is_last=True)
        failure = Failure(code=event.code, message=event.why, at_s=now_s)
        return self._ending.fail(failure, now_s, is_last=True)

    # ------------------------------------------------------------ decisions

    def _form(self, now_s: float) -> list[Action]:
        """Take all sites one stage further, once all have reached the one before.

        An earlier coordinator may have got half of them there.
        """
        if self._ending.has_begun or self.state is not RunState.FORMING:
            return []
        if self._is_rolling_back:
            if not all(s.state is SiteState.ENDED and s.has_agent for s in self._present()):
                return []
            self._begin_again()
        states = {site.state for site in self._present()}
        if states == {SiteState.JOINED}:
            return self._prepare()
        if not self._may_start:
            return self._activate(now_s)
        listening = tuple(endpoint for site in self._present() for endpoint in site.endpoints)
        if not self._wan.leads_to(listening):
            return self._wan.ask_for_relay(listening)
        return self._start(self._address_book())

    def _begin_again(self) -> None:
        """Forget how far a run had got that was rolled back."""
        self._is_rolling_back = False
        for site in self._present():
            site.begin_again()
        self._wan.await_others()
        self._begin_comparing()

    def _address_book(self) -> dict[str, tuple[Endpoint, ...]]:
        """Return whom each site dials: the gateways of the sites that it has a link to."""
        present = [site for site in self._all() if site.is_returning or not site.is_out]
        listening = [endpoint for site in present for endpoint in site.endpoints]
        return {
            site.name: self._wan.ways(
                site.name,
                [each for each in listening if self._topology.link(site.name, each.site)],
            )
            for site in self._all()
        }

    @property
    def _may_start(self) -> bool:
        """Whether all gateways listen, and some ranks were not started yet."""
        states = {site.state for site in self._present()}
        begun = {SiteState.PREPARED, SiteState.STARTING, SiteState.RUNNING}
        return SiteState.PREPARED in states and states <= begun

    def _prepare(self) -> list[Action]:
        """Tell all sites to prepare; where packets are emulated, once the namespaces are there."""
        if any(site.is_told_to_prepare for site in self._all()):
            return []
        namespaces = self._wan.namespaces
        if namespaces is None:
            return self._wan.ask_for_namespaces()
        for site in self._present():
            site.is_told_to_prepare = True
        prepare = [run_events.SendPrepare(s.name, namespaces.get(s.name)) for s in self._present()]
        return [RecordEvent("run.preparing"), *prepare]

    def _start(self, book: Mapping[str, tuple[Endpoint, ...]]) -> list[Action]:
        """Start all sites, each with its own address book."""
        if self._ending.has_begun or not self._may_start:
            return []
        actions: list[Action] = []
        for site in [each for each in self._all() if each.state is SiteState.PREPARED]:
            site.state = SiteState.STARTING
            site.is_told_to_start = True
            actions.append(RecordEvent("site.starting", site.name))
            actions.append(run_events.SendStart(site.name, book.get(site.name, ())))
        return actions

    def _release_if_done(self) -> list[Action]:
        """Let all gateways go once every site is done: one that is lost before may need them."""
        if self._is_released or not self.is_going_on or not self._are_all_done:
            return []
        self._is_released = True
        waiting = [site for site in self._present() if site.may_have_processes]
        for site in waiting:
            if site.is_lost_perhaps:  # nobody waits for its lease
                site.state = SiteState.LOST
        return [run_events.SendRelease(site.name) for site in waiting]

    @property
    def _are_all_done(self) -> bool:
        """Whether the ranks of all sites that take part are done with the job."""
        sites = self._present()
        return bool(sites) and all(site.is_done or site.is_successful for site in sites)

    def _stop_if_due(self, now_s: float) -> list[Action]:
        """Stop all sites: for a cancellation, a failure that was waited for, or a late start."""
        actions: list[Action] = []
        is_late = self.state is RunState.FORMING and now_s >= self._start_deadline_s
        if is_late and not self._ending.has_begun:
            actions += self._start_timed_out(now_s)
        if not self._ending.is_stop_due(now_s):
            return actions
        reason = self._ending.verdict.reason
        self._ending.stopped_s = now_s
        self.state = RunState.STOPPING
        actions.append(RecordEvent("run.stopping", detail={"reason": reason}))
        actions += [self._stop(site, reason) for site in self._all() if site.may_have_processes]
        return actions

    def _start_timed_out(self, now_s: float) -> list[Action]:
        """Fail a start that took too long, for the sites furthest behind: the others wait."""
        states = {site.state for site in self._present()}
        behind = next(state for state in _WHAT_IS_MISSING if state in states)
        names = [site.name for site in self._present() if site.state is behind]
        told = "site" if len(names) == 1 else "sites"
        message = (
            f"not up within {self._timeouts.start_s:g} s: {told} {', '.join(names)}: "
            f"{behind.lower()}, {_WHAT_IS_MISSING[behind]}"
        )
        site = names[0] if len(names) == 1 else ""
        return self._fail("START_TIMED_OUT", message, now_s, site=site, is_last=True)

    def stop_late(self, site: str) -> Action:
        """Return what a site is told that has come up after the run's end."""
        return self._stop(self._sites[site], "the run has ended")

    def _stop(self, site: _Site, reason: str) -> Action:
        site.is_told_to_stop = True
        return run_events.SendStop(site.name, reason, self._timeouts.stop_grace_s)

    def _finish_if_over(self, now_s: float) -> list[Action]:
        """End the run once nothing of it is left, or a site has had long enough to say so."""
        actions: list[Action] = []
        is_done = bool(self.successful or self._is_released) and all(
            site.is_successful or site.is_out or (self._is_released and site.state in _GONE)
            for site in self._all()
        )
        if is_done and not self._ending.has_begun:
            difference = self._digests.flush()
            if difference is None:
                late = [site for site in self._all() if site.is_returning]
                stops = [self._stop(site, "the run has ended") for site in late]
                return [*stops, *self._finish(self._success, now_s)]
            actions += self._differ(difference, now_s)
        if not self._ending.has_begun:
            return actions
        remaining = [site for site in self._all() if site.may_have_processes]
        stopped_s = self._ending.stopped_s
        if remaining and (stopped_s is None or now_s < stopped_s + self._confirm_s):
            return actions
        actions += [RecordEvent("site.unconfirmed", site.name) for site in remaining]
        return actions + self._finish(self._ending.verdict, now_s)

    @property
    def _success(self) -> Verdict:
        """What a run has come to that has gone well for those who were there at its end."""
        lost = [
            site
            for site in self._all()
            if site.is_out and not (site.is_later or site.is_dropped or site.has_ended_early)
        ]
        said = [f"site {each.name} was lost and did not come back: {each.why_out}" for each in lost]
        said += [self._last_checkpoint_problem] if self._last_checkpoint_problem else []
        if not said or self._topology.failure.allows_losses:
            return Verdict(RunState.SUCCEEDED)
        failures = [failure for site in lost for failure in site.losses]
        failure = first_failure(failures) if failures else None
        return Verdict(RunState.SUCCEEDED, "WITH_LOSSES", "; ".join(said), failure)

    @property
    def _last_checkpoint_problem(self) -> str:
        """Why the run's last checkpoint is not there; empty: it is, or none was wanted."""
        failed = self._unsaved
        if failed is not None and failed.step > self._saved_step:
            return (
                f"the last checkpoint, of step {failed.step}, failed at site {failed.site}: "
                f"{failed.reason}"
            )
        if self._saved_step >= 0 or not (self._saves and self._has_steps):
            return ""
        return "no checkpoint was written" + ("" if self._has_state else f": {NO_STATE}")

    @property
    def _confirm_s(self) -> float:
        """After Stop, for a site to say that nothing is left; its agent's lease ends by then."""
        return self._timeouts.stop_grace_s + self._timeouts.lease_s

    def _finish(self, verdict: Verdict, now_s: float) -> list[Action]:
        failure = verdict.failure
        begun = [site for site in self._all() if not site.is_later]
        left = [site for site in begun if site.is_out]
        early = [site.name for site in left if site.has_ended_early and not site.is_dropped]
        dropped = [site.name for site in left if site.is_dropped]
        out = [site.name for site in left if site.name not in {*early, *dropped}]
        told = [f"sites lost on the way: {', '.join(out)}"] if out else []
        told += [f"sites that ended before the others: {', '.join(early)}"] if early else []
        told += [f"sites dropped on the way: {', '.join(dropped)}"] if dropped else []
        detail: dict[str, object] = {
            "state": verdict.state.value,
            "reason_code": verdict.code,
            "reason": verdict.reason,
            "failure": failure.to_json() if failure else None,
            "active_s": self.active_for_s(now_s),
        }
        if told:
            detail["note"] = "; ".join(told)
        if self._ending.stopped_s is None:
            self._ending.stopped_s = now_s
        self.state = verdict.state
        recorded = RecordEvent("run.ended", detail=detail)
        finish = run_events.FinishRun(verdict.state, verdict.code, verdict.reason, failure)
        return [recorded, finish]

    def _all(self) -> Sequence[_Site]:
        return list(self._sites.values())

    def _present(self) -> Sequence[_Site]:
        return [site for site in self._all() if not site.is_out]


def _noted_not_finite(found: NotFinite | None) -> list[Action]:
    if found is None:
        return []
    detail = {"step": found.step, "rank": found.rank, "tensor": found.tensor, "note": found.note}
    return [RecordEvent("gradient.non_finite", found.site if found.rank >= 0 else "", detail)]


def _reported(failure: Failure) -> Action:
    return RecordEvent("failure.reported", failure.site, failure.to_json())


class _Ending:
    """Why a run ends before its work is done: a first failure, or a cancellation.

    After a failure the other sites have a moment to report theirs. Then all are stopped.
    """

    def __init__(self, collect_s: float) -> None:
        """Nothing has happened yet.

        After the first failure others have `collect_s` to come that may explain it.
        """
        self.stopped_s: float | None = None
        """When the sites were told to stop, or had ended by themselves."""
        self._collect_s = collect_s
        self._failures: list[Failure] = []
        self._collect_deadline_s = math.inf
        self._cancelled_because = ""

    @property
    def has_begun(self) -> bool:
        """Whether the run will not succeed any more."""
        return bool(self._failures or self._cancelled_because)

    @property
    def verdict(self) -> Verdict:
        """What the run has come to, once its end `has_begun`."""
        if self._cancelled_because:
            return Verdict(RunState.CANCELLED, "CANCELLED", self._cancelled_because)
        first = first_failure(self._failures)
        return Verdict(RunState.FAILED, first.code, first.reason, first)

    def fail(self, failure: Failure, now_s: float, *, is_last: bool = False) -> list[Action]:
        """Note a failure. What breaks after the sites were told to stop follows from that.

        With `is_last` no other could explain it, so none is waited for.
        """
        if self.stopped_s is not None and failure.at_s > self.stopped_s:
            failure = replace(failure, is_collateral=True)
        if not self._failures:
            self._collect_deadline_s = now_s + (0.0 if is_last else self._collect_s)
        self._failures.append(failure)
        return [_reported(failure)]

    def cancel(self, because: str) -> list[Action]:
        """Note that somebody wants the run to end, unless a failure came first."""
        if self.has_begun:
            return []
        self._cancelled_because = because
        return [RecordEvent("run.cancel_requested", detail={"message": because})]

    def is_stop_due(self, now_s: float) -> bool:
        """Whether the sites are to be told to stop now."""
        is_known = bool(self._cancelled_because) or now_s >= self._collect_deadline_s
        return is_known and self.stopped_s is None


class _WanStage:
    """How a run's WAN is emulated: asks for an emulator once, and knows what came of it.

    Packets are emulated in namespaces, which are there before sites prepare. A relay dials the
    gateways, so it is opened after sites have prepared, and led to those that are started later.
    """

    def __init__(self, topology: Topology) -> None:
        self.uses_relay = topology.emulate and topology.emulator == "relay"
        self.may_fall_back = topology.emulator != "netns"
        """Whether a relay will do where packets cannot be emulated."""
        needs_namespaces = topology.emulate and not self.uses_relay
        self.namespaces: Mapping[str, SiteNamespace] | None = None if needs_namespaces else {}
        """The sites' namespaces; None until they are open."""
        self._are_namespaces_asked = False
        self._is_relay_asked = False
        self._ways: dict[Endpoint, Mapping[str, Endpoint]] = {}
        """For each gateway to which a relay leads: where it is dialled instead, by the dialler."""

    @property
    def awaits_namespaces(self) -> bool:
        """Whether namespaces were asked for, and have not come."""
        return self._are_namespaces_asked and self.namespaces is None

    def ask_for_namespaces(self) -> list[Action]:
        """Return the action that opens namespaces; none where they were asked for before."""
        is_first, self._are_namespaces_asked = not self._are_namespaces_asked, True
        return [run_events.OpenNamespaces()] if is_first else []

    def ask_for_relay(self, listening: Iterable[Endpoint]) -> list[Action]:
        """Return the action that opens the relay; none where it was asked for before."""
        is_first, self._is_relay_asked = not self._is_relay_asked, True
        return [run_events.OpenRelay(tuple(listening))] if is_first else []

    def await_others(self) -> None:
        """Gateways will listen elsewhere, to which a relay has to lead anew."""
        self._is_relay_asked = False

    def lead_to(self, listening: Sequence[Endpoint]) -> list[Action]:
        """Have the relay, if there is one, lead to these gateways of a site, not to older ones."""
        if not (self.uses_relay and listening):
            return []
        site = listening[0].site
        self._ways = {each: ways for each, ways in self._ways.items() if each.site != site}
        return [run_events.OpenRelay(tuple(listening))]

    def leads_to(self, listening: Iterable[Endpoint]) -> bool:
        """Whether all these gateways can be dialled by now."""
        return not self.uses_relay or all(each in self._ways for each in listening)

    def ways(self, dialler: str, listening: Iterable[Endpoint]) -> tuple[Endpoint, ...]:
        """Return where a site dials these gateways, as far as it can.

        Those without a port dial it, and stand there as they are.
        """
        if not self.uses_relay:
            return tuple(listening)
        found = [
            each if not each.port else self._ways.get(each, {}).get(dialler) for each in listening
        ]
        return tuple(each for each in found if each is not None)

    def relay_opened(self, ways: Mapping[Endpoint, Mapping[str, Endpoint]]) -> list[Action]:
        """Take where the relay listens for each of some gateways."""
        is_first = not self._ways
        self._ways.update(ways)
        return [RecordEvent("wan.emulated", detail={"emulator": "relay"})] if is_first else []

    def opened(self, namespaces: Mapping[str, SiteNamespace]) -> list[Action]:
        """Take the namespaces in which packets are emulated."""
        if not self.awaits_namespaces:
            return []
        self.namespaces = namespaces
        return [RecordEvent("wan.emulated", detail={"emulator": "netns"})]

    def fall_back(self, why: str) -> list[Action]:
        """Take the relay instead, and say what that loses."""
        self.namespaces, self.uses_relay = {}, True
        return [RecordEvent("wan.fallback", detail={"note": f"{FALLBACK} {why}"})]
