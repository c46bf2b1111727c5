"""What of the exchange hides behind the backward pass, and what does not. Pure.

Gradients are complete only in the backward pass of the **last** micro-batch: with m micro-batches a
step, what can hide anything is one m-th of the step's backward time, not all of it. There, bucket
i becomes ready at r_i and takes t_i on a resource that serves them in order:

    e_i = max(r_i, e_(i-1)) + t_i,    exposed = max(0, e_n - end of the backward pass)

A bucket that crosses several resources one after another (reduce-scatter inside the site, the WAN,
all-gather inside the site) queues at each of them as it leaves the one before: a flow shop in which
nobody overtakes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Overlap:
    """Where the time of an exchange went."""

    busy_s: float
    """Of the busiest resource, over all buckets: what it would take if nothing hid it."""
    exposed_s: float
    """From the end of the backward pass to that of the exchange."""

    @property
    def hidden_s(self) -> float:
        """What the backward pass covered of `busy_s`."""
        return max(0.0, self.busy_s - self.exposed_s)


def fifo_ends_s(ready_s: Sequence[float], durations_s: Sequence[float]) -> list[float]:
    """Return when one resource is done with each bucket, which it serves in this order.

    Raises:
        ValueError: not as many durations as buckets.
    """
    ends_s: list[float] = []
    free_s = 0.0
    for ready, duration in zip(ready_s, durations_s, strict=True):
        free_s = max(ready, free_s) + duration
        ends_s.append(free_s)
    return ends_s


def overlap(
    ready_s: Sequence[float],
    stages_s: Sequence[Sequence[float]],
    backward_end_s: float,
    delay_s: float = 0.0,
) -> Overlap:
    """Return what of an exchange is exposed.

    Args:
        ready_s: when each bucket's gradients are there, in the order in which they are sent.
        stages_s: by resource in the order of their use: what each bucket takes there.
        backward_end_s: on the same clock.
        delay_s: that a bucket spends on its way without occupying anything: propagation.
    """
    ends_s = list(ready_s)
    for durations_s in stages_s:
        ends_s = fifo_ends_s(ends_s, durations_s)
    last_s = ends_s[-1] + delay_s if ends_s else 0.0
    busy_s = max((sum(durations_s) for durations_s in stages_s), default=0.0)
    return Overlap(busy_s, max(0.0, last_s - backward_end_s))


def ready_times_s(
    bucket_elements: Sequence[int], window_s: float, window_end_s: float
) -> list[float]:
    """Return when buckets are ready whose gradients appear evenly during a backward pass.

    Args:
        bucket_elements: in the order in which backward makes them; the last ends the window.
        window_s: of the last micro-batch's backward pass over what this rank holds.
        window_end_s: when it ends.
    """
    total, made, ready = sum(bucket_elements), 0, []
    for elements in bucket_elements:
        made += elements
        ready.append(window_end_s - window_s * (1 - made / total) if total else window_end_s)
    return ready


def even_buckets(elements: int, bucket_elements: int) -> list[int]:
    """Return the sizes of buckets that `elements` are cut into, the last one being the rest.

    Raises:
        ValueError: a bucket holds less than one.
    """
    if bucket_elements < 1:
        raise ValueError(f"bucket_elements: want >= 1, got {bucket_elements}")
    full, rest = divmod(elements, bucket_elements)
    return [bucket_elements] * full + ([rest] if rest else [])


def bytes_per_s_needed(
    exchanged_bytes: float, step_s: float, window_s: float, efficiency: float, delay_s: float = 0.0
) -> float:
    """Return the rate at which an exchange leaves a step its efficiency; infinite if none does.

    The exchange may take what is hidden and what the efficiency allows to be exposed:
    bytes / (window + step (1/efficiency - 1) - delay). Small buckets are assumed: the last one's
    own time is left out.

    Args:
        exchanged_bytes: that each site sends, and receives at the same time.
        step_s: of a step without exchange.
        window_s: of it, during which gradients can cross; 0: no overlap.
        efficiency: wanted, that is step_s over the step with its exchange; in (0, 1].
        delay_s: of propagation.
    """
    if not 0 < efficiency <= 1:
        raise ValueError(f"efficiency: want more than 0 and at most 1, got {efficiency}")
    allowed_s = window_s + step_s * (1 / efficiency - 1) - delay_s
    return exchanged_bytes / allowed_s if allowed_s > 0 else math.inf
