"""The life of one run: all sites start together or none does, and every end has one first cause.

- FORMING: Prepare to all once every site has an agent; Start to all once all are prepared. Where
  the WAN is emulated, namespaces are opened before Prepare, or else a relay after it.
- ACTIVE: all sites are running.
- STOPPING: a failure (after a moment in which the other sites may report theirs) or a cancellation;
  Stop went to every site that was told to prepare.
- SUCCEEDED: every site ended by itself, well. FAILED. CANCELLED.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from orchestrator.core import events, found_failures
from orchestrator.core.digests import Difference, DigestComparison
from orchestrator.core.events import Action, Endpoint, RecordEvent
from orchestrator.core.run_ending import RunEnding, Verdict
from orchestrator.core.run_sites import RunSite, start_timed_out
from orchestrator.core.states import RunState, SiteState
from orchestrator.core.wan_stage import WanStage
from topology.timeouts import Timeouts
from topology.world import Topology


class RunMachine:
    """Pure: events in, actions out. Messages of other generations never come here."""

    def __init__(self, topology: Topology, now_s: float) -> None:
        self.state = RunState.FORMING
        self._topology = topology
        self._timeouts = Timeouts.derive(topology.failure)
        self._sites = {site.name: RunSite(site.name) for site in topology.sites}
        self._digests = DigestComparison({site.name: site.num_ranks for site in topology.sites})
        self._start_deadline_s = now_s + self._timeouts.start_s
        self._wan = WanStage(topology)
        self._ending = RunEnding(self._timeouts.collect_s)
        self._active_s: float | None = None

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

    def handle(self, event: events.Event, now_s: float) -> list[Action]:
        """Apply one event. Late, repeated and impossible ones change nothing.

        Args:
            event: what happened.
            now_s: the coordinator's monotonic clock; never less than in the call before.
        """
        if self.state.is_terminal or self._is_of_another_site(event):
            return []
        actions = self._apply(event, now_s)
        actions += self._form()
        actions += self._stop_if_due(now_s)
        actions += self._finish_if_over(now_s)
        return actions

    def _is_of_another_site(self, event: events.Event) -> bool:
        """Whether it is about a site that takes no part: an agent may be there all the same."""
        site = getattr(event, "site", None)
        return site is not None and site not in self._sites

    # ------------------------------------------------------------ facts

    def _apply(self, event: events.Event, now_s: float) -> list[Action]:
        """Take the event into the facts; nothing is decided here."""
        match event:
            case events.SiteJoined():
                return self._joined(event)
            case events.SiteLost():
                return self._lost(event, now_s)
            case events.AgentEnded():
                return self._agent_ended(event, now_s)
            case events.SitePrepared():
                return self._sites[event.site].prepared(event.endpoints)
            case events.SiteRunning():
                return self._running(event, now_s)
            case events.SiteEnded():
                return self._ended(event, now_s)
            case events.DigestReported():
                return self._compared(event, now_s)
            case events.NamespacesOpened():
                return self._wan.opened(event.namespaces)
            case events.NamespacesRefused():
                return self._namespaces_refused(event, now_s)
            case events.RelayOpened():
                recorded = RecordEvent("wan.emulated", detail={"emulator": "relay"})
                return [recorded, *self._start(event.endpoints)]
            case events.EmulatorEnded():
                return self._ending.fail(found_failures.emulator_ended(event, now_s), now_s)
            case events.CancelRequested():
                return self._ending.cancel(event.message)
            case events.Ticked():
                return []

    def _namespaces_refused(self, event: events.NamespacesRefused, now_s: float) -> list[Action]:
        """Fall back to the relay where the topology leaves the choice."""
        if not self._wan.awaits_namespaces:
            return []
        instead = self._wan.fall_back(event.why)
        if instead is not None:
            return instead
        return self._ending.fail(found_failures.namespaces_refused(event, now_s), now_s)

    def _joined(self, event: events.SiteJoined) -> list[Action]:
        site = self._sites[event.site]
        recorded = RecordEvent("site.joined", site.name, {"host": event.host})
        if site.state is SiteState.ABSENT:
            site.state = SiteState.JOINED
            return [recorded]
        if site.state is SiteState.LOST:
            # It is back, but the run goes on without it: whatever is left there has to go.
            return [recorded, self._stop(site, "the site was lost")]
        return []

    def _lost(self, event: events.SiteLost, now_s: float) -> list[Action]:
        site = self._sites[event.site]
        if site.state is SiteState.ABSENT or site.state is SiteState.LOST:
            return []
        detail = {"message": event.message}
        if not site.may_have_processes:
            site.state = SiteState.ABSENT if site.state is SiteState.JOINED else site.state
            return [RecordEvent("site.left", site.name, detail)]
        site.state = SiteState.LOST
        failed = self._ending.fail(found_failures.site_lost(event, now_s), now_s)
        return [RecordEvent("site.lost", site.name, detail), *failed]

    def _agent_ended(self, event: events.AgentEnded, now_s: float) -> list[Action]:
        if self._sites[event.site].state is not SiteState.ABSENT or self._ending.has_begun:
            return []  # its session told, or will tell
        return self._ending.fail(found_failures.agent_ended(event, now_s), now_s)

    def _running(self, event: events.SiteRunning, now_s: float) -> list[Action]:
        site = self._sites[event.site]
        if site.state is not SiteState.STARTING:
            return []
        site.state = SiteState.RUNNING
        return [RecordEvent("site.running", site.name), *self._activate(now_s)]

    def _activate(self, now_s: float) -> list[Action]:
        """Call the run active once all sites are up; a short job may have ended at some already."""
        if self.state is not RunState.FORMING or not all(
            site.state is SiteState.RUNNING or site.is_successful for site in self._all()
        ):
            return []
        self.state = RunState.ACTIVE
        self._active_s = now_s
        return [RecordEvent("run.active")]

    def _ended(self, event: events.SiteEnded, now_s: float) -> list[Action]:
        site = self._sites[event.site]
        if not site.is_told_to_prepare or site.state is SiteState.ENDED:
            return []
        was_lost = site.state is SiteState.LOST
        site.state = SiteState.ENDED
        site.is_successful = event.succeeded and not event.failures and not was_lost
        actions: list[Action] = [
            RecordEvent("site.ended", site.name, {"succeeded": site.is_successful})
        ]
        for failure in event.failures:
            actions += self._ending.fail(failure, now_s)
        is_explained = event.failures or was_lost or site.is_told_to_stop
        if not is_explained and not (site.is_successful and site.is_told_to_start):
            site.is_successful = False
            unasked = found_failures.ended_unasked(site.name, now_s)
            actions += self._ending.fail(unasked, now_s)
        return actions + self._activate(now_s)

    def _compared(self, event: events.DigestReported, now_s: float) -> list[Action]:
        if self._ending.has_begun:
            return []
        difference = self._digests.report(
            event.site, event.rank, event.step, event.combined, event.tensors, event.names
        )
        return [] if difference is None else self._differ(difference, now_s)

    def _differ(self, difference: Difference, now_s: float) -> list[Action]:
        return self._ending.fail(found_failures.parameters_differ(difference, now_s), now_s)

    # ------------------------------------------------------------ decisions

    def _form(self) -> list[Action]:
        """Take all sites one stage further, once all have reached the one before."""
        if self._ending.has_begun:
            return []
        states = {site.state for site in self._all()}
        if states == {SiteState.JOINED}:
            return self._prepare()
        if states != {SiteState.PREPARED}:
            return []
        listening = tuple(endpoint for site in self._all() for endpoint in site.endpoints)
        if not self._wan.uses_relay:
            return self._start(
                {site.name: self._dialled(site.name, listening) for site in self._all()}
            )
        return self._wan.ask_for_relay(listening)

    def _prepare(self) -> list[Action]:
        """Tell all sites to prepare; where packets are emulated, once the namespaces are there."""
        if any(site.is_told_to_prepare for site in self._all()):
            return []
        namespaces = self._wan.namespaces
        if namespaces is None:
            return self._wan.ask_for_namespaces()
        for site in self._all():
            site.is_told_to_prepare = True
        prepare = [events.SendPrepare(s.name, namespaces.get(s.name)) for s in self._all()]
        return [RecordEvent("run.preparing"), *prepare]

    def _dialled(self, source: str, listening: Iterable[Endpoint]) -> tuple[Endpoint, ...]:
        """Return the gateways that a site may dial: those it has a link to."""
        return tuple(each for each in listening if self._topology.link(source, each.site))

    def _start(self, book: Mapping[str, tuple[Endpoint, ...]]) -> list[Action]:
        """Start all sites, each with its own address book."""
        if self._ending.has_begun or any(
            site.state is not SiteState.PREPARED for site in self._all()
        ):
            return []
        actions: list[Action] = []
        for site in self._all():
            site.state = SiteState.STARTING
            site.is_told_to_start = True
            actions.append(RecordEvent("site.starting", site.name))
            actions.append(events.SendStart(site.name, book.get(site.name, ())))
        return actions

    def _stop_if_due(self, now_s: float) -> list[Action]:
        """Stop all sites: for a cancellation, a failure that was waited for, or a late start."""
        actions: list[Action] = []
        is_late = self.state is RunState.FORMING and now_s >= self._start_deadline_s
        if is_late and not self._ending.has_begun:
            timed_out = start_timed_out(self._all(), self._timeouts.start_s, now_s)
            actions += self._ending.fail(timed_out, now_s, at_once=True)
        if not self._ending.is_stop_due(now_s):
            return actions
        reason = self._ending.verdict.reason
        self._ending.stopped_s = now_s
        self.state = RunState.STOPPING
        actions.append(RecordEvent("run.stopping", detail={"reason": reason}))
        actions += [self._stop(site, reason) for site in self._all() if site.may_have_processes]
        return actions

    def _stop(self, site: RunSite, reason: str) -> Action:
        site.is_told_to_stop = True
        return events.SendStop(site.name, reason, self._timeouts.stop_grace_s)

    def _finish_if_over(self, now_s: float) -> list[Action]:
        """End the run once nothing of it is left, or a site has had long enough to say so."""
        actions: list[Action] = []
        if all(site.is_successful for site in self._all()) and not self._ending.has_begun:
            difference = self._digests.flush()
            if difference is None:
                return self._finish(Verdict(RunState.SUCCEEDED), now_s)
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
    def _confirm_s(self) -> float:
        """After Stop, for a site to say that nothing is left; its agent's lease ends by then."""
        return self._timeouts.stop_grace_s + self._timeouts.lease_s

    def _finish(self, verdict: Verdict, now_s: float) -> list[Action]:
        failure = verdict.failure
        detail = {
            "state": verdict.state.value,
            "reason_code": verdict.code,
            "reason": verdict.reason,
            "failure": failure.to_json() if failure else None,
            "active_s": self.active_for_s(now_s),
        }
        if self._ending.stopped_s is None:
            self._ending.stopped_s = now_s
        self.state = verdict.state
        recorded = RecordEvent("run.ended", detail=detail)
        return [recorded, events.FinishRun(verdict.state, verdict.code, verdict.reason, failure)]

    def _all(self) -> Sequence[RunSite]:
        return list(self._sites.values())
