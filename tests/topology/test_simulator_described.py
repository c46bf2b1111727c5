"""Simulated steps of models that jobs describe.

Pipelines against the bubble's formula, sites against the planner.
"""

from __future__ import annotations

import dataclasses

import pytest

from isthmus.topology.model.buckets import gradient_bytes
from isthmus.topology.model.step_model import StepModel
from isthmus.topology.planner.cuts import every_cut, placed_timings
from isthmus.topology.simulator.settings import Settings
from isthmus.topology.simulator.simulation import SimulatedRun, simulate, simulate_alone
from isthmus.topology.simulator.step_work import described_buckets, inside_of
from isthmus.topology.spec.job import Job, Placed
from isthmus.topology.spec.model_shape import Degrees, layers_per_stage, workload_described
from isthmus.topology.spec.workload import DescribedModel, Parallel
from isthmus.topology.spec.world import Topology
from isthmus.topology.trees.tree_choice import plan_reduction
from tests.fakes.described import described_job, sites_of_nodes
from tests.topology.simulated import efficiency

PLAIN = Settings(gateways_take_time=False)
MODEL = DescribedModel(
    layers=32, width=2048, heads=16, vocabulary=512, context=512, global_batch=64
)
"""Its head is a thousandth of it: stages are equal, nearly."""


def cut_job(parallel: Parallel, *sequences: int, model: DescribedModel = MODEL) -> Job:
    """Return a job whose sites s0, s1, ... all cut the model alike."""
    placement = tuple(
        Placed(site=f"s{index}", sequences=each, parallel=parallel)
        for index, each in enumerate(sequences)
    )
    model = dataclasses.replace(model, global_batch=sum(sequences))
    return dataclasses.replace(described_job(model), plan=None, placement=placement)


def pair(bytes_per_s: float = 1e9, rtt_s: float = 0.02) -> Topology:
    return sites_of_nodes([4, 4], [(0, 1, bytes_per_s, rtt_s)])


@pytest.mark.parametrize(
    ("pipeline", "parts", "micro_batches"),
    [(2, 1, 4), (4, 1, 8), (8, 1, 8), (16, 1, 48), (4, 2, 8), (8, 2, 16), (8, 4, 64), (16, 2, 160)],
)
def test_the_bubble_is_that_of_the_formula(pipeline: int, parts: int, micro_batches: int) -> None:
    """(p - 1) / (v m) of the time that a stage computes.

    Narayanan et al., SC'21, sections 2.2.1 and 2.2.2.
    """
    cut = Parallel(pipeline=pipeline, virtual_stages=parts, data=16 // pipeline)
    job = cut_job(cut, micro_batches * cut.data)
    site = sites_of_nodes([4], []).sites[0]
    inside = inside_of(job, site)
    assert inside.step.num_micro_batches == micro_batches
    busy_s = max(inside.stages_busy_s)
    bubble = inside.step.pipeline_s / busy_s - 1
    # The last stage has the logits too, so it is idle a little less than the others.
    assert bubble == pytest.approx((pipeline - 1) / (parts * micro_batches), rel=0.03)


@pytest.mark.slow
@pytest.mark.parametrize(
    "cut",
    [
        Parallel(data=16),
        Parallel(data=16, zero_stage=3),
        Parallel(tensor=4, data=4, zero_stage=1),
        Parallel(tensor=2, pipeline=4, data=2, zero_stage=1),
        Parallel(pipeline=4, virtual_stages=2, data=4),
        Parallel(pipeline=8, virtual_stages=4, data=2, zero_stage=1),
        Parallel(pipeline=16),
    ],
)
@pytest.mark.parametrize("bytes_per_s", [1e9, 20e9])
def test_a_step_is_that_of_the_planner(cut: Parallel, bytes_per_s: float) -> None:
    job, topology = cut_job(cut, 32, 32), pair(bytes_per_s)
    run = simulate(job, topology, Settings(slow_start=False))
    model = StepModel(job, topology, plan_reduction(job, topology))
    timings = placed_timings(job, topology)
    assert run.mean_step_s == pytest.approx(model.step_s(timings), rel=0.035)
    alone = simulate_alone(job, topology, PLAIN)
    assert alone.mean_step_s == pytest.approx(timings[0].alone_s, rel=0.01)


def test_a_nodes_gateways_share_its_work() -> None:
    job, topology = cut_job(Parallel(tensor=4, data=4, zero_stage=1), 32, 32), pair()
    sites = tuple(dataclasses.replace(each, gateways_per_node=2) for each in topology.sites)
    both = (topology, dataclasses.replace(topology, sites=sites))
    models = [StepModel(job, each, plan_reduction(job, each)) for each in both]
    one_s, two_s = (each.gateway_s(placed_timings(job, topology)) for each in models)
    assert two_s == pytest.approx([each_s / 2 for each_s in one_s])
    one, two = (simulate(job, each, PLAIN).work.sites[0].gateway for each in both)
    assert two.num_gateways == 2 * one.num_gateways


@pytest.mark.slow
def test_stages_may_be_uneven() -> None:
    """126 layers over 16 stages are 14 stages of 8 layers and 2 of 7: these wait for the others."""
    uneven = dataclasses.replace(MODEL, layers=126)
    cut, site = Parallel(pipeline=16), sites_of_nodes([4], []).sites[0]
    assert any(degrees.pipeline == 16 for degrees in every_cut(uneven, site))
    assert layers_per_stage(workload_described(uneven), Degrees(pipeline=16)) == 8
    job, topology = cut_job(cut, 32, 32, model=uneven), pair()
    run = simulate(job, topology, Settings(slow_start=False))
    model = StepModel(job, topology, plan_reduction(job, topology))
    assert run.mean_step_s == pytest.approx(model.step_s(placed_timings(job, topology)), rel=0.035)
    in_order(run)
    wider = cut_job(cut, 32, 32, model=dataclasses.replace(MODEL, layers=128))
    slower = simulate(wider, topology, Settings(slow_start=False))
    one, other = (each.work.inside[0].step for each in (run, slower))
    assert one.compute_s == pytest.approx(other.stages_s[1])
    assert one.pipeline_s < other.pipeline_s
    assert run.work.inside[0].stages_busy_s[0] < run.work.inside[0].stages_busy_s[1]


@pytest.mark.slow
def test_links_that_cost_nothing_give_an_efficiency_of_one() -> None:
    job = cut_job(Parallel(tensor=2, pipeline=4, data=2), 16, 16)
    topology = pair(1e18, 0.0)
    run = simulate(job, topology, PLAIN)
    assert efficiency(run, simulate_alone(job, topology, PLAIN)) == pytest.approx(1.0, abs=0.001)


@pytest.mark.slow
def test_sites_may_cut_it_differently() -> None:
    job = cut_job(Parallel(pipeline=4, data=4), 32, 16)
    other = Placed(site="s1", sequences=16, parallel=Parallel(tensor=4, data=4, zero_stage=1))
    job = dataclasses.replace(job, placement=(job.placement[0], other))
    run = simulate(job, pair(), PLAIN)
    assert [each.degrees.pipeline for each in run.work.inside] == [4, 1]
    assert [site.tokens for site in run.work.sites] == [32 * 512, 16 * 512]
    assert [max(site.lanes) for site in run.work.sites] == [3, 0]
    in_order(run)


def in_order(run: SimulatedRun) -> None:
    """Assert that gradients leave from the model's end to its start, in the pipeline's time."""
    for site in run.work.sites:
        assert list(site.ready_s) == sorted(site.ready_s)
        assert site.ready_s[0] > 0
        assert site.ready_s[-1] <= site.compute_s


@pytest.mark.slow
@pytest.mark.parametrize("parts", [1, 2, 4])
def test_gradients_become_ready_from_the_last_layer_to_the_first(parts: int) -> None:
    in_order(simulate(cut_job(Parallel(pipeline=8, virtual_stages=parts, data=2), 16, 16), pair()))


def test_buckets_hold_the_whole_model_and_are_not_many() -> None:
    for layers, bucket_bytes, most in ((32, 1 << 20, 34), (2000, 1 << 20, 256), (32, 1 << 50, 1)):
        model = dataclasses.replace(MODEL, layers=layers, width=256, tied=False)
        job = cut_job(Parallel(data=16), 16, model=model)
        found = described_buckets(workload_described(model), bucket_bytes)
        assert sum(each.raw_bytes for each in found) == gradient_bytes(job)
        assert len(found) <= most
        assert [each.last_layer for each in found] == sorted(
            (each.last_layer for each in found), reverse=True
        )


@pytest.mark.parametrize(
    ("micro_batches", "parts"), [(1, 2), (1, 4), (3, 2), (7, 4), (14, 2), (17, 4), (31, 2), (33, 3)]
)
def test_any_number_of_micro_batches_goes_round(micro_batches: int, parts: int) -> None:
    """A single one passes through every part, one after another."""
    cut = Parallel(pipeline=8, virtual_stages=parts, data=2)
    inside = inside_of(cut_job(cut, 2 * micro_batches), sites_of_nodes([4], []).sites[0])
    busy_s = inside.stages_busy_s
    # No stage is faster than its work, and no micro-batch than its way through all of them.
    assert inside.step.pipeline_s >= max(busy_s)
    assert inside.step.pipeline_s >= sum(busy_s) / micro_batches - 1e-9
    if micro_batches == 1:
        assert inside.step.pipeline_s == pytest.approx(sum(busy_s))


def test_a_pipeline_hides_what_its_last_backward_pass_lasts() -> None:
    """Gradients of a stage leave while the stages before it still compute."""
    serial = dataclasses.replace(described_job(MODEL).exchange, schedule="serial")
    job = cut_job(Parallel(pipeline=8, data=2), 32, 32)
    overlapped = simulate(job, pair(4e9), PLAIN).mean_step_s
    after = simulate(dataclasses.replace(job, exchange=serial), pair(4e9), PLAIN).mean_step_s
    assert overlapped < after


@pytest.mark.slow
def test_degrees_are_those_of_the_job() -> None:
    cut = Parallel(tensor=2, pipeline=2, data=4, zero_stage=1, recompute="full")
    run = simulate(cut_job(cut, 16, 16), pair())
    degrees: Degrees = run.work.inside[0].degrees
    assert (degrees.tensor, degrees.pipeline, degrees.data) == (2, 2, 4)
    assert (degrees.zero_stage, degrees.recompute) == (1, "full")
