"""A whole run in one process, on a fake clock and a fake network, with faults drawn from a seed.

Under test are the product's machines of epochs: the coordinator's (orchestrator/core/membership.py)
and those at the sites (`site.py`). What the run promises is checked at every step.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from orchestrator.core.membership import (
    DropWanted,
    EndRun,
    EntryBegun,
    Event,
    Limits,
    LoseSite,
    Reached,
    SendCancel,
    SendResume,
    SendSettle,
    SessionLost,
    SiteDone,
    SiteEnters,
    SiteFinished,
    SiteGone,
    SiteSettled,
    Suspected,
    TreesWanted,
)
from orchestrator.core.run_events import RecordEvent
from tests.sim.coordinator import FakeJournal, Send, SimCoordinator
from tests.sim.plans import NAMES, plan_of
from tests.sim.site import (
    NUM_CHUNKS,
    BrokenPromiseError,
    Chunk,
    Frame,
    Outside,
    Part,
    Report,
    Saved,
    SimSite,
)
from topology.epoch import Epoch

MUTANTS = (
    "no_fence",
    "no_chain_check",
    "mixed_views",
    "stale_residual",
    "ranges_twice",
    "generation_not_persisted",
    "ends_at_once",
)
FAULTS_S = 60.0
"""Faults come within this; then everything that was cut is mended."""
CALM_ROUNDS = 3
"""Rounds that have to follow."""
LIMITS = Limits(min_sites=1, detect_s=3.0, ride_out_s=15.0, alone_s=60.0, collect_s=0.6)
CALM_S = LIMITS.ride_out_s + 6 * LIMITS.detect_s
"""Time for them."""
FORKS = 0.01
"""Part of the faults that change what a site's results are."""
REPEATED = 0.4
"""Part of the frames that come a second time, later."""
SHORT = 0.3
"""Part of the runs that are done with the job after so many rounds, or fewer:"""
SHORT_ROUNDS = 25
ROUND_S = 6.0
"""More than a round takes on average once all is well."""
STEP_S = 1.5
"""About what a rank computes before it posts a chunk."""
FOLLOW_STEP_S = 0.3
"""The same where its site follows: it has less data."""
FETCH_S = 6.0
"""The longest that a state takes to a site that comes back."""


@dataclass(slots=True)
class Wire:
    """One direction between two sites, or a site and the coordinator."""

    is_cut: bool = False
    cuts: int = 0
    slow: float = 1.0
    free_s: float = 0.0
    """When the latest message arrives; only control messages keep their order."""
    waiting: list[Callable[[], None]] = field(default_factory=list)
    """What comes of those that have arrived at a cut."""


class Simulation:
    """One run with one seed."""

    def __init__(
        self, seed: int, mutant: str = "", told: Callable[[str], None] | None = None
    ) -> None:
        """Draw a run from a seed; `told` hears of every step."""
        if mutant and mutant not in MUTANTS:
            raise ValueError(f"no mutant {mutant!r}; there are {', '.join(MUTANTS)}")
        self.random = random.Random(seed)
        self.mutant, self._told_of = mutant, told
        self.counts: Counter[str] = Counter()
        self.now_s = 0.0
        self._queue: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = itertools.count()
        self.names = NAMES[: self.random.choice((2, 3, 3, 4))]
        self._first = Epoch(
            number=0,
            members=self.names,
            reduction=plan_of(self.names, self.names, frozenset(), 0),
            from_round=0,
        )
        self._outside = Outside(
            self._send_frame,
            self._draw,
            self._check_result,
            self._check_round,
            self._post_round,
            self._resumed,
            self._left,
            self._save,
            self._load,
            mutant,
        )
        self._store: dict[int, Saved] = {}
        """Checkpoints, by the epoch that begins with them."""
        self._fetched_s: dict[tuple[str, int], float] = {}
        """When a site has all of an epoch's checkpoint."""
        self._level_from: dict[str, float] = dict.fromkeys(self.names, 0)
        """Up to which round a site may be behind all others, for it follows."""
        self._spoilt: set[int] = set()
        """Epochs of which sites have saved different ones: a site was lost meanwhile."""
        self._answers: dict[tuple[int, str], Report] = {}
        """What sites have answered, by epoch and site."""
        is_short = self.random.random() < SHORT
        self._last_round = self.random.randint(1, SHORT_ROUNDS) if is_short else sys.maxsize
        self.sites = {name: self._new_site(name) for name in self.names}
        self._sessions = dict.fromkeys(self.names, 0)
        self._wires = {way: Wire() for way in itertools.permutations((*self.names, ""), 2)}
        self._journal = FakeJournal(self._note_record)
        self._members = self.names
        """Of the epoch written down last."""
        self._holders: dict[int, tuple[str, int]] = {}
        """Who took a range of the data, and for which round; a site without a name: nobody yet."""
        self._is_over = False
        self.coordinator = self._start_coordinator()

    def _new_site(self, name: str, *, returns: bool = False) -> SimSite:
        return SimSite(name, self._outside, self._first, self._last_round, returns=returns)

    # ------------------------------------------------------------ clock and network

    def at(self, after_s: float, do: Callable[..., None], *args: object) -> None:
        """Do something later."""
        heapq.heappush(self._queue, (self.now_s + after_s, next(self._order), do, args))

    def _say(self, what: str) -> None:
        if self._told_of is not None:
            self._told_of(f"{self.now_s:8.2f} {what}")

    def _delay_s(self) -> float:
        draw = self.random.random()
        return 0.02 + 0.05 * draw if draw < 0.85 else self.random.uniform(0.1, 2.5)

    def _send_frame(self, site: SimSite, target: str, frame: Frame) -> None:
        if site.is_fenced or not site.is_alive:
            raise BrokenPromiseError(f"{site.name} sends, though it was told to end")
        wire, receiver = self._wires[site.name, target], self.sites[target]
        late_s = [self._delay_s() * wire.slow]
        if self.random.random() < REPEATED:
            late_s.append(self.random.uniform(0.5, 4.0))
        site.num_on_way += len(late_s)
        for each in late_s:
            self.at(each, self._arrive, site, receiver, frame)

    def _arrive(self, site: SimSite, receiver: SimSite, frame: Frame) -> None:
        """A frame comes, or waits for its link; with either end what had not crossed is gone."""
        if self._wires[site.name, receiver.name].is_cut:
            if site.is_alive:
                self.at(1.0, self._arrive, site, receiver, frame)
            return
        site.num_on_way -= 1
        receiver.receive(site.name, frame)
        if site.has_left:
            self._left(site)

    def _post_round(self, site: SimSite, _round: int) -> None:
        step_s = FOLLOW_STEP_S if site.epochs.follows(site.round) else STEP_S
        for number in range(NUM_CHUNKS):
            self.at(step_s * self.random.uniform(0.5, 1.2), site.post, number)

    # ------------------------------------------------------------ control messages

    def _start_coordinator(self) -> SimCoordinator:
        coordinator = SimCoordinator(
            self.names,
            LIMITS,
            self._first,
            self._journal,
            self._send_control,
            self._note_end,
            self._note_done,
            self._say,
            self.now_s,
            self.mutant,
        )
        for name in self.names:
            self.at(self.random.uniform(0.1, 1.0), self._reconnect, name, 0)
        return coordinator

    def _send_control(self, message: Send, generation: int) -> None:
        """Send to a site's agent: in order, as long as the session lasts."""
        session, wire = self._sessions[message.site], self._wires["", message.site]
        wire.free_s = max(wire.free_s, self.now_s + self._delay_s() * wire.slow)
        site = self.sites[message.site]
        is_old = not site.is_started
        hear = partial(self._hear, message, generation, session, is_old)
        site.is_told_to_end |= isinstance(message, LoseSite) and not is_old
        self.at(wire.free_s - self.now_s, self._pass, wire, hear)

    def _pass(self, wire: Wire, do: Callable[[], None]) -> None:
        """A control message gets through, once its wire is mended; in order."""
        if not wire.is_cut and not wire.waiting:
            do()
            return
        wire.waiting.append(do)
        if len(wire.waiting) == 1:
            self.at(0.5, self._pass_waiting, wire)

    def _pass_waiting(self, wire: Wire) -> None:
        if wire.is_cut:
            self.at(0.5, self._pass_waiting, wire)
            return
        waiting, wire.waiting = wire.waiting, []
        for do in waiting:
            do()

    def _hear(self, message: Send, generation: int, session: int, is_old: bool) -> None:
        """An agent gets a message; `is_old`: it was about processes that have ended since."""
        site = self.sites[message.site]
        is_stale = session != self._sessions[message.site] or generation < site.generation
        if is_stale or not site.has_agent:
            return
        site.generation = generation
        match message:
            case SendSettle():
                report = site.settle(message.epoch, is_redo=message.is_redo)
                if report is not None:
                    self._answer(site, report)
            case SendResume():
                site.resume(message.epoch, message.handovers, message.enters)
            case SendCancel():
                site.cancel(message.epoch)
            case LoseSite():
                site.is_fenced |= not (is_old and site.is_started)

    def _answer(self, site: SimSite, report: Report) -> None:
        self._answers[report.epoch, site.name] = report
        settled = SiteSettled(
            site=site.name,
            epoch=report.epoch,
            round=report.round,
            finished=report.finished,
            chain=report.chain,
            chain_round=report.chain_round,
        )
        self._tell(settled, site)

    def _resumed(self, site: SimSite, round_: int) -> None:
        self._tell(EntryBegun(site.name, site.epoch, round_), site)

    def _tell_done(self, site: SimSite) -> None:
        """The ranks of a site are done with the job."""
        if site.completed < self._last_round or not site.is_alive or site.is_fenced:
            return
        if self.mutant == "ends_at_once":
            site.is_fenced = True
            self._tell(SiteFinished(site.name), site)
        else:
            self._tell(SiteDone(site.name), site)

    def _note_done(self, done: Sequence[str]) -> None:
        """All are done with the job, and may end: each has had the same rounds."""
        if self._is_over:
            return
        self._is_over = True
        self.counts["done"] += 1
        pasts = {name: self.sites[name].chains.get(self._last_round) for name in done}
        if None in pasts.values() or len(set(pasts.values())) > 1:
            raise BrokenPromiseError(f"all are done, and do not end alike: {pasts}")

    def _left(self, site: SimSite) -> None:
        """A site that was dropped ends, once what others need of it has come."""
        site.has_left = True
        if site.num_on_way or site.is_fenced:
            return
        self.counts["left"] += 1
        self._say(f"{site.name} leaves after round {site.completed}")
        site.is_fenced = True
        self._tell(SiteFinished(site.name), site)

    def _tell(self, event: Event, site: SimSite) -> None:
        """An agent says something: in order, as long as the session lasts."""
        wire = self._wires[site.name, ""]
        wire.free_s = max(wire.free_s, self.now_s + self._delay_s() * wire.slow)
        session = self._sessions[site.name]
        take = partial(self._take, event, site, site.generation, session)
        self.at(wire.free_s - self.now_s, self._pass, wire, take)

    def _take(self, event: Event, site: SimSite, generation: int, session: int) -> None:
        """The coordinator gets a message."""
        is_known = generation == self.coordinator.generation
        is_known &= session == self._sessions[site.name] or self.mutant == MUTANTS[-1]
        is_known &= self.coordinator.has_lease(site.name)
        # Whoever is told to end does not enter, whatever it has said meanwhile.
        is_known &= not (site.is_told_to_end and isinstance(event, SiteEnters))
        if is_known and site.has_agent and self.sites[site.name] is site:
            self.coordinator.tell(event, self.now_s)

    def _reconnect(self, name: str, attempt: int) -> None:
        """A site's agent opens a session and says what it knows."""
        site = self.sites[name]
        if not site.has_agent:
            return
        if self._is_mute(name) or not self.coordinator.is_alive:
            self.at(0.7, self._reconnect, name, attempt + 1)
            return
        self._sessions[name] += 1
        site.generation = max(site.generation, self.coordinator.generation)
        self.coordinator.heard(name, site.epoch, self.now_s)
        for other, is_gone in site.suspects.items():
            self._tell(Suspected(name, other, is_gone, "still"), site)
        if not site.is_alive:
            self._tell(SiteGone(name, "its gateway has ended"), site)
        self._tell_done(site)

    def _is_mute(self, name: str) -> bool:
        return self._wires[name, ""].is_cut or self._wires["", name].is_cut

    # ------------------------------------------------------------ promises

    def _check_result(self, site: SimSite, chunk: Chunk, part: Part) -> None:
        if site.name not in self._members:
            return
        for name in self._members:
            other = self.sites[name]
            theirs = other.results.get(chunk)
            if theirs is not None and theirs != part and not other.is_fenced:
                raise BrokenPromiseError(f"{chunk} is {part} at {site.name}, {theirs} at {name}")

    def _check_round(self, site: SimSite, round_: int) -> None:
        self.counts["rounds"] += 1
        self._say(f"{site.name} has completed round {round_}")
        self._tell_done(site)
        self.at(0.0, site.begin_if_due)
        self._give_state()
        if site.name not in self._members:
            return
        for name in self._members:
            other = self.sites[name]
            if other.is_fenced or not other.has_state:
                continue
            follows = any(each.completed < self._level_from[each.name] for each in (site, other))
            if other.is_alive and not follows and abs(other.completed - round_) > 1:
                raise BrokenPromiseError(f"{site.name} is at {round_}, {name} at {other.completed}")
            if other.chains.get(round_, site.chains[round_]) != site.chains[round_]:
                raise BrokenPromiseError(f"{site.name} and {name} differ after round {round_}")

    def _give_state(self) -> None:
        """Sites that come back load the checkpoint that they need, if it is there."""
        for site in self.sites.values():
            self.counts["states taken"] += site.take_state()

    def _save(self, epoch: int, saved: Saved) -> None:
        """Ranks save after the same step, or nobody enters with that epoch."""
        if self._store.setdefault(epoch, saved) != saved:
            self._spoilt.add(epoch)

    def _load(self, site: SimSite, epoch: int) -> Saved | None:
        if site.name not in self._members:
            return None
        if epoch in self._spoilt:
            raise BrokenPromiseError(f"checkpoints of epoch {epoch} differ")
        saved = self._store.get(epoch)
        if saved is not None and (site.name, epoch) not in self._fetched_s:
            self._fetched_s[site.name, epoch] = self.now_s + self.random.uniform(0.0, FETCH_S)
        is_there = self.now_s >= self._fetched_s.get((site.name, epoch), 0.0)
        return saved if is_there else None

    def _draw(self, site: SimSite, round_: int) -> tuple[int, ...]:
        """Give a site the data of a round: a new range, and those that nobody used."""
        if site.name not in self._members:
            return ()
        holes = [each for each, (name, _) in self._holders.items() if not name]
        taken = (*holes, len(self._holders))
        self._holders |= dict.fromkeys(taken, (site.name, round_))
        return taken

    def _note_record(self, record: RecordEvent) -> None:
        """With an epoch, data of lost sites that no round contains is given back."""
        if record.kind != "epoch.begun":
            return
        detail: Any = record.detail
        self._check_one_past(detail["epoch"], tuple(detail["members"]))
        self._members = tuple(detail["members"])
        follows = detail["record"].get("follows", ())
        for name, level_from in self._level_from.items():
            if level_from == math.inf:
                self._level_from[name] = detail["from_round"]
        self._level_from |= dict.fromkeys(follows, math.inf)
        self.counts["followed"] += bool(follows)
        self.counts["entered"] += detail["why"].endswith("takes part again")
        self.counts["redone" if detail["is_redo"] else "planned"] += 1
        self.counts["handovers"] += len(detail["handovers"])
        self.counts["lost"] += len(detail["lost"])
        unused = dict(detail["unused"])
        if self.mutant == "ranges_twice":
            unused = dict.fromkeys(unused, detail["from_round"])
        for each, (name, round_) in self._holders.items():
            if name in unused and round_ >= unused[name]:
                self._holders[each] = ("", -1)
                self.counts["holes"] += 1

    def _check_one_past(self, epoch: int, members: tuple[str, ...]) -> None:
        """Members that go on together have had the same results, as far as they can be compared."""
        known: dict[int, int] = {}
        for name in members:
            answer = self._answers.get((epoch, name))
            if answer is None or self.sites[name].returns:
                continue
            if known.setdefault(answer.chain_round, answer.chain) != answer.chain:
                raise BrokenPromiseError(f"{members} go on, and {name} has had other results")

    def _check_ranges(self) -> None:
        """Every range of the data is in one round that is finished, or in none."""
        seen: defaultdict[int, set[int]] = defaultdict(set)
        working = self._working()
        for site in working:
            for (round_, _), part in site.results.items():
                for each in part.ranges:
                    seen[each].add(round_)
        if not working:
            return
        last = min(site.completed for site in working)
        for each, (name, round_) in self._holders.items():
            rounds = seen.get(each, set())
            if len(rounds) > 1 or (rounds and not name):
                raise BrokenPromiseError(
                    f"range {each} of {name or 'nobody'} is in rounds {rounds}"
                )
            if name and round_ <= last and rounds != {round_}:
                raise BrokenPromiseError(f"range {each} of {name} is not in round {round_}")

    def _note_end(self, end: EndRun) -> None:
        self._is_over = True
        self.counts["ended"] += 1
        working = [site.name for site in self._working()]
        if end.code == "PARAMETERS_DIFFER" and any(each.is_forked for each in self.sites.values()):
            self.counts["forks found"] += 1
        elif end.code not in ("SITE_LOST", "PEER_LOST") or len(working) > 1:
            raise BrokenPromiseError(f"the run ends, though {working} work: {end}")

    # ------------------------------------------------------------ faults

    def _suspect(self, by: str, name: str, is_gone: bool, cut: int | None) -> None:
        """A site notices that another is not reached, if that is still so."""
        site, other = self.sites[by], self.sites[name]
        wires = self._wires[name, by], self._wires[by, name]
        if cut is not None and not (any(wire.is_cut for wire in wires) or not other.is_alive):
            return
        if not site.is_alive or site.suspects.get(name) is is_gone:
            return
        site.suspects[name] = is_gone
        self._tell(Suspected(by, name, is_gone, "gone" if is_gone else "silent"), site)

    def _reach(self, by: str, name: str) -> None:
        site, other = self.sites[by], self.sites[name]
        wires = self._wires[name, by], self._wires[by, name]
        if any(wire.is_cut for wire in wires) or not other.is_alive or not site.is_alive:
            return
        if site.suspects.pop(name, None) is not None:
            self._tell(Reached(by, name), site)

    def _cut(self, source: str, target: str, for_s: float) -> None:
        self._say(f"from {source or 'the coordinator'} to {target or 'the coordinator'}: cut")
        wire = self._wires[source, target]
        wire.is_cut = True
        wire.cuts += 1
        self.at(for_s, self._mend, source, target, wire.cuts)
        if source and target:
            for by, name in ((target, source), (source, target)):
                late_s = LIMITS.detect_s + self.random.uniform(0, 0.3)
                self.at(late_s, self._suspect, by, name, False, wire.cuts)

    def _mend(self, source: str, target: str, cut: int) -> None:
        wire = self._wires[source, target]
        if wire.cuts != cut or not wire.is_cut:
            return
        wire.is_cut = False
        if source and target:
            for by, name in ((target, source), (source, target)):
                self.at(self.random.uniform(0.05, 0.8), self._reach, by, name)
            return
        name = source or target
        if not self.coordinator.has_lease(name):
            self.at(0.3, self._reconnect, name, 0)

    def _kill(self, name: str, what: str) -> None:
        """End a site's gateway, its agent with all below it, or the machine."""
        site = self.sites[name]
        if not site.is_alive:
            return
        self._say(f"{name}: its {what} is killed")
        self.counts[f"killed {what}"] += 1
        site.is_alive = False
        site.has_agent = what == "gateway"
        is_gone = what != "machine"
        for by in self.names:
            late_s = self.random.uniform(0.02, 0.5) if is_gone else LIMITS.detect_s
            if by != name:
                self.at(late_s, self._suspect, by, name, is_gone, None)
        if what == "gateway":
            self._tell(SiteGone(name, "its gateway was killed"), site)
        if what == "agent" and not self._is_mute(name):
            self.at(0.1, self._session_lost, name, self._sessions[name])

    def _session_lost(self, name: str, session: int) -> None:
        if self._sessions[name] == session:
            self.coordinator.tell(SessionLost(name, "its agent has ended"), self.now_s)

    def _crash(self, how: str) -> None:
        """The coordinator ends: at once, or with the next record that it writes."""
        self._say(f"the coordinator ends: {how}")
        self.counts[f"coordinator {how}"] += 1
        if how == "now":
            self.coordinator.is_alive = False
            self.coordinator.dead_since_s = self.now_s
        else:
            self._journal.dies_at = how

    def _come_back(self, name: str) -> None:
        """A site that is out starts anew."""
        site = self.sites[name]
        is_leaving = name in self.coordinator.machine._leaving
        if name in self._members or is_leaving or (site.is_alive and not site.is_fenced):
            return
        again = self._new_site(name, returns=True)
        again.generation, again.is_started = site.generation, False
        self.sites[name] = again
        self._sessions[name] += 1
        self.counts["came back"] += 1
        for by in self.names:
            if by != name:
                self.at(0.2, self._reach, by, name)
        self._reconnect(name, 0)
        self.at(1.5, self._start, again)

    def _start(self, site: SimSite) -> None:
        """Its processes are up again, whatever it was told to end before."""
        site.is_fenced, site.is_started = False, True
        self._ready(site)

    def _ready(self, site: SimSite) -> None:
        is_there = self.sites[site.name] is site and site.is_alive and not site.is_fenced
        if is_there and not site.epoch:
            if self.coordinator.is_settling:
                self.counts["ready while others settle"] += 1
            self._tell(SiteEnters(site.name), site)
            self.at(6.0, self._ready, site)

    def _want_trees(self) -> None:
        self.counts["trees wanted"] += 1
        self.coordinator.turn += 1
        members = self.coordinator.machine.epoch.members
        reduction = plan_of(self.names, members, frozenset(), self.coordinator.turn)
        self.coordinator.tell(TreesWanted(members, reduction, "other trees"), self.now_s)

    def _fault(self) -> None:
        """Let something happen."""
        name, other = self.random.sample(self.names, 2)
        for_s = self.random.choice((0.5, 2.0, 5.0, 12.0, 25.0))
        if self.random.random() < FORKS:
            self.sites[name].is_forked = True
            return
        match self.random.randrange(16):
            case 0 | 1:
                self._kill(name, self.random.choice(("gateway", "agent", "machine")))
            case 2:
                self._cut(name, other, for_s)
                self._cut(other, name, for_s)
            case 3:
                self._cut(name, other, for_s)
            case 4:
                for each in (*self.names, ""):
                    if each != name:
                        self._cut(name, each, for_s)
                        self._cut(each, name, for_s)
            case 5:
                self._cut(name, "", for_s)
                self._cut("", name, for_s)
            case 6:
                self._wires[name, other].slow = self.random.choice((1.0, 3.0, 8.0))
            case 7 | 8:
                self._crash(self.random.choice(("now", "torn", "full", "kept")))
            case 9:
                for one, two in itertools.permutations(self.names, 2):
                    self._cut(one, two, for_s)
            case 10 | 11 | 12:
                for each in self.names:
                    self._come_back(each)
            case 13:
                self._want_trees()
                if self.random.random() < 0.5:
                    self.at(self.random.uniform(0.0, 0.3), self._crash, "now")
            case 14:
                self._journal.dies_at = "kept"
                self._kill(name, "gateway")
            case _:
                if len(self._members) > 2:
                    self.coordinator.tell(DropWanted(name, "dropped"), self.now_s)

    # ------------------------------------------------------------ the run

    def _tick(self) -> None:
        coordinator = self.coordinator
        if coordinator.is_alive:
            audible = {
                name
                for name in self.names
                if self.sites[name].has_agent and not self._is_mute(name)
            }
            coordinator.tick({each for each in audible if coordinator.has_lease(each)}, self.now_s)
        elif self.now_s - coordinator.dead_since_s > 1.0 + 3 * self.random.random():
            self._journal.dies_at = ""
            self.coordinator = self._start_coordinator()
        self._give_state()
        self.at(0.5, self._tick)

    def run(self) -> Counter[str]:
        """Carry the run out; return what happened.

        Raises:
            BrokenPromiseError: what the run promises did not hold.
        """
        for site in self.sites.values():
            site.begin_if_due()
        self.at(0.2, self._tick)
        for _ in range(self.random.randint(3, 14)):
            self.at(self.random.uniform(1.5, FAULTS_S), self._fault)
        while self.now_s < FAULTS_S and self._advance():
            pass
        self._calm_down()
        goal: int | None = None
        num_left = min(self._last_round, SHORT_ROUNDS)
        deadline_s = self.now_s + CALM_S + num_left * ROUND_S
        while not self._is_over:
            if self.now_s > deadline_s:
                raise BrokenPromiseError(f"no rounds any more: {self._state()}")
            self._advance()
            working = self._working()
            if not working:
                break  # whoever is left has to come back first
            least = min(site.completed for site in working)
            if goal is None:
                goal = least + CALM_ROUNDS
            if least >= goal and self._last_round == sys.maxsize:
                break
        self._check_ranges()
        return self.counts

    def _working(self) -> list[SimSite]:
        """Return the members that are alive and have the run's state."""
        members = [self.sites[name] for name in self._members]
        return [site for site in members if site.is_alive and site.has_state]

    def _calm_down(self) -> None:
        """Mend everything; who is dead stays so."""
        self._journal.dies_at = ""
        for (source, target), wire in self._wires.items():
            wire.slow = 1.0
            self._mend(source, target, wire.cuts)

    def _advance(self) -> bool:
        self.now_s, _, do, args = heapq.heappop(self._queue)
        do(*args)
        return not self._is_over

    def _state(self) -> str:
        sites = [
            f"{site.name}: epoch {site.epoch}, round {site.round}, alive {site.is_alive}, "
            f"fenced {site.is_fenced}, has state {site.has_state}, suspects {site.suspects}"
            for site in self.sites.values()
        ]
        return f"members {self._members}; {'; '.join(sites)}"
