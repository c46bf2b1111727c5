"""One simulated site: its agent, one gateway and one rank, without any I/O.

The gateway is the smallest that keeps what docs/protocols.md promises for a change of the epoch.
Contributions are integers. The first site's codec loses the last bits of what it sends, and owes
them to the next round.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from tests.sim.plans import NAMES
from topology.epoch import Epoch, Finished, Handover, numbers_of, runs_of

NUM_CHUNKS = 3
LOST_BITS = 15
"""Of a contribution, by the lossy codec."""

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
    why: str


class BrokenPromiseError(AssertionError):
    """An invariant does not hold."""


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
    mutant: str = ""


@dataclass(slots=True)
class SimSite:
    """What one incarnation of a site's processes knows."""

    name: str
    outside: Outside
    first: Epoch | None
    """None: it takes no part yet."""
    is_alive: bool = True
    """Its gateway and its rank run."""
    has_agent: bool = True
    is_fenced: bool = False
    generation: int = 0
    """The highest of any coordinator that the agent has heard."""
    epochs: list[Epoch] = field(default_factory=list)
    settled: Report | None = None
    """The answer to the latest Settle that nothing has come of."""
    is_stopped: bool = False
    """Chunks of older epochs cross no more."""
    round: int = -1
    """The latest that has begun."""
    completed: int = -1
    needs_state_for: int = -1
    """The first round here, while the state before it has yet to come; -1: it is there."""
    _joined_for: int = 0
    """The first round in which it has a part."""
    results: dict[Chunk, Part] = field(default_factory=dict)
    chains: dict[int, int] = field(default_factory=lambda: {-1: 0})
    suspects: dict[str, bool] = field(default_factory=dict)
    """Who is not reached, and whether it is gone."""
    _own: dict[Chunk, Part] = field(default_factory=dict)
    """Posted and not finished."""
    _ranges: tuple[int, ...] = ()
    _sent: set[Chunk] = field(default_factory=set)
    _parts: dict[Chunk, dict[str, Part]] = field(default_factory=dict)
    _ahead: list[tuple[str, Frame]] = field(default_factory=list)
    _promised: dict[Chunk, list[str]] = field(default_factory=dict)
    """Chunks to hand over once they are here, and to whom."""
    _awaited: set[Chunk] = field(default_factory=set)
    """Chunks that another site hands over."""
    _residuals: dict[int, int] = field(default_factory=dict)
    _replaced: dict[Chunk, int] = field(default_factory=dict)
    """The residual before an encoding whose chunk is not finished."""

    def __post_init__(self) -> None:
        if self.first is not None:
            self.epochs.append(self.first)

    @property
    def epoch(self) -> int:
        """The number of the latest epoch."""
        return self.epochs[-1].number if self.epochs else -1

    def plan(self, round_: int) -> Epoch | None:
        """Return the epoch that carries a round."""
        for each in reversed(self.epochs):
            if each.from_round <= round_:
                return each
        return None

    # ------------------------------------------------------------ rounds

    def begin_if_due(self) -> None:
        """Begin the next round, if the one before is complete and nothing holds it back."""
        following = self.round + 1
        epoch = self.plan(following)
        if (
            not self._takes_part
            or self.settled is not None
            or self.needs_state_for >= 0
            or self.completed < self.round
            or epoch is None
            or self.name not in epoch.members
        ):
            return
        self.round = following
        self._ranges = self.outside.draw(self, following)
        self.outside.on_begun(self, following)

    def post(self, number: int) -> None:
        """The rank has computed one chunk of the present round."""
        chunk = (self.round, number)
        if not self._takes_part or chunk in self._own or chunk in self.results:
            return
        value = hash((NAMES.index(self.name), *chunk, *self._ranges)) & 0xFFFF
        self._own[chunk] = Part(value, frozenset(self._ranges))
        self._sum(chunk)
        self._take_ahead()

    @property
    def _takes_part(self) -> bool:
        return self.is_alive and not self.is_fenced

    # ------------------------------------------------------------ chunks

    def receive(self, sender: str, frame: Frame) -> None:
        """A frame has come."""
        if not self._takes_part:
            return
        round_ = frame.chunk[0]
        epoch = self.plan(round_)
        # What is handed over is of the donor's latest epoch, which may begin with a later round.
        if epoch is None or frame.epoch > self.epoch or round_ > self.round:
            self._ahead.append((sender, frame))
            return
        is_old = frame.epoch < epoch.number
        if (is_old and self.outside.mutant != "no_fence") or frame.chunk in self.results:
            return
        if self.is_stopped and self.outside.mutant != "mixed_views":
            return  # of an epoch that ends; it is done again
        if is_old and self.outside.mutant != "no_fence":
            raise BrokenPromiseError(f"{self.name}: a frame of epoch {frame.epoch} is applied")
        if frame.is_result:
            if frame.chunk in self._own or frame.is_handover:
                self._finish(frame.chunk, frame.part, passes_on=not frame.is_handover)
            else:
                self._ahead.append((sender, frame))
            return
        self._parts.setdefault(frame.chunk, {})[sender] = frame.part
        self._sum(frame.chunk)

    def _take_ahead(self) -> None:
        waiting, self._ahead = self._ahead, []
        for sender, frame in waiting:
            self.receive(sender, frame)

    def _sum(self, chunk: Chunk) -> None:
        """Pass the sum of the own part and the children's on, once all are there."""
        own, epoch = self._own.get(chunk), self.plan(chunk[0])
        if own is None or chunk in self._sent or chunk in self._awaited or epoch is None:
            return
        if self.is_stopped and self.outside.mutant != "mixed_views":
            return
        plan = epoch.reduction.plan
        tree = plan.trees[plan.tree_index(chunk[1])]
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
            self.outside.send(self, parent, Frame(epoch.number, chunk, False, part))

    def _encoded(self, chunk: Chunk, value: int) -> int:
        if self.name != NAMES[0]:
            return value
        owed = self._residuals.get(chunk[1], 0)
        before = self._replaced.setdefault(chunk, owed)
        if before != owed:
            raise BrokenPromiseError(
                f"{self.name}: chunk {chunk} owes {owed}, before it owed {before}"
            )
        self._residuals[chunk[1]] = (value + owed) & LOST_BITS
        return (value + owed) & ~LOST_BITS

    def _finish(self, chunk: Chunk, part: Part, *, passes_on: bool = True) -> None:
        epoch = self.plan(chunk[0])
        assert epoch is not None
        self.results[chunk] = part
        self._own.pop(chunk, None)
        self._parts.pop(chunk, None)
        self._replaced.pop(chunk, None)
        self._awaited.discard(chunk)
        self.outside.on_finished(self, chunk, part)
        plan = epoch.reduction.plan
        tree = plan.trees[plan.tree_index(chunk[1])]
        me = NAMES.index(self.name)
        if passes_on:
            for other in tree.receivers(me):
                self.outside.send(self, NAMES[other], Frame(epoch.number, chunk, True, part))
        for receiver in self._promised.pop(chunk, ()):
            self._hand_over(receiver, chunk)
        self._complete()

    def _complete(self) -> None:
        round_ = self.completed + 1
        if round_ > self.round:
            return
        chunks = [(round_, number) for number in range(NUM_CHUNKS)]
        if not all(chunk in self.results for chunk in chunks):
            return
        totals = tuple(self.results[chunk].total for chunk in chunks)
        self.chains[round_] = hash((self.chains[round_ - 1], round_, totals))
        self.completed = round_
        self.outside.on_completed(self, round_)

    # ------------------------------------------------------------ changes of the epoch

    def settle(self, epoch: int, *, is_redo: bool) -> Report | None:
        """Begin no new round, stop all chunks where asked; say what is there."""
        if not self._takes_part or epoch <= self.epoch:
            return None
        if self.settled is not None and epoch <= self.settled.epoch:
            return self.settled if epoch == self.settled.epoch else None
        self.is_stopped |= is_redo
        latest = max((round_ for round_, _ in self.results), default=-1)
        if latest < self._joined_for:
            latest = -1  # results that came with the state are no frames to hand over
        numbers = [number for round_, number in self.results if round_ == latest]
        finished = (Finished(latest, 0, runs_of(numbers)),) if is_redo and numbers else ()
        self.settled = Report(
            epoch=epoch,
            round=self.round,
            finished=finished,
            chain=self.chains[self.completed],
            chain_round=self.completed,
            why="its state has not come" if is_redo and self.needs_state_for >= 0 else "",
        )
        return self.settled

    def cancel(self, epoch: int) -> None:
        """A change does not come."""
        if self.settled is not None and self.settled.epoch <= epoch:
            self.settled, self.is_stopped = None, False
            self.begin_if_due()

    def resume(self, epoch: Epoch, handovers: tuple[Handover, ...]) -> None:
        """Go on in a new epoch."""
        if not self._takes_part or epoch.number <= self.epoch:
            return
        is_new = not self.epochs
        self.epochs.append(epoch)
        self.settled, self.is_stopped = None, False
        if is_new:
            self.needs_state_for = self._joined_for = epoch.from_round
            return
        handed = [
            (each, (each.round, number)) for each in handovers for number in numbers_of(each.runs)
        ]
        if epoch.from_round <= self.round:
            self._promised.clear()
            self._awaited = {
                chunk
                for each, chunk in handed
                if each.receiver == self.name and chunk not in self.results
            }
            self._do_again(epoch.from_round)
        for each, chunk in handed:
            if each.donor == self.name:
                self._hand_over(each.receiver, chunk)
        for chunk in list(self._own):
            self._sum(chunk)
        self._take_ahead()
        self.begin_if_due()

    def _do_again(self, from_round: int) -> None:
        """Forget all of unfinished chunks but the own parts."""
        for chunk in [each for each in self._parts if each[0] >= from_round]:
            del self._parts[chunk]
        for chunk in [each for each in self._sent if each[0] >= from_round]:
            if chunk not in self.results:
                self._sent.discard(chunk)
        if self.outside.mutant != "stale_residual":
            for chunk in self._replaced.keys() - self._awaited:
                self._residuals[chunk[1]] = self._replaced[chunk]

    def _hand_over(self, receiver: str, chunk: Chunk) -> None:
        if chunk in self.results:
            frame = Frame(self.epoch, chunk, True, self.results[chunk], is_handover=True)
            self.outside.send(self, receiver, frame)
        else:
            self._promised.setdefault(chunk, []).append(receiver)

    # ------------------------------------------------------------ coming back

    def take_state(self, donor: SimSite) -> None:
        """Take what came before the first round here; what is here already has to be the same."""
        last = self.needs_state_for - 1
        if self.chains.get(self.completed) != donor.chains.get(self.completed):
            raise BrokenPromiseError(f"{self.name} comes back with another past than {donor.name}")
        self.results |= {chunk: part for chunk, part in donor.results.items() if chunk[0] <= last}
        self.chains |= {round_: chain for round_, chain in donor.chains.items() if round_ <= last}
        self.completed = self.round = last
        self.needs_state_for = -1
        self._take_ahead()
        self.begin_if_due()
