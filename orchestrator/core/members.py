"""One site of a run: how far its processes have got, whether it takes part, what is wrong with it.

A `Member` is what the journal says of a site, and only the fold of the journal (journaled_run.py)
changes it. How far the processes of a site are is its `Stage`. How it stands to the run is its
`Standing`, which changes in the methods `become_...` only.

    OUTSIDE -> RETURNING -> TAKES_PART -> LEAVING -> OUTSIDE

Why no round waits for it is its `Absence`, whose words are the only ones for that.

A `Contact` is what one coordinator has heard of a site and has said to it: no journal has that, and
the next coordinator hears it anew.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from isthmus.orchestrator.core.run_events import DropRequested, Endpoint
from isthmus.protos.failure import Failure

RETURNS_WITHIN_S = 3600.0
"""Within this long a site is started again `failure.max_restarts` times at most."""


NODE_FAULTY, GRADIENTS_DIFFER = "NODE_FAULTY", "GRADIENTS_DIFFER"
NODE_FAULTS = frozenset({NODE_FAULTY, GRADIENTS_DIFFER})
"""Failures for which a machine is to blame: its devices or disks. GRADIENTS_DIFFER: it computes
wrongly, and nothing of it is to be averaged again before somebody has looked."""


class Stage(Enum):
    """How far the processes of a run have got at a site."""

    NO_AGENT = auto()
    JOINED = auto()
    """An agent is there, and was told nothing of the run yet."""
    PREPARING = auto()
    """Its agent was told to start the gateways."""
    PREPARED = auto()
    STARTING = auto()
    RUNNING = auto()
    ENDED = auto()
    """Its agent says that nothing is left."""
    LOST = auto()
    """Nobody is left who could say so, or it was told to end."""

    @property
    def is_over(self) -> bool:
        """Whether nothing comes of these processes any more."""
        return self in {Stage.ENDED, Stage.LOST}


_COMING_UP = frozenset({Stage.PREPARING, Stage.PREPARED, Stage.STARTING})


class Standing(Enum):
    """How a site stands to the run."""

    OUTSIDE = auto()
    """The run goes on without it, or has not begun with it."""
    RETURNING = auto()
    """It was started while the run goes on, and its part does not count yet.

    As a member of an epoch it catches up: it gets the results of all rounds, and gives nothing.
    """
    TAKES_PART = auto()
    LEAVING = auto()
    """It has its last round, and ends after it."""


class Wish(Enum):
    """What an operator has asked for, and what has not come yet or is to last."""

    NONE = auto()
    OUT = auto()
    """Dropped: it takes part no more."""
    IN = auto()
    """Added: it is started again, however often it was."""


@dataclass(slots=True)
class Restarts:
    """How often a site was started again."""

    at_s: list[float] = field(default_factory=list)
    num_vain: int = 0
    """How many of the latest have not had it take part yet."""
    num: int = 0
    """How many there were at all."""

    def lately(self, now_s: float) -> list[float]:
        """Return those that still count."""
        return [each for each in self.at_s if now_s - each < RETURNS_WITHIN_S]

    def next_s(self, detect_s: float) -> float:
        """Return when the next may be: the pause is doubled by each that came to nothing."""
        doublings = min(max(0, self.num_vain - 1), 5)
        return self.at_s[-1] + detect_s * 2**doublings if self.at_s else 0.0

    def add(self, now_s: float) -> None:
        """Note one more."""
        self.at_s = [*self.lately(now_s), now_s]
        self.num_vain += 1
        self.num += 1


class Absence(Enum):
    """Why no round waits for a site; of several that hold, the first counts."""

    FINISHED = auto()
    """A member of the epoch is done with the job, and nothing of it is left."""
    LEFT = auto()
    """A site that is no member any more is done with the job, and nothing of it is left."""
    GONE = auto()
    """Nothing of it is left that its epochs know of, by its agent's word or by all signs."""
    LEFT_OUT = auto()
    """The others go on without it, though it lives."""
    SILENT = auto()
    """Its agent's lease has ended."""


FINAL = frozenset({Absence.FINISHED, Absence.LEFT, Absence.GONE})
"""None of the site's processes is left."""


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a site is absent, and since when."""

    why: str
    since_s: float
    drop: DropRequested | None = None
    """The drop for which it is left out; None: it is not, or for something else."""


@dataclass(slots=True)
class Contact:
    """What this coordinator has heard of a site, and has said to it."""

    has_agent: bool = False
    is_told_to_stop: bool = False
    begun: int = -1
    """The latest round that its ranks have begun, as far as is known."""
    absences: dict[Absence, Reason] = field(default_factory=dict)
    """LEFT_OUT and SILENT, where they hold: one ends without the other."""
    why_disconnected: str | None = None
    """Why its agent's connection broke: no absence, for its lease goes on; None: it did not."""

    @property
    def absence(self) -> Absence | None:
        """The one that counts."""
        return next((each for each in Absence if each in self.absences), None)

    @property
    def is_unheard(self) -> bool:
        """Whether nothing comes of its agent."""
        return Absence.SILENT in self.absences or self.why_disconnected is not None

    @property
    def whys(self) -> list[str | None]:
        """What is known of why it may be absent, the first that counts first."""
        known = [self.absences[each].why for each in Absence if each in self.absences]
        return [*known, self.why_disconnected]

    def miss(self, how: Absence, why: str, now_s: float, drop: DropRequested | None = None) -> None:
        """It is absent, from now on."""
        self.absences[how] = Reason(why, now_s, drop)

    def hear(self) -> None:
        """Its agent is there again."""
        self.absences.pop(Absence.SILENT, None)
        self.why_disconnected = None

    def begin_anew(self) -> None:
        """Its processes are there, and nothing holds that was said of those before."""
        self.absences.clear()
        self.why_disconnected, self.begun = None, -1


@dataclass(slots=True)
class Member:
    """One site of a run, whether it takes part or not, as the journal has it."""

    name: str
    stage: Stage = Stage.NO_AGENT
    standing: Standing = Standing.TAKES_PART
    endpoints: tuple[Endpoint, ...] = ()
    wish: Wish = Wish.NONE
    why_dropped: str = ""
    """Why it takes part no more, where that was wished."""
    has_taken_part: bool = True
    last_round: int | None = None
    """The last that they begin, now that they are done with the job; -1: not known."""
    has_ended_early: bool = False
    """It is done, and others go on, or do so no more because of that."""
    losses: list[Failure] = field(default_factory=list)
    """What befell it while the run could go on without it."""
    faults: dict[tuple[int, int], Failure] = field(default_factory=dict)
    """What was a machine's fault since an operator last had the site started: by the number of the
    node, and how often the site had been started again; of each start the first."""
    kept_out: str = ""
    """Which node is at fault so often that the site stays out, and what to do."""
    why_out: str = ""
    """Why the run continues without it."""
    restarts: Restarts = field(default_factory=Restarts)
    absence: Absence | None = None
    """FINISHED, LEFT or GONE; None: some of the processes are left that its epochs know of."""
    why_absent: str = ""
    """Why it left or is gone."""
    expired: set[str] = field(default_factory=set)
    """Certificates that its connections take and that have expired, by the names of their files."""
    since_round: int = 0
    """The first round in which it takes part, or whose result it gets."""

    @property
    def is_outside(self) -> bool:
        """Whether the run continues without its part."""
        return self.standing not in {Standing.TAKES_PART, Standing.LEAVING}

    @property
    def is_returning(self) -> bool:
        """Whether it was started while the run goes on, and its part does not count yet."""
        return self.standing is Standing.RETURNING

    @property
    def is_coming_up(self) -> bool:
        """Whether it was started while the run goes on, and its ranks are not there yet."""
        return self.is_returning and self.stage in _COMING_UP

    @property
    def is_new(self) -> bool:
        """Whether nothing of the run was ever there, and nobody waits for it."""
        return not self.has_taken_part and self.stage in {Stage.NO_AGENT, Stage.JOINED}

    @property
    def may_have_processes(self) -> bool:
        """Whether something of the run may be alive there, and its agent may still say so."""
        return not (self.stage.is_over or self.stage in {Stage.NO_AGENT, Stage.JOINED})

    @property
    def is_done(self) -> bool:
        """Whether its ranks are done with the job; its gateways wait until all are."""
        return self.last_round is not None

    @property
    def has_finished(self) -> bool:
        """Whether nothing of it is left, for it is done with the job."""
        return self.absence in {Absence.FINISHED, Absence.LEFT}

    @property
    def is_dropped(self) -> bool:
        """Whether an operator has it take part no more."""
        return self.wish is Wish.OUT

    # ------------------------------------------------------------ standing

    def become_outside(self) -> None:
        """The run goes on without it: what it was done with counts no more."""
        self.standing, self.last_round = Standing.OUTSIDE, None
        match self.absence:
            case Absence.LEFT:
                self.absence = Absence.GONE
            case Absence.FINISHED:
                self.absence = None

    def become_returning(self, now_s: float) -> None:
        """It is started again while the run goes on, by agents that have nothing of it left.

        Invariant: it was outside. Nothing that its former processes have said holds any more.
        """
        assert self.standing is Standing.OUTSIDE, f"{self.name} is {self.standing}"
        self.standing, self.stage = Standing.RETURNING, Stage.PREPARING
        self.has_ended_early, self.last_round = False, None
        self.wish = Wish.NONE if self.wish is Wish.IN else self.wish
        self.restarts.add(now_s)

    def become_taking_part(self) -> None:
        """Rounds count its part."""
        self.standing, self.has_taken_part = Standing.TAKES_PART, True
        self.restarts.num_vain = 0
        self.losses.clear()

    def become_leaving(self) -> None:
        """It takes part in the rounds before the epoch's first one, and ends after them.

        Who only gets results has none to wait for: it is outside already, or will be.
        """
        if self.standing is Standing.TAKES_PART:
            self.standing = Standing.LEAVING

    def become_outside_again(self) -> None:
        """It does not come back by this start, if it was to."""
        if self.is_returning:
            self.standing = Standing.OUTSIDE

    # ------------------------------------------------------------ its processes

    def add_fault(self, failure: Failure) -> None:
        """Note what ended a rank, if that was its machine's fault."""
        if failure.code in NODE_FAULTS and not failure.is_collateral:
            self.faults.setdefault((failure.node, self.restarts.num), failure)

    def lose(self, why: str, stage: Stage = Stage.LOST) -> None:
        """None of its processes is left, or nobody who could say so."""
        self.stage = stage
        self.become_absent(Absence.GONE, why)
        self.become_outside_again()

    def become_absent(self, how: Absence, why: str = "") -> None:
        """None of its processes is left; the first reason stays."""
        self.absence, self.why_absent = how, self.why_absent or why

    def begin_again(self) -> None:
        """It is started as if for the first time, after all sites were rolled back."""
        self.stage, self.endpoints = Stage.JOINED, ()
        self.absence, self.why_absent = None, ""

    def begin_anew(self) -> None:
        """Its ranks are there, and nothing holds that was said of those before."""
        self.absence, self.why_absent, self.last_round = None, "", None
