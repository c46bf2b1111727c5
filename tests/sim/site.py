"""The processes of one simulated site: a gateway and a rank, without any I/O.

The gateway's epochs are the product's (sites/gateway/reduction/epochs.py), and so is what its rank
makes of members that are lost and enter, and of their data (tests/fakes/rank_data.py). Between the
two are the smallest sums that have something to lose. Contributions are integers. The first site's
codec loses the last bits of what it sends, and adds them in the next round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from isthmus.sites.gateway.reduction.epochs import (
    Epochs,
    Fate,
    Gift,
    PlanInForce,
    Verdict,
    in_force,
)
from isthmus.sites.local.rank_messages import Members
from isthmus.sites.worker.data.batch_shares import BatchShares
from isthmus.sites.worker.exchange.member_history import CatchingUp, CaughtUp
from isthmus.topology.spec.batch_rule import FullBatch
from isthmus.topology.spec.epoch import Epoch, Finished, Handover
from tests.fakes.rank_data import RankData
from tests.sim.plans import NAMES

NUM_CHUNKS = 3
LOST_BITS = 15
"""Of a contribution, by the lossy codec."""
NOTICE_ROUNDS = 4
"""Rounds after which all ranks know of a site that is lost."""
SHARES = BatchShares(full=FullBatch(12, len(NAMES)), rule="keep", ranks=(1,) * len(NAMES))
LEVEL_EVERY = 4
"""Rounds between two attempts of a site that follows to take part."""
BEHIND_EVERY = 3
"""A site that follows tries to take part in one round of so many, though it is behind."""
FORK = 1
"""What the results of a site differ by, whose chain is forked."""

Chunk = tuple[int, int]
"""Round, and number within it."""


@dataclass(frozen=True, slots=True)
class Part:
    """Contributions to one chunk: what they come to, and the data that they stand for."""

    total: int
    ranges: frozenset[int]


@dataclass(frozen=True, slots=True)
class Frame:
    """What crosses between two gateways."""

    epoch: int
    chunk: Chunk
    is_result: bool
    part: Part
    is_handover: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What the gateway answers to Settle."""

    epoch: int
    round: int
    finished: tuple[Finished, ...]
    chain: int
    chain_round: int


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint: all that follows from the rounds up to one."""

    completed: int
    results: dict[Chunk, Part]
    chains: dict[int, int]
    data: dict[str, Any]
    """The place in the data, and which sites have had no part in it."""


class BrokenPromiseError(AssertionError):
    """An invariant does not hold."""


class NotSimulatedError(Exception):
    """Sites need notice of different lengths; real ones would agree on the longest."""


@dataclass(slots=True)
class Outside:
    """What a site can do beyond itself."""

    send: Callable[[SimSite, str, Frame], None]
    draw: Callable[[SimSite, int], tuple[int, ...]]
    """Takes ranges of the data for a round."""
    on_finished: Callable[[SimSite, Chunk, Part], None]
    on_completed: Callable[[SimSite, int], None]
    on_begun: Callable[[SimSite, int], None]
    """A round has begun: its chunks are to be posted, each after a while."""
    on_resumed: Callable[[SimSite, int, int], None]
    """The site uses another epoch, from that round on; or it follows, and may enter so far behind.
    """
    on_left: Callable[[SimSite], None]
    """The site has had its last round, and nobody needs anything more of it."""
    save: Callable[[int, Saved], None]
    """Writes the checkpoint of an epoch in which others enter."""
    load: Callable[[SimSite, int], Saved | None]
    """Reads that; None: it is not there yet."""
    last_round: Callable[[str], int]
    """Tells with which round the job is done at a site."""
    mutant: str = ""
    noticed: dict[tuple[int, tuple[str, ...]], int] = field(default_factory=dict)
    """By round and sites, after how many steps the members said that these take part again."""


@dataclass(slots=True)
class SimSite:
    """What one incarnation of a site's processes knows."""

    name: str
    outside: Outside
    first: Epoch
    returns: bool = False
    """It comes back to a run that goes on."""
    steps_of_round: int = 1
    """Steps that the rank takes by itself up to a round, and the one that the round ends."""
    rounds_ahead: int = 0
    """Rounds for which a data loader fetches ahead."""
    is_alive: bool = True
    """Nothing has killed it."""
    has_ranks: bool = False
    """Its rank was started."""
    is_fenced: bool = False
    """It was told to end, or has ended well."""
    has_ended: bool = False
    """No process of it is left."""
    has_left: bool = False
    """It was dropped, and has had its last round."""
    num_on_way: int = 0
    """Frames that it has sent and nobody has."""
    is_forked: bool = False
    """From now on its results are told to differ from the others'."""
    epoch: int = 0
    """The latest that it uses."""
    completed: int = -1
    results: dict[Chunk, Part] = field(default_factory=dict)
    chains: dict[int, int] = field(default_factory=lambda: {-1: 0})
    """What all results came to; unlike the gateway's it goes on where another site's state ends."""
    suspects: dict[str, bool] = field(default_factory=dict)
    """Who is not reached, and whether it is gone."""
    _may_suspect: tuple[str, ...] = NAMES
    epochs: Epochs = field(init=False)
    data: RankData = field(init=False)
    places: dict[int, object] = field(default_factory=dict)
    """The place in the data after each round, and what sites get in the next step."""
    num_steps: int = 0
    has_state: bool = field(init=False)
    """Whether it has, or needs not, the others' state."""
    _marks: int = 0
    """The epoch with which the next round is marked, for others enter; 0: none."""
    _own: dict[Chunk, Part] = field(default_factory=dict)
    """Posted and not finished."""
    _ranges: tuple[int, ...] = ()
    _sent: set[Chunk] = field(default_factory=set)
    _parts: dict[Chunk, dict[str, Part]] = field(default_factory=dict)
    _ahead: list[tuple[str, Frame]] = field(default_factory=list)
    """Frames of epochs that have not begun here, and who sent them."""
    _early: dict[Chunk, Part] = field(default_factory=dict)
    """Results that came to a site that follows before its rank had got so far."""
    _level_at: int = 0
    _residuals: dict[int, int] = field(default_factory=dict)
    _replaced: dict[Chunk, int] = field(default_factory=dict)
    """The residual before an encoding whose chunk is not finished."""

    def __post_init__(self) -> None:
        self.epochs = Epochs(self._in_force(self.first))
        self.data = RankData(
            self.name,
            NAMES,
            SHARES,
            rejoins=self.returns,
            ahead=self.rounds_ahead * self.steps_of_round,
            notice_steps=NOTICE_ROUNDS * self.steps_of_round,
        )
        if not self.returns:
            self.data.begin_without({*NAMES} - {*self.first.members})
        self.has_state = not self.returns

    @property
    def round(self) -> int:
        """The latest that has begun here."""
        return self.epochs.round

    @property
    def _takes_part(self) -> bool:
        return self.is_alive and not self.is_fenced

    def _in_force(self, epoch: Epoch) -> PlanInForce:
        reduction, me = epoch.reduction, NAMES.index(self.name)
        return in_force(
            reduction.plan, reduction.codecs, me, epoch=epoch.number, from_round=epoch.from_round
        )

    # ------------------------------------------------------------ rounds

    def begin_if_due(self) -> None:
        """Begin the next round, if the one before is complete and nothing holds it back."""
        following = self.completed + 1
        is_due = self._takes_part and self.has_ranks and self.has_state
        is_due &= self.round < following <= self.outside.last_round(self.name)
        if is_due and self.epochs.is_over(following):
            self.outside.on_left(self)
        if not is_due or not self.epochs.may_begin(following):
            return
        has_entered = bool(self._marks) and self.epochs.enter(self._marks, following)
        if self._marks and self.outside.mutant != "entry_forgotten":
            self.data.missing.begin_round(following)
        self._marks = 0
        self.epochs.begin(following)
        follows = self.epochs.follows(following)
        self._ranges = () if follows else self.outside.draw(self, following)
        newest = max((round_ for round_, _ in self._early), default=-1)
        behind = max(0, newest - following + 1)
        is_let_in = not behind or following % BEHIND_EVERY == 0
        if follows and following >= self._level_at and is_let_in:
            self._level_at = following + LEVEL_EVERY
            self.outside.on_resumed(self, following, behind)
        self.outside.on_begun(self, following)
        if has_entered:
            self._tell_resumed(following)
            self._take_ahead()

    def post(self, number: int) -> None:
        """The rank has computed one chunk of the present round."""
        chunk = (self.round, number)
        if not self._takes_part or chunk in self._own or chunk in self.results:
            return
        value = hash((NAMES.index(self.name), *chunk, *self._ranges)) & 0xFFFF
        self._own[chunk] = Part(value, frozenset(self._ranges))
        if chunk in self._early:
            self._finish(chunk, self._early.pop(chunk))
        self._sum(chunk)

    def _complete(self) -> None:
        """The rank has all results of a round, and makes a step."""
        round_ = self.completed + 1
        chunks = [(round_, number) for number in range(NUM_CHUNKS)]
        if round_ > self.round or not all(chunk in self.results for chunk in chunks):
            return
        totals = tuple(self.results[chunk].total for chunk in chunks)
        self.chains[round_] = hash((self.chains[round_ - 1], round_, totals))
        self.completed = round_
        for _ in range(self.steps_of_round - 1):
            self._end_step(round_ - 1, has_landed=False)
            if self.data.history.end_step(round_, self._notice_steps, has_landed=False):
                raise BrokenPromiseError(f"{self.name}: members change amid round {round_}")
        self._end_step(round_, has_landed=True)
        for change in self.data.history.end_step(round_ + 1, self._notice_steps):
            self.data.apply(change)
            if isinstance(change, CatchingUp | CaughtUp):
                self._marks = change.epoch
            if isinstance(change, CatchingUp):
                data = self.data.state()
                saved = Saved(round_, dict(self.results), dict(self.chains), data)
                self.outside.save(change.epoch, saved)
        self.places[round_] = self.data.place, self.data.parts, self.data.rung
        self.outside.on_completed(self, round_)

    def _end_step(self, round_: int, *, has_landed: bool) -> None:
        self.data.use(self.num_steps)
        self.num_steps += 1
        self.data.end_step(round_, self.epochs.missing, has_landed=has_landed)
        missing = {site for site, at in self.epochs.missing.items() if at < round_}
        forgotten = missing.difference(self.data.missing.absent())
        if has_landed and forgotten:
            raise BrokenPromiseError(f"{self.name} counts on {forgotten} after round {round_}")

    def _notice_steps(self, sites: Sequence[str]) -> int:
        """Return after how many steps all ranks know: a round ends with the last of them."""
        most, asked = self.data.notice_steps(sites), (self.completed, tuple(sites))
        if self.data.history.is_catching_up:  # what it says counts for nothing
            most = self.outside.noticed.get(asked, most)
        elif self.outside.noticed.setdefault(asked, most) != most:
            raise NotSimulatedError
        if most > NOTICE_ROUNDS * self.steps_of_round:
            raise BrokenPromiseError(f"{self.name}: {sites} take part after {most} steps' notice")
        return -(-most // self.steps_of_round) * self.steps_of_round

    # ------------------------------------------------------------ chunks

    def receive(self, sender: str, frame: Frame) -> None:
        """A frame has come."""
        if not self._takes_part:
            return
        verdict, chunk = self._verdict(frame), frame.chunk
        if verdict is Verdict.WAIT:
            self._ahead.append((sender, frame))
        if verdict is not Verdict.TAKE or chunk in self.results:
            return
        if frame.is_handover:
            if self.epochs.donor(_order(chunk)) == NAMES.index(sender):
                self._finish(chunk, frame.part, passes_on=False)
                self._hand_over()
        elif frame.is_result and chunk not in self._own:
            if self.returns and self.epochs.number == 0:
                return  # of somebody who takes it for the processes that were there before
            if not self.epochs.follows(chunk[0]):
                raise BrokenPromiseError(f"{self.name} gets {chunk} without its part")
            self._early[chunk] = frame.part
        elif frame.is_result:
            self._finish(chunk, frame.part)
        else:
            self._parts.setdefault(chunk, {})[sender] = frame.part
            self._sum(chunk)

    def _verdict(self, frame: Frame) -> Verdict:
        round_ = frame.chunk[0]
        verdict = self.epochs.verdict(frame.epoch, round_)
        if verdict is Verdict.DROP and self.outside.mutant:
            is_old = frame.epoch < self.epochs.plan_of(round_).epoch
            if self.outside.mutant == ("no_fence" if is_old else "mixed_views"):
                return Verdict.TAKE
        return verdict

    def _take_ahead(self) -> None:
        waiting, self._ahead = self._ahead, []
        for sender, frame in waiting:
            self.receive(sender, frame)

    @property
    def _stands_still(self) -> bool:
        return self.epochs.is_stopped and self.outside.mutant != "mixed_views"

    def _sum(self, chunk: Chunk) -> None:
        """Pass the sum of the own part and the children's on, once all are there."""
        own = self._own.get(chunk)
        if own is None or chunk in self._sent or self._stands_still:
            return
        if self.epochs.follows(chunk[0]):
            return
        if self.epochs.donor(_order(chunk)) is not None:
            return
        ruling = self.epochs.plan_of(chunk[0])
        tree = ruling.plan.trees[ruling.plan.tree_index(chunk[1])]
        me = NAMES.index(self.name)
        children = [NAMES[each] for each in tree.children(me)]
        parts = self._parts.get(chunk, {})
        if any(child not in parts for child in children):
            return
        self._sent.add(chunk)
        total, ranges = self._encoded(chunk, own.total), own.ranges
        for child in children:
            total, ranges = total + parts[child].total, ranges | parts[child].ranges
        part = Part(total, ranges)
        if me == tree.root:
            self._finish(chunk, part)
        else:
            parent = NAMES[tree.parent[me]]
            self.outside.send(self, parent, Frame(ruling.epoch, chunk, False, part))

    def _encoded(self, chunk: Chunk, value: int) -> int:
        if self.name != NAMES[0]:
            return value
        residual = self._residuals.get(chunk[1], 0)
        before = self._replaced.setdefault(chunk, residual)
        if before != residual:
            raise BrokenPromiseError(
                f"{self.name}: chunk {chunk} has the residual {residual}, before it had {before}"
            )
        self._residuals[chunk[1]] = (value + residual) & LOST_BITS
        return (value + residual) & ~LOST_BITS

    def _finish(self, chunk: Chunk, part: Part, *, passes_on: bool = True) -> None:
        self.results[chunk] = part
        self._own.pop(chunk, None)
        self._parts.pop(chunk, None)
        self._replaced.pop(chunk, None)
        self.outside.on_finished(self, chunk, part)
        checksum = hash((chunk, part.total)) + FORK * self.is_forked
        self.epochs.finish(_order(chunk), (part,), checksum)
        ruling = self.epochs.plan_of(chunk[0])
        tree = ruling.plan.trees[ruling.plan.tree_index(chunk[1])]
        if passes_on:
            for other in tree.receivers(NAMES.index(self.name)):
                self.outside.send(self, NAMES[other], Frame(ruling.epoch, chunk, True, part))
        self._complete()

    # ------------------------------------------------------------ who is not reached

    def may_suspect(self, name: str) -> bool:
        """Whether a site's agent passes on that another is not reached."""
        return name in self._may_suspect

    def forget_suspects(self, epoch: Epoch, rejoins: tuple[str, ...]) -> list[str]:
        """Return whom it suspects no more, as the agent does: sites/agent/site_gateways.py."""
        self._may_suspect = epoch.members
        stays = set[str]() if self.name in rejoins else {*epoch.members}.difference(rejoins)
        dropped = sorted({*self.suspects}.difference(stays))
        self.suspects = {name: how for name, how in self.suspects.items() if name in stays}
        return dropped

    # ------------------------------------------------------------ changes of the epoch

    def settle(self, epoch: int, *, is_redo: bool) -> Report | None:
        """Begin no new round, stop all chunks where asked; say what is there."""
        if not self._takes_part:
            return None
        was_stopped = self.epochs.is_stopped
        self.epochs.settle(epoch, stops=is_redo)
        if self.epochs.is_stopped and not was_stopped:
            self._parts.clear()
            self._early.clear()
            self._sent.clear()
        chain_round = max(self.epochs.chains, default=-1)
        return Report(
            epoch=epoch,
            round=self.round,
            finished=self.epochs.finished(),
            chain=self.epochs.chains.get(chain_round, 0),
            chain_round=chain_round,
        )

    def cancel(self, epoch: int) -> None:
        """A change does not come."""
        if self._takes_part:
            self.epochs.cancel(epoch)
            self.begin_if_due()

    def resume(
        self, epoch: Epoch, handovers: tuple[Handover, ...], enters: tuple[str, ...]
    ) -> None:
        """Go on in a new epoch."""
        if not self._takes_part:
            return
        told = Members(
            epoch=epoch.number,
            from_round=epoch.from_round,
            sites=epoch.members,
            enters=enters,
            follows=epoch.follows,
            shares=epoch.shares,
            rung=epoch.rung,
        )
        self.data.history.tell(told)
        if enters and self.name not in epoch.follows:
            self.epochs.await_entry(self._in_force(epoch))
            if self.epochs.number >= epoch.number:
                self._tell_resumed(self.epochs.from_round)
            self.begin_if_due()
            return
        was_stopped = self.epochs.is_stopped
        if self.epochs.resume(self._in_force(epoch), map(_gift, handovers)):
            if was_stopped:
                self._do_again(epoch.from_round)
            self._hand_over()
            for chunk in list(self._own):
                self._sum(chunk)
            self._take_ahead()
        self._tell_resumed(self.round)
        self.begin_if_due()

    def _tell_resumed(self, round_: int) -> None:
        self.epoch = self.epochs.number
        self.outside.on_resumed(self, round_, 0)

    def _do_again(self, from_round: int) -> None:
        """Put back the residuals of chunks that are begun anew."""
        if self.outside.mutant == "stale_residual":
            return
        for chunk in [each for each in self._replaced if each[0] >= from_round]:
            if self.epochs.fate(_order(chunk)) is Fate.AGAIN:
                self._residuals[chunk[1]] = self._replaced[chunk]

    def _hand_over(self) -> None:
        for (round_, _, number), receiver, (part,) in self.epochs.due():
            assert isinstance(part, Part)
            frame = Frame(self.epochs.number, (round_, number), True, part, is_handover=True)
            self.outside.send(self, NAMES[receiver], frame)

    # ------------------------------------------------------------ coming back

    def take_state(self) -> bool:
        """Load the checkpoint of the epoch in which this site enters, as soon as it is there."""
        if self.has_state or not self._takes_part:
            return False
        entry = self.data.history.own_entry(0.0)
        saved = None if entry is None else self.outside.load(self, entry.epoch)
        if entry is None or saved is None:
            return False
        if saved.completed != entry.from_round - 1:
            raise BrokenPromiseError(
                f"{self.name} enters with round {entry.from_round}, and has the state after "
                f"{saved.completed}"
            )
        self.results, self.chains = dict(saved.results), dict(saved.chains)
        self.completed = saved.completed
        self.data.take(saved.data, {*entry.sites} - {*entry.follows})
        self.has_state = True
        self.begin_if_due()
        return True


def _order(chunk: Chunk) -> tuple[int, int, int]:
    return chunk[0], 0, chunk[1]


def _gift(each: Handover) -> Gift:
    donor, receiver = NAMES.index(each.donor), NAMES.index(each.receiver)
    return Gift(donor, receiver, each.round, each.bucket, each.runs)
