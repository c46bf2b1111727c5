"""What broke, as the core sees it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Something that ended or broke at a site, or that the coordinator found itself."""

    code: str
    """A key of protos/catalogue.py."""
    message: str
    """One line."""
    at_s: float
    """When it happened, on the coordinator's monotonic clock: a message's arrival less its age."""
    site: str = ""
    node: int = -1
    rank: int = -1
    exit_code: int = 0
    """Negative: the signal's number."""
    log_path: str = ""
    reported_by: str = ""
    """The site that told of it, which may blame another; empty: the coordinator."""
    collateral: bool = False
    """A consequence of something else, by the judgement of whoever reported it."""

    @property
    def place(self) -> str:
        """Where it happened, for people: `site b, rank 3`; empty for the run as a whole."""
        parts = [f"site {self.site}"] if self.site else []
        if self.rank >= 0:
            parts.append(f"rank {self.rank}")
        elif self.node >= 0:
            parts.append(f"node {self.node}")
        return ", ".join(parts)

    @property
    def reason(self) -> str:
        """The message in one line, with its place unless it names the site itself."""
        names_site = not self.site or f"site {self.site}" in self.message
        return self.message if names_site else f"{self.place}: {self.message}"

    def to_json(self) -> dict[str, Any]:
        """Return what the journal keeps: all but the time, which means nothing to others."""
        fields = dataclasses.asdict(self)
        del fields["at_s"]
        return fields

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Failure:
        """Return the failure that `to_json` wrote."""
        return cls(**fields, at_s=0.0)
