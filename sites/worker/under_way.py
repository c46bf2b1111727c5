"""The round that a rank has under way: what came back of it, who waits for that, the first error.

All threads of the exchange meet here, and only here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

from protos.errors import (
    DeadlineExceededError,
    IsthmusError,
    LocalProtocolError,
    RankLostError,
    RemoteProtocolError,
)
from sites.worker.link import Reduced
from sites.worker.rounds import Bucket, Round

_CAUSE_S = 1.0
"""For the gateway to say, or show by its end, why another rank of the site has gone."""


class UnderWay:
    """At most one round. All methods may be called from any thread."""

    def __init__(self, *, deadline_s: float, now_s: Callable[[], float]) -> None:
        """Begin before the first round.

        Args:
            deadline_s: for every wait.
            now_s: the clock.
        """
        self.round: Round | None = None
        self.error: IsthmusError | None = None
        """The first."""
        self._deadline_s = deadline_s
        self._now_s = now_s
        self._changed = threading.Condition()

    @property
    def current(self) -> Round:
        """The open round."""
        assert self.round is not None, "begin comes first"
        return self.round

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
            current.note_computed(len(current.buckets) - 1, bucket.submitted_s)

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
            failure = LocalProtocolError(f"{type(error).__name__}: {error}")
            failure.__cause__ = error
            self.fail(failure)

    # ---------------------------------------------------------------- results

    def note_reduced(self, reduced: Reduced) -> None:
        """Keep a result; one that was not asked for is an error of the gateway."""
        with self._changed:
            bucket = None if self.round is None else self.round.find(reduced)
            if bucket is not None and bucket.reduced is None:
                bucket.reduced = reduced
                bucket.reduced_s = self._now_s()
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
            bucket.finished_s = current.end_s = self._now_s()
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
