"""Finds which failure of a site was the cause of the others. Pure."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence

from isthmus.protos.failure import Failure

SIMULTANEOUS_S = 0.25
"""Ends closer than this count as simultaneous: a busy machine may see them in any order."""

_LOST_A_RANK = re.compile(r"RankLostError|Connection (closed|reset) by peer|Broken pipe|ncclRemote")
"""Messages of a rank that ended because another rank of its site had gone."""
_EXITS = frozenset(
    {"SCRIPT_FAILED", "RANK_EXITED", "NODE_FAULTY", "RANK_KILLED", "GATEWAY_EXITED", "NODE_LOST"}
)
"""Codes of failures that are ends of processes of this site, even with status 0."""


def order_failures(
    failures: Sequence[Failure], site: str = "", left_s: Mapping[int, float] | None = None
) -> list[Failure]:
    """Return the failures with the cause first, and later ones marked as consequences.

    A gateway's "rank 3 has gone" is known better by the launcher, so it counts as a consequence
    once any process of the site is known to have ended.

    The first end is the cause. So if all failures are consequences, and a rank of the site had
    ended before without a failure, that rank is the cause. `left_s` says when ranks left.
    """
    has_exit = any(_is_exit(failure) and not failure.is_collateral for failure in failures)
    marked = [
        dataclasses.replace(failure, is_collateral=True)
        if has_exit and not _is_exit(failure) and failure.rank >= 0
        else failure
        for failure in failures
    ]
    if marked and all(failure.is_collateral for failure in marked):
        killed = _killed_first(marked, left_s or {})
        marked = [
            dataclasses.replace(each, is_collateral=False) if each is killed else each
            for each in marked
        ]
        if killed is None:
            marked = [*_early_ends(marked, site, left_s or {}), *marked]
    ordered = sorted(marked, key=lambda failure: (failure.is_collateral, failure.at_s))
    if not ordered:
        return []
    near = [
        failure
        for failure in ordered
        if not failure.is_collateral and failure.at_s - ordered[0].at_s < SIMULTANEOUS_S
    ]
    first = min(near, key=lambda failure: (_kind(failure), failure.at_s), default=ordered[0])
    ordered.remove(first)
    return [first, *(dataclasses.replace(failure, is_collateral=True) for failure in ordered)]


def awaits_cause(failures: Sequence[Failure], left_s: Mapping[int, float]) -> bool:
    """Whether a rank of the site was lost, and it is not known yet which one, or why.

    A gateway reports that a rank has gone, the launcher how it ended, and other ranks that they
    lost it. On a busy machine any of the three may come last.
    """
    if not all(failure.is_collateral for failure in failures):
        return False
    ended = {each.rank for each in failures if _is_exit(each)}
    is_lost = any(_has_lost_a_rank(each) or _is_gone(each) for each in failures)
    return is_lost and left_s.keys() <= ended


def _has_lost_a_rank(failure: Failure) -> bool:
    return _is_exit(failure) and _LOST_A_RANK.search(failure.message) is not None


def _killed_first(victims: Sequence[Failure], left_s: Mapping[int, float]) -> Failure | None:
    """Return the kill of a rank that went before the ranks that lost it; None: no such.

    A launcher takes a SIGTERM for torchrun's once it has seen another rank fail.
    """
    gone_s = _gone_s(victims, left_s)
    first = min(gone_s, key=gone_s.__getitem__, default=None)
    if not any(_has_lost_a_rank(each) and each.rank != first for each in victims):
        return None
    return next((each for each in victims if each.rank == first and each.exit_code < 0), None)


def _gone_s(victims: Sequence[Failure], left_s: Mapping[int, float]) -> dict[int, float]:
    """Return when ranks left or went away, by rank."""
    gone_s = dict(left_s)
    for each in victims:
        if _is_gone(each):
            gone_s.setdefault(each.rank, each.at_s)
    return gone_s


def _early_ends(
    victims: Sequence[Failure], site: str, left_s: Mapping[int, float]
) -> list[Failure]:
    """Return the end with status 0 of a rank that others lost, as a list of at most one.

    The rank left cleanly or not, as by `os._exit(0)`. The others lost a rank, not a site: a lost
    site has another message.
    """
    ended = {each.rank for each in victims if _is_exit(each) and each.rank >= 0}
    lost_a_rank = [each for each in victims if _has_lost_a_rank(each)]
    gone_s = _gone_s(victims, left_s)
    first = min(gone_s.keys() - ended, key=gone_s.__getitem__, default=None)
    if first is None or not lost_a_rank:
        return []
    # The rank's own report takes another way than theirs, which may be faster.
    at_s = min(gone_s[first], *(each.at_s for each in lost_a_rank))
    others = ", ".join(str(each) for each in sorted(ended))
    message = (
        f"rank {first} of site {site} ended with status 0 while others of its site still trained "
        f"(rank {others}): all ranks have to take as many steps"
    )
    return [Failure(code="SCRIPT_FAILED", message=message, at_s=at_s, site=site, rank=first)]


def _is_gone(failure: Failure) -> bool:
    """Whether a gateway reports a rank that went away without leaving."""
    return failure.code == "RANK_LOST" and failure.rank >= 0 and not _is_exit(failure)


def _is_exit(failure: Failure) -> bool:
    """Whether a failure is the end of a process, not a report of a gateway or the agent."""
    return failure.exit_code != 0 or failure.code in _EXITS


def _kind(failure: Failure) -> int:
    """Return the order of simultaneous failures: signals, then exits, then reports.

    A lost node comes first: it takes all its processes with it.
    """
    if failure.code == "NODE_LOST":
        return -1
    return 0 if failure.exit_code < 0 else 1 if _is_exit(failure) else 2
