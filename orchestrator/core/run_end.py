"""What a run came to, and why: a first failure, a cancellation, or that all its work is done."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from isthmus.orchestrator.core.first_failure import first_failure
from isthmus.orchestrator.core.members import NODE_FAULTY, Member
from isthmus.orchestrator.core.run_events import RunState
from isthmus.protos.failure import Failure

LOSES_SITE = frozenset(
    {
        "RANK_EXITED",
        "RANK_KILLED",
        "RANK_LOST",
        "GATEWAY_EXITED",
        "NODE_LOST",
        NODE_FAULTY,
        "SITE_LOST",
        "LAUNCH_FAILED",
        "CANNOT_TRAIN",
        "FILE_ERROR",
        "PEER_LOST",
        "RANK_STALLED",
    }
)
"""Failures that an active run can survive: they befall one site. Others break promises to all."""
SCRIPT_FAILED = "SCRIPT_FAILED"
"""Befalls one site, too, but is no outage: the script does it again wherever it is started."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a run came to."""

    state: RunState
    code: str = ""
    reason: str = ""
    failure: Failure | None = None


@dataclass(slots=True)
class Ending:
    """Why a run ends before its work is done: a first failure, or a cancellation.

    After a failure the other sites have a moment to report theirs. Then all are stopped.
    """

    stopped_s: float | None = None
    """When the sites were told to stop, or had ended by themselves."""
    _failures: list[Failure] = field(default_factory=list)
    _first_s: float = math.inf
    _is_explained: bool = False
    """No other failure could explain the first."""
    _cancelled_because: str = ""

    @property
    def has_begun(self) -> bool:
        """Whether the run will not succeed any more."""
        return bool(self._failures or self._cancelled_because)

    @property
    def verdict(self) -> Verdict:
        """What the run has come to, once its end `has_begun`."""
        if self._cancelled_because:
            return Verdict(RunState.CANCELLED, "CANCELLED", self._cancelled_because)
        first = first_failure(self._failures)
        return Verdict(RunState.FAILED, first.code, first.reason, first)

    def fail(self, failure: Failure, now_s: float, *, is_last: bool = False) -> None:
        """Note a failure. With `is_last` no other could explain it, so none is waited for."""
        if not self._failures:
            self._first_s, self._is_explained = now_s, is_last
        self._failures.append(failure)

    def cancel(self, because: str) -> None:
        """Note that somebody wants the run to end."""
        self._cancelled_because = because

    def is_stop_due(self, now_s: float, collect_s: float) -> bool:
        """Return whether the sites are to be told to stop now.

        After the first failure others have `collect_s` to come that may explain it.
        """
        known_s = self._first_s + (0.0 if self._is_explained else collect_s)
        is_known = bool(self._cancelled_because) or now_s >= known_s
        return is_known and self.stopped_s is None


def success(members: Sequence[Member], checkpoint_problem: str, *, allows_losses: bool) -> Verdict:
    """Return what a run has come to that has gone well for those who were there at its end."""
    lost = [
        site
        for site in members
        if site.is_outside and site.has_taken_part and not (site.is_dropped or site.has_ended_early)
    ]
    said = [f"site {site.name} was lost and did not come back: {site.why_out}" for site in lost]
    said += [checkpoint_problem] if checkpoint_problem else []
    if not said or allows_losses:
        return Verdict(RunState.SUCCEEDED)
    failures = [failure for site in lost for failure in site.losses]
    failure = first_failure(failures) if failures else None
    return Verdict(RunState.SUCCEEDED, "WITH_LOSSES", "; ".join(said), failure)


def note_of_missing(members: Sequence[Member]) -> str:
    """Return what people should know of sites that were not there at the end; empty: nothing."""
    left = [site for site in members if site.has_taken_part and site.is_outside]
    early = [site.name for site in left if site.has_ended_early and not site.is_dropped]
    dropped = [site.name for site in left if site.is_dropped]
    out = [site.name for site in left if site.name not in {*early, *dropped}]
    notes = [f"sites lost on the way: {', '.join(out)}"] if out else []
    notes += [f"sites that ended before the others: {', '.join(early)}"] if early else []
    notes += [f"sites dropped on the way: {', '.join(dropped)}"] if dropped else []
    return "; ".join(notes)
