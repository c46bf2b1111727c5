"""What a simulation takes beside the job and its topology. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from topology.faults.script import TimedChange
from topology.simulator.chance import Stragglers
from topology.simulator.outages import Outages
from topology.simulator.rounds import Rounds
from topology.units import format_duration, format_fraction

SHARINGS = ("fifo", "fair")
"""How flows share a link: one after another in the order of buckets, or as many at once as there
are connections, each with its max-min fair share (topology/simulator/sharing.py)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How a job is simulated."""

    steps: int = 20
    """That are done at the end, whatever was lost meanwhile."""
    seed: int = 0
    """Of stragglers and outages: the same seed gives the same times on every machine."""
    sharing: str = "fifo"
    """One of SHARINGS."""
    slow_start: bool | None = None
    """TCP starts slowly after a pause; None: where there are packets
    (topology.model.wire_load)."""
    ratio: float | None = None
    """Encoded bytes for each byte of float32; None: as codecs usually come to
    (topology.codec_costs)."""
    gateways_take_time: bool = True
    """False: encoding, decoding and sending cost gateways nothing."""
    stragglers: Stragglers | None = None
    outages: Outages | None = None
    changes: tuple[TimedChange, ...] = ()
    """Of links, by time since the beginning: rates, delays, cuts, and ends of them
    (topology.faults.script)."""
    rounds: Rounds | None = None
    """Sites exchange parameters once a round; None: gradients in every step."""
    reuse_steps: bool = True
    """Steps that repeat themselves are not simulated again (topology/simulator/site_step.py)."""

    def __post_init__(self) -> None:
        if self.sharing not in SHARINGS:
            raise ValueError(f"sharing: want one of {', '.join(SHARINGS)}; got {self.sharing!r}")
        if self.changes and self.outages is not None:
            raise ValueError("changes: of links or outages of sites, not both")
        if self.rounds is not None and self.steps % self.rounds.steps:
            raise ValueError(f"steps: want whole rounds of {self.rounds.steps}, got {self.steps}")
        if (
            self.rounds is not None
            and self.outages is not None
            and self.outages.checkpoint_every % self.rounds.steps
        ):
            raise ValueError(
                f"checkpoint_every: want whole rounds of {self.rounds.steps} steps, "
                f"got {self.outages.checkpoint_every}"
            )
        if self.steps < 1:
            raise ValueError(f"steps: want 1 at least, got {self.steps}")

    @property
    def may_reuse_steps(self) -> bool:
        """Whether steps can repeat themselves at all, and such are not simulated again."""
        return self.reuse_steps and self.stragglers is None and not self.changes

    def in_words(self) -> list[str]:
        """Return for people what of it is not usual."""
        words = []
        if self.rounds is not None:
            words.append(self.rounds.in_words())
        if self.sharing != "fifo":
            words.append(f"links shared: {self.sharing}")
        if self.stragglers is not None:
            spread = format_fraction(self.stragglers.spread)
            words.append(f"stragglers: {self.stragglers.distribution}, {spread}")
        if self.outages is not None:
            words.append(
                f"a site fails every {format_duration(self.outages.mtbf_s)} in the mean, recovery "
                f"takes {format_duration(self.outages.recovery_s)}, checkpoints every "
                f"{self.outages.checkpoint_every} steps"
            )
        return words
