"""Plan files: written by `isthmus plan`, edited by people, executed by `launch`."""

from __future__ import annotations

import functools
from typing import Any

from isthmus.topology.documents.load import load_job, load_topology
from isthmus.topology.documents.run_documents import DocumentText, load_run
from isthmus.topology.planner.document import PlanFile, plan_text
from isthmus.topology.planner.plan import make_plan
from isthmus.topology.spec.errors import ConfigError
from isthmus.topology.text.yaml_document import read_with_overrides
from tests.fakes.described import MODEL, described_job, sites_of_nodes
from tests.fuzz.document_targets import yaml_bytes
from tests.fuzz.target import Target
from tests.topology.documents import JOB, TOPOLOGY

_DESCRIBED_JOB = """\
version: 1
name: mine
topology: topology.yaml
entrypoint: train.py
workload: {layers: 8, width: 2048, heads: 16, vocabulary: 32000, context: 2048, global_batch: 16}
"""
_SITES = """\
version: 1
name: two
accelerators: {chip: {peak: {bf16: 100TFLOP/s}, memory: 80GiB, mfu: 0.5}}
sites:
  - {name: s0, nodes: 1, accelerators_per_node: 4, accelerator: chip}
  - {name: s1, like: s0}
links:
  - {between: [s0, s1], bandwidth: 100Gbit/s, rtt: 2ms}
"""


@functools.cache
def _plans() -> tuple[dict[str, Any], dict[str, Any]]:
    shipped = make_plan(load_job(JOB, "job.yaml"), load_topology(TOPOLOGY, "topology.yaml"))
    world = sites_of_nodes([1, 1], [(0, 1, 12.5e9, 0.002)])
    return shipped, make_plan(described_job(MODEL), world)


def _samples() -> list[bytes]:
    return [plan_text(plan).encode() for plan in _plans()]


def _read_plan(data: bytes) -> None:
    """Read a plan, put its decisions into the job that it is for, and write it again."""
    text = data.decode("utf-8", errors="replace")
    plan = PlanFile(read_with_overrides(text, "plan.yaml", ()))
    again = PlanFile(read_with_overrides(plan_text(plan.plain), "again.yaml", ()))
    assert again.plain == plan.plain
    assert again.overrides() == plan.overrides()
    is_described = bool(plan.model.inside)
    job, topology = (_DESCRIBED_JOB, _SITES) if is_described else (JOB, TOPOLOGY)
    try:
        load_run(
            DocumentText(job, "job.yaml", plan.overrides()), DocumentText(topology, "topology.yaml")
        )
    except ConfigError as error:
        raise plan.blamed(error) from error


PLAN_TARGETS = (
    Target(
        name="plan-file",
        decode=_read_plan,
        refusals=(ConfigError,),
        samples=_samples,
        # Read twice, and written once.
        most_bytes=lambda data: 3 * yaml_bytes(data),
        mutations=40,
    ),
)
