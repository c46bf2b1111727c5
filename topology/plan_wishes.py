"""What a job lets a planner decide, and what it is to aim at. Frozen."""

from dataclasses import dataclass

PLAN_SITES = ("auto", "all")
"""`auto`: a site that slows the others is left out; `all`: none is."""
MICRO_BATCHES = ("given", "auto")
"""`given`: a plan keeps the trainer's; `auto`: it takes the largest that fits the accelerators'
memory."""
OBJECTIVES = ("throughput", "cost")
"""What a plan is best at: tokens a second, or US dollars a token."""
GATEWAYS = ("measured", "unlimited")
"""How fast a plan takes gateways and codecs to be: as they were measured, or of no cost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replan:
    """When a running job is planned again (orchestrator/core/replan_machine.py)."""

    drift: float = 0.2
    """How far a link's measured figure is off what the plan counts on, of that."""
    lasting_s: float = 60.0
    """For so long, all the time."""
    gain: float = 0.05
    """Of the predicted step, that other trees have to save."""

    @property
    def gap_s(self) -> float:
        """After a switch, before a plan is made again."""
        return 5 * self.lasting_s


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanWishes:
    """What a planner may decide (topology/planner), and what it is to aim at."""

    codecs: tuple[str, ...] = ()
    """To choose from; empty: only the exchange's own."""
    sites: str = "auto"
    """One of PLAN_SITES."""
    max_sync_period: int = 1
    """Steps between two exchanges, at most."""
    objective: str = "throughput"
    """One of OBJECTIVES."""
    micro_batch: str = "given"
    """One of MICRO_BATCHES."""
    gateways: str = "measured"
    """One of GATEWAYS."""
    replan: Replan | None = Replan()
    """None: a run keeps its plan whatever becomes of its links."""
