"""The plan of Llama 3 405B on 16,384 H100, against what its authors measured."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from isthmus.topology.documents.load import load_job, load_topology
from isthmus.topology.planner.plan import make_plan
from isthmus.topology.spec.job import Job, Placed
from isthmus.topology.spec.model_shape import workload_described
from isthmus.topology.spec.workload import Limits, Parallel

FOLDER = Path(__file__).parents[2] / "examples" / "llama3_405b"
JOB = load_job((FOLDER / "job.yaml").read_text(), "job.yaml")
TOPOLOGY = load_topology((FOLDER / "topology.yaml").read_text(), "topology.yaml")
MEASURED = 400
"""TFLOP/s of each accelerator (arXiv 2407.21783, table 4)."""


def rate(job: Job, plan: dict[str, Any]) -> float:
    """Return TFLOP/s of each accelerator; attention counts as the mask leaves it."""
    assert job.workload is not None
    workload, batch = workload_described(job.workload), job.workload.global_batch
    masked = 3 * workload.layers * workload.attention_flops(batch) / 2
    flops = workload.model_flops(batch) - masked
    step_s: float = plan["predicted"]["step_s"]
    return flops / step_s / TOPOLOGY.num_ranks / 1e12


def test_the_plan_is_as_fast_as_what_was_measured() -> None:
    plan = make_plan(JOB, TOPOLOGY)
    assert rate(JOB, plan) == pytest.approx(MEASURED, rel=0.10)
    cut = plan["decisions"]["placement"][0]["parallel"]
    assert (cut["tensor"], cut["context"], cut["recompute"]) == (8, 1, "none")


def test_the_published_cut_is_kept_and_as_fast_as_measured() -> None:
    """Tensor 8, pipeline 16, data 128; its parts of a layer or none are eight a stage."""
    published = Parallel(tensor=8, pipeline=16, virtual_stages=8, data=128, zero_stage=1)
    placement = (Placed(site="cluster", sequences=2048, parallel=published),)
    job = dataclasses.replace(JOB, placement=placement)
    plan = make_plan(job, TOPOLOGY)
    assert plan["decisions"]["placement"][0]["parallel"] == dataclasses.asdict(published)
    assert rate(job, plan) == pytest.approx(MEASURED, rel=0.10)
    assert any("does not fit" in each for each in plan["warnings"])


@pytest.mark.slow
def test_context_parallelism_would_be_faster() -> None:
    assert JOB.workload is not None
    workload = dataclasses.replace(JOB.workload, at_most=Limits())
    job = dataclasses.replace(JOB, workload=workload)
    assert MEASURED < rate(job, make_plan(job, TOPOLOGY)) <= 1.15 * MEASURED
