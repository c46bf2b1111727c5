"""Sites that fail, and what it costs: the run stops, and goes on from its last checkpoint. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Outages:
    """How often sites fail, and how long it takes to go on.

    Times between failures are exponential.
    """

    mtbf_s: float
    """Of one site: mean time between its failures."""
    recovery_s: float
    """From a failure until all sites compute again."""
    checkpoint_every: int = 1
    """Steps. What was done since the last checkpoint is done again."""

    def __post_init__(self) -> None:
        if not self.mtbf_s > 0 or self.recovery_s < 0 or self.checkpoint_every < 1:
            raise ValueError(
                "outages: want mtbf_s > 0, recovery_s >= 0 and checkpoint_every >= 1; "
                f"got {self.mtbf_s}, {self.recovery_s}, {self.checkpoint_every}"
            )


@dataclass(frozen=True, slots=True)
class Outage:
    """One failure, and what it undid."""

    at_s: float
    """Since the simulation began."""
    until_s: float
    site: str
    lost_steps: int
    """That were done, and are done again."""
