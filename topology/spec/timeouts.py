"""Every timeout of a run, derived from the figures that a user sets.

With D = failure.detect_within: the fractions keep three heartbeats inside a lease and a dead path
noticed by keepalive before the lease ends. A run waits at most failure.ride_out for its sites to
reach each other, and failure.coordinator_within for its coordinator. Ranks wait longer than both,
so that the layer which knows the cause reports first. Hanging ranks are found by
failure.stall_within.
"""

from __future__ import annotations

from dataclasses import dataclass

from isthmus.topology.spec.errors import ConfigError, Problem
from isthmus.topology.spec.world import Detection

SHORTEST_DETECT_S = 0.5
"""Smallest allowed detect_within: on a busy machine a healthy process can be silent for 0.1 s."""
STALL_STEPS = 5
"""Default number of median steps that a rank may be late."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """The timeouts of a run, in seconds."""

    heartbeat_s: float
    """D/5: interval of an agent's heartbeats."""
    keepalive_time_s: float
    """D/3: idle HTTP/2 connections are pinged this often."""
    keepalive_timeout_s: float
    """D/3: an unanswered ping closes the connection after this."""
    lease_s: float
    """D: a silent agent's site is lost; an agent that hears nothing dials again."""
    peer_lost_s: float
    """D: a gateway gives up on a peer that it cannot reach."""
    stop_grace_s: float
    """D/5, at most 5 s: between SIGTERM and SIGKILL."""
    collect_s: float
    """D/5, at most 2 s: after a failure, for the other sites' reports, to find the first one."""
    process_group_s: float
    """The longer of failure.ride_out and failure.coordinator_within, and 10 D more, at least 120 s
    more: NCCL's or Gloo's own timeout inside a site, and every other wait of a rank for what comes
    from elsewhere."""
    start_s: float
    """failure.start_within: every site is up, or all are rolled back."""
    ride_out_s: float
    """failure.ride_out: an outage of this length is waited out."""
    stall_s: float
    """failure.stall_within, or D: a rank that does not come is named, not before `stall_steps`."""
    stall_steps: int
    """STALL_STEPS; 0 where the user has set failure.stall_within."""
    coordinator_s: float
    """failure.coordinator_within: sites go on without a coordinator for so long."""

    @classmethod
    def derive(cls, failure: Detection) -> Timeouts:
        """Derive all from `failure`.

        Raises:
            ConfigError: a figure is too short, or start_within not longer than detect_within.
        """
        within_s = failure.detect_within_s
        stall_s = within_s if failure.stall_within_s is None else failure.stall_within_s
        for key, given_s in (("detect_within", within_s), ("stall_within", stall_s)):
            if given_s < SHORTEST_DETECT_S:
                raise _refused(key, f"want at least {SHORTEST_DETECT_S:g} s, got {given_s:g} s")
        for key, given_s in (
            ("ride_out", failure.ride_out_s),
            ("coordinator_within", failure.coordinator_within_s),
        ):
            if given_s < within_s:
                raise _refused(
                    key,
                    f"{key} ({given_s:g} s) must not be shorter than detect_within ({within_s:g} s)",
                )
        if failure.start_within_s <= within_s:
            raise _refused(
                "start_within",
                f"start_within ({failure.start_within_s:g} s) must be longer than "
                f"detect_within ({within_s:g} s)",
            )
        return cls(
            heartbeat_s=within_s / 5,
            keepalive_time_s=within_s / 3,
            keepalive_timeout_s=within_s / 3,
            lease_s=within_s,
            peer_lost_s=within_s,
            stop_grace_s=min(within_s / 5, 5.0),
            collect_s=min(within_s / 5, 2.0),
            process_group_s=max(failure.ride_out_s, failure.coordinator_within_s)
            + max(10 * within_s, 120.0),
            start_s=failure.start_within_s,
            ride_out_s=failure.ride_out_s,
            stall_s=stall_s,
            stall_steps=STALL_STEPS if failure.stall_within_s is None else 0,
            coordinator_s=failure.coordinator_within_s,
        )


def _refused(key: str, message: str) -> ConfigError:
    return ConfigError([Problem("topology", 0, 0, message, f"failure.{key}")])
