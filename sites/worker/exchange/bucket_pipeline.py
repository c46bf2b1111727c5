"""Averages buckets over all ranks of all sites, several at once, in the order of their submission.

    autograd thread   scale, start the reduce-scatter                       submit()
    posting thread    wait for it in order, hand the shard to the gateway   _post()
    link's thread     hear of results, in any order                         OpenRound.note_reduced()
    finishing thread  take results in order, all-gather, complete futures   _finish()

Each thread does its part for every bucket in the same order on every rank, so that ranks never
disagree on the order of collectives. The first error of any thread is kept, completes all futures
that are still open, and is raised by every later call.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

from isthmus.protos.errors import (
    DeadlineExceededError,
    IsthmusError,
    LocalProtocolError,
    NonFiniteError,
    NoTokensError,
    RankLostError,
    RemoteProtocolError,
    ScriptError,
)
from isthmus.protos.failure import reason_of
from isthmus.sites.local.rank_messages import Form, Handed, Reduce, Reduced
from isthmus.sites.local.regions import FLOAT_BYTES
from isthmus.sites.local.squares import total_of, units_of, words_of
from isthmus.sites.worker.exchange.bucket_copy import Slot, Transfer, write_pieces
from isthmus.sites.worker.exchange.collectives import wait
from isthmus.sites.worker.exchange.finite_watch import FiniteWatch, Named, are_finite
from isthmus.sites.worker.exchange.gateway_link import Link
from isthmus.sites.worker.exchange.member_history import MemberHistory
from isthmus.sites.worker.exchange.rounds import (
    EVERYBODY,
    PLAIN,
    Bucket,
    BucketTimes,
    Round,
    RoundTerms,
    ShardWork,
    SharedBy,
    check_alike,
    hash_of_site,
)
from isthmus.sites.worker.exchange.routes import Route
from isthmus.sites.worker.exchange.shard_encoder import ShardEncoder
from isthmus.sites.worker.exchange.slots import SharedTensors, Slots

MAX_BUCKETS = 1 << 16
"""The most buckets of one round: 256 GiB at 4 MiB a bucket, which is the shipped setting."""
_CAUSE_S = 1.0
"""Time for the gateway to say, or show by its end, why another rank of the site has gone."""


class OpenRound:
    """The round that is open, what came back of it, who waits for that, and the first error.

    All threads of the pipeline meet here, and only here: every method may be called from any. At
    most one round is open.
    """

    def __init__(self, *, deadline_s: float, now_s: Callable[[], float]) -> None:
        """`deadline_s` is for every wait."""
        self.round: Round | None = None
        self.error: IsthmusError | None = None
        """The first error, after which nothing is averaged any more."""
        self._deadline_s = deadline_s
        self._now_s = now_s
        self._changed = threading.Condition()

    @property
    def current(self) -> Round:
        """The open round."""
        assert self.round is not None, "begin comes first"
        return self.round

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way, and nothing has failed."""
        opened = self.round
        is_complete = opened is None or opened.num_finished == len(opened.buckets)
        return self.error is None and is_complete

    def check(self) -> None:
        """Raise the first error, if there was one."""
        if self.error is not None:
            raise self.error

    def open(self, opened: Round) -> None:
        """Go on to the next round; every bucket of the previous one is finished."""
        with self._changed:
            self.round = opened

    def add(self, current: Round, bucket: Bucket) -> None:
        """Add the next bucket to the open round."""
        with self._changed:
            current.buckets.append(bucket)
            current.by_number[bucket.number] = bucket
            current.note_computed(bucket.index, bucket.times.submitted_s)

    # ---------------------------------------------------------------- errors

    def fail(self, error: IsthmusError) -> None:
        """Keep the first error and complete every open future with it."""
        with self._changed:
            if self.error is None:
                self.error = error
            opened = [] if self.round is None else [b for b in self.round.buckets if not b.done]
            for bucket in opened:
                bucket.done = True
            self._changed.notify_all()
        for bucket in opened:
            bucket.future.set_exception(error)  # type: ignore[arg-type] # annotated wrongly by torch

    def run(self, part: Callable[[], None]) -> None:
        """Do a thread's part; whatever ends it fails the round."""
        try:
            part()
        except RankLostError as error:
            # It may have gone for what this rank is about to hear, too: that says more.
            with self._changed:
                self._changed.wait_for(lambda: self.error is not None, _CAUSE_S)
            self.fail(error)
        except IsthmusError as error:
            self.fail(error)
        except Exception as error:  # noqa: BLE001 - a thread's root; the error reaches backward
            failure = LocalProtocolError(reason_of(error))
            failure.__cause__ = error
            self.fail(failure)

    # ---------------------------------------------------------------- results

    def note_reduced(self, reduced: Reduced) -> None:
        """Keep a result; one that was not asked for is an error of the gateway."""
        with self._changed:
            bucket = None if self.round is None else self.round.find(reduced)
            if bucket is not None and bucket.reduced is None:
                bucket.reduced = reduced
                bucket.times.reduced_s = self._now_s()
                self._changed.notify_all()
                return
        self.fail(
            RemoteProtocolError(
                f"the gateway sent round {reduced.round} bucket {reduced.bucket}, not asked for"
            )
        )

    def wait_reduced(self, current: Round, bucket: Bucket) -> Reduced | None:
        """Wait for a bucket's result and return it; None: an error came first.

        Raises:
            DeadlineExceededError: neither came in time.
        """
        with self._changed:
            self._changed.wait_for(partial(self._is_back, bucket), self._deadline_s)
        if self.error is not None:
            return None
        if bucket.reduced is None:
            raise DeadlineExceededError(self._late(current))
        return bucket.reduced

    def complete(self, bucket: Bucket) -> None:
        """Complete a future with its result, unless a failure was faster."""
        with self._changed:
            if bucket.done:
                return
            bucket.done = True
        bucket.future.set_result(bucket.pieces[0])

    def note_finished(self, current: Round, bucket: Bucket) -> None:
        """A bucket's result is in place; on CUDA, that is enqueued."""
        with self._changed:
            current.num_finished += 1
            bucket.times.finished_s = current.end_s = self._now_s()
            self._changed.notify_all()

    def wait_finished(self, current: Round, num_buckets: int) -> None:
        """Wait until the first `num_buckets` of a round are in place.

        Raises:
            IsthmusError: the first error.
            DeadlineExceededError: they were not in time; that fails the round.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self.error or current.num_finished >= num_buckets, self._deadline_s
            )
            complete = current.num_finished >= num_buckets
        self.check()
        if not complete:
            self.fail(DeadlineExceededError(self._late(current)))
            self.check()

    def _is_back(self, bucket: Bucket) -> bool:
        return self.error is not None or bucket.reduced is not None

    def _late(self, current: Round) -> str:
        return (
            f"round {current.number}: {current.num_finished} of {len(current.buckets)} buckets "
            f"were back after {self._deadline_s:g} s; is another site still computing?"
        )


class BucketPipeline:
    """The pipeline of one rank."""

    def __init__(
        self,
        link: Link,
        transfer: Transfer,
        *,
        rank: int,
        world_size: int,
        deadline_s: float,
        overlaps: bool = True,
        encoder: ShardEncoder | None = None,
        shared: SharedTensors | None = None,
        members: MemberHistory | None = None,
        finite: FiniteWatch | None = None,
        measures_own: bool = False,
        now_s: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Prepare; `start` starts the threads.

        `deadline_s` is for every wait. Without `overlaps`, all buckets of a round are handed over
        at its end, which shows what overlapping is worth. `encoder` encodes what is not exact;
        None: the gateway does. `shared` are tensors that are averaged where they lie. `members`
        is told what the gateway says of them, and allows rounds. `finite` is told of gradients that
        are not. `measures_own`: rounds have the norm of the site's own gradient, too.
        """
        self._link = link
        self._transfer = transfer
        self._rank = rank
        self._overlaps = overlaps
        self._encoder = encoder
        self._now_s = now_s
        self._slots = Slots(link, transfer, world_size, shared)
        self._open = OpenRound(deadline_s=deadline_s, now_s=now_s)
        self._members = members or MemberHistory("")
        self._finite = finite
        self._measures_own = measures_own
        self.num_rounds = 0
        """How many rounds of the run have begun."""
        self.before_gradients: Callable[[], None] = lambda: None
        """Called before a round of gradients begins."""
        self.take_epoch: Callable[[], int] = lambda: 0
        """Returns the epoch that a round of gradients begins, after that; 0: none."""
        self._to_post: queue.Queue[tuple[Round, list[Bucket]] | None]
        self._to_post = queue.Queue(MAX_BUCKETS + 1)
        self._to_finish: queue.Queue[tuple[Round, Bucket] | None] = queue.Queue(MAX_BUCKETS + 1)
        self._threads = [
            threading.Thread(target=self._open.run, args=(each,), name=name, daemon=True)
            for each, name in [(self._post, "isthmus-post"), (self._finish, "isthmus-finish")]
        ]

    def start(self) -> None:
        """Start the threads and listen to the link."""
        for thread in self._threads:
            thread.start()
        self._link.start(self._open.note_reduced, self._open.fail, self._members.tell)

    def close(self) -> None:
        """End the threads; what is under way is abandoned. Idempotent."""
        is_idle = self._open.is_idle
        self._open.fail(LocalProtocolError("this rank has left"))
        ends = (self._to_post.put_nowait, self._to_finish.put_nowait)
        for thread, end in zip(self._threads, ends, strict=True):
            try:
                end(None)
            except queue.Full:
                continue  # A thread that is stuck in a collective ends with the process.
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join(timeout=1.0)
        if is_idle:  # else a device may never come to the end of what was enqueued
            self._slots.close()

    def check(self) -> None:
        """Raise the first error of any thread or of the gateway, if there was one."""
        self._open.check()

    def begin(self, tokens: float, terms: RoundTerms = PLAIN) -> Round:
        """Open the next round, from every rank. The previous one is complete, or waited for.

        `tokens` is this rank's weight in the averages, not negative.

        Raises:
            RuntimeError: this site rejoins a run, and has not got the others' state, or begins with
                something else than gradients.
        """
        self._open.check()
        self._members.check_may_begin(self.num_rounds, is_gradient=terms.is_gradient)
        begins_epoch = 0
        if terms.is_gradient:
            self.before_gradients()
            begins_epoch = self.take_epoch()
        previous = self._open.round
        if previous is not None and previous.num_finished < len(previous.buckets):
            if not previous.terms.is_background:
                raise ScriptError(
                    "an average over sites began before the previous one, a backward pass say, "
                    "was complete"
                )
            self._wait_finished(previous)
        self._slots.forget()
        total, pending = self._transfer.launch_sum(tokens, terms.counted_by)
        opened = Round(self.num_rounds, tokens, total, pending, terms)
        opened.is_catching_up = self._members.is_catching_up
        opened.begins_epoch = begins_epoch
        self._open.open(opened)
        self.num_rounds += 1
        return opened

    def submit(
        self,
        pieces: Sequence[torch.Tensor],
        layout: int,
        *,
        exact: bool = False,
        route: Route | None = None,
        number: int | None = None,
        sharing: SharedBy = EVERYBODY,
        factors: Sequence[float] = (),
        is_gradient: bool = True,
        named: Named = (),
        work: ShardWork | None = None,
    ) -> torch.futures.Future[torch.Tensor]:
        """Average a bucket over all ranks of all sites, weighted by their tokens, in place.

        Of a round in the background, the pieces are anything until it has been waited for.

        Args:
            pieces: what it consists of, one at least: floating point, of any shape and strides, in
                row-major order. Overwritten.
            layout: equal on all ranks of all sites, or the run ends with LAYOUT_MISMATCH.
            exact: let nothing but fp32 cross the WAN.
            route: of a bucket whose elements the ranks hold shards of: `pieces` are this rank's,
                and hold the average over the site's ranks, weighted by their tokens, already.
            number: of the bucket in its round, where not all ranks have all buckets; ascending.
            sharing: which ranks share it.
            factors: by which each of the pieces is multiplied, in place of the tokens; of sums,
                empty is 1.
            is_gradient: its elements count in the round's norm.
            named: the gradients in it, by which one that is not finite is named: views.
            work: is done to this rank's shard in the host's memory, before it crosses and after.
                Nothing is multiplied by tokens then, and the gateway encodes.

        Returns:
            Completed with the first of `pieces`. Open futures end with the error that `wait`
            raises.

        Steps inside the site: P - 1 each for reduce-scatter and all-gather, P ranks.
        """
        self._open.check()
        current = self._open.current
        index = len(current.buckets)
        if index == MAX_BUCKETS:
            raise ScriptError(f"more than {MAX_BUCKETS} buckets: make them larger")
        slot_index = self._free_slot(current, index)
        numel = sum(each.numel() for each in pieces) if route is None else route.numel
        slot = self._slots.get(slot_index, numel, route, pieces)
        is_own = route is None or current.terms.counted_by == (self._rank,)
        with torch.no_grad():
            is_finite = None
            if current.terms.is_gradient and is_gradient and self._counts(current, is_own=is_own):
                is_finite = self._look(current, pieces, named, is_own=is_own)
            if work is not None or (current.terms.is_summed and not factors):
                factors = [1.0] * len(pieces)
            if is_gradient and current.is_void(is_own=is_own):
                factors = [0.0] * len(pieces)
            weights = factors or (current.tokens if is_own else self.site_tokens())
            write_pieces(pieces, weights, slot.padded)
        pending = self._transfer.launch(slot)
        bucket = Bucket(
            current.terms.first_bucket + (index if number is None else number),
            index,
            sharing,
            slot,
            pieces,
            layout,
            exact,
            is_gradient,
            pending,
            self._transfer.make_future(),
            self._shard_bytes(slot, self._rank if route is None else route.index),
            BucketTimes(self._now_s()),
            named=named,
            is_finite=is_finite,
            is_own=is_own,
            work=work,
        )
        if self._encoder is not None and not exact and work is None:
            slot.encode = partial(
                self._encoder.encode,
                bucket=bucket.number,
                numel=numel,
                layout=layout,
                participants=sharing.participants,
            )
        self._link.send(Handed(round=current.number))
        self._open.add(current, bucket)
        if self._overlaps:
            self._release(current)
        return bucket.future

    def _shard_bytes(self, slot: Slot, place: int) -> int:
        """Return the float32 bytes of the shard at a place among ranks, without padding."""
        first = min(place * slot.region.numel(), slot.numel)
        return FLOAT_BYTES * min(slot.region.numel(), slot.numel - first)

    def _counts(self, current: Round, *, is_own: bool) -> bool:
        """Whether what this rank submits has a part in the average, and anybody wants to know."""
        has_part = not (current.is_catching_up or (is_own and current.tokens == 0))
        return self._finite is not None and has_part

    def _look(
        self, current: Round, pieces: Sequence[torch.Tensor], named: Named, *, is_own: bool
    ) -> torch.Tensor | None:
        """Look for what is not finite before another rank can have it.

        Returns:
            On CUDA, what says so once the reduce-scatter is over.

        Raises:
            NonFiniteError: there is some, and the run is to stop for that.
        """
        found = are_finite(pieces)
        if self._transfer.device.type != "cpu":
            return found
        if not bool(found):
            self._tell_not_finite(current, named, is_own=is_own)
        return None

    def _tell_not_finite(self, current: Round, named: Named, *, is_own: bool) -> None:
        assert self._finite is not None, "nobody looks"
        terms = current.terms
        try:
            self._finite.found(named, is_own=is_own, what=terms.what, since=terms.since())
        except NonFiniteError as error:
            self._open.fail(error)
            raise

    def site_tokens(self) -> torch.Tensor:
        """Return the tokens of all ranks of the site, this round: float64[1], on this stream."""
        wait(self._open.current.pending)
        return self._open.current.total

    def release(self) -> None:
        """Hand over all of the open round, which crosses in the background from now on."""
        self._release(self._open.current)

    def wait(self, of: Round | None = None, *, has_norm: bool = False) -> Round:
        """Wait until every bucket of a round is in place; return the round.

        `of` is one in the background; None: the open one. `has_norm`: so that its norm can be asked
        for, ranks of the site add up a few numbers.

        Raises:
            IsthmusError: the first error of any thread or of the gateway.
            DeadlineExceededError: results did not come in time.
            NonFiniteError: the average is not finite, and the run is to stop for that.
        """
        current = of or self._open.current
        self._release(current)
        self._wait_finished(current)
        if self._finite is not None and current.terms.is_gradient and not current.is_catching_up:
            self._finite.end_round(unfit=current.unfit, what=current.terms.what)
        if has_norm:
            own = words_of(current.own_squares) if self._measures_own else []
            words = [*words_of(current.squares), *own]
            current.read_squares = self._transfer.sum_words(words)
            current.end_s = self._now_s()
        return current

    def _wait_finished(self, current: Round) -> None:
        begin_s = self._now_s() if current.terms.is_background else 0.0
        self._open.wait_finished(current, len(current.buckets))
        if current.terms.is_background:
            current.waits.append((begin_s, self._now_s()))

    def _release(self, current: Round) -> None:
        """Give the posting thread all buckets that it has not had."""
        released = current.buckets[current.num_posted :]
        if released:
            current.num_posted += len(released)
            self._to_post.put_nowait((current, released))

    def _free_slot(self, current: Round, index: int) -> int:
        """Return which buffers a bucket gets, once an earlier one has gone from them."""
        if current.terms.num_slots is None:
            return index
        earlier = index - current.terms.num_slots
        if earlier >= 0:
            self._release(current)
            self._open.wait_finished(current, earlier + 1)
            current.buckets[earlier].future.wait()  # on CUDA this stream does
        return index % current.terms.num_slots

    def _post(self) -> None:
        """Hand shards to the gateway, in order, as their reduce-scatters complete."""
        while (item := self._to_post.get()) is not None and self._open.error is None:
            current, buckets = item
            if buckets[0].index == 0:
                current.site_weight = self._transfer.read_sum(current.total, current.pending)
                check_alike(current)
            for bucket in buckets:
                computed_s = self._transfer.collect(bucket.slot, bucket.pending)
                if computed_s is not None:
                    # Submitted long before: the device still computed what was only enqueued.
                    bucket.times.submitted_s = self._now_s() - computed_s
                    current.note_computed(bucket.index, bucket.times.submitted_s)
                if bucket.work is not None:
                    bucket.work.leave(bucket.slot.region, current.site_weight)
                if bucket.is_finite is not None and not bool(bucket.is_finite):
                    self._tell_not_finite(current, bucket.named, is_own=bucket.is_own)
            if current.terms.is_gradient and self._rank == 0 and buckets[0] is current.buckets[0]:
                current.gradient_hash = hash_of_site(buckets[0].slot.region)
            for bucket in buckets:
                if self._measures_own and bucket.is_gradient:
                    current.own_squares = total_of((current.own_squares, _squares(bucket.slot)))
                self._hand_over(current, bucket)

    def _hand_over(self, current: Round, bucket: Bucket) -> None:
        bucket.times.start_s = self._now_s()
        # Before the gateway can answer, the finishing thread may know of the bucket.
        self._to_finish.put_nowait((current, bucket))
        self._link.send(
            Reduce(
                round=current.number,
                bucket=bucket.number,
                region=bucket.slot.region_id,
                offset=bucket.slot.offset,
                numel=bucket.slot.numel,
                layout=bucket.layout,
                weight=current.site_weight,
                exact=bucket.exact,
                form=bucket.slot.form,
                encoded_bytes=bucket.slot.encoded_bytes,
                enters=current.begins_epoch,
                participants=bucket.sharing.participants,
                after=bucket.sharing.after,
            )
        )

    def _finish(self) -> None:
        """Put results in place, in order."""
        while (item := self._to_finish.get()) is not None:
            current, bucket = item
            reduced = self._open.wait_reduced(current, bucket)
            if reduced is None:
                return
            # Sites that catch up give no token, and may be the only ones left.
            may_be_empty = current.terms.may_be_empty or current.is_catching_up
            if reduced.weight == 0.0 and not may_be_empty:
                raise NoTokensError("no rank of any site has tokens (count_tokens)")
            if bucket.work is not None:
                bucket.work.land(bucket.slot.region)
            complete = partial(self._open.complete, bucket)
            self._transfer.deliver(bucket.slot, bucket.pieces, complete)
            if not math.isnan(reduced.weight):
                current.weight = reduced.weight
            self._open.note_finished(current, bucket)


def _squares(slot: Slot) -> int | None:
    """Return the squares of a shard before it crosses, in units; None: it is encoded already."""
    # Imported only by runs that ask for it: it loads compiled loops.
    from isthmus.sites.codecs.kernels import loops

    if slot.form is not Form.VALUES:
        return None
    return units_of(loops.sum_of_squares(slot.region.numpy()))
