"""Tells the agent which of a gateway's ranks have not moved for too long."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

from isthmus.sites.gateway.agent_port import Stalled, Still
from isthmus.sites.gateway.config import GatewayConfig
from isthmus.sites.gateway.ranks.stall_watch import StallWatch


class StallReports:
    """A `StallWatch` with a lock and a clock. All methods may be called from any thread.

    Nothing is watched before all ranks have joined, or if the run reports no stalls.
    """

    def __init__(self, config: GatewayConfig, write: Callable[[Stalled], None]) -> None:
        """`write` sends a message to the agent."""
        self._config = config
        self._write = write
        self._lock = threading.Lock()
        self._watch: StallWatch | None = None

    def begin(self, ranks: list[int]) -> None:
        """Watch from now on: all ranks have joined."""
        config = self._config
        if config.stall is not None:
            self._watch = StallWatch(ranks, config.stall, config.peer_lost_s, time.monotonic())

    def note(self, noted: Callable[[StallWatch, float], None]) -> None:
        """Note something that a rank did; `noted` gets the watch and the time."""
        if self._watch is not None:
            with self._lock:
                noted(self._watch, time.monotonic())

    def report(self, every_s: float, results_wait_s: float = math.inf) -> None:
        """Tell the agent what has changed; called every so many seconds.

        `results_wait_s` is as of `StallWatch.look`.
        """
        watch = self._watch
        if watch is None:
            return
        with self._lock:
            now_s = time.monotonic()
            stalled = watch.look(now_s, every_s, results_wait_s)
            if stalled is None:
                return
            absent, waiting = (
                tuple(
                    Still(
                        rank=rank,
                        for_s=watch.silent_s(rank, now_s),
                        round=watch.round_of(rank),
                    )
                    for rank in ranks
                )
                for ranks in (stalled.absent, stalled.waiting)
            )
        self._write(Stalled(absent=absent, waiting=waiting, behind=stalled.is_behind))
