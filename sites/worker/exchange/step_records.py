"""Reports a rank's optimizer steps to the coordinator: their records, pictures and digests."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from isthmus.protos import metrics
from isthmus.protos.errors import ScriptError
from isthmus.sites.local.rank_messages import Digest, Metric, Moved, Reduced
from isthmus.sites.worker.exchange.gateway_link import Link
from isthmus.sites.worker.exchange.rank_pace import RankPace
from isthmus.sites.worker.exchange.rounds import Bucket, Landing, Round
from isthmus.sites.worker.exchange.tensor_hashes import ParameterHashes
from isthmus.topology.spec.step_parts import step_parts

MAX_BUCKETS = 256
"""A step's picture has so many of its first buckets: more than anybody can see."""
FIRST_STEPS = 3
"""Their pictures are always kept, for DDP changes its buckets after the first step."""

_WALL_OFFSET_S = time.time() - time.perf_counter()
"""From the pipeline's clock to the wall's. Taken once, so that times of one process never go
back."""

Hashes = Callable[[], ParameterHashes | None]
"""None: this rank has nothing to tell that others do not."""


class TokenCount:
    """How much data is behind this rank's next gradient: its weight in the average of all ranks.

    Adds up what the script counts until a backward pass takes it.
    """

    def __init__(self) -> None:
        self._counted: int | None = None
        self._must_count = False
        self.of_batch: Callable[[bool], float] = lambda _: 1.0
        """Weighs a step that nobody counts, given whether ranks of the site have to weigh alike."""

    @property
    def is_counted(self) -> bool:
        """Whether the script counts tokens, or has to."""
        return self._must_count

    def require(self) -> None:
        """From now on a step whose tokens the script does not count is an error."""
        self._must_count = True

    def add(self, tokens: int) -> None:
        """Count tokens of the current step.

        Raises:
            ValueError: a negative count.
        """
        if tokens < 0:
            raise ValueError(f"count_tokens: want >= 0, got {tokens}")
        self._counted = (self._counted or 0) + tokens
        self._must_count = True

    def take(self, *, is_alike: bool = False) -> float:
        """Return the step's tokens and start anew; of one that never counts, its batch's weight.

        `is_alike`: all ranks of the site have to have counted as many.

        Raises:
            ScriptError: the script counted before other steps, or its loss is a sum, but not
                before this one.
        """
        if self._counted is None and self._must_count:
            raise ScriptError(
                "count_tokens was called for earlier steps, or losses are sums that need it "
                '(loss="sum"), but not before this backward pass: its gradient would weigh 1 token'
            )
        tokens = self.of_batch(is_alike) if self._counted is None else self._counted
        self._counted = None
        return float(tokens)


class StepLog:
    """Counts the steps of one optimizer, and reports each.

    Every rank sends the digests of the steps that are verified. Only a site's first rank sends the
    steps' records.
    """

    def __init__(
        self,
        link: Link,
        *,
        sends: bool,
        timeline_every: int,
        verify_every: int,
        rejoins: bool = False,
        pace: RankPace | None = None,
        now_s: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Start the clock of the first step.

        `timeline_every` is steps between those that are kept in detail, `verify_every` those
        between digests; 0: there are none. `sends`: this rank sends records. `rejoins`: the site
        comes into a run that goes on, and what it begins with is not compared. `pace` is told of
        each step; None: no other rank waits for this one.
        """
        self._link = link
        self._sends = sends
        self._timeline_every = timeline_every
        self.verify_every = verify_every
        """Steps between digests; 0: there are none."""
        self._rejoins = rejoins
        self.pace = pace
        self.counts = not rejoins
        """Whether what the site makes of its data counts: not while it catches up."""
        self._now_s = now_s
        self._start_s = now_s()
        self._values: dict[str, float] = {}
        self._begun_at: int | None = None
        """After how many steps something was attached, the last time; None: nothing is."""
        self._hook: RemovableHandle | None = None
        """In the optimizer whose steps are the run's."""
        self._listeners: list[Callable[[int], None]] = []
        self.before_end: Callable[[int], Landing | None] = lambda _: None
        """Called when an optimizer has stepped, before that is recorded as the end of a step, with
        how many there are then. Returns a round that has ended without waiting for anybody."""
        self.landing: Landing | None = None
        """Its latest return value."""
        self.take_inputs: Callable[[], int] = lambda: 0
        """Returns a hash of what models were called with in a step; 0: it tells nothing."""
        self.own_values: Callable[[], Mapping[str, float]] = dict
        """Returns what is in the record of a step beside its times."""
        self.after_end: Callable[[], None] = lambda: None
        """Called when all listeners have heard of a step."""
        self.num_steps = 0
        self._last_round = -1
        """In which the gradients of the latest step crossed; -1: they have not."""

    def begin(self, caller: str) -> None:
        """Claim the run's steps for what one method of the site averages from now on.

        Raises:
            RuntimeError: another one has, and no step has been since.
        """
        if self._begun_at == self.num_steps:
            raise RuntimeError(
                f"site.{caller}: a model is attached already, and has not taken a step: give "
                "site.attach all models and all optimizers at once"
            )
        self._begun_at = self.num_steps

    @property
    def has_begun(self) -> bool:
        """Whether something is attached."""
        return self._begun_at is not None

    def resume(self, num_steps: int) -> None:
        """Go on counting after steps that a checkpoint has."""
        self.num_steps = num_steps
        self._start_s = self._now_s()

    def listen(self, listener: Callable[[int], None]) -> None:
        """Call `listener` after each step, with how many there were."""
        self._listeners.append(listener)

    def count(
        self,
        optimizer: torch.optim.Optimizer,
        hashes: Hashes,
        take_rounds: Callable[[], list[Round]],
    ) -> Callable[[], None]:
        """Count this optimizer's steps from now on, and send the digest of what all begin with.

        `hashes` are of all that sites are to hold alike; `take_rounds` returns the latest ones.
        Returns what counts a step that changes nothing.
        """
        if self._hook is not None:
            self._hook.remove()
        if self.num_steps == 0 and not self._rejoins:
            self._send_digest(hashes)
        self._start_s = self._now_s()

        def end_step(*_: Any) -> None:  # noqa: ANN401 - torch's own arguments
            is_over = False
            while not is_over:
                self.landing = landing = self.before_end(self.num_steps + 1)
                is_over = landing is None or not landing.is_followed
                self.end_step(take_rounds())
                if is_over:
                    self._send_digest(hashes)
                for listener in self._listeners:
                    listener(self.num_steps)
                self.after_end()

        self._hook = optimizer.register_step_post_hook(end_step)
        return end_step

    def end_step(self, rounds: Sequence[Round]) -> None:
        """Count a step, and make its record.

        `rounds` are those whose results are known since the step before. If some stay inside the
        site, it is these by which the site has trained.
        """
        self.flush()
        start_s, end_s = self._start_s, self._now_s()
        parts = step_parts(start_s, end_s, [each.times for each in rounds])
        crossed = [each for each in rounds if each.crosses]
        if not crossed:
            self._link.send(Moved())
        own = [each for each in rounds if not each.crosses] or crossed
        self.num_steps += 1 if self.landing is None else self.landing.num_steps
        if self._sends and is_kept(self.num_steps, self._timeline_every):
            for metric in timeline_of(self.num_steps, start_s, end_s, rounds):
                self._link.send(metric)
        if self.pace is not None:
            self.pace.end_step(self.num_steps, start_s, end_s, rounds)
        self._start_s = end_s
        self._last_round = crossed[-1].number if crossed else -1
        times = [each for at in crossed for each in at.results]
        self._values = {
            metrics.STEP_S: end_s - start_s,
            metrics.COMPUTE_S: parts.compute_s,
            metrics.INTRA_S: parts.intra_s,
            metrics.EXPOSED_INTER_S: parts.exposed_inter_s,
            metrics.WAIT_S: parts.wait_s,
            metrics.HIDDEN_INTER_S: parts.hidden_inter_s,
            metrics.INTER_S: parts.inter_s,
            metrics.ENCODE_S: sum(each.encode_s for each in times),
            metrics.DECODE_S: sum(each.decode_s for each in times),
            metrics.TOKENS: sum(each.weight for each in crossed),
            # A site that catches up trains on nothing: others have its samples.
            metrics.SITE_TOKENS: sum(each.site_weight for each in own if self.counts),
            metrics.RAW_BYTES: float(sum(each.raw_bytes for each in crossed)),
            metrics.WIRE_BYTES: float(sum(each.wire_bytes for each in crossed)),
            metrics.GRADIENT_HASH: float(own[-1].gradient_hash if own and self.counts else 0),
            metrics.INPUT_HASH: float(self.take_inputs() if self.counts else 0),
        }
        self._values |= self.own_values()
        if self.landing is not None and self.counts:
            self._values[metrics.ROUND_STEPS] = float(self.landing.own)
        if crossed:
            self._values[metrics.ROUND] = float(self._last_round)
        gradients = [each for each in crossed if each.terms.is_gradient]
        if self._sends and len(gradients) == 1 and (norm := gradients[0].site_norm) is not None:
            self._values[metrics.SITE_GRADIENT_NORM] = norm
            self._values[metrics.MEAN_GRADIENT_NORM] = gradients[0].norm

    def add(self, values: Mapping[str, float]) -> None:
        """Put values into the last step's record and send it.

        Raises:
            RuntimeError: no step has been completed yet.
        """
        if self.num_steps == 0:
            raise RuntimeError("site.log: there is no completed optimizer step to add to")
        self._values.update(values)
        self.flush()

    def flush(self) -> None:
        """Send the last step's record if it has not been sent."""
        values, self._values = self._values, {}
        if values and self._sends:
            self._link.send(
                Metric(kind=metrics.STEP, step=self.num_steps, values=values, labels={})
            )

    def _send_digest(self, hashes_now: Hashes) -> None:
        """Send hashes of all parameters, after the steps that are verified.

        Buffers are left out: a running mean is each rank's own, as in DistributedDataParallel.
        """
        if self.verify_every == 0 or self.num_steps % self.verify_every != 0:
            return
        hashes = hashes_now()
        if hashes is None:
            return
        shown = hashes.bounded()
        self._link.send(
            Digest(
                step=self.num_steps,
                combined=hashes.combined,
                tensors=shown.tensors,
                names=shown.names,
                round=None if self._last_round < 0 else self._last_round,
            )
        )


class StepNumbers:
    """The numbers of the steps that a script is to take: what it loops over."""

    def __init__(self, steps: StepLog) -> None:
        """Go by what `steps` counts."""
        self._steps = steps
        self.are_used = False
        """The script has asked for them."""

    def until(self, stop: int) -> Iterator[int]:
        """Yield the number of each step, from 0, that is to be taken: `Site.steps`.

        Raises:
            ScriptError: the loop's body has taken no step.
        """
        self.are_used = True
        before = -1
        while (step := self._steps.num_steps) < stop:
            if step == before:
                raise ScriptError(
                    f"site.steps: step {step} was begun again, for the optimizer that site.attach "
                    "was given has not stepped in it"
                )
            before = step
            yield step


def is_kept(step: int, every: int) -> bool:
    """Return whether a step's picture is kept: `every` so many, and the first; 0: none is."""
    return every > 0 and (step <= FIRST_STEPS or step % every == 0)


def timeline_of(
    step: int, begin_s: float, end_s: float, rounds: Sequence[Round]
) -> Iterable[Metric]:
    """Return a step's picture: records of kind `timeline` and `bucket`.

    Steps count from 1; times are those of `time.perf_counter`.
    """
    computed_s = [each.last_submit_s for each in rounds if not each.terms.is_background]
    values = {
        metrics.BEGIN_S: _wall_s(begin_s),
        metrics.COMPUTED_S: _wall_s(max(computed_s, default=end_s)),
        metrics.END_S: _wall_s(end_s),
    }
    yield Metric(kind=metrics.TIMELINE, step=step, values=values, labels={})
    buckets = [bucket for each in rounds for bucket in each.buckets]
    for index, bucket in enumerate(buckets[:MAX_BUCKETS]):
        if bucket.reduced is not None:
            values = _bucket_values(index, bucket, bucket.reduced)
            yield Metric(kind=metrics.BUCKET, step=step, values=values, labels={})


def _bucket_values(index: int, bucket: Bucket, reduced: Reduced) -> dict[str, float]:
    return {
        metrics.BUCKET_INDEX: float(index),
        metrics.SUBMITTED_S: _wall_s(bucket.times.submitted_s),
        metrics.POSTED_S: _wall_s(bucket.times.start_s),
        metrics.REDUCED_S: _wall_s(bucket.times.reduced_s),
        metrics.FINISHED_S: _wall_s(bucket.times.finished_s),
        metrics.RAW_BYTES: float(bucket.raw_bytes),
        metrics.WIRE_BYTES: float(reduced.wire_bytes),
        metrics.WAIT_S: reduced.times.wait_s,
        metrics.ENCODE_S: reduced.times.encode_s,
        metrics.DECODE_S: reduced.times.decode_s,
    }


def _wall_s(at_s: float) -> float:
    return at_s + _WALL_OFFSET_S
