"""The part of a job that says what a planner may decide, and what it is to aim at. Frozen."""

from dataclasses import dataclass
from typing import Annotated

from isthmus.topology.spec.codec_names import CODECS, RUNGS
from isthmus.topology.spec.units import format_duration
from isthmus.topology.spec.yaml_keys import (
    Bounds,
    Budget,
    Key,
    KeyedError,
    PositiveDuration,
    Section,
    Share,
    Short,
    choice,
)

PLAN_SITES = ("auto", "all")
"""The choices of sites. `auto`: a site that slows the others is left out; `all`: none is."""
MICRO_BATCHES = ("given", "auto")
"""The choices of micro-batch. `given`: a plan keeps the trainer's; `auto`: it takes the largest
that fits the accelerators' memory."""
CUTS = ("given", "auto")
"""The choices of how a site's ranks share the shipped trainer's model. `given`: as the job's
placement says, else each has all of it; `auto`: the plan decides."""
OBJECTIVES = ("throughput", "cost")
"""The aims of a plan: the most tokens a second, or the fewest US dollars a token."""
SHARES = ("follow", "fixed")
"""What becomes of the sites' parts of the batch, or of the regime, while a run goes on."""
GATEWAYS = ("measured", "unlimited")
"""The speeds that a plan assumes for gateways and codecs: as measured, or of no cost."""


REPORTS_S = 0.5
"""Seconds between two reports of a gateway on its links (sites/gateway/gateway.py)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replan(Section):
    """When the plan of a run is made again while it goes on."""

    drift: Share = 0.2
    """How far a link is off what the plan counts on."""
    lasting_s: Annotated[PositiveDuration, Key("lasting")] = 60.0
    """For so long, all the time; 500ms at least."""
    gain: Share = 0.05
    """Of the predicted step, that other trees have to save."""
    least_exact: Annotated[str, choice(RUNGS)] | None = None
    """The least exact codec to which a run may go over, as its links narrow; else it keeps
    exchange.codec."""
    shares: Annotated[str, choice(SHARES)] = "follow"
    """fixed: sites keep their parts of the batch, however fast they are."""
    regime: Annotated[str, choice(SHARES)] = "fixed"
    """follow: the run begins in sync, goes over to delayed or diloco while its links are too slow,
    and comes back; within max_loss_gap and max_sync_period."""

    @property
    def gap_s(self) -> float:
        """The seconds after a switch before a plan is made again."""
        return 5 * self.lasting_s

    def check(self) -> None:
        """Refuse a time in which gateways do not report."""
        if self.lasting_s < REPORTS_S:
            raise KeyedError(
                "lasting",
                f"want at least {format_duration(REPORTS_S)}, in which gateways report once; "
                f"got {format_duration(self.lasting_s)}",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanWishes(Section):
    """What `isthmus plan` may decide; with this section, `launch` makes a plan by itself."""

    codecs: tuple[Annotated[str, choice(CODECS)], ...] = ()
    """To choose from; of equally fast ones the most exact. Else exchange.codec."""
    sites: Annotated[str, choice(PLAN_SITES)] = "auto"
    max_sync_period: Annotated[int, Bounds(ge=1, le=100_000)] = 1
    """Steps between two exchanges that are permitted."""
    max_loss_gap: Share | None = None
    """How much more loss than sync's a regime may be expected to end with: 1%."""
    objective: Annotated[str, choice(OBJECTIVES)] = "throughput"
    budget_usd_per_s: Annotated[Budget | None, Key("budget")] = None
    """What egress may cost, at most; choices above it are left out."""
    micro_batch: Annotated[str, choice(MICRO_BATCHES)] = "given"
    """given: trainer.micro_batch; auto: the largest that fits the memory."""
    cuts: Annotated[str, choice(CUTS)] = "given"
    """auto: the plan decides how each site's ranks share the trainer's model."""
    gateways: Annotated[str, choice(GATEWAYS)] = "measured"
    """unlimited: as if gateways and codecs took no time; with `workload` only."""
    replan: Annotated[
        Replan | None,
        Short(lambda value: None if value == "off" else value, {"type": "string", "const": "off"}),
    ] = Replan()
    """Other trees while a run goes on, where links have drifted; or off."""

    def check(self) -> None:
        """Refuse a codec that is there twice."""
        twice = [codec for codec in self.codecs if self.codecs.count(codec) > 1]
        if twice:
            raise KeyedError("codecs", f"{twice[0]!r} is there twice")
