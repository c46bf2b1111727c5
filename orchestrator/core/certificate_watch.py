"""Says when a party's certificate ends soon, has expired or was renewed. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from isthmus.orchestrator.core.event_kinds import kind_named
from isthmus.orchestrator.core.run_events import CertificateSeen, RecordEvent
from isthmus.protos.identities import WARN_DAYS

DAY_S = 86_400.0
VALID, ENDING, LAST_DAY, EXPIRED = "valid", "ending", "last_day", "expired"
KIND = "certificate."
"""What the kinds of its events begin with; then the stage follows."""
TOLERANCE_S = 60.0
"""A time that an agent tells varies by how long the message takes."""


@dataclass(frozen=True, slots=True)
class Certificate:
    """What the journal says of a certificate."""

    ends_wall_s: float
    stage: str


def look(known: Certificate | None, seen: CertificateSeen) -> Iterator[RecordEvent]:
    """Yield what is news of a certificate, if anything.

    Args:
        known: What was recorded last; None: nothing.
        seen: What its holder says now.
    """
    stage = _stage(seen.left_s)
    is_same = known is not None and abs(known.ends_wall_s - seen.ends_wall_s) < TOLERANCE_S
    if known is not None and is_same and known.stage == stage:
        return
    detail: dict[str, object] = {"certificate": seen.name, "ends_wall_s": seen.ends_wall_s}
    cure = f"`isthmus certs renew {seen.name}`, and take it there"
    if stage == EXPIRED:
        detail["note"] = (
            f"the certificate {seen.name} has expired: a connection that breaks stays down, and "
            f"the run waits for it: {cure}"
        )
    elif stage != VALID:
        detail["note"] = f"the certificate {seen.name} ends in {words(seen.left_s)}: {cure}"
    elif known is not None and known.stage != VALID:
        detail["note"] = f"the certificate {seen.name} was renewed: it ends in {words(seen.left_s)}"
    yield RecordEvent(kind_named(f"{KIND}{stage}"), seen.site or "", detail)


def words(left_s: float) -> str:
    """Return how long a certificate is valid, in words."""
    hours = left_s / 3600
    if hours >= 48:
        return f"{hours / 24:.0f} days"
    return f"{hours:.1f} h" if hours >= 1 else f"{left_s / 60:.0f} min"


def _stage(left_s: float) -> str:
    if left_s <= 0:
        return EXPIRED
    if left_s < DAY_S:
        return LAST_DAY
    return ENDING if left_s < WARN_DAYS * DAY_S else VALID
