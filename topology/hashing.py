"""One hash for what a run is configured to be: sites compare it before they exchange anything."""

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence

from topology.job import Job, Trainer
from topology.trees.trees import ReductionPlan
from topology.world import Topology


def topology_hash(topology: Topology) -> str:
    """Return the sha256 of the resolved topology, in hex: comments and spelling do not count."""
    return _sha256({"topology": _canonical(topology)})


def config_hash(job: Job, topology: Topology) -> str:
    """Return the sha256 of job and topology together, in hex.

    The path by which the job names its topology does not count, for the topology itself does.
    """
    described = dataclasses.replace(job, topology="")
    return _sha256({"job": _canonical(described), "topology": _canonical(topology)})


def plan_hashes(job: Job, topology: Topology) -> tuple[str, str]:
    """Return the sha256, in hex, of what a plan follows from: in the job, and in the topology.

    How long a run is, what it is called, whether its WAN is emulated, and when it is planned again
    make no other plan.

    Args:
        job: Its placement does not count: it is what a plan decides.
        topology: Described in full.
    """
    trainer = job.trainer
    asked = Job(
        name="",
        topology="",
        entrypoint=job.entrypoint,
        exchange=job.exchange,
        reduction=job.reduction,
        trainer=Trainer(
            global_batch=trainer.global_batch,
            micro_batch=trainer.micro_batch,
            model=trainer.model,
        ),
        plan=None if job.plan is None else dataclasses.replace(job.plan, replan=None),
        workload=job.workload,
    )
    world = {"sites": _canonical(topology.sites), "links": _canonical(topology.links)}
    return _sha256({"job": _canonical(asked)}), _sha256(world)


def reduction_hash(plan: ReductionPlan, codecs: Sequence[str]) -> str:
    """Return the sha256, in hex, of what carries chunks: trees, weights and codecs, in order."""
    trees = [
        {"root": tree.root, "parent": dict(tree.parent), "weight": tree.weight}
        for tree in plan.trees
    ]
    return _sha256({"num_sites": plan.num_sites, "trees": trees, "codecs": list(codecs)})


def _sha256(value: object) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _canonical(value: object) -> object:
    """Return JSON values only. Floats are written by repr, the same on every machine."""
    if dataclasses.is_dataclass(value):
        # A field that does not take part in equality is derived from the others.
        return {
            field.name: _canonical(getattr(value, field.name))
            for field in dataclasses.fields(value)
            if field.compare
        }
    if isinstance(value, tuple):
        return [_canonical(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): _canonical(item) for key, item in value.items()}
    return value
