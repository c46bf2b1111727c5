"""A run whose sites cut the trainer's model in unlike ways, as the plan says."""

from __future__ import annotations

import pytest

from isthmus.sites.trainer.reference import train_alone
from isthmus.topology.documents.load import load_job
from tests.multiprocess.harness import Bench, job_yaml, topology_yaml

STEPS = 30
CUTS = """\
placement:
  - {site: a, sequences: 8, parallel: {tensor: 2, data: 2, zero_stage: 3, micro_batch: 4}}
  - {site: b, sequences: 8, parallel: {pipeline: 2, data: 2, zero_stage: 1, micro_batch: 2}}
"""


@pytest.mark.multiprocess
@pytest.mark.exhaustive
@pytest.mark.slow
def test_tensor_parallelism_beside_a_pipeline(run: Bench) -> None:
    topology = topology_yaml([(1, 4), (1, 4)], rtt="2ms")
    job = job_yaml(steps=STEPS, codec="fp32", global_batch=16)
    job = job.replace("context: 32}", "context: 32, tied: false}")
    path = run.write(topology, f"{job}plan: {{}}\n{CUTS}")
    plan = run.folder / "plan.yaml"
    decided = run.isthmus("plan", str(path), "--out", str(plan), "--json").check().envelope
    inside = {each["site"]: each["cut"] for each in decided["data"]["plan"]["inside"]}
    assert inside["a"].startswith("tensor 2, data 2, ZeRO 3")
    assert inside["b"].startswith("tensor 1, pipeline 2, data 2, ZeRO 1")

    result = run.isthmus("launch", str(path), "--plan", str(plan), "--json").check()

    assert result.envelope["data"]["state"] == "SUCCEEDED"
    assert result.envelope["data"]["verified_steps"] == 1 + STEPS
    alone = train_alone(load_job(job, "job.yaml"), run.folder)
    # As in test_same_training: the same sums in another order.
    assert run.losses() == pytest.approx(alone.losses, rel=1e-5)
