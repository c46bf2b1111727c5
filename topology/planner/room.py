"""Whether the trainer that ships fits the accelerators of the sites that a plan gives it."""

from __future__ import annotations

from topology.cost.degrees import Degrees
from topology.cost.memory import memory
from topology.cost.workload import workload_of
from topology.job import Job
from topology.planner.choice import Choice
from topology.units import format_size
from topology.world import Topology


def too_large(job: Job, topology: Topology, choice: Choice) -> list[str]:
    """Return a warning for each site whose accelerators have less memory than a rank needs.

    Every rank holds all of the model: parameters, gradients and Adam's moments in float32, and the
    activations of a micro-batch. What the runtime takes is left out, for it is not the same on all.
    """
    if job.entrypoint is not None:
        return []
    workload = workload_of(job.trainer.model)
    found = []
    for name, count in zip(choice.sites, choice.sequences, strict=True):
        site = topology.site(name)
        most = min(job.trainer.micro_batch, -(-count // site.num_ranks))
        cut = Degrees(data=site.num_ranks, micro_batch=most, fused_attention=True)
        needed = memory(workload, cut, count)
        needed_bytes, has = needed.total - needed.runtime, site.accelerator.memory_bytes
        if needed_bytes > has:
            found.append(
                f"{name}: a rank needs {format_size(needed_bytes)} of memory for {most} sequences at "
                f"once, and its accelerator has {format_size(has)}: lower trainer.micro_batch or the model"
            )
    return found
