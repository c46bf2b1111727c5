"""Finds which of the things that broke at this site was the cause of the others. Pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from protos.failure import Failure

SIMULTANEOUS_S = 0.25
"""Closer together than this, the order in which ends were seen says little on a busy machine."""

_EXITS = frozenset({"RANK_EXITED", "RANK_KILLED", "GATEWAY_EXITED", "NODE_LOST"})
"""Codes that tell of the end of a process of this site, even where its status was 0."""


def order_failures(failures: Sequence[Failure]) -> list[Failure]:
    """Return the failures with the cause first, and everything after it marked as its consequence.

    A gateway that says "rank 3 has gone" only saw what the launcher knows better, so it counts as
    a consequence as soon as any process of the site is known to have ended.
    """
    has_exit = any(_is_exit(failure) and not failure.is_collateral for failure in failures)
    marked = [
        dataclasses.replace(failure, is_collateral=True)
        if has_exit and not _is_exit(failure) and failure.rank >= 0
        else failure
        for failure in failures
    ]
    rest = sorted(marked, key=lambda failure: (failure.is_collateral, failure.at_s))
    if not rest:
        return []
    near = [
        failure
        for failure in rest
        if not failure.is_collateral and failure.at_s - rest[0].at_s < SIMULTANEOUS_S
    ]
    first = min(near, key=lambda failure: (_kind(failure), failure.at_s), default=rest[0])
    rest.remove(first)
    return [first, *(dataclasses.replace(failure, is_collateral=True) for failure in rest)]


def _is_exit(failure: Failure) -> bool:
    """Whether a process of this site ended; else a gateway or the agent tells of something."""
    return failure.exit_code != 0 or failure.code in _EXITS


def _kind(failure: Failure) -> int:
    """Rank simultaneous failures: a signal answers to nothing, an exit may, a report does.

    A node takes all that is on it with it.
    """
    if failure.code == "NODE_LOST":
        return -1
    return 0 if failure.exit_code < 0 else 1 if _is_exit(failure) else 2
