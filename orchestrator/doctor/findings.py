"""One thing that is not as a run needs it: what was found, why it matters, and its cure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Severity(StrEnum):
    """How bad a finding is, the worst first."""

    ERROR = "error"
    """A run would fail."""
    WARNING = "warning"
    """A run would be slow, or may fail."""
    NOTE = "note"
    """It could not be examined from here, or is as good to know."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One finding. Its `kind` is stable; its texts are for people."""

    severity: Severity
    kind: str
    """As `small-send-buffer`."""
    found: str
    why: str
    cure: str
    """A command, or what to write where."""
    site: str | None = None
    """None: of the whole run, or of this machine."""
    path: tuple[str | int, ...] = ()
    """The place in the job that it is about, where there is one."""
    line: tuple[str, int, int] | None = None
    """File, line and column outside of the job that it is about."""

    def __post_init__(self) -> None:
        """Keep control characters, which names of files may hold, from the terminal."""
        for name in ("found", "why", "cure"):
            told = "".join(
                each if each.isprintable() else "\N{REPLACEMENT CHARACTER}"
                for each in getattr(self, name)
            )
            object.__setattr__(self, name, told)

    def to_json(self) -> dict[str, Any]:
        """Return what programs get."""
        return {
            "severity": str(self.severity),
            "kind": self.kind,
            "site": self.site,
            "found": self.found,
            "why": self.why,
            "cure": self.cure,
        }


def in_order(findings: list[Finding]) -> list[Finding]:
    """Return each finding once, the worst first."""
    ranks = {severity: rank for rank, severity in enumerate(Severity)}
    return sorted(dict.fromkeys(findings), key=lambda each: ranks[each.severity])
