"""A whole run in one process, on a fake clock and a fake network, with faults drawn from a seed.

Under test are the product's machines: all that the coordinator decides of a run, with what another
one takes up from its journal (`coordinator.py`), and the epochs at the sites (`site.py`). What the
run promises is checked at every step, and what it comes to: every run ends.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from isthmus.orchestrator.core.members import GRADIENTS_DIFFER, NODE_FAULTS, NODE_FAULTY
from isthmus.orchestrator.core.policy import FAULTS
from isthmus.orchestrator.core.run_end import LOSES_SITE, SCRIPT_FAILED
from isthmus.orchestrator.core.run_events import (
    CancelRequested,
    EpochEntered,
    Event,
    Reached,
    RecordEvent,
    RunState,
    SendStop,
    SiteRunning,
    StepTaken,
    Suspected,
    TreesWanted,
)
from isthmus.topology.spec.epoch import Epoch
from tests.sim.agent import Around, SimAgent, Stage, Told
from tests.sim.coordinator import BROKEN, FORGOTTEN, FakeJournal, Outward, SimCoordinator
from tests.sim.plans import LIMITS, NAMES, plan_of
from tests.sim.site import (
    NOTICE_ROUNDS,
    NUM_CHUNKS,
    BrokenPromiseError,
    Chunk,
    Frame,
    NotSimulatedError,
    Outside,
    Part,
    Report,
    Saved,
    SimSite,
)

MUTANTS = (
    "no_fence",
    "mixed_views",
    "stale_residual",
    "ranges_twice",
    "entry_forgotten",
    "ends_at_once",
    *BROKEN,
    *FORGOTTEN,
)
_OF_SITES = LOSES_SITE | {GRADIENTS_DIFFER}
WRONG = 0.25
"""Part of the sites' ends that are those of a rank which computes wrongly."""
FAULTY = 0.75
"""Part of them that are for a fault of the machine."""
FAULTS_S = 60.0
"""Faults come within this; then everything that was cut is mended."""
EARLY = 0.1
"""Part of the runs in which something also happens while they begin:"""
EARLY_S = 2.0
CALM_ROUNDS = 3
"""Rounds that have to follow once all is well; after as many more the job is done."""
CALM_S = LIMITS.ride_out_s + LIMITS.alone_s + 6 * LIMITS.detect_s
"""Time for them, and for the end where nobody is left."""
HEARD_S = 5.0
"""In this time the coordinator has heard who reaches whom, once all is well."""
END_S = 12.0
"""Time in which nothing is left of a run that has ended."""
SCRIPT_ERRORS = 0.01
"""Part of the faults that are a script's error."""
FORKS = 0.01
"""Part of the faults that change what a site's results are."""
REPEATED = 0.4
"""Part of the frames that come a second time, later."""
SHORT = 0.3
"""Part of the runs that are done with the job after so many rounds, or fewer:"""
SHORT_ROUNDS = 25
ENDS_EARLY = 0.15
"""Part of the runs in which the script of one site ends before the others'."""
LATER = 0.2
"""Part of the runs that begin without some of their sites."""
ROUND_S = 6.0
"""More than a round takes on average once all is well."""
STEPS_OF_ROUNDS = (1, 1, 2, 5)
"""Regimes: how many steps of their own sites take in a round."""
STEP_S = 1.5
"""About what a rank computes before it posts a chunk."""
FOLLOW_STEP_S = 0.3
"""The same where its site follows: it has less data."""
FETCH_S = 6.0
"""The longest that a state takes to a site that comes back."""
BREAKS_S = 1.2
"""A connection to the coordinator that is cut for longer breaks."""


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
        begin_with = self.names
        if self.random.random() < LATER:
            begin_with = self.names[: self.random.randrange(1, len(self.names))]
        self._first = Epoch(
            number=0,
            members=begin_with,
            reduction=plan_of(self.names, begin_with, frozenset(), 0),
            from_round=0,
        )
        self.counts["begun with some"] += begin_with != self.names
        self._steps_of_round = random.Random(f"regime {seed}").choice(STEPS_OF_ROUNDS)
        self.counts["rounds of several steps"] += self._steps_of_round > 1
        self._rounds_ahead = random.Random(f"loader {seed}").randrange(NOTICE_ROUNDS - 1)
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
            self._last_round_of,
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
        self._early: dict[str, int] = {}
        """With which round the script of a site ends, whatever that of the others does."""
        if self.random.random() < ENDS_EARLY:
            self._early[self.random.choice(self.names)] = self.random.randint(1, SHORT_ROUNDS)
        around = Around(
            lambda: self.now_s,
            self.at,
            self.random.uniform,
            self._transmit,
            self._new_site,
            self._note_settled,
            mutant,
        )
        self.agents = {
            name: SimAgent(name, around, self._new_site(name, False)) for name in self.names
        }
        self._wires = {way: Wire() for way in itertools.permutations((*self.names, ""), 2)}
        self._journal = FakeJournal(self._note_record)
        self._members = begin_with
        """Of the epoch written down last."""
        self._have_been = {*begin_with}
        """Members of any epoch."""
        self._follows: tuple[str, ...] = ()
        self._holders: dict[int, tuple[str, int]] = {}
        """Who took a range of the data, and for which round; a site without a name: nobody yet."""
        self._drops: set[str] = set()
        """Sites that somebody was told will be dropped, and that are members still."""
        self._have_ended_early: set[str] = set()
        """Sites that are done, and others went on."""
        self._out: set[str] = set()
        """Sites without which the run goes on."""
        self._took_part = {*begin_with}
        """Sites that have not only followed."""
        self._wrong = random.Random(f"gradients {seed}")
        self._num_starts: Counter[str] = Counter()
        self._faults: defaultdict[str, set[int]] = defaultdict(set)
        """In which of its starts a site's machine was at fault, since an operator last added it."""
        self._condemned: set[str] = set()
        """Sites whose machine is at fault too often, and that wait for an operator."""
        self._unwanted: set[str] = set()
        """Those that an operator has dropped."""
        self._is_cancelled = False
        self._has_faults = False
        self._is_over = False
        self.coordinator = self._start_coordinator()
        for name in self.names:
            self.at(self.random.uniform(0.0, 0.4), self._join, self.agents[name], 0)

    def _last_round_of(self, name: str) -> int:
        return min(self._last_round, self._early.get(name, sys.maxsize))

    def _new_site(self, name: str, returns: bool) -> SimSite:
        self.counts["came back"] += returns
        steps = self._steps_of_round
        return SimSite(
            name,
            self._outside,
            self._first,
            returns=returns,
            steps_of_round=steps,
            rounds_ahead=self._rounds_ahead,
        )

    @property
    def sites(self) -> dict[str, SimSite]:
        """The latest processes of each site."""
        return {name: agent.site for name, agent in self.agents.items()}

    # ------------------------------------------------------------ clock and network

    def at(self, after_s: float, do: Callable[..., None], *args: object) -> None:
        """Do something later."""
        heapq.heappush(self._queue, (self.now_s + after_s, next(self._order), do, args))

    def _say(self, *what: object) -> None:
        if self._told_of is not None:
            self._told_of(f"{self.now_s:8.2f} {' '.join(map(str, what))}")

    def _delay_s(self) -> float:
        draw = self.random.random()
        return 0.02 + 0.05 * draw if draw < 0.85 else self.random.uniform(0.1, 2.5)

    def _send_frame(self, site: SimSite, target: str, frame: Frame) -> None:
        if site.is_fenced or not site.is_alive:
            raise BrokenPromiseError(f"{site.name} sends, though it was told to end")
        wire, receiver = self._wires[site.name, target], self.agents[target].site
        late_s = [self._delay_s() * wire.slow]
        if self.random.random() < REPEATED:
            late_s.append(self.random.uniform(0.5, 4.0))
        site.num_on_way += len(late_s)
        for each in late_s:
            self.at(each, self._arrive, site, receiver, frame)

    def _arrive(self, site: SimSite, receiver: SimSite, frame: Frame) -> None:
        """A frame comes, or waits for its link; with either end what had not crossed is gone."""
        if self._wires[site.name, receiver.name].is_cut:
            if site.is_alive and not site.has_ended:
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
        outward = Outward(self._send_control, self._say)
        coordinator = SimCoordinator(
            self.names, self._first, self._journal, outward, self.now_s, self.mutant
        )
        if self._journal.records and not self._journal.has("run.preparing"):
            self.counts["abandoned"] += 1  # no site has heard of it: it ends as lost
            self._is_over = True
            coordinator.die(math.inf)
        return coordinator

    def _send_control(self, message: Told, incarnation: int, generation: int) -> None:
        """Send to a site's agent: in order, as long as the session lasts."""
        if isinstance(message, SendStop):
            self._check_stop(message)
        agent = self.agents[message.site]
        if agent.incarnation != incarnation:
            return
        wire, session = self._wires["", message.site], (agent.incarnation, agent.session)
        wire.free_s = max(wire.free_s, self.now_s + self._delay_s() * wire.slow)
        hear = partial(self._hear, message, generation, session)
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

    def _hear(self, message: Told, generation: int, session: tuple[int, int]) -> None:
        """An agent gets a message."""
        agent = self.agents[message.site]
        is_known = session == (agent.incarnation, agent.session)
        if is_known and generation >= agent.generation and agent.is_alive:
            agent.generation = generation
            agent.hear(message)

    def _note_settled(self, name: str, report: Report) -> None:
        self._answers[report.epoch, name] = report

    def _resumed(self, site: SimSite, round_: int, behind: int) -> None:
        self.counts["behind"] += bool(behind)
        self._tell(EpochEntered(site.name, site.epoch, round_, behind), site)

    def _left(self, site: SimSite) -> None:
        """A site that was dropped ends, once what others need of it has come."""
        site.has_left = True
        agent = self.agents[site.name]
        if site.num_on_way or site.is_fenced or agent.site is not site:
            return
        self.counts["left"] += 1
        self._say(f"{site.name} leaves after round {site.completed}")
        agent.end(succeeded=True, within_s=0.3)

    def _tell(self, event: Event, site: SimSite) -> None:
        """Processes say something to their agent, which passes it on."""
        agent = self.agents[site.name]
        if agent.site is site and agent.is_alive:
            agent.put(event)

    def _transmit(self, agent: SimAgent, number: int, event: Event) -> None:
        """An agent sends a message: in order, as long as the session lasts."""
        wire = self._wires[agent.name, ""]
        wire.free_s = max(wire.free_s, self.now_s + self._delay_s() * wire.slow)
        session = (agent.incarnation, agent.session)
        take = partial(self._take, agent, number, event, session)
        self.at(wire.free_s - self.now_s, self._pass, wire, take)

    def _take(self, agent: SimAgent, number: int, event: Event, session: tuple[int, int]) -> None:
        """The coordinator gets a message. Only what is on disk is acknowledged, some time later."""
        coordinator, current = self.coordinator, (agent.incarnation, agent.session)
        if session != current or not coordinator.has_session(agent.name):
            return
        if isinstance(event, SiteRunning) and coordinator.is_changing:
            self.counts["ready while others settle"] += 1
        coordinator.tell(event, self.now_s)
        if coordinator.is_alive:
            late_s = self._delay_s()
            self.at(late_s, self._acknowledge, agent, number, session)

    def _acknowledge(self, agent: SimAgent, number: int, session: tuple[int, int]) -> None:
        if session == (agent.incarnation, agent.session):
            agent.outbox.acknowledge(number)

    def _join(self, agent: SimAgent, attempt: int) -> None:
        """An agent opens a session, or goes on with it, and says what it knows."""
        name, site = agent.name, agent.site
        if not agent.is_alive:
            return
        is_refused = self._is_mute(name) or not self.coordinator.is_alive
        if is_refused or not self.coordinator.join(agent, site.epoch, self.now_s):
            self.at(0.7, self._join, agent, attempt + 1)
            return
        if agent.has_run:
            for other, is_gone in site.suspects.items():
                self.coordinator.tell(Suspected(name, other, is_gone, "still"), self.now_s)

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
        if not self._has_first_step:
            self._tell(StepTaken(site.name), site)
        self.agents[site.name].look_whether_done()
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
            if other.places.get(round_, site.places[round_]) != site.places[round_]:
                what = f"{site.places[round_]}, {other.places[round_]}"
                raise BrokenPromiseError(f"{site.name}, {name}: data after round {round_}: {what}")

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
        if record.kind in {"site.drop_refused", "site.add_requested"}:
            self._drops.discard(record.site)
        self._note_loss(record)
        if record.kind == "run.ended":
            self._note_end(record.detail)
        if record.kind == "run.rolled_back":
            self.counts["rolled back"] += 1
        if record.kind == "run.preparing":  # or begins again: with all of the data
            self._holders.clear()
        if record.kind != "epoch.begun":
            return
        detail: Any = record.detail
        self._check_one_past(detail["epoch"], tuple(detail["members"]))
        self._members = tuple(detail["members"])
        self._drops &= set(self._members)
        self._follows = follows = tuple(detail["record"].get("follows", ()))
        for name, level_from in self._level_from.items():
            if level_from == math.inf:
                self._level_from[name] = detail["from_round"]
        self._level_from |= dict.fromkeys(follows, math.inf)
        self.counts["followed"] += bool(follows)
        self.counts["entered"] += detail["why"].endswith("takes part again")
        self.counts["added"] += bool(set(follows) - self._have_been)
        self._have_been |= {*self._members}
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

    def _note_loss(self, record: RecordEvent) -> None:
        """Once all have taken a step, the run continues without a site."""
        match record.kind:
            case "site.lost" | "site.dropped" if record.detail.get("is_out"):
                self._out.add(record.site)
                if record.kind == "site.lost" and not self._has_first_step:
                    raise BrokenPromiseError(f"{record.site} is lost before all took a step")
            case "epoch.begun":  # a coordinator that ends then writes no more of the loss
                detail: Any = record.detail
                succeeded = self._succeeded()
                self._out |= {each for each in detail["lost"] if not succeeded.get(each)}
            case "site.ended_early":
                self.counts["ended early"] += 1
                self._have_ended_early.add(record.site)
            case "failure.reported" if record.detail["is_loss"]:
                self._note_fault(record.site, record.detail)
            case "site.ended" if "fault" in record.detail:
                fault: Any = record.detail["fault"]
                self._note_fault(record.site, fault)
            case "node.kept_out":
                self.counts["kept out"] += 1
                self.counts["at fault twice"] += len(self._faults[record.site]) >= FAULTS
                if record.site not in self._condemned:
                    raise BrokenPromiseError(f"{record.site} is kept out for nothing")
            case "site.returning":
                if record.site in self._condemned:
                    raise BrokenPromiseError(f"{record.site} is at fault, and is started again")
                self._num_starts[record.site] += 1
                self._have_ended_early.discard(record.site)
            case "site.returned":
                self._took_part.add(record.site)
                self._out.discard(record.site)
            case "site.drop_requested":
                self._unwanted.add(record.site)
            case "site.drop_refused" | "site.add_requested":
                self._unwanted.discard(record.site)
                if record.kind == "site.add_requested":
                    self._condemned.discard(record.site)
                    self._faults[record.site].clear()

    def _note_fault(self, site: str, failure: Mapping[str, Any]) -> None:
        """Note a failure that was the machine's fault: only so many may be."""
        code = failure["code"]
        if code in NODE_FAULTS and not failure.get("collateral", False):
            self._faults[site].add(self._num_starts[site])
            if code == GRADIENTS_DIFFER or len(self._faults[site]) >= FAULTS:
                self._condemned.add(site)

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

    def _note_end(self, end: Mapping[str, object]) -> None:
        """The run has ended: once, as it may, and alike at all sites where it has ended well."""
        if self._is_over:
            raise BrokenPromiseError(f"the run ends again: {end}")
        self._is_over = True
        working = [
            site.name
            for site in self._working()
            if not (site.is_fenced or self._is_mute(site.name))
        ]
        has_forks = any(each.is_forked for each in self.sites.values())
        match end["state"], end["reason_code"]:
            case RunState.SUCCEEDED, code:
                lost = self._took_part & self._out - self._unwanted - self._have_ended_early
                if (code == "WITH_LOSSES") is not bool(lost):
                    raise BrokenPromiseError(f"lost are {lost}, and the run ends: {end}")
                if self._is_script_to_blame:
                    raise BrokenPromiseError(f"a script has failed, and the run ends: {end}")
                self.counts["done with losses" if lost else "done"] += 1
                self._check_done()
            case RunState.CANCELLED, _ if self._is_cancelled:
                self.counts["cancelled"] += 1
            case RunState.FAILED, "PARAMETERS_DIFFER" if has_forks:
                self.counts["forks found"] += 1
            case RunState.FAILED, _ if self._has_faults and not self._journal.has("run.active"):
                self.counts["not begun"] += 1
            case RunState.FAILED, code if code == SCRIPT_FAILED and self._is_script_to_blame:
                self.counts["script failed"] += 1
            case RunState.FAILED, code if code in _OF_SITES and not self._has_first_step:
                self.counts["no first step"] += 1
            case RunState.FAILED, code if code in _OF_SITES and len(working) <= 1:
                self.counts["failed"] += 1
            case _:
                raise BrokenPromiseError(f"the run ends, though {working} work: {end}")

    @property
    def _has_first_step(self) -> bool:
        """Whether all have taken a step: before that none may be lost."""
        return self._journal.has("run.first_step")

    @property
    def _is_script_to_blame(self) -> bool:
        """Whether the coordinator has heard of a script that failed at a site that takes part."""
        failures = [each for _, each in self._journal.records if each.kind == "failure.reported"]
        return any(each.detail["code"] == SCRIPT_FAILED for each in failures)

    def _check_done(self) -> None:
        """All are done with the job: each has had the same rounds."""
        succeeded = self._succeeded()
        pasts = defaultdict(set)
        for name, site in self.sites.items():
            is_gone = site.has_left or name in self._have_ended_early & self._out
            if succeeded.get(name) and not is_gone:
                last_round = self._last_round_of(name)
                pasts[last_round].add(site.chains.get(last_round))
        if any(None in each or len(each) > 1 for each in pasts.values()):
            raise BrokenPromiseError(f"all are done, and do not end alike: {dict(pasts)}")

    def _succeeded(self) -> dict[str, bool]:
        """Return of each site that has ended whether it has ended well."""
        succeeded: dict[str, bool] = {}
        for _, record in self._journal.records:
            if record.kind in {"site.ended", "site.lost", "site.dropped", "site.returning"}:
                succeeded[record.site] = bool(record.detail.get("succeeded"))
        return succeeded

    def _check_stop(self, stop: SendStop) -> None:
        """While a run goes on, only who takes no part is stopped.

        Or who follows, and is dropped; or is lost once all whom it followed are done.
        """
        agent, run = self.agents[stop.site], self.coordinator.run
        followed = {*self._members} - {*self._follows}
        are_done = bool(followed) and all(
            run.members[name].is_done or run.members[name].has_finished for name in followed
        )
        is_member = stop.site in self._members and agent.stage is Stage.RUNNING
        may_be_stopped = stop.site in self._drops or are_done
        is_member &= not (may_be_stopped and stop.site in self._follows)
        is_member &= bool(agent.site.epoch) or not agent.site.returns
        if run.is_going_on and is_member and not agent.site.is_fenced and agent.site.is_alive:
            raise BrokenPromiseError(f"{stop.site} takes part, and is stopped: {stop.reason}")

    def _check_nothing_left(self) -> None:
        left = [
            f"{name}: {agent.stage.name}"
            for name, agent in self.agents.items()
            if agent.is_alive and agent.has_run
        ]
        if left:
            raise BrokenPromiseError(f"the run has ended, and something is left: {left}")

    # ------------------------------------------------------------ faults

    def _suspect(self, by: str, name: str, is_gone: bool, cut: int | None) -> None:
        """A site notices that another is not reached, if that is still so."""
        site, other = self.sites[by], self.sites[name]
        wires = self._wires[name, by], self._wires[by, name]
        if cut is not None and not (any(wire.is_cut for wire in wires) or not other.is_alive):
            return
        if not site.is_alive or site.suspects.get(name) is is_gone or not site.may_suspect(name):
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
        if not (source and target):
            self.at(BREAKS_S, self._break, source or target, wire, wire.cuts)
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
        agent = self.agents[source or target]
        if not agent.is_connected:
            self.at(0.3, self._join, agent, 0)

    def _break(self, name: str, wire: Wire, cuts: int) -> None:
        """A connection to the coordinator breaks, for it was cut for too long."""
        agent = self.agents[name]
        if not wire.is_cut or wire.cuts != cuts or not agent.is_connected:
            return
        agent.is_connected = False
        self.counts["sessions broken"] += 1
        self.coordinator.broke(name, self.now_s)

    def _kill(self, name: str, what: str) -> None:
        """End a site's gateway, its agent with all below it, or the machine; or ask the agent."""
        agent = self.agents[name]
        site = agent.site
        if (
            not agent.is_alive
            or not site.is_alive
            or (what in {"gateway", "script"} and not agent.has_run)
        ):
            return
        self._say(f"{name}: its {what} is killed")
        self.counts[f"killed {what}"] += 1
        has_run, is_gone = agent.has_run, what != "machine"
        if what in {"gateway", "script"}:
            site.is_alive = False
            code = SCRIPT_FAILED if what == "script" else "GATEWAY_EXITED"
            drawn = self._wrong.random() if what == "gateway" else 1.0
            if drawn < WRONG:
                code = GRADIENTS_DIFFER  # a rank of it ends, and the site with it
                self.counts["computed wrongly"] += 1
            elif drawn < WRONG + FAULTY:
                code = NODE_FAULTY
            agent.end(succeeded=False, within_s=0.5, failure=code)
        else:
            agent.die()
        for by in self.names:
            late_s = self.random.uniform(0.02, 0.5) if is_gone else LIMITS.detect_s
            if by != name and has_run:
                self.at(late_s, self._suspect, by, name, is_gone, None)
        if what == "agent" and not self._is_mute(name):
            ends = self.random.choice((self.coordinator.broke, self.coordinator.leave))
            self.at(0.1, self._session_ends, agent, ends)
        if what == "agent" and self.random.random() < 0.5:
            self.at(self.random.uniform(1.0, 8.0), self._restart, agent)

    def _session_ends(self, agent: SimAgent, ends: Callable[[str, float], None]) -> None:
        if self.agents[agent.name] is agent and self.coordinator.has_session(agent.name):
            ends(agent.name, self.now_s)

    def _restart(self, old: SimAgent) -> None:
        """An agent that has ended is started again: it knows nothing but its generation."""
        if self.agents[old.name] is not old or old.is_alive or self._is_over:
            return
        new = SimAgent(
            old.name,
            old.around,
            old.site,
            incarnation=old.incarnation + 1,
            generation=old.generation,
        )
        self.agents[old.name] = new
        self._join(new, 0)

    def _crash(self, how: str) -> None:
        """The coordinator ends: at once, or with the next record that it writes."""
        self._say(f"the coordinator ends: {how}")
        self.counts[f"coordinator {how}"] += 1
        if how == "now":
            self.coordinator.die(self.now_s)
        else:
            self._journal.dies_at = how

    def _come_back(self, name: str) -> None:
        """Somebody looks after a site that is out."""
        agent = self.agents[name]
        if not agent.is_alive:
            self._restart(agent)
        elif self.random.random() < 0.5:
            self.coordinator.add(name, self.now_s)

    def _drop(self, name: str) -> None:
        """An operator drops a site; that is on disk before it is said to be done."""
        if name not in self._members:
            return
        self._drops.add(name)
        if self.coordinator.drop(name, self.now_s):
            self.counts["drops"] += 1
        elif not self._journal.last_is("site.drop_requested", name):
            self._drops.discard(name)

    def _want_trees(self) -> None:
        self.counts["trees wanted"] += 1
        self.coordinator.turn += 1
        members = self.coordinator.members
        reduction = plan_of(self.names, members, frozenset(), self.coordinator.turn)
        parts = tuple(self.random.choices(range(1, 10), k=len(self.names)))
        regime = self.random.choice((None, "", "delayed", "diloco"))
        parts = self.random.choice((parts, ()))
        wanted = TreesWanted(members, reduction, "other trees", parts, regime)
        self.coordinator.tell(wanted, self.now_s)

    def _fault(self) -> None:
        """Let something happen."""
        if self._is_over:
            return
        self._has_faults = True
        name, other = self.random.sample(self.names, 2)
        for_s = self.random.choice((0.5, 2.0, 5.0, 12.0, 25.0))
        if self.random.random() < FORKS:
            self.sites[name].is_forked = True
            return
        if self.random.random() < SCRIPT_ERRORS:
            self._kill(name, "script")
            return
        match self.random.randrange(17):
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
            case 15 if self.random.random() < 0.1:
                self._is_cancelled = True
                self.coordinator.tell(CancelRequested("cancelled"), self.now_s)
            case _:
                if len(self._members) > 2:
                    self._drop(name)
                    if self.random.random() < 0.3:
                        self.at(self.random.uniform(0.0, 0.5), self._crash, "now")

    # ------------------------------------------------------------ the run

    def _tick(self) -> None:
        coordinator = self.coordinator
        if coordinator.is_alive:
            audible = {
                name
                for name, agent in self.agents.items()
                if agent.is_alive and agent.is_connected and not self._is_mute(name)
            }
            coordinator.tick(audible, self.now_s)
        elif self.now_s - coordinator.dead_since_s > 1.0 + 3 * self.random.random():
            self._journal.dies_at = ""
            self.coordinator = self._start_coordinator()
            for agent in self.agents.values():
                agent.is_connected = False
                self.at(self.random.uniform(0.1, 1.0), self._join, agent, 0)
        is_done = any(agent.stage is Stage.DONE for agent in self.agents.values())
        for agent in self.agents.values():
            agent.look_whether_done()
            if is_done:
                agent.tell_round()
        self._give_state()
        self.at(0.5, self._tick)

    def run(self) -> Counter[str]:
        """Carry the run out, as far as it is simulated; return what happened.

        Raises:
            BrokenPromiseError: what the run promises did not hold.
        """
        try:
            self._carry_out()
        except NotSimulatedError:
            self.counts["not simulated"] += 1
        return self.counts

    def _carry_out(self) -> None:
        self.at(0.2, self._tick)
        if self.random.random() < EARLY:
            self.at(self.random.uniform(0.0, EARLY_S), self._fault)
        for _ in range(self.random.randint(3, 14)):
            self.at(self.random.uniform(EARLY_S + 1.0, FAULTS_S), self._fault)
        while self.now_s < FAULTS_S and not self._is_over:
            self._advance()
        self._calm_down()
        self._reach_the_end()
        self._check_ranges()
        over_s = self.now_s + END_S
        while self.now_s < over_s:
            self._advance()
        self._check_nothing_left()

    def _reach_the_end(self) -> None:
        """Nothing happens any more: after some rounds the job is done, and the run ends."""
        goal, heard_s = None, self.now_s + HEARD_S
        num_left = min(self._last_round, SHORT_ROUNDS)
        deadline_s = self.now_s + CALM_S + num_left * ROUND_S
        while not self._is_over:
            if self.now_s > deadline_s:
                drops = f"to be dropped {sorted(self._drops)}; " if self._drops else ""
                raise BrokenPromiseError(f"the run does not end: {drops}{self._state()}")
            self._advance()
            working = self._working()
            if not working or self._last_round < sys.maxsize:
                continue
            going = [site for site in working if site.completed < self._last_round_of(site.name)]
            least = min(site.completed for site in going or working)
            if goal is None:
                goal = least + CALM_ROUNDS
            if least >= goal and not self._drops and self.now_s > heard_s:
                self._check_nobody_is_suspected(working)
                most = max(site.round for site in self.sites.values())
                self._last_round = most + CALM_ROUNDS

    def _check_nobody_is_suspected(self, working: list[SimSite]) -> None:
        """Members that reach each other are not taken for ones that do not."""
        names = {site.name for site in working}
        if wrong := self.coordinator.suspicions & {(by, of) for by in names for of in names}:
            raise BrokenPromiseError(f"suspected for what was before: {sorted(wrong)}")

    def _working(self) -> list[SimSite]:
        """Return the members that are alive and have the run's state."""
        members = [self.agents[name].site for name in self._members]
        return [site for site in members if site.is_alive and site.has_state]

    def _calm_down(self) -> None:
        """Mend everything; who is dead stays so."""
        self._journal.dies_at = ""
        for (source, target), wire in self._wires.items():
            wire.slow = 1.0
            self._mend(source, target, wire.cuts)

    def _advance(self) -> None:
        self.now_s, _, do, args = heapq.heappop(self._queue)
        do(*args)

    def _state(self) -> str:
        sites = [
            f"{site.name}: {self.agents[site.name].stage.name}, epoch {site.epoch}, round "
            f"{site.round}, alive {site.is_alive}, fenced {site.is_fenced}, has state "
            f"{site.has_state}, suspects {site.suspects}"
            for site in self.sites.values()
        ]
        return f"members {self._members}; {'; '.join(sites)}"
