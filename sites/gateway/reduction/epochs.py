"""The epochs of one gateway: which plan carries a round, and what a resume means. Pure.

Members and trees change in two phases (topology/spec/epoch.py). *Settle*: no new round begins. If a
site is lost, chunks stop, too, and the answer reports which are finished. *Resume*: later rounds
use the new plan; if a site was lost, all rounds from the oldest unfinished one on. Each chunk of
these has one of three fates: it is done, it comes from a site that has it, or it is done again. An
announced change may also be *cancelled*, but not if a site is lost, for frames have been dropped.

The result's frames of each finished chunk are kept, for sites that may lack them, until its round
is *stable*: finished at all members. A finished chunk of the next round proves that, because each
member contributes to it only after it has finished this round.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto

from isthmus.protos.errors import LocalProtocolError
from isthmus.sites.codecs.codec import Codec
from isthmus.sites.codecs.registry import codec_named
from isthmus.sites.gateway.reduction.chunk_reduction import Role, roles
from isthmus.topology.spec.epoch import Finished, Runs, numbers_of, runs_of
from isthmus.topology.spec.reduction_plan import ReductionPlan

ChunkOrder = tuple[int, int, int]
"""Round, bucket, chunk."""
BucketKey = tuple[int, int]
"""Round and bucket."""

_CHAIN_FACTOR = 0x9E3779B97F4A7C15
"""2^64 divided by the golden ratio, odd: no power of it is 0."""
_WORD = 1 << 64
_CHAINS_KEPT = 4
"""Rounds whose checksums are kept: more than gateways of a site may be apart."""


@dataclass(frozen=True, slots=True)
class PlanInForce:
    """A plan as one site uses it: codecs and the site's roles."""

    plan: ReductionPlan
    codecs: tuple[Codec, ...]
    """One codec per tree, or the only one of a gather."""
    roles: tuple[Role, ...]
    """This site's role in each tree."""
    epoch: int
    """Epoch of the plan; 0: the run's first plan."""
    from_round: int
    small: PlanInForce | None = None
    """Gather for buckets of at most `plan.gathered_bytes`; None: such buckets use the plan
    itself."""

    def of_bucket(self, numel: int) -> PlanInForce:
        """Return the plan for a bucket of `numel` float32 elements."""
        if self.small is not None and 4 * numel <= self.plan.gathered_bytes:
            return self.small
        return self


def in_force(
    plan: ReductionPlan, codecs: Sequence[str], site: int, *, epoch: int, from_round: int
) -> PlanInForce:
    """Return a plan as one site uses it."""
    small = None
    if plan.gathered_bytes:
        small = in_force(plan.gathering(), codecs[:1], site, epoch=epoch, from_round=from_round)
    own = roles(plan, site)
    return PlanInForce(plan, tuple(map(codec_named, codecs)), own, epoch, from_round, small)


@dataclass(frozen=True, slots=True)
class Gift:
    """Chunks of a bucket that one site hands over to another. Sites are indices."""

    donor: int
    receiver: int
    round: int
    bucket: int
    runs: Runs


class Fate(Enum):
    """What a resume means for a chunk of a round that moves to the new epoch."""

    DONE = auto()
    """The chunk is finished here."""
    COMES = auto()
    """Another member has finished the chunk, and hands it over."""
    AGAIN = auto()
    """No member has finished the chunk: it is repeated by the new plan."""


class Verdict(Enum):
    """How to treat a received frame."""

    TAKE = auto()
    DROP = auto()
    """The frame's epoch is over: the sender repeats the chunk, or need not."""
    WAIT = auto()
    """The frame's epoch has not begun here."""


@dataclass(frozen=True, slots=True)
class _Hold:
    """An announced change whose outcome is not known yet."""

    epoch: int
    from_round: int
    """Rounds from this one on may not begin."""
    stops: bool
    """Whether chunks are stopped, because a site is lost."""


class Epochs:
    """The epochs of one gateway, and its finished chunks. Not thread-safe."""

    def __init__(self, first: PlanInForce) -> None:
        """Begin with the plan of the run's configuration."""
        self.round = -1
        """Latest round that has begun here; -1 before the first."""
        self._site = {role.site for role in first.roles}.pop()
        self._plans = [first]
        self.missing: dict[int, int] = {}
        """Sites that have left, with the first round without them."""
        self._hold: _Hold | None = None
        self._pending: PlanInForce | None = None
        """New epoch in which a site rejoins; it begins with a round that ranks will mark. None:
        none."""
        self._cancelled_epoch = 0
        self._leaves_at: int | None = None
        """First round after this site has left; None: it is a member."""
        self._finished: dict[BucketKey, dict[int, tuple[object, ...]]] = {}
        """Result frames of finished chunks, for rounds not known to be stable."""
        self._coming: dict[ChunkOrder, int] = {}
        """Unfinished chunks that another site hands over, with that site."""
        self._gifts: dict[BucketKey, list[Gift]] = {}
        self._digests: dict[int, int] = {}
        self._chains: dict[int, int] = {}

    # ---------------------------------------------------------------- rounds

    @property
    def number(self) -> int:
        """Number of the newest epoch in force."""
        return self._plans[-1].epoch

    @property
    def from_round(self) -> int:
        """First round of the newest epoch in force."""
        return self._plans[-1].from_round

    @property
    def is_stopped(self) -> bool:
        """Whether chunks are stopped until a resume, because a site is lost."""
        return self._hold is not None and self._hold.stops

    def plan_of(self, round_: int) -> PlanInForce:
        """Return the plan of a round that `may_begin`, or has begun."""
        found = [each for each in self._plans if each.from_round <= round_]
        return found[-1] if found else self._plans[0]

    def follows(self, round_: int) -> bool:
        """Whether this site is catching up in a round: it gets results and contributes nothing."""
        return self.plan_of(round_).roles[0].follows

    def may_begin(self, round_: int) -> bool:
        """Whether this site takes part in a round, and the round's plan is known."""
        return (self._hold is None or round_ < self._hold.from_round) and not self.is_over(round_)

    def is_over(self, round_: int) -> bool:
        """Whether this site has left before the round."""
        return self._leaves_at is not None and round_ >= self._leaves_at

    def begin(self, round_: int) -> None:
        """Begin a round; earlier rounds are complete.

        Drops plans of rounds before the previous one.
        """
        assert self.may_begin(round_), "nobody knows yet what carries it"
        over = [each for each in self._plans[1:] if each.from_round < round_]
        del self._plans[: len(over)]
        before, self.round = self.round, round_
        if before >= 0:
            self._extend_chain(before, round_)

    def is_in_force(self, epoch: int) -> bool:
        """Whether a current or later round has the plan of an epoch."""
        return any(plan.epoch == epoch for plan in self._plans)

    def needs(self, site: int) -> bool:
        """Whether a plan in use has traffic to or from a site."""
        plans = [*self._plans, *([self._pending] if self._pending else [])]
        return any(site in each.plan.neighbours(self._site) for each in plans)

    def verdict(self, epoch: int, round_: int) -> Verdict:
        """Return how to treat a frame of an epoch and round."""
        if epoch > self.number:
            return Verdict.WAIT
        if self.is_stopped or epoch < self.plan_of(round_).epoch:
            return Verdict.DROP
        return Verdict.TAKE

    # ---------------------------------------------------------------- what is finished

    def finish(self, order: ChunkOrder, frames: tuple[object, ...], checksum: int) -> None:
        """Record a finished chunk.

        Args:
            order: the chunk.
            frames: the result, or in a gather all contributions, for sites that lack it.
            checksum: the sum of the frames' checksums.
        """
        round_, bucket, chunk = order
        for key in [key for key in self._finished if key[0] < round_]:
            del self._finished[key]  # they are stable
        self._finished.setdefault((round_, bucket), {})[chunk] = frames
        self._coming.pop(order, None)
        self._digests[round_] = (self._digests.get(round_, 0) + checksum) % _WORD

    def finished(self) -> tuple[Finished, ...]:
        """Return the finished chunks of rounds that are not known to be stable, in order."""
        return tuple(Finished(*key, runs_of(self._finished[key])) for key in sorted(self._finished))

    @property
    def chains(self) -> Mapping[int, int]:
        """Checksums over all results up to a round, by round, for the latest complete rounds.

        Modulo 2^64. Added up over the gateways of a site, they must be equal at all members.
        """
        return self._chains

    def _extend_chain(self, before: int, round_: int) -> None:
        chain = self._chains.get(before - 1, 0)
        for each in range(before, round_):
            chain = (chain * _CHAIN_FACTOR + self._digests.pop(each, 0)) % _WORD
            self._chains[each] = chain
        for each in [each for each in self._chains if each < round_ - _CHAINS_KEPT]:
            del self._chains[each]

    # ---------------------------------------------------------------- changes

    def settle(self, epoch: int, *, stops: bool) -> None:
        """Begin no further round; with `stops`, also stop all chunks.

        An epoch older than one in force or announced changes nothing.
        """
        hold = self._hold
        pending = self._pending.epoch if self._pending else 0
        newest = max(self.number, self._cancelled_epoch, pending)
        if epoch <= newest or (hold is not None and epoch < hold.epoch):
            return
        stops = stops or self.is_stopped  # frames dropped since do not come back
        self._hold = _Hold(epoch, self.round + 1, stops)

    def cancel(self, epoch: int) -> None:
        """Call off a change. If chunks are stopped, they wait for another one."""
        hold = self._hold
        self._cancelled_epoch = max(self._cancelled_epoch, epoch)
        if hold is not None and hold.epoch <= epoch and not hold.stops:
            self._hold = None

    def resume(self, plan: PlanInForce, gifts: Iterable[Gift] = ()) -> bool:
        """Take a new epoch; return whether it is new. If this site is no member of it, it leaves.

        If chunks were stopped, `fate` then answers for rounds from `plan.from_round` on.

        Raises:
            LocalProtocolError: its first round has begun here, and chunks were not stopped.
        """
        hold = self._hold
        if plan.epoch <= self.number or (hold is not None and plan.epoch < hold.epoch):
            return False
        self._note_missing(plan)
        if self.is_stopped:
            self._plans = [plan]
            self._coming, self._gifts = {}, {}  # a planned change lets them go on
        elif plan.from_round <= self.round:
            raise LocalProtocolError(
                f"epoch {plan.epoch} from round {plan.from_round} on; round {self.round} has begun"
            )
        else:
            kept = [each for each in self._plans if each.from_round < plan.from_round]
            if self.round < 0 and plan.roles[0].follows:
                kept = [each for each in kept if each.roles[0].follows]  # no part in others
            self._plans = [*kept, plan]
        self._hold = self._pending = None
        if self._site not in plan.plan.members and not plan.roles[0].follows:
            self._leaves_at = plan.from_round
        for gift in gifts:
            key = gift.round, gift.bucket
            if gift.donor == self._site:
                self._gifts.setdefault(key, []).append(gift)
            if gift.receiver == self._site:
                done = self._finished.get(key, {})
                coming = ((*key, chunk) for chunk in numbers_of(gift.runs) if chunk not in done)
                self._coming.update(dict.fromkeys(coming, gift.donor))
        return True

    def await_entry(self, plan: PlanInForce) -> bool:
        """Take a new epoch that starts when ranks mark a round; return whether it is new.

        Until `enter` the current epoch goes on. Any other new epoch replaces the awaited one.
        """
        hold = self._hold
        pending = self._pending.epoch if self._pending else 0
        if plan.epoch <= max(self.number, pending) or self.is_stopped:
            return False
        if hold is not None and plan.epoch < hold.epoch:
            return False
        self._hold, self._pending = None, plan
        return True

    def enter(self, epoch: int, round_: int) -> bool:
        """Ranks have marked a round; return whether the awaited epoch begins with it."""
        pending = self._pending
        if pending is None or pending.epoch != epoch or round_ <= self.round:
            return False
        plan = replace(pending, from_round=round_)
        self._note_missing(plan)
        self._plans.append(plan)
        self._pending = None
        return True

    def _note_missing(self, plan: PlanInForce) -> None:
        before, after = {*self._plans[-1].plan.members}, plan.plan.members
        if self._pending is not None:  # ranks may already count on the sites that were to enter
            before |= {*self._pending.plan.members}
        known = {site: at for site, at in self.missing.items() if site not in after}
        self.missing = {site: plan.from_round for site in before if site not in after} | known

    def fate(self, order: ChunkOrder) -> Fate:
        """Return the fate of a chunk in a round that a resume has restarted."""
        if order[2] in self._finished.get(order[:2], {}):
            return Fate.DONE
        return Fate.COMES if order in self._coming else Fate.AGAIN

    def donor(self, order: ChunkOrder) -> int | None:
        """Return the site that hands a chunk over to this one; None: none does."""
        return self._coming.get(order)

    def due(self) -> list[tuple[ChunkOrder, int, tuple[object, ...]]]:
        """Return the handovers that are due: (chunk, receiving site, frames).

        A handover is returned once. A chunk not finished here yet comes from another donor first.
        """
        handovers = []
        for key, gifts in self._gifts.items():
            done = self._finished.get(key, {})
            for at, gift in enumerate(gifts):
                ready = [chunk for chunk in numbers_of(gift.runs) if chunk in done]
                handovers += [((*key, chunk), gift.receiver, done[chunk]) for chunk in ready]
                left = runs_of(set(numbers_of(gift.runs)).difference(ready))
                gifts[at] = Gift(gift.donor, gift.receiver, *key, left)
        return handovers
