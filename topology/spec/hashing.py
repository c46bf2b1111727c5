"""Hashes of documents, to compare them and to match plans to them."""

import dataclasses
import hashlib
import json

from isthmus.topology.spec.job import Job, Trainer
from isthmus.topology.spec.json_fields import to_json
from isthmus.topology.spec.world import Topology


def topology_hash(topology: Topology) -> str:
    """Return the sha256 of the resolved topology, in hex: comments and spelling do not count."""
    return _sha256({"topology": _compared(topology)})


def config_hash(job: Job, topology: Topology) -> str:
    """Return the sha256 of job and topology together, in hex.

    The path by which the job names its topology does not count, for the topology itself does.
    """
    described = dataclasses.replace(job, topology="")
    return _sha256({"job": _compared(described), "topology": _compared(topology)})


def plan_hashes(job: Job, topology: Topology) -> tuple[str, str]:
    """Return two sha256 in hex, of the parts of job and topology on which a plan depends.

    A run's length, name, emulation and replanning do not matter. Nor does the placement, which a
    plan decides on a topology with all sites.
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
        regime=job.regime,
    )
    world = {"sites": _compared(topology.sites), "links": _compared(topology.links)}
    return _sha256({"job": _compared(asked)}), _sha256(world)


def _sha256(value: object) -> str:
    """Return the hash of JSON in one spelling; repr writes floats alike on all machines."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _compared(value: object) -> object:
    """Return JSON of a value's compared fields; other fields do not affect a run."""
    return to_json(value, lambda field, _: field.compare)
