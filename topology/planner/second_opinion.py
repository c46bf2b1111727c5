"""What the simulator says of a plan, where that is not what the plan says of itself."""

from __future__ import annotations

from topology.job import Job
from topology.model.buckets import gradient_bytes
from topology.planner.choice import Choice
from topology.simulator.settings import Settings
from topology.simulator.simulation import simulate
from topology.units import format_duration
from topology.world import Topology

DOUBTFUL = 0.05
"""Of a step: by so much the two may differ."""
_STEPS, _SKIPPED = 12, 4
"""Steps that are simulated, and the first of them, which begin as no later one does."""
_CHUNKS_MAX = 20_000
"""Of a step, over all trees' links: more take seconds."""


def simulated_s(job: Job, topology: Topology, choice: Choice) -> float | None:
    """Return a plan's simulated step, whose slowest site counts; None where that would take long.

    Args:
        job: As it was given; the trainer that ships.
        topology: Described in full.
        choice: The plan.
    """
    decided, here = choice.job(job), choice.topology(topology)
    num_hops = 2 * len(here.sites) * len(here.sites)
    num_chunks = gradient_bytes(decided) / choice.sizing.chunk_bytes
    if job.entrypoint is not None or len(here.sites) < 2 or num_chunks * num_hops > _CHUNKS_MAX:
        return None
    run = simulate(decided, here, Settings(steps=_STEPS))
    return max(run.step_s(site, _SKIPPED) for site in range(len(here.sites)))


def simulated_otherwise(job: Job, topology: Topology, choice: Choice) -> list[str]:
    """Return a warning if the simulator, following every chunk, predicts another step; else none.

    The planner's formulas are made so that a wider link never makes them slower, and are least true
    of several trees that share links. Arguments are those of `simulated_s`.
    """
    step_s = simulated_s(job, topology, choice)
    if step_s is None or abs(step_s / choice.step_s - 1) <= DOUBTFUL:
        return []
    return [
        f"simulated chunk by chunk, a step takes {format_duration(step_s)}, {step_s / choice.step_s - 1:+.1%}: "
        "formulas are least true of several trees that share links"
    ]
