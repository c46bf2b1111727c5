"""Whether the trainer that ships fits the accelerators of the sites that a plan gives it."""

from __future__ import annotations

from topology.cost.degrees import Degrees
from topology.cost.memory import memory
from topology.cost.workload import workload_of
from topology.job import Job
from topology.planner.choice import Choice
from topology.units import format_size
from topology.world import Site, Topology


def too_large(job: Job, topology: Topology, choice: Choice) -> list[str]:
    """Return a warning for each site whose accelerators have less memory than a rank needs."""
    if job.entrypoint is not None:
        return []
    found = []
    for name, count in zip(choice.sites, choice.sequences, strict=True):
        site = topology.site(name)
        most = min(choice.micro_batch, -(-count // site.num_ranks))
        needed_bytes, has = rank_bytes(job, site, most), site.accelerator.memory_bytes
        if needed_bytes > has:
            found.append(
                f"{name}: a rank needs {format_size(needed_bytes)} of memory for {most} sequences at "
                f"once, and its accelerator has {format_size(has)}: lower trainer.micro_batch or the model"
            )
    return found


def rank_bytes(job: Job, site: Site, micro_batch: int) -> float:
    """Return the memory that a rank of the shipped trainer needs, with so many sequences at once.

    Every rank holds all of the model: parameters, gradients and Adam's moments in float32, and the
    activations of a micro-batch. What the runtime takes is left out, for it is not the same on all.
    """
    workload = workload_of(job.trainer.model)
    cut = Degrees(data=site.num_ranks, micro_batch=micro_batch, fused_attention=True)
    needed = memory(workload, cut, micro_batch * site.num_ranks)
    return needed.total - needed.runtime
