"""Why a gateway cannot go on, in the words that its agent, its ranks and its peers are told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from protos.errors import IsthmusError, PeerLostError
from topology.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """One failure. The first ends the gateway; later ones are its consequences."""

    code: str
    """A key of protos/catalogue.py."""
    message: str
    """One line."""
    site: str = ""
    """Where it failed; empty: here."""
    rank: int = -1
    """Inside that site; -1: none."""
    collateral: bool = False
    """The consequence of something that somebody else reports better."""

    @classmethod
    def of(cls, error: BaseException, site: str = "") -> Failure:
        """Return the failure that an error is; `site` is where it came from, if it says nothing."""
        if isinstance(error, PeerLostError) and error.site:
            site = error.site
        if isinstance(error, IsthmusError):
            return cls(code=error.code, message=one_line(str(error)), site=site)
        if isinstance(error, ConfigError):
            return cls(code="INVALID_CONFIG", message=one_line(str(error)), site=site)
        return cls(code="INTERNAL", message=one_line(f"{type(error).__name__}: {error}"), site=site)

    def to_agent(self) -> dict[str, Any]:
        """Return the line for the agent."""
        return {
            "op": "failed",
            "code": self.code,
            "message": self.message,
            "site": self.site,
            "rank": self.rank,
            "collateral": self.collateral,
        }

    def to_rank(self) -> dict[str, Any]:
        """Return the message for a rank."""
        return {"op": "failed", "code": self.code, "message": self.message, "site": self.site}


def one_line(text: str) -> str:
    """Return `text` on one line of bounded length."""
    return " ".join(text.split())[:500]
