"""Counts optimizer steps, and tells the coordinator how each went."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from protos import metrics
from sites.worker.link import Link
from sites.worker.rounds import Round
from sites.worker.timeline import Timeline
from topology.model.step_parts import step_parts


class StepLog:
    """The metric records of one rank's steps; only a site's first rank sends them."""

    def __init__(
        self,
        link: Link,
        *,
        sends: bool,
        timeline_every: int,
        now_s: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Start the clock of the first step.

        Args:
            link: takes the records.
            sends: whether this rank sends any.
            timeline_every: steps between those that are kept in detail; 0: none is.
            now_s: the clock, the exchange's too.
        """
        self._link = link
        self._sends = sends
        self._timeline = Timeline(link, timeline_every)
        self._now_s = now_s
        self._start_s = now_s()
        self._values: dict[str, float] = {}
        self.num_steps = 0

    def restart_clock(self) -> None:
        """Let the first step begin now."""
        self._start_s = self._now_s()

    def end_step(self, rounds: Sequence[Round]) -> None:
        """Count a step that synchronised in `rounds`, and make its record."""
        self.flush()
        start_s, end_s = self._start_s, self._now_s()
        parts = step_parts(start_s, end_s, [each.times for each in rounds])
        self.num_steps += 1
        if self._sends:
            self._timeline.send(self.num_steps, start_s, end_s, rounds)
        self._start_s = end_s
        self._values = {
            metrics.STEP_S: end_s - start_s,
            metrics.COMPUTE_S: parts.compute_s,
            metrics.INTRA_S: parts.intra_s,
            metrics.EXPOSED_INTER_S: parts.exposed_inter_s,
            metrics.WAIT_S: parts.wait_s,
            metrics.HIDDEN_INTER_S: parts.hidden_inter_s,
            metrics.INTER_S: parts.inter_s,
            metrics.ENCODE_S: sum(each.encode_s for each in rounds),
            metrics.DECODE_S: sum(each.decode_s for each in rounds),
            metrics.TOKENS: sum(each.weight for each in rounds),
            metrics.SITE_TOKENS: sum(each.site_weight for each in rounds),
            metrics.RAW_BYTES: float(sum(each.raw_bytes for each in rounds)),
            metrics.WIRE_BYTES: float(sum(each.wire_bytes for each in rounds)),
        }

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
            self._link.send_metric(metrics.STEP, self.num_steps, values, {})
