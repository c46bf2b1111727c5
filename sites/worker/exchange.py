"""Averages buckets over all ranks of all sites, several at once, in the order of their submission.

    autograd thread    scale, start the reduce-scatter                       submit()
    posting thread     wait for it in order, hand the shard to the gateway   _post()
    (the link's thread hears of results, in any order)                       UnderWay.note_reduced()
    finishing thread   take results in order, all-gather, complete futures   _finish()

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

from protos.errors import LocalProtocolError, NoTokensError
from sites.worker.collectives import wait
from sites.worker.encoding import ShardEncoder
from sites.worker.link import Link, Reduce
from sites.worker.region import FLOAT_BYTES
from sites.worker.rounds import Bucket, Round
from sites.worker.routes import Route
from sites.worker.shared_tensors import SharedTensors
from sites.worker.slots import Slots
from sites.worker.transfer import Transfer, write_pieces
from sites.worker.under_way import UnderWay

MAX_BUCKETS = 1 << 16
"""Of one round. 4 MiB a bucket, the shipped setting, reaches 256 GiB."""


class Exchange:
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
        now_s: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Start nothing.

        Args:
            link: the way to the other sites.
            transfer: the way to the link.
            rank: inside the site.
            world_size: ranks of the site.
            deadline_s: for every wait.
            overlaps: hand buckets over as they come; else all of a round at its end, which shows
                what overlapping is worth.
            encoder: encodes what is not exact; None: the gateway does.
            shared: tensors that are averaged where they lie; None: there are none.
            now_s: the clock.
        """
        self._link = link
        self._transfer = transfer
        self._rank = rank
        self._overlaps = overlaps
        self._encoder = encoder
        self._now_s = now_s
        self._slots = Slots(link, transfer, world_size, shared)
        self._under_way = UnderWay(deadline_s=deadline_s, now_s=now_s)
        self._num_rounds = 0
        self._to_post: queue.Queue[tuple[Round, list[Bucket]] | None]
        self._to_post = queue.Queue(MAX_BUCKETS + 1)
        self._to_finish: queue.Queue[tuple[Round, Bucket] | None] = queue.Queue(MAX_BUCKETS + 1)
        self._threads = [
            threading.Thread(target=self._under_way.run, args=(each,), name=name, daemon=True)
            for each, name in [(self._post, "isthmus-post"), (self._finish, "isthmus-finish")]
        ]

    def start(self) -> None:
        """Start the threads and listen to the link."""
        for thread in self._threads:
            thread.start()
        self._link.start(self._under_way.note_reduced, self._under_way.fail)

    def close(self) -> None:
        """End the threads; what is under way is abandoned. Idempotent."""
        self._under_way.fail(LocalProtocolError("this rank has left"))
        ends = (self._to_post.put_nowait, self._to_finish.put_nowait)
        for thread, end in zip(self._threads, ends, strict=True):
            try:
                end(None)
            except queue.Full:
                continue  # A thread that is stuck in a collective ends with the process.
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join(timeout=1.0)

    def begin(self, tokens: float, *, first_bucket: int = 0, num_slots: int | None = None) -> None:
        """Open the next round. The previous one is complete, and every rank opens this one.

        Args:
            tokens: this rank's weight in the round's averages; not negative.
            first_bucket: the number of its first bucket. What a lossy codec loses of a bucket is
                owed to the next one of the same number, so each sequence of buckets that comes
                again and again has numbers of its own.
            num_slots: buckets under way, at most: then `submit` waits. None: as many as there
                are, for a backward pass goes on meanwhile.
        """
        self._under_way.check()
        previous = self._under_way.round
        if previous is not None and previous.num_finished < len(previous.buckets):
            raise LocalProtocolError(
                "an average over sites began before the previous one, a backward pass say, "
                "was complete"
            )
        self._slots.forget()
        total, pending = self._transfer.launch_sum(tokens)
        self._under_way.open(
            Round(self._num_rounds, tokens, total, pending, first_bucket, num_slots)
        )
        self._num_rounds += 1

    def submit(
        self,
        pieces: Sequence[torch.Tensor],
        layout: int,
        *,
        exact: bool = False,
        route: Route | None = None,
    ) -> torch.futures.Future[torch.Tensor]:
        """Average a bucket over all ranks of all sites, weighted by their tokens, in place.

        Args:
            pieces: what it consists of, one at least: floating point, shape (n,). Overwritten.
            layout: equal on all ranks of all sites, or the run ends with LAYOUT_MISMATCH.
            exact: let nothing but fp32 cross the WAN.
            route: of a bucket whose elements the ranks hold shards of: `pieces` are this rank's,
                and hold the average over the site's ranks, weighted by their tokens, already.

        Returns:
            Completed with the first of `pieces`. Open futures end with the error that `wait`
            raises.

        Steps inside the site: P - 1 each for reduce-scatter and all-gather, P ranks.
        """
        self._under_way.check()
        current = self._under_way.current
        index = len(current.buckets)
        if index == MAX_BUCKETS:
            raise LocalProtocolError(f"more than {MAX_BUCKETS} buckets: make them larger")
        slot_index = self._free_slot(current, index)
        numel = sum(each.numel() for each in pieces) if route is None else route.numel
        slot = self._slots.get(slot_index, numel, route, pieces)
        with torch.no_grad():
            tokens = current.tokens if route is None else self.site_tokens()
            write_pieces(pieces, tokens, slot.padded)
        pending = self._transfer.launch(slot)
        future = self._transfer.make_future()
        first = min(self._rank * slot.region.numel(), slot.numel)
        raw_bytes = FLOAT_BYTES * min(slot.region.numel(), slot.numel - first)
        now_s = self._now_s()
        number = current.first_bucket + index
        if self._encoder is not None and not exact:
            slot.encode = partial(self._encoder.encode, bucket=number, numel=numel, layout=layout)
        bucket = Bucket(number, slot, pieces, layout, exact, pending, future, raw_bytes, now_s)
        self._under_way.add(current, bucket)
        if self._overlaps:
            self._release(current)
        return future

    def site_tokens(self) -> torch.Tensor:
        """Return the tokens of all ranks of the site, this round: float64[1], on this stream."""
        wait(self._under_way.current.pending)
        return self._under_way.current.total

    def wait(self) -> Round:
        """Wait until every bucket of the round is in place; return the round.

        Raises:
            IsthmusError: the first error of any thread or of the gateway.
            DeadlineExceededError: results did not come in time.
        """
        current = self._under_way.current
        self._release(current)
        self._under_way.wait_finished(current, len(current.buckets))
        return current

    def _release(self, current: Round) -> None:
        """Give the posting thread all buckets that it has not had."""
        released = current.buckets[current.num_posted :]
        if released:
            current.num_posted += len(released)
            self._to_post.put_nowait((current, released))

    def _free_slot(self, current: Round, index: int) -> int:
        """Return which buffers a bucket gets, once an earlier one has gone from them."""
        if current.num_slots is None:
            return index
        earlier = index - current.num_slots
        if earlier >= 0:
            self._release(current)
            self._under_way.wait_finished(current, earlier + 1)
            current.buckets[earlier].future.wait()  # on CUDA this stream does
        return index % current.num_slots

    def _post(self) -> None:
        """Hand shards to the gateway, in order, as their reduce-scatters complete."""
        while (item := self._to_post.get()) is not None and self._under_way.error is None:
            current, buckets = item
            if buckets[0].number == current.first_bucket:
                current.site_weight = self._transfer.read_sum(current.total, current.pending)
            for bucket in buckets:
                computed_s = self._transfer.collect(bucket.slot, bucket.pending)
                if computed_s is not None:
                    # Submitted long before: the device still computed what was only enqueued.
                    bucket.submitted_s = self._now_s() - computed_s
                    current.note_computed(bucket.number - current.first_bucket, bucket.submitted_s)
            for bucket in buckets:
                self._hand_over(current, bucket)

    def _hand_over(self, current: Round, bucket: Bucket) -> None:
        bucket.start_s = self._now_s()
        # Before the gateway can answer, the finishing thread may know of the bucket.
        self._to_finish.put_nowait((current, bucket))
        self._link.reduce(
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
            )
        )

    def _finish(self) -> None:
        """Put results in place, in order."""
        while (item := self._to_finish.get()) is not None:
            current, bucket = item
            reduced = self._under_way.wait_reduced(current, bucket)
            if reduced is None:
                return
            if reduced.weight == 0.0:
                raise NoTokensError("no rank of any site has tokens (count_tokens)")
            complete = partial(self._under_way.complete, bucket)
            self._transfer.deliver(bucket.slot, bucket.pieces, complete)
            if not math.isnan(reduced.weight):
                current.weight = reduced.weight
            self._under_way.note_finished(current, bucket)
