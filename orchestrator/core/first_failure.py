"""Finds which of many reported failures was the first real one; how the journal has a failure.

When a rank dies at one site, its gateway loses it, the other sites' gateways lose that gateway,
their ranks fail, and torchrun terminates what is left: a dozen reports of one event. Sites date
what they report by its age, so that clocks need not agree.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from isthmus.protos.failure import Failure
from isthmus.topology.spec.json_fields import read_json, to_json

TIE_S = 0.1
"""Between two sites an age is only as exact as a message's journey: closer ones count as equal."""

_CONSEQUENCES = frozenset({"PEER_LOST", "STALE_GENERATION"})
"""What a healthy site sees of another's failure."""

_PRIORITY = {
    code: priority
    for priority, codes in enumerate(
        (
            # These name a cause, and what else was seen at that moment followed from it.
            (
                "GRADIENTS_DIFFER",
                "STEPS_DIFFER",
                "PARAMETERS_DIFFER",
                "NON_FINITE",
                "SAME_DATA",
                "DATA_DIFFERS",
                "LAYOUT_MISMATCH",
                "CORRUPT_DATA",
                "CONFIG_MISMATCH",
            ),
            ("RANK_STALLED",),
            ("NODE_LOST",),
            (
                "SCRIPT_FAILED",
                "NODE_FAULTY",
                "RANK_EXITED",
                "RANK_KILLED",
                "LAUNCH_FAILED",
                "FILE_ERROR",
                "CANNOT_TRAIN",
                "NEVER_JOINED",
            ),
            ("NEVER_ATTACHED",),
            ("GATEWAY_EXITED",),
            ("SITE_LOST",),
            ("PROTOCOL_VIOLATION", "INTERNAL"),
        )
    )
    for code in codes
}


def first_failure(failures: Sequence[Failure]) -> Failure:
    """Return the failure, of at least one, that explains the others.

    The earliest that nobody calls collateral; a lost peer only where nothing better explains it. Of
    those that different sites report within TIE_S the code decides, then the time.
    """
    real = [each for each in failures if not each.is_collateral]
    causes = [each for each in real if each.code not in _CONSEQUENCES]
    candidates = causes or real or list(failures)
    if any(each.code == "PARAMETERS_DIFFER" for each in candidates):
        # A site that was silent before does not explain unlike results.
        candidates = [each for each in candidates if each.code != "SITE_LOST"]
    earliest = min(candidates, key=lambda each: each.at_s)
    tied = _tied_with(earliest, candidates)
    return min(tied, key=lambda each: (_priority(each), each.at_s, each.site, each.rank))


def _tied_with(earliest: Failure, candidates: Iterable[Failure]) -> list[Failure]:
    """Return what may have been as early: within a site ages share a clock and are exact."""
    return [
        each
        for each in candidates
        if each.at_s == earliest.at_s
        or (each.reported_by != earliest.reported_by and each.at_s - earliest.at_s <= TIE_S)
    ]


def _priority(failure: Failure) -> int:
    return _PRIORITY.get(failure.code, len(_PRIORITY))


def detail_of(failure: Failure) -> dict[str, Any]:
    """Return a failure as the journal, --json and the API have it.

    `at_s` is left out: it is meaningless on another machine.
    """
    fields: dict[str, Any] = to_json(failure, lambda field, _: field.name != "at_s")
    fields["collateral"] = fields.pop("is_collateral")
    return fields


def failure_of(detail: Mapping[str, Any]) -> Failure:
    """Return the failure in an event's detail, which may have more fields.

    Raises:
        ConfigError: a field has another type, or the code or the message is missing.
    """
    fields = {**detail, "is_collateral": detail.get("collateral", False)}
    return read_json(Failure, fields, on_unknown=lambda _: None)
