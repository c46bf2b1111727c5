"""The executor of a gateway: brings local ranks' parts and peers' frames together, chunk by chunk.

Each epoch has an exchange (`exchange.py`), which has its buckets. Each chunk's machine
(`chunk_reduction.py`) gets its events one after another; different chunks run side by side, so
encoding, sending, summing and decoding overlap. A rank's own part is worked on by whichever pool
thread is free. A peer's frame is worked on by the thread that received it, if it is small, and else
by the pool.

Peers' frames are accepted at once, in any order, and kept until they can be summed. Own parts are
admitted to encoding in (round, bucket, chunk) order, as fast as links take them and peers have room
(`admission.py`).

A round has one plan (`epochs.py`). While members or trees change, ranks wait at the next round. If
a site is lost, chunks stop, and are then handed over or repeated; a repeated chunk is admitted
anew.

One lock guards all of this; machines work outside of it.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from isthmus.protos.errors import (
    DeadlineExceededError,
    IsthmusError,
    PeerLostError,
    failure_of,
)
from isthmus.protos.failure import Failure
from isthmus.protos.frame import ChunkKey, Frame, Kind, Packed, checksum_of, pack
from isthmus.sites.codecs.codec import Floats
from isthmus.sites.codecs.registry import EXACT
from isthmus.sites.gateway.config import GatewayConfig, GatewayId
from isthmus.sites.gateway.links.peer_links import Link
from isthmus.sites.gateway.reduction.admission import Admission, Handovers
from isthmus.sites.gateway.reduction.bucket import (
    Chunk,
    GatewayBucket,
    RoundHistory,
    check_finite,
)
from isthmus.sites.gateway.reduction.chunk_reduction import (
    Event,
    Finish,
    HandedOver,
    Own,
    Received,
)
from isthmus.sites.gateway.reduction.epochs import (
    Epochs,
    Gift,
    PlanInForce,
    in_force,
)
from isthmus.sites.gateway.reduction.exchange import Arrivals, Exchanges
from isthmus.sites.gateway.reduction.following import Following, OthersRounds
from isthmus.sites.gateway.reduction.pool import Pool
from isthmus.sites.gateway.reduction.reductions import Reductions
from isthmus.sites.gateway.reduction.residuals import KeptResiduals
from isthmus.sites.local.rank_messages import Form, Missing, Reduce, Reduced
from isthmus.sites.silence import Standstills
from isthmus.topology.spec.epoch import Finished
from isthmus.topology.spec.reduction_plan import ReductionPlan

_HERE_BYTES = 2 << 20
"""Largest payload that the receiving thread sums itself. That takes about 0.2 ms, in which all
links wait; waking a pool thread would cost more."""
_OUTCOME_CHECK_S = 1.0


@dataclass(frozen=True, slots=True)
class Settled:
    """A gateway's progress, as reported during a change."""

    round: int
    """Latest round that a local rank has posted; -1 before the first."""
    finished: tuple[Finished, ...]
    """Finished chunks of rounds not known to be stable. Final if chunks are stopped."""
    chains: Mapping[int, int]
    """Checksums of complete rounds: `Epochs.chains`."""


@dataclass(frozen=True, slots=True)
class Begun:
    """An epoch that begins with a round that a rank posts."""

    epoch: int
    """The epoch in which a site rejoins, or in which this site is catching up and could rejoin."""
    behind: int = 0
    """Rounds that this site, while catching up, may be behind when it rejoins; 0 for a member."""


class SiteLeftError(IsthmusError):
    """The site has left: it has no part in this round."""

    code = "CANCELLED"


class Executor:
    """Reduces the buckets of one gateway. All methods may be called from any thread."""

    def __init__(
        self,
        config: GatewayConfig,
        pool: Pool,
        *,
        on_reduced: Callable[[int, Reduced], None],
        on_failure: Callable[[Failure], None],
        on_round_ends: Callable[[int], None] = lambda _: None,
    ) -> None:
        """Callbacks come from any thread; `on_failure` must not block.

        `on_round_ends` is told of a round of which another site has taken all steps.
        """
        self._config = config
        self._pool = pool
        self._on_reduced = on_reduced
        self._on_failure = on_failure
        self._on_round_ends = on_round_ends
        self._ended_round = -1
        """Latest round of which some site has taken all steps."""
        self._condition = threading.Condition()
        """Guards everything below. Notified when a round's plan becomes known."""
        self._is_closed = False
        self._history = RoundHistory()
        self._reductions = Reductions(config)
        self._admission = Admission(config, self._history)
        self._handovers = Handovers(config, self._reductions)
        self._arrivals = Arrivals()
        self._num_working = 0
        """Number of events that machines are handling."""
        self._following = Following(config.peer_lost_s, config.steps_per_round)
        self._others = OthersRounds()
        self._epochs = Epochs(self._plan(config.plan, config.codecs, epoch=0, from_round=0))
        self._exchanges = Exchanges(
            config, self._epochs, self._history, self._reductions, self._admission.room_bytes
        )

    def connect(self, links: Mapping[GatewayId, Link]) -> None:
        """Set the current links, as an immutable mapping.

        Must be called before the first post.
        """
        self._admission.links = links

    def close(self) -> None:
        """End all waits."""
        with self._condition:
            self._is_closed = True
            self._admission.clear()
            self._condition.notify_all()

    def wait_complete(self) -> None:
        """Wait until every posted bucket is reduced, or this gateway ends."""
        with self._condition:
            while any(self._exchanges.open_buckets()) and not self._is_closed:
                self._condition.wait(_OUTCOME_CHECK_S)

    @property
    def held_bytes(self) -> int:
        """Bytes of peers' frames that are kept until they can be summed."""
        with self._condition:
            return self._exchanges.held_bytes

    def residuals_of(self, rank: int) -> KeptResiduals:
        """Return copies of the residuals of a rank's shards. Call between its rounds."""
        with self._condition:
            residual = self._reductions.residuals_of(rank)
        # Copied without the lock: with a large model it takes seconds, and frames keep coming.
        return {key: lost.copy() for key, lost in residual.items()}

    def restore(self, residual: KeptResiduals) -> None:
        """Load residuals from a checkpoint, before the first round."""
        with self._condition:
            self._reductions.restore(residual)

    # ---------------------------------------------------------------- epochs

    @property
    def round(self) -> int:
        """The latest round that a local rank has posted; -1 before the first."""
        return self._history.current

    @property
    def results_wait_s(self) -> float:
        """How long ranks that catch up may leave results waiting; infinity: none wait."""
        with self._condition:
            is_behind = self._epochs.follows(self.round + 1) and self._others.newest > self.round
            return self._others.patience_s if is_behind else math.inf

    def needs(self, site: int) -> bool:
        """Whether the plan of a current or later round needs the link to a site."""
        with self._condition:
            return self._epochs.needs(site)

    def settle(self, epoch: int, *, stops: bool) -> Settled:
        """Begin no new round before `resume` or `cancel`; with `stops`, also stop all chunks.

        Returns the progress; with `stops`, no further chunk will finish.
        """
        with self._condition:
            was_stopped = self._epochs.is_stopped
            self._epochs.settle(epoch, stops=stops)
            if self._epochs.is_stopped and not was_stopped:
                self._admission.stop(self._exchanges.stop())
            while self._epochs.is_stopped and self._num_working and not self._is_closed:
                self._condition.wait(_OUTCOME_CHECK_S)
            return Settled(self.round, self._epochs.finished(), dict(self._epochs.chains))

    def cancel(self, epoch: int) -> None:
        """Call off a change: go on as before."""
        with self._condition:
            self._epochs.cancel(epoch)
            self._condition.notify_all()

    def resume(
        self,
        epoch: int,
        from_round: int,
        plan: ReductionPlan,
        codecs: tuple[str, ...],
        gifts: Iterable[Gift] = (),
    ) -> None:
        """Use a plan from a round on; if chunks were stopped, continue or repeat them.

        Repeated calls change nothing.

        Raises:
            LocalProtocolError: the round has begun and chunks were not stopped.
        """
        with self._condition:
            was_stopped = self._epochs.is_stopped
            ruling = self._plan(plan, codecs, epoch=epoch, from_round=from_round)
            if not self._epochs.resume(ruling, gifts):
                return
            history, follows = self._history, self._epochs.follows(from_round)
            if self.round < 0 and not history.has_followed:
                history.first = from_round  # this site may have joined late
            if follows and not history.has_followed:
                history.has_followed = True
                self._exchanges.drop_expected()  # meant for this site's previous processes
            ahead = self._exchanges.begin()
            if was_stopped:
                self._admission.add(self._exchanges.move(from_round))
                self._handovers.clear()
            self._handovers.add(self._epochs.due())
            if history.has_followed and not follows:
                self._others.wait(time.monotonic())
            self._condition.notify_all()
        self._receive_again(ahead)
        self.pump()

    def await_entry(
        self, epoch: int, from_round: int, plan: ReductionPlan, codecs: tuple[str, ...]
    ) -> int | None:
        """Use a plan from the round on that ranks mark with its epoch, for a rejoining site.

        Rounds go on meanwhile. Repeated calls change nothing. Return the round with which the epoch
        has begun; None: it has not.
        """
        with self._condition:
            if self._epochs.await_entry(
                self._plan(plan, codecs, epoch=epoch, from_round=from_round)
            ):
                self._condition.notify_all()
            return self._epochs.from_round if self._epochs.number >= epoch else None

    def _plan(
        self, plan: ReductionPlan, codecs: tuple[str, ...], *, epoch: int, from_round: int
    ) -> PlanInForce:
        site = self._config.site_index
        return in_force(plan, codecs, site, epoch=epoch, from_round=from_round)

    def _receive_again(self, frames: Iterable[tuple[GatewayId, Frame]]) -> None:
        """Receive frames that were kept: errors are those of their senders."""
        for sender, frame in frames:
            try:
                self.receive(sender, frame)
            except IsthmusError as error:
                self._on_failure(failure_of(error, self._config.sites[sender[0]]))

    def _wait_for_plan(self, round_: int) -> None:
        """Wait until a round's plan is known; the caller holds the lock.

        Raises:
            SiteLeftError: this site has left before the round.
            DeadlineExceededError: the plan did not become known in time.
            PeerLostError: this gateway is stopping.
        """
        if round_ <= self.round or self._epochs.may_begin(round_):
            return
        config, now_s = self._config, time.monotonic()
        patience_s = config.rank_wait_s
        deadline_s, standstills = now_s + patience_s, Standstills(now_s, config.peer_lost_s)
        while not self._epochs.may_begin(round_):
            if self._epochs.is_over(round_):
                raise SiteLeftError(
                    f"site {config.site} was dropped from the run, and has had its last round, "
                    f"{round_ - 1}: its processes end"
                )
            if self._is_closed:
                raise PeerLostError("this gateway is stopping", config.site)
            remaining_s = deadline_s - time.monotonic()
            if remaining_s <= 0:
                raise DeadlineExceededError(
                    f"round {round_} has waited {patience_s:g} s to hear which sites and trees "
                    "carry it"
                )
            wait_s = min(remaining_s, _OUTCOME_CHECK_S)
            self._condition.wait(wait_s)
            # Time in which this process was suspended does not count.
            deadline_s += standstills.look(time.monotonic(), wait_s)

    # ---------------------------------------------------------------- local ranks

    def post(self, rank: int, request: Reduce, values: Floats) -> Begun | None:
        """Start the reduction of a rank's part, which is borrowed until then; see `add_part`.

        Returns:
            The epoch to report to the coordinator; None: none begins.

        Raises:
            SiteLeftError: the site has no part in the round.
            PeerLostError: the site rejoins, and the others have waited for it for too long.
            LocalProtocolError: the rank broke the order of posts.
            LayoutMismatchError: another rank or site has a different bucket under this index.
            NonFiniteError: the part holds NaN or infinity, and the run is configured to stop.
        """
        if self._config.non_finite == "stop" and request.form is not Form.ENCODED:
            check_finite(request, values)
        with self._condition:
            self._wait_for_plan(request.round)
            has_entered = bool(request.enters) and self._epochs.enter(request.enters, request.round)
            ahead = self._exchanges.begin() if has_entered else []
            now_s = time.monotonic()
            is_new = request.round > self.round
            behind = self._begin_to_follow(request.round, now_s) if is_new else None
            bucket = self._exchanges.opened(rank, request, self._on_failure)
            self._admission.add(bucket.add_part(rank, request, values, now_s))
            reduced = self._take_reduced(bucket, now_s)
        self.pump()
        self._reply(reduced)
        self._receive_again(ahead)
        if behind is not None:
            return Begun(self._epochs.number, behind)
        return Begun(request.enters) if has_entered else None

    def _begin_to_follow(self, round_: int, now_s: float) -> int | None:
        """Return how many rounds this site may be behind at its rejoin: `Following.begins`.

        Raises:
            PeerLostError: the others have waited for this site for too long.
        """
        if not self._epochs.follows(round_):
            self._others.wait(math.inf)
            return None
        longest_s = 2 * self._following.wait_s
        if self._others.waited_s(now_s) > longest_s:
            why = f"this site takes part again, and the others have waited for {longest_s:g} s"
            raise PeerLostError(why, self._config.site)
        return self._following.begins(round_, self._others.newest, now_s)

    # ---------------------------------------------------------------- frames

    def pump(self) -> None:
        """Admit own chunks to encoding, as far as links and peers have room.

        Handovers that others wait for come first.
        """
        # Read without the lock: whoever adds an entry calls `pump` afterwards.
        if self._admission.is_idle and self._handovers.is_idle:
            return
        with self._condition:
            self._admit()

    def _admit(self) -> None:
        self._handovers.send(self._admission.links, self._epochs.number)
        while not self._epochs.is_stopped and (admitted := self._admission.take()) is not None:
            order, chunk = admitted
            assert chunk.own is not None
            if chunk.deliver(chunk.own):
                self._pool.submit(order, partial(self._work, chunk))

    def end_round(self, round_: int, sender: GatewayId | None = None) -> bool:
        """Tell peers that a site has taken all steps of a round; return whether that is new.

        `sender` is the peer that has said so; None: a local rank.
        """
        with self._condition:
            if round_ <= self._ended_round:
                return False
            self._ended_round, epoch = round_, self._epochs.number
        key = ChunkKey(round_, 0, 0, self._config.site_index, Kind.ROUND_ENDS)
        for peer, link in self._admission.links.items():
            if peer != sender:
                link.send(Frame(key, epoch, EXACT.number, 0, 0, 0, 0.0, b""), 0)
        return True

    def receive(self, sender: GatewayId, frame: Frame) -> None:
        """Accept a peer's frame, and sum its chunk if it was the last one missing; never waits.

        A repeated frame, or one of an epoch or a bucket that is over, changes nothing.

        Raises:
            IsthmusError: the peer may not send this frame.
        """
        if frame.key.kind is Kind.ROUND_ENDS:
            if self.end_round(frame.key.round, sender):
                self._on_round_ends(frame.key.round)
            return
        with self._condition:
            if self._is_closed:
                raise PeerLostError("this gateway is stopping", self._config.site)
            chunk = self._exchanges.receive(sender, frame, partial(self._note, sender, frame))
            problem = self._exchanges.lag_problem()
        if problem:
            self._on_failure(failure_of(PeerLostError(problem, self._config.site)))
        if chunk is not None and len(frame.payload) <= _HERE_BYTES:
            self._work(chunk)
        elif chunk is not None:
            self._pool.submit(chunk.order, partial(self._work, chunk))

    def _note(self, sender: GatewayId, frame: Frame, bucket: GatewayBucket) -> None:
        """Note when a frame has come, before its bucket takes it."""
        now_s = time.monotonic()
        if not bucket.is_open:
            self._others.note(frame.key.round, now_s)
        self._arrivals.note(bucket, sender, frame, self._admission.links.get(sender), now_s)

    # ---------------------------------------------------------------- chunks

    def _work(self, chunk: Chunk) -> None:
        """Let a chunk's machine handle its inbox; runs on one thread at a time."""
        with self._condition:
            event = self._next(chunk)
        while event is not None:
            wire_bytes, finish = self._handle(chunk, event)
            with self._condition:
                self._num_working -= 1
                reduced = self._account(chunk, event, wire_bytes, finish)
                event = self._next(chunk)
            self._reply(reduced)

    def _next(self, chunk: Chunk) -> Event | None:
        """Return the next event of a chunk; None: there is none now."""
        if not chunk.inbox or self._is_closed:
            chunk.is_scheduled = False
            if not self._num_working:
                self._condition.notify_all()  # `settle` may wait for the last event
            return None
        self._num_working += 1
        return chunk.inbox.popleft()

    def _handle(self, chunk: Chunk, event: Event) -> tuple[int, Finish | None]:
        """Give a chunk's machine an event, and carry out its actions one by one.

        Return the bytes that were sent, and the chunk's end if it has come.
        """
        wire_bytes, bucket = 0, chunk.bucket
        finish: Finish | None = None
        try:
            for action in chunk.machine.handle(event):
                if isinstance(action, Finish):
                    self._note_summed(chunk, tuple(map(pack, action.frames)), is_last=True)
                    finish = action
                    continue
                # In a tree a sent frame is a complete sum; in a gather it is the own part.
                if not bucket.reduction.is_gather:
                    self._note_summed(chunk, ())
                wire_bytes += len(pack(action.frame))  # at once: its payload may change
                link = self._admission.links.get(bucket.gateway(chunk.index, action.site))
                if link is not None:
                    link.send(action.frame, chunk.raw_bytes)
        except Exception as error:  # noqa: BLE001 - the root of a task: reported, ends the run
            origin = self._config.sites[event.sender] if isinstance(event, Received) else ""
            self._on_failure(failure_of(error, origin))
        return wire_bytes, finish

    def _account(
        self, chunk: Chunk, event: Event, wire_bytes: int, finish: Finish | None
    ) -> list[tuple[int, Reduced]]:
        """Note what an event has led to; return the ranks that have their results now."""
        if isinstance(event, Own):
            self._admission.encoding_bytes -= chunk.raw_bytes
        reduced = []
        if wire_bytes or finish is not None:
            chunk.bucket.account(chunk, wire_bytes, finish)
            reduced = self._take_reduced(chunk.bucket, time.monotonic())
            if isinstance(event, HandedOver):
                self._handovers.add(self._epochs.due())
        if isinstance(event, Own) or finish is not None:
            self._admit()
        return reduced

    def _note_summed(
        self, chunk: Chunk, frames: tuple[Packed, ...], *, is_last: bool = False
    ) -> None:
        """Release a summed chunk's kept frames, before any peer can learn that it is summed.

        `is_last`: the chunk is finished, and `frames` are its result for other sites.
        """
        with self._condition:
            order = chunk.order
            chunk.is_summed, chunk.is_finished = True, is_last
            self._exchanges.of(chunk.bucket).held.release(order)
            if is_last:
                self._admission.credit.give_back(order)
                self._epochs.finish(order, frames, sum(map(checksum_of, frames)))

    def _take_reduced(self, bucket: GatewayBucket, now_s: float) -> list[tuple[int, Reduced]]:
        """Return finished ranks with their results; drop the bucket after the last rank."""
        reduced = bucket.take_reduced(now_s)
        if self._epochs.missing:
            told = self._epochs.missing.items()
            missing = tuple(Missing(site=site, from_round=at) for site, at in told)
            reduced = [(rank, replace(each, missing=missing)) for rank, each in reduced]
        if reduced and bucket.is_reduced:
            self._exchanges.end(bucket)
            self._condition.notify_all()  # `wait_complete` may wait for it
        return reduced

    def _reply(self, reduced: list[tuple[int, Reduced]]) -> None:
        for rank, result in reduced:
            self._on_reduced(rank, result)
