"""The part of a job that says what a planner may decide, and what it is to aim at. Frozen."""

from dataclasses import dataclass, field

from isthmus.topology.spec.json_fields import IN_USE

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
"""What becomes of the sites' parts of the batch while a run goes on."""
GATEWAYS = ("measured", "unlimited")
"""The speeds that a plan assumes for gateways and codecs: as measured, or of no cost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replan:
    """The settings of planning a running job again (orchestrator/core/replan_machine.py)."""

    drift: float = 0.2
    """Share by which a link's measured figure has to be off the one that the plan counts on."""
    lasting_s: float = 60.0
    """Seconds for which it has to be off all the time."""
    gain: float = 0.05
    """Share of the predicted step that other trees have to save."""
    least_exact: str | None = field(default=None, metadata=IN_USE)
    """The least exact codec that the run may go over to; None: it keeps the exchange's."""
    shares: str = field(default="follow", metadata=IN_USE)
    """One of SHARES: whether sites get other parts of the batch as their speeds change."""

    @property
    def gap_s(self) -> float:
        """The seconds after a switch before a plan is made again."""
        return 5 * self.lasting_s


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanWishes:
    """What a planner may decide (topology/planner), and what it is to aim at."""

    codecs: tuple[str, ...] = ()
    """The codecs to choose from; empty: only the exchange's own."""
    sites: str = "auto"
    """One of PLAN_SITES."""
    max_sync_period: int = 1
    """The most steps between two exchanges."""
    max_loss_gap: float | None = field(default=None, metadata=IN_USE)
    """How much more loss than that of `sync` a regime may be expected to end with, as a share of
    it; None: any regime is permitted whose rounds are."""
    objective: str = "throughput"
    """One of OBJECTIVES."""
    budget_usd_per_s: float | None = field(default=None, metadata=IN_USE)
    """What egress may cost, in US dollars a second; None: anything."""
    micro_batch: str = "given"
    """One of MICRO_BATCHES."""
    cuts: str = "given"
    """One of CUTS."""
    gateways: str = "measured"
    """One of GATEWAYS."""
    replan: Replan | None = Replan()
    """The settings of planning again; None: a run keeps its plan whatever becomes of its links."""
