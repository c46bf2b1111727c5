"""A coordinator's part in a case where a site is done before the others: they go on without it.

What is decided is the product's, and so is what passes from there to gateways and back.
"""

from __future__ import annotations

import io
import time
from collections.abc import Sequence
from functools import partial

from isthmus.orchestrator.coordinator.run_epochs import (
    epoch_message,
    epoch_rules,
    first_epoch,
    paused_from,
)
from isthmus.orchestrator.core.epoch_changes import Action
from isthmus.orchestrator.core.epochs import Epochs
from isthmus.orchestrator.core.event_kinds import EventKind
from isthmus.orchestrator.core.journaled_run import JournaledRun
from isthmus.orchestrator.core.members import Contact
from isthmus.orchestrator.core.run_events import (
    Event,
    RecordEvent,
    RoundBegun,
    SendCancel,
    SendPause,
    SendResume,
    SiteDone,
    SiteEndedEarly,
)
from isthmus.protos import metrics
from isthmus.protos.control.v1.control_pb2 import Resumed, Settled
from isthmus.sites.agent.site_gateways import EpochChange
from isthmus.sites.gateway import agent_port
from isthmus.sites.local.rank_messages import Metric
from isthmus.topology.spec.json_lines import line_of
from isthmus.topology.spec.run_spec import RunSpec
from tests.fakes.gateway_sites import Member
from tests.fakes.run_worlds import read_again


class Coordinated:
    """The sites of one case, of one gateway each."""

    def __init__(self, spec: RunSpec, members: Sequence[Member]) -> None:
        """Begin with all of them."""
        self._record = JournaledRun("run", spec.site_names, first_epoch(spec))
        contacts = {name: Contact() for name in spec.site_names}
        self._epochs = Epochs(epoch_rules(spec), self._record, contacts)
        self._members = {member.config.site: member for member in members}
        self._ranks = {site.name: site.num_ranks for site in spec.topology.sites}
        self._num_read = dict.fromkeys(self._members, 0)
        self._last_rounds: dict[str, list[int]] = {site: [] for site in self._members}
        self._agents = {
            site: EpochChange(1, partial(self._tell, site), partial(self._hear, site))
            for site in self._members
        }
        self.early: list[SiteEndedEarly] = []
        """Who has ended before others."""

    def look(self) -> None:
        """Take what gateways have said, and have them do what follows."""
        for site, member in self._members.items():
            said = member.said[self._num_read[site] :]
            self._num_read[site] += len(said)
            for each in said:
                self._take(site, each)

    def _take(self, site: str, said: agent_port.Said) -> None:
        match said:
            case agent_port.RankLeft(round=round_):
                rounds = self._last_rounds[site]
                rounds.append(round_)
                if len(rounds) == self._ranks[site]:
                    self._handle(SiteDone(site, max(rounds)))
            case Metric(kind=metrics.LINK, step=step):
                self._handle(RoundBegun(site, step))
            case agent_port.Settled() | agent_port.Resumed():
                self._agents[site].answered(said)

    def _handle(self, event: Event) -> None:
        now_s = time.monotonic()
        if isinstance(event, SiteDone):
            self._write(RecordEvent(EventKind.SITE_DONE, event.site, {"round": event.round}), now_s)
        for action in self._epochs.handle(event, now_s):
            if isinstance(action, RecordEvent):
                self._write(action, now_s)
            else:
                self._do(action)

    def _write(self, record: RecordEvent, now_s: float) -> None:
        self._record.apply(read_again(record, 0), now_s)

    def _do(self, action: Action) -> None:
        match action:
            case SiteEndedEarly():
                self.early.append(action)
            case SendPause():
                told = epoch_message(action, "run", 1, lambda *_: ())
                self._agents[action.site].settle(told.settle)
            case SendResume():
                told = epoch_message(action, "run", 1, lambda *_: ())
                self._agents[action.site].resume(told.resume)
            case SendCancel():
                self._agents[action.site].cancel(action.epoch)

    def _tell(self, site: str, command: agent_port.Command) -> None:
        gateway = self._members[site].gateway
        for told in agent_port.read_commands(io.BytesIO(line_of(command))):
            match told:
                case agent_port.Settle():
                    gateway.settle(told)
                case agent_port.Resume():
                    gateway.resume(told)

    def _hear(self, site: str, answer: Settled | Resumed) -> None:
        if isinstance(answer, Settled):
            self._handle(paused_from(site, answer))
