"""How a rank's steps go beside those of the other ranks of its site: told now and then.

A rank hands its last gradients to a reduce-scatter over the site, which is over once all ranks have
done so. So who is late waits least, on whatever clock. The agent compares the ranks
(sites/agent/rank_paces.py).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch

from isthmus.protos import metrics
from isthmus.sites.local.rank_messages import Metric
from isthmus.sites.worker.exchange.rounds import Round

EVERY_STEPS = 10
"""Windows end after so many steps, or a multiple, at all ranks alike."""
LEAST_S = 5.0
LEAST_S_A_RANK = 0.05
"""A window is at least so long: many ranks of a site tell less often."""

Facts = tuple[Mapping[str, float], Mapping[str, str]]
"""Values and labels of what may slow a rank: sites/worker/api/rank_facts.py."""


class RankPace:
    """Keeps the times of the last steps. For the training thread: microseconds a step."""

    def __init__(
        self,
        send: Callable[[Metric], None],
        *,
        rank: int,
        num_ranks: int,
        read_facts: Callable[[], Facts] = lambda: ({}, {}),
        now_s: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Begin a window.

        Args:
            send: Takes a metric of kind RANK.
            rank: In the site.
            num_ranks: Of the site.
            read_facts: Called at the end of a window.
            now_s: The clock of rounds.
        """
        self._send = send
        self._rank, self._num_ranks = rank, num_ranks
        self._read_facts, self._now_s = read_facts, now_s
        self._least_s = max(LEAST_S, LEAST_S_A_RANK * num_ranks)
        self._begin_s = now_s()
        self._is_warm = False
        """Whether the first window is over: in it ranks compile, and caches fill."""
        self._forward_s: float | None = None
        self._steps_s: list[float] = []
        self._waits_s: list[float] = []
        self._between_s: list[float] = []

    def note_forward(self, *_: object) -> None:
        """A forward pass that trains begins. A forward hook."""
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return
        if self._forward_s is None:
            self._forward_s = self._now_s()

    def end_step(self, step: int, start_s: float, end_s: float, rounds: Sequence[Round]) -> None:
        """Note a step that began and ended then, with rounds in it; tell, if it is time."""
        self._steps_s.append(end_s - start_s)
        self._waits_s.append(sum(map(_wait_s, rounds)))
        if self._forward_s is not None and self._forward_s >= start_s:
            self._between_s.append(self._forward_s - start_s)
        self._forward_s = None
        if step % EVERY_STEPS == 0 and end_s - self._begin_s >= self._least_s:
            facts = self._read_facts()
            if self._is_warm and len(self._steps_s) >= EVERY_STEPS:
                self._tell(step, facts)
            self._is_warm, self._begin_s = True, end_s
            for each in (self._steps_s, self._waits_s, self._between_s):
                each.clear()

    def _tell(self, step: int, facts: Facts) -> None:
        values, labels = facts
        values = {
            metrics.RANK_NUMBER: float(self._rank),
            metrics.NUM_RANKS: float(self._num_ranks),
            metrics.NUM_STEPS: float(len(self._steps_s)),
            metrics.STEP_S: statistics.median(self._steps_s),
            metrics.SITE_WAIT_S: statistics.median(self._waits_s),
            **values,
        }
        if self._between_s:
            values[metrics.BETWEEN_S] = statistics.median(self._between_s)
        self._send(Metric(kind=metrics.RANK, step=step, values=values, labels=dict(labels)))


def _wait_s(of: Round) -> float:
    """Return how long a round's last gradients waited for the other ranks of the site."""
    if of.terms.is_background or not of.buckets:
        return 0.0
    last = max(of.buckets, key=lambda each: each.times.submitted_s)
    return max(0.0, last.times.start_s - last.times.submitted_s)
