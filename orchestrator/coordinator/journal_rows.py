"""Rows of the journal as events, and events as what rows say."""

from __future__ import annotations

import json
from typing import Any

from orchestrator.core.run_view import RecordedEvent

COLUMNS = "sequence, wall_s, run_id, generation, kind, site, detail"
"""Of a row, in this order."""


def event_of(row: tuple[Any, ...]) -> RecordedEvent:
    """Return what a row of COLUMNS says.

    Raises:
        TypeError: its detail is no object.
        ValueError: or not JSON.
    """
    sequence, wall_s, run_id, generation, kind, site, detail = row
    return RecordedEvent(
        sequence=sequence,
        wall_s=wall_s,
        run_id=run_id,
        generation=generation,
        kind=kind,
        site=site,
        detail=object_of(detail),
    )


def object_of(text: str) -> dict[str, Any]:
    """Return a JSON object.

    Raises:
        TypeError: it is something else.
        ValueError: it is not JSON.
    """
    value = json.loads(text)
    if not isinstance(value, dict):
        raise TypeError(f"want an object, got {text:.100}")
    return value


def ended_after(last: RecordedEvent, detail: dict[str, Any]) -> RecordedEvent:
    """Return the event that would follow `last` if a coordinator were there to write it."""
    return RecordedEvent(
        sequence=last.sequence + 1,
        wall_s=last.wall_s,
        run_id=last.run_id,
        generation=last.generation,
        kind="run.ended",
        site="",
        detail=detail,
    )
