"""What broke at this site, and what broke first. Pure: times are arguments."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from signal import Signals

from protos.control.v1.control_pb2 import Failure
from sites.launcher.failures import RankFailure, one_line

SIMULTANEOUS_S = 0.25
"""Closer together than this, the order in which ends were seen says little on a busy machine."""


class SiteError(Exception):
    """A step of a run cannot be done; `code` is a key of protos/catalogue.py."""

    def __init__(self, code: str, message: str, *, node: int = -1, log_path: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.node = node
        self.log_path = log_path


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteFailure:
    """One thing that ended or broke, as this site saw it."""

    code: str
    message: str
    time_s: float
    """CLOCK_MONOTONIC of this machine."""
    site: str
    """Where: another site's name when a gateway blames one."""
    node: int = -1
    rank: int = -1
    exit_code: int = 0
    """Negative: the signal's number."""
    log_path: str = ""
    collateral: bool = False
    ended: bool = True
    """A process of this site ended; False: a gateway or a step tells of something."""

    @property
    def kind(self) -> int:
        """Among simultaneous ones: a signal answers to nothing, an exit may, a report does."""
        return 0 if self.exit_code < 0 else 1 if self.ended else 2

    def to_proto(self, now_s: float) -> Failure:
        """Return the message; `now_s` on the clock of `time_s`."""
        return Failure(
            code=self.code,
            message=self.message,
            site=self.site,
            node=self.node,
            rank=self.rank,
            exit_code=self.exit_code,
            log_path=self.log_path,
            age_s=max(0.0, now_s - self.time_s),
            collateral=self.collateral,
        )


def of_rank(failure: RankFailure, site: str, node: int) -> SiteFailure:
    """Return the report of a rank that did not end with 0."""
    end = describe_end(failure.exit_code)
    said = f": {failure.message}" if failure.message else ""
    return SiteFailure(
        code="RANK_KILLED" if failure.exit_code < 0 else "RANK_EXITED",
        message=one_line(f"rank {failure.rank} of site {site} {end}{said}"),
        time_s=failure.time_s,
        site=site,
        node=node,
        rank=failure.rank,
        exit_code=failure.exit_code,
        log_path=failure.log_path,
        collateral=failure.collateral,
    )


def describe_end(exit_code: int) -> str:
    """Return how a process ended, as the rest of a sentence."""
    if exit_code >= 0:
        return f"exited with status {exit_code}"
    try:
        return f"was killed by {Signals(-exit_code).name}"
    except ValueError:
        return f"was killed by signal {-exit_code}"


def order_failures(failures: Sequence[SiteFailure]) -> list[SiteFailure]:
    """Return the failures with the cause first, and everything after it marked as its consequence.

    A gateway that says "rank 3 has gone" only saw what the launcher knows better, so it counts as
    a consequence as soon as any process of the site is known to have ended.
    """
    ended = any(failure.ended and not failure.collateral for failure in failures)
    marked = [
        dataclasses.replace(failure, collateral=True)
        if ended and not failure.ended and failure.rank >= 0
        else failure
        for failure in failures
    ]
    rest = sorted(marked, key=lambda failure: (failure.collateral, failure.time_s))
    if not rest:
        return []
    near = [
        failure
        for failure in rest
        if not failure.collateral and failure.time_s - rest[0].time_s < SIMULTANEOUS_S
    ]
    first = min(near, key=lambda failure: (failure.kind, failure.time_s), default=rest[0])
    rest.remove(first)
    return [first, *(dataclasses.replace(failure, collateral=True) for failure in rest)]
