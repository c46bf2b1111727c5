"""What happened when in single steps, for pictures: records of kind `timeline` and `bucket`."""

from __future__ import annotations

import time
from collections.abc import Sequence

from protos import metrics
from sites.worker.link import Link, Reduced
from sites.worker.rounds import Bucket, Round

MAX_BUCKETS = 256
"""That are told of in one step, the first ones: more than a picture can show."""
FIRST_STEPS = 3
"""Which are always kept, for DDP changes its buckets after the first."""

_WALL_OFFSET_S = time.time() - time.perf_counter()
"""From the exchange's clock to the wall's. Taken once, so that times of one process never go
back."""


class Timeline:
    """Sends the kept steps of one rank."""

    def __init__(self, link: Link, every: int) -> None:
        """Send nothing yet.

        Args:
            link: takes the records.
            every: steps between those that are kept; 0: none is.
        """
        self._link = link
        self._every = every

    def send(self, step: int, begin_s: float, end_s: float, rounds: Sequence[Round]) -> None:
        """Send a step if it is one that is kept. Times are those of `time.perf_counter`.

        Args:
            step: counts completed ones, from 1.
            begin_s: when it began.
            end_s: when the optimizer's step was done.
            rounds: in which it synchronised.
        """
        if self._every == 0 or (step > FIRST_STEPS and step % self._every != 0):
            return
        values = {
            metrics.BEGIN_S: _wall_s(begin_s),
            metrics.COMPUTED_S: _wall_s(
                max((each.last_submit_s for each in rounds), default=end_s)
            ),
            metrics.END_S: _wall_s(end_s),
        }
        self._link.send_metric(metrics.TIMELINE, step, values, {})
        buckets = [bucket for each in rounds for bucket in each.buckets]
        for index, bucket in enumerate(buckets[:MAX_BUCKETS]):
            if bucket.reduced is not None:
                values = _bucket_values(index, bucket, bucket.reduced)
                self._link.send_metric(metrics.BUCKET, step, values, {})


def _bucket_values(index: int, bucket: Bucket, reduced: Reduced) -> dict[str, float]:
    return {
        metrics.BUCKET_INDEX: float(index),
        metrics.SUBMITTED_S: _wall_s(bucket.submitted_s),
        metrics.POSTED_S: _wall_s(bucket.start_s),
        metrics.REDUCED_S: _wall_s(bucket.reduced_s),
        metrics.FINISHED_S: _wall_s(bucket.finished_s),
        metrics.RAW_BYTES: float(bucket.raw_bytes),
        metrics.WIRE_BYTES: float(reduced.wire_bytes),
        metrics.WAIT_S: reduced.wait_s,
        metrics.ENCODE_S: reduced.encode_s,
        metrics.DECODE_S: reduced.decode_s,
    }


def _wall_s(at_s: float) -> float:
    return at_s + _WALL_OFFSET_S
