"""How a run begins: all sites come up together, or all are rolled back and begin again. Pure.

Prepare goes to all sites once each has an agent. Start goes to all once all are prepared. Where the
WAN is emulated by packets, its namespaces are opened before Prepare; a relay is opened after it. A
site whose agent is lost meanwhile rolls all back: what was started is stopped, and all begin again
once the agent is back, within `failure.start_within`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from isthmus.orchestrator.core import run_events
from isthmus.orchestrator.core.event_kinds import EventKind
from isthmus.orchestrator.core.known_run import KnownRun
from isthmus.orchestrator.core.members import Member, Stage
from isthmus.orchestrator.core.run_events import Action, Endpoint, RecordEvent
from isthmus.orchestrator.core.wan_stage import WanStage

_WHAT_IS_MISSING = {
    Stage.LOST: "lost, its agent has not come back",
    Stage.NO_AGENT: "absent, no agent has joined",
    Stage.JOINED: "joined, its gateways do not listen yet",
    Stage.PREPARING: "joined, its gateways do not listen yet",
    Stage.PREPARED: "prepared, it waits for the WAN",
    Stage.STARTING: "starting, its ranks have not all joined",
    Stage.ENDED: "ended, it has yet to be started again",
}
"""Why a site is not running, in the order in which a site comes up."""


class Forming:
    """Brings the sites up with which a run begins."""

    def __init__(self, known: KnownRun, now_s: float) -> None:
        """Begin with what the journal says of the sites: nothing, of a new run."""
        self._topology, self._record, self._contacts = known.topology, known.record, known.contacts
        self._members = known.record.members
        self._within_s = known.timeouts.start_s
        self._deadline_s = now_s + self._within_s
        self.wan = WanStage(known.topology)

    def put_off(self, now_s: float) -> None:
        """Begin the time for the start anew: a site fetches, which takes as long as it takes."""
        self._deadline_s = now_s + self._within_s

    def is_late(self, now_s: float) -> bool:
        """Whether the start takes too long."""
        return now_s >= self._deadline_s

    def next(self) -> Iterator[Action]:
        """Take all sites one stage further, once all have reached the one before.

        An earlier coordinator may have got half of them there. Of a run that is rolled back nothing
        is started until all have ended, and all agents are there.
        """
        present = self._present()
        if self._record.is_rolling_back:
            is_due = all(
                site.stage is Stage.ENDED and self._contacts[site.name].has_agent
                for site in present
            )
        else:
            is_due = {site.stage for site in present} == {Stage.JOINED}
        if is_due:
            yield from self._prepare()
        if not self._may_start:
            return
        listening = tuple(endpoint for site in present for endpoint in site.endpoints)
        if self.wan.leads_to(listening):
            yield from self._start()
        else:
            yield from self.wan.ask_for_relay(listening)

    @property
    def is_up(self) -> bool:
        """Whether all sites are up; a short job may have ended at some already."""
        return all(
            site.stage is Stage.RUNNING or site.is_done or site.has_finished
            for site in self._present()
        )

    def _prepare(self) -> Iterator[Action]:
        """Tell all sites to prepare; where packets are emulated, once the namespaces are there."""
        namespaces = self.wan.namespaces
        if namespaces is None:
            yield from self.wan.ask_for_namespaces()
            return
        self.wan.await_others()
        yield RecordEvent(EventKind.RUN_PREPARING)
        for site in self._present():
            self._contacts[site.name].is_told_to_stop = False
            yield run_events.SendPrepare(site.name, namespaces.get(site.name))

    @property
    def _may_start(self) -> bool:
        """Whether all gateways listen, and some ranks were not started yet."""
        stages = {site.stage for site in self._present()}
        begun = {Stage.PREPARED, Stage.STARTING, Stage.RUNNING}
        return Stage.PREPARED in stages and stages <= begun

    def _start(self) -> Iterator[Action]:
        """Start all sites, each with its own address book."""
        book = self.address_book()
        for site in [each for each in self._members.values() if each.stage is Stage.PREPARED]:
            yield RecordEvent(EventKind.SITE_STARTING, site.name)
            yield run_events.SendStart(site.name, book[site.name])

    def address_book(self) -> dict[str, tuple[Endpoint, ...]]:
        """Return whom each site dials: the gateways of the sites that it has a link to."""
        present = [
            site for site in self._members.values() if site.is_returning or not site.is_outside
        ]
        listening = [endpoint for site in present for endpoint in site.endpoints]
        return {
            name: self.wan.ways(
                name, [each for each in listening if self._topology.link(name, each.site)]
            )
            for name in self._members
        }

    def roll_back(self, lost: Member, why: str, now_s: float) -> RecordEvent:
        """Return the record that all begin again once a site that was lost is back."""
        left_s = max(0.0, self._deadline_s - now_s)
        note = f"{why}; all sites begin again if it is back within {left_s:.0f} s"
        return RecordEvent(EventKind.RUN_ROLLED_BACK, lost.name, {"message": why, "note": note})

    def why_late(self) -> tuple[str, str]:
        """Return the site that is furthest behind, if there is one such, and what is missing."""
        stages = {site.stage for site in self._present()}
        behind = next(stage for stage in _WHAT_IS_MISSING if stage in stages)
        names = [site.name for site in self._present() if site.stage is behind]
        message = (
            f"not up within {self._within_s:g} s: {'site' if len(names) == 1 else 'sites'} "
            f"{', '.join(names)}: {_WHAT_IS_MISSING[behind]}"
        )
        return names[0] if len(names) == 1 else "", message

    def _present(self) -> Sequence[Member]:
        return [site for site in self._members.values() if not site.is_outside]
