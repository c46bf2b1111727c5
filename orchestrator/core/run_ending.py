"""Why a run ends before its work is done: a first failure, or a cancellation. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from orchestrator.core.events import Action, RecordEvent
from orchestrator.core.first_failure import first_failure
from orchestrator.core.states import RunState
from protos.failure import Failure


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a run came to."""

    state: RunState
    code: str = ""
    reason: str = ""
    failure: Failure | None = None


class RunEnding:
    """One run's. After a failure the other sites have a moment to report theirs.

    Then all are stopped.
    """

    def __init__(self, collect_s: float) -> None:
        """Nothing has happened.

        Args:
            collect_s: From the first failure on, for others that may explain it.
        """
        self.stopped_s: float | None = None
        """When the sites were told to stop, or had ended by themselves."""
        self._collect_s = collect_s
        self._failures: list[Failure] = []
        self._collect_deadline_s = math.inf
        self._cancelled_because = ""

    @property
    def has_begun(self) -> bool:
        """Whether the run will not succeed any more."""
        return bool(self._failures or self._cancelled_because)

    @property
    def verdict(self) -> Verdict:
        """What the run has come to, once this `has_begun`."""
        if self._cancelled_because:
            return Verdict(RunState.CANCELLED, "CANCELLED", self._cancelled_because)
        first = first_failure(self._failures)
        return Verdict(RunState.FAILED, first.code, first.reason, first)

    def fail(self, failure: Failure, now_s: float, *, at_once: bool = False) -> list[Action]:
        """Note a failure. What happens after the sites were told to stop is their stopping.

        Args:
            failure: What was found or reported.
            now_s: The coordinator's clock.
            at_once: No other could explain it.
        """
        if self.stopped_s is not None and failure.at_s > self.stopped_s:
            failure = replace(failure, is_collateral=True)
        if not self._failures:
            self._collect_deadline_s = now_s + (0.0 if at_once else self._collect_s)
        self._failures.append(failure)
        return [RecordEvent("failure.reported", failure.site, failure.to_json())]

    def cancel(self, because: str) -> list[Action]:
        """Note that somebody wants the run to end; a failure came first, if there is one."""
        if self.has_begun:
            return []
        self._cancelled_because = because
        return [RecordEvent("run.cancel_requested", detail={"message": because})]

    def is_stop_due(self, now_s: float) -> bool:
        """Whether the sites are to be told to stop now."""
        is_known = bool(self._cancelled_because) or now_s >= self._collect_deadline_s
        return is_known and self.stopped_s is None
