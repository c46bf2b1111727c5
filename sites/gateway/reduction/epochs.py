"""The epochs of one gateway: which plan carries a round, and what a resume means. Pure.

Members and trees change in two phases (topology/spec/epoch.py). *Settle*: no new round begins.
Where a site is lost, chunks stop, too, and what is finished here no longer changes: that is what
the answer says. *Resume*: later rounds have the new plan. Where a site was lost, all rounds from
the oldest unfinished one on have it. Each chunk of these has one of three fates: it is done, it
comes from a site that has it, or it is done again. A change that was announced may also be
*cancelled*, but not where a site is lost, for frames have been dropped.

Of each finished chunk the result's frames are kept, for those who might not get them, until its
round is *stable*: finished at all members. A finished chunk of the next round proves that, for each
member has put into it what it made of all of this one.
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
"""Rounds that gateways of a site may be apart, and some."""


@dataclass(frozen=True, slots=True)
class PlanInForce:
    """What a bucket needs to know of the plan that carries it."""

    plan: ReductionPlan
    codecs: tuple[Codec, ...]
    """One for each tree, or the only one of a gather."""
    roles: tuple[Role, ...]
    """This site's roles in it."""
    epoch: int
    """0 is the plan that the run began with."""
    from_round: int
    small: PlanInForce | None = None
    """What carries buckets of `plan.gathered_bytes` at most; None: there are none."""

    def of_bucket(self, numel: int) -> PlanInForce:
        """Return what carries a bucket of so many float32 elements."""
        if self.small is not None and 4 * numel <= self.plan.gathered_bytes:
            return self.small
        return self


def in_force(
    plan: ReductionPlan, codecs: Sequence[str], site: int, *, epoch: int, from_round: int
) -> PlanInForce:
    """Return a plan as one site has it."""
    small = None
    if plan.gathered_bytes:
        small = in_force(plan.gathering(), codecs[:1], site, epoch=epoch, from_round=from_round)
    own = roles(plan, site)
    return PlanInForce(plan, tuple(map(codec_named, codecs)), own, epoch, from_round, small)


@dataclass(frozen=True, slots=True)
class Gift:
    """Chunks of a bucket that one site hands over to another; sites are given by index."""

    donor: int
    receiver: int
    round: int
    bucket: int
    runs: Runs


class Fate(Enum):
    """What a resume means for a chunk of a round that the new epoch carries."""

    DONE = auto()
    """It is finished here."""
    COMES = auto()
    """Another member has finished it, and hands it over."""
    AGAIN = auto()
    """No member has finished it: it is done by the new plan."""


class Verdict(Enum):
    """What is done with a frame that came."""

    TAKE = auto()
    DROP = auto()
    """Its epoch is over: its sender does the chunk again, or has no need to."""
    WAIT = auto()
    """Its epoch has not begun here."""


@dataclass(frozen=True, slots=True)
class _Hold:
    """A change that was announced, and whose outcome is not known."""

    epoch: int
    from_round: int
    """No round from here on begins."""
    stops: bool
    """A site is lost: chunks do not move."""


class Epochs:
    """The epochs of one gateway, and what it has finished. Not thread-safe."""

    def __init__(self, first: PlanInForce) -> None:
        """Begin with the plan of the run's configuration."""
        self.round = -1
        """The latest that has begun here; -1 before the first."""
        self._site = {role.site for role in first.roles}.pop()
        self._plans = [first]
        self.missing: dict[int, int] = {}
        """Sites that take part no more, and the first round without them."""
        self._hold: _Hold | None = None
        self._pending: PlanInForce | None = None
        """It begins with a round that ranks will mark: a site enters then."""
        self._cancelled_epoch = 0
        self._leaves_at: int | None = None
        """The first round in which this site has no part any more."""
        self._finished: dict[BucketKey, dict[int, tuple[object, ...]]] = {}
        """The frames of each finished chunk's result; of rounds not known to be stable."""
        self._coming: dict[ChunkOrder, int] = {}
        """Unfinished chunks that others hand over, and who."""
        self._gifts: dict[BucketKey, list[Gift]] = {}
        self._digests: dict[int, int] = {}
        self._chains: dict[int, int] = {}

    # ---------------------------------------------------------------- rounds

    @property
    def number(self) -> int:
        """The newest epoch in force."""
        return self._plans[-1].epoch

    @property
    def from_round(self) -> int:
        """The first round of the newest epoch in force."""
        return self._plans[-1].from_round

    @property
    def is_stopped(self) -> bool:
        """Whether chunks stand still until a resume, for a site is lost."""
        return self._hold is not None and self._hold.stops

    def plan_of(self, round_: int) -> PlanInForce:
        """Return what carries a round that `may_begin`, or has begun."""
        found = [each for each in self._plans if each.from_round <= round_]
        return found[-1] if found else self._plans[0]

    def follows(self, round_: int) -> bool:
        """Whether this site only gets the results of a round that `may_begin`, or has begun."""
        return self.plan_of(round_).roles[0].follows

    def may_begin(self, round_: int) -> bool:
        """Whether this site has a part in a round, and it is known which plan carries it."""
        return (self._hold is None or round_ < self._hold.from_round) and not self.is_over(round_)

    def is_over(self, round_: int) -> bool:
        """Whether this site has left before a round."""
        return self._leaves_at is not None and round_ >= self._leaves_at

    def begin(self, round_: int) -> None:
        """A round begins here; those before are complete.

        Plans of rounds before the previous one are forgotten.
        """
        assert self.may_begin(round_), "nobody knows yet what carries it"
        over = [each for each in self._plans[1:] if each.from_round < round_]
        del self._plans[: len(over)]
        before, self.round = self.round, round_
        if before >= 0:
            self._extend_chain(before, round_)

    def needs(self, site: int) -> bool:
        """Whether a plan that carries rounds has bytes go to or from a site."""
        plans = [*self._plans, *([self._pending] if self._pending else [])]
        return any(site in each.plan.neighbours(self._site) for each in plans)

    def verdict(self, epoch: int, round_: int) -> Verdict:
        """Return what is done with a frame of an epoch that belongs to a round."""
        if epoch > self.number:
            return Verdict.WAIT
        if self.is_stopped or epoch < self.plan_of(round_).epoch:
            return Verdict.DROP
        return Verdict.TAKE

    # ---------------------------------------------------------------- what is finished

    def finish(self, order: ChunkOrder, frames: tuple[object, ...], checksum: int) -> None:
        """A chunk's result is in place.

        Args:
            order: Which chunk.
            frames: The result, or in a gather all contributions: what another site needs of it.
            checksum: The sum of the frames' own checksums.
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
        """What all results of the rounds up to one came to, for the latest complete ones.

        Modulo 2^64. Gateways of a site have theirs added up: then all members have the same.
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
        """Begin no further round, and `stops`: let no chunk move.

        An older epoch than one in force, or announced, changes nothing.
        """
        hold = self._hold
        pending = self._pending.epoch if self._pending else 0
        newest = max(self.number, self._cancelled_epoch, pending)
        if epoch <= newest or (hold is not None and epoch < hold.epoch):
            return
        stops = stops or self.is_stopped  # what was dropped since does not come back
        self._hold = _Hold(epoch, self.round + 1, stops)

    def cancel(self, epoch: int) -> None:
        """The change does not come. Where chunks are stopped, another one will."""
        hold = self._hold
        self._cancelled_epoch = max(self._cancelled_epoch, epoch)
        if hold is not None and hold.epoch <= epoch and not hold.stops:
            self._hold = None

    def resume(self, plan: PlanInForce, gifts: Iterable[Gift] = ()) -> bool:
        """Take a new epoch; return whether it is new here. A site that is no member in it leaves.

        Afterwards `fate` tells about chunks of rounds from `plan.from_round` on, if they had been
        stopped.

        Raises:
            LocalProtocolError: its first round has begun here, and was not stopped.
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
        """Take a new epoch that begins with a round that ranks will mark; return whether it is new.

        Until `enter` all goes on as before. Any other new epoch takes its place.
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
        """Ranks have marked a round; return whether an epoch begins with it that was awaited."""
        pending = self._pending
        if pending is None or pending.epoch != epoch or round_ <= self.round:
            return False
        plan = replace(pending, from_round=round_)
        self._note_missing(plan)
        self._plans.append(plan)
        self._pending = None
        return True

    def _note_missing(self, plan: PlanInForce) -> None:
        before, after = self._plans[-1].plan.members, plan.plan.members
        self.missing = {site: at for site, at in self.missing.items() if site not in after}
        self.missing |= {site: plan.from_round for site in before if site not in after}

    def fate(self, order: ChunkOrder) -> Fate:
        """Return what becomes of a chunk of a round that a resume has begun anew."""
        if order[2] in self._finished.get(order[:2], {}):
            return Fate.DONE
        return Fate.COMES if order in self._coming else Fate.AGAIN

    def donor(self, order: ChunkOrder) -> int | None:
        """Return the site that hands a chunk over to here; None: nobody does."""
        return self._coming.get(order)

    def due(self) -> list[tuple[ChunkOrder, int, tuple[object, ...]]]:
        """Return what is to be handed over now: chunks, to which site, and their frames.

        Each is told once. What is not finished here yet comes from another donor first.
        """
        found = []
        for key, gifts in self._gifts.items():
            done = self._finished.get(key, {})
            for at, gift in enumerate(gifts):
                ready = [chunk for chunk in numbers_of(gift.runs) if chunk in done]
                found += [((*key, chunk), gift.receiver, done[chunk]) for chunk in ready]
                left = runs_of(set(numbers_of(gift.runs)).difference(ready))
                gifts[at] = Gift(gift.donor, gift.receiver, *key, left)
        return found
