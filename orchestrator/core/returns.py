"""How a site comes up while the run goes on: one that was lost, or that was not there before."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from isthmus.orchestrator.core import run_events
from isthmus.orchestrator.core.event_kinds import EventKind
from isthmus.orchestrator.core.forming import Forming
from isthmus.orchestrator.core.known_run import KnownRun
from isthmus.orchestrator.core.members import Member, Stage, Standing
from isthmus.orchestrator.core.policy import (
    faults_of_node,
    is_restart_due,
    may_restart,
    next_restart_s,
    waits_for_operator,
)
from isthmus.orchestrator.core.rank_reports import NO_STATE
from isthmus.orchestrator.core.run_events import Action, RecordEvent
from isthmus.protos.failure import Failure


class Returns:
    """Starts sites while the run goes on, where nothing of it is left there."""

    def __init__(self, known: KnownRun, forming: Forming, *, may_return: bool) -> None:
        """`may_return`: a site can be given the run's state."""
        self._topology, self._contacts = known.topology, known.contacts
        self._members, self._progress = known.record.members, known.record.progress
        self._forming, self._may_return = forming, may_return

    # ------------------------------------------------------------ whether they may

    @property
    def problem(self) -> str:
        """Why no site comes back; empty: it may, or that is not known yet."""
        if not self._may_return:
            return "no site comes back where `exchange.schedule: off`"
        return f"no site comes back: {NO_STATE}" if self._progress.lacks_state else ""

    def add_problem(self, site: Member) -> str:
        """Return why a site of a run that goes on cannot be started; nothing if it can."""
        if site.is_new:
            return self._new_problem(site)
        if site.standing is Standing.LEAVING:
            return f"site {site.name} is about to leave"
        if not site.is_outside:
            return f"site {site.name} takes part"
        if site.is_returning:
            return f"site {site.name} is coming back already"
        return self.problem

    def _new_problem(self, site: Member) -> str:
        """Return why a site that the run did not begin with cannot be added; nothing if it can."""
        topology = self._topology
        present = [each.name for each in self._members.values() if not each.is_outside]
        if not any(topology.link(site.name, at) and topology.link(at, site.name) for at in present):
            return (
                f"the topology has no link, both ways, between site {site.name} and any that takes "
                f"part ({', '.join(present)}): add a site first to which it has one, or write one "
                "into `links` and go on with `isthmus launch --resume`"
            )
        if not self._contacts[site.name].has_agent:
            place = topology.coordinator.dialled
            at = f"{place.host}:{place.port}" if place.port else "HOST:PORT"
            return (
                f"site {site.name} has no agent: start one there, by `isthmus up` or `isthmus agent "
                f"--site {site.name} --coordinator {at} --topology FILE --state FOLDER`, and add "
                "the site again"
            )
        return self.problem

    def note_in_vain(self, site: Member, why: str, now_s: float, *, brings_back: bool) -> str:
        """Say why a site did not come back, and when it is started again."""
        note = f"site {site.name} did not come back: {why}"
        if not brings_back or waits_for_operator(site):
            return note
        rules = self._topology.failure
        if not may_restart(site, rules, now_s):
            return (
                f"{note}; it is not started again: `failure.max_restarts` are used up, "
                f"{len(site.restarts.lately(now_s))} within an hour (`isthmus sites add` starts it)"
            )
        next_s = max(0.0, next_restart_s(site, rules) - now_s)
        return f"{note}; it is started again in {next_s:.0f} s"

    def keep_out(self) -> Iterator[Action]:
        """Say once of each site that stays out for one of its nodes what is to be done."""
        for site in self._members.values():
            faults = faults_of_node(site)
            if faults and site.is_outside and not site.kept_out:
                node, number = faults[-1].node, len(faults)
                detail = {"node": node, "note": self._kept_out_note(site, node, faults[-1], number)}
                yield RecordEvent(EventKind.NODE_KEPT_OUT, site.name, detail)

    def _kept_out_note(self, site: Member, node: int, fault: Failure, number: int) -> str:
        which = f"node {node} of site {site.name}" if node >= 0 else f"site {site.name}"
        often = "its machine was at fault twice, last: " if number > 1 else ""
        num_nodes = self._topology.site(site.name).nodes
        others = (
            f", or go on with the site's other nodes: cancel, set `nodes: {num_nodes - 1}` for it, "
            "and `isthmus launch --resume`"
            if num_nodes > 1
            else ""
        )
        return (
            f"{which} is kept out: {often}{fault.reason}; test it with `isthmus doctor TOPOLOGY "
            f"--burn-in 60s`, mend or replace it, and `isthmus sites add {site.name}` starts the "
            f"site again{others}"
        )

    # ------------------------------------------------------------ how they do

    def next(self, now_s: float, coming_back: Collection[str]) -> Iterator[Action]:
        """Take each site that comes back one stage further, and start those that are due.

        Of those that are `coming_back` already nothing is started: a refusal would end that, too.
        """
        rules = self._topology.failure
        for name, site in self._members.items():
            contact = self._contacts[name]
            is_prepared = site.is_returning and site.stage is Stage.PREPARED
            if is_prepared and self._forming.wan.leads_to(site.endpoints):
                yield from self._start(site)
            is_due = is_restart_due(site, rules, now_s, has_agent=contact.has_agent)
            if is_due and name not in coming_back:
                note = f"site {name} is started{' again' if site.has_taken_part else ''}"
                yield RecordEvent(EventKind.SITE_RETURNING, name, {"note": note})
                contact.is_told_to_stop = False
                yield self.prepare(site)

    def prepare(self, site: Member) -> Action:
        """Return what an agent is told first."""
        namespace = (self._forming.wan.namespaces or {}).get(site.name)
        return run_events.SendPrepare(site.name, namespace, returns=True)

    def _start(self, site: Member) -> Iterator[Action]:
        """Start the ranks of a site, and lead others to it that come back as well."""
        yield RecordEvent(EventKind.SITE_STARTING, site.name)
        book = self._forming.address_book()
        started = {Stage.STARTING, Stage.RUNNING}
        everybody = self._members.values()
        others = [each for each in everybody if each.is_returning and each.stage in started]
        # They may be about to take over what lies at this site.
        for name in (site.name, *(other.name for other in others if other is not site)):
            yield run_events.SendStart(name, book[name])
