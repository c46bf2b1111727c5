"""The simulated coordinator: the product's machine, a journal that may fail, and leases."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from orchestrator.core.membership import (
    Action,
    EndChange,
    EndRun,
    Event,
    LeaseEnded,
    Limits,
    LoseSite,
    Membership,
    SendCancel,
    SendResume,
    SendSettle,
    SiteDone,
    SiteEnters,
    SiteFinished,
    SiteHeard,
    Ticked,
)
from orchestrator.core.run_events import RecordEvent
from tests.sim.plans import all_pairs, followed_plan, links_of
from topology.epoch import Epoch

Send = SendSettle | SendResume | SendCancel | LoseSite


class CoordinatorDiedError(Exception):
    """It ended in the middle of what it did."""


@dataclass(slots=True)
class FakeJournal:
    """What is on disk: it outlives coordinators."""

    on_kept: Callable[[RecordEvent], None]
    generation: int = 0
    records: list[RecordEvent] = field(default_factory=list)
    dies_at: str = ""
    """What the next record comes to: `torn` or `full` (it is lost, and the coordinator ends), or
    `kept` (it is there, and the coordinator ends before it does anything else)."""

    def append(self, record: RecordEvent) -> None:
        """Write a record.

        Raises:
            CoordinatorDiedError: by `dies_at`.
        """
        dies_at, self.dies_at = self.dies_at, ""
        if dies_at in {"", "kept"}:
            self.records.append(record)
            self.on_kept(record)
        if dies_at:
            raise CoordinatorDiedError(dies_at)


class SimCoordinator:
    """One coordinator process."""

    def __init__(
        self,
        names: tuple[str, ...],
        limits: Limits,
        first: Epoch,
        journal: FakeJournal,
        send: Callable[[Send, int], None],
        on_end: Callable[[EndRun], None],
        on_done: Callable[[Sequence[str]], None],
        say: Callable[[str], None],
        now_s: float,
        mutant: str,
    ) -> None:
        self._journal, self._send = journal, send
        self._on_end, self._on_done, self._say = on_end, on_done, say
        forgets = mutant == "generation_not_persisted"
        journal.generation += not (forgets and journal.generation)
        self.generation = journal.generation
        self.is_alive = True
        self.dead_since_s = 0.0
        self.turn = 0
        self._names, self._detect_s = names, limits.detect_s
        self.machine = Membership(
            ranks=dict.fromkeys(names, 2),
            links=all_pairs(names),
            limits=limits,
            make_plan=lambda members, dead, follows: followed_plan(
                names, members, dead, follows, self.turn
            ),
            links_of=lambda reduction: links_of(names, reduction),
            first=first,
        )
        if mutant == "no_chain_check":
            self.machine._chains.agrees = lambda *_: True  # type: ignore[method-assign]
        if journal.records:
            kept = [each for each in journal.records if not forgets or each.kind == "epoch.begun"]
            self.machine.restore(kept)
        self._heard_s = dict.fromkeys(names, now_s)
        self._expired: set[str] = set()

    def tell(self, event: Event, now_s: float) -> None:
        """Let the machine decide, and do what it says."""
        if not self.is_alive:
            return
        if not isinstance(event, Ticked):
            self._say(f"generation {self.generation} hears {event}")
        try:
            if isinstance(event, SiteFinished) and event.site in self.machine._leaving:
                self._journal.append(RecordEvent("site.dropped", event.site))
            if isinstance(event, SiteDone) and event.site in self.machine.epoch.members:
                self._journal.append(RecordEvent("site.done", event.site))
            for action in self.machine.handle(event, now_s):
                self._do(action)
            if self.machine._is_over:
                members = (self.machine._sites[each] for each in self.machine.epoch.members)
                self._on_done([each.name for each in members if not each.gone])
        except CoordinatorDiedError:
            self.is_alive = False
            self.dead_since_s = now_s

    def heard(self, site: str, epoch: int, now_s: float) -> None:
        """A site's session begins."""
        self._expired.discard(site)
        self._heard_s[site] = now_s
        self.tell(SiteHeard(site, epoch), now_s)

    def tick(self, audible: set[str], now_s: float) -> None:
        """Let time pass; heartbeats of some sites come through."""
        for name in self._names:
            if name in audible:
                self._heard_s[name] = now_s
            elif name not in self._expired and now_s - self._heard_s[name] > self._detect_s:
                self._expired.add(name)
                self.tell(LeaseEnded(name, "silent"), now_s)
        self.tell(Ticked(), now_s)

    @property
    def is_settling(self) -> bool:
        """Whether sites are asked to settle, or somebody is about to enter."""
        return bool(self.machine._proposal or self.machine._entry)

    def has_lease(self, site: str) -> bool:
        """Whether a site's session goes on."""
        return site not in self._expired

    def _do(self, action: Action) -> None:
        self._say(f"    {action}")
        match action:
            case RecordEvent():
                self._journal.append(action)
            case EndRun():
                self._on_end(action)
            case EndChange(change=SiteEnters(site=site), epoch=None):
                self._send(LoseSite(site, action.why), self.generation)
            case EndChange():
                pass
            case _:
                if isinstance(action, LoseSite):
                    detail = {"message": action.why}
                    self._journal.append(RecordEvent("site.lost", action.site, detail))
                self._send(action, self.generation)
