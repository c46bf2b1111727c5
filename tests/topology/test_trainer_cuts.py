"""Cuts of the shipped trainer's model: which it can run, and that no other is planned or taken."""

from __future__ import annotations

import dataclasses

import pytest

from isthmus.topology.documents.load import load_job
from isthmus.topology.documents.placement import problems_of
from isthmus.topology.documents.run_documents import joined
from isthmus.topology.planner.cuts import every_cut, in_words, site_cuts
from isthmus.topology.planner.plan import make_plan
from isthmus.topology.spec.errors import ConfigError
from isthmus.topology.spec.job import Job, Model
from isthmus.topology.spec.trainer_cuts import cut_of, is_cut, is_uneven, why_not
from isthmus.topology.spec.workload import Parallel
from isthmus.topology.text.yaml_document import read_with_overrides
from tests.fakes.described import MODEL as MODEL_OF_SCRIPT
from tests.fakes.described import sites_of_nodes

WORLD = sites_of_nodes([1, 1], [(0, 1, 1e9, 0.01)])
RANKS = WORLD.sites[0].num_ranks
JOB = """\
version: 1
name: cut
topology: topology.yaml
trainer:
  global_batch: 64
  model: {layers: 8, heads: 8, width: 512, context: 256, tied: false}
"""
MODEL = Model(layers=4, heads=4, width=32, context=24, tied=False)


@pytest.mark.parametrize(
    ("model", "cut", "why"),
    [
        (MODEL, Parallel(tensor=4, pipeline=2, data=2, zero_stage=3), None),
        (MODEL, Parallel(tensor=3), "tensor: 3 does not divide the 4 heads"),
        (
            dataclasses.replace(MODEL, context=25),
            Parallel(tensor=2),
            "tensor: 2 does not divide the context of 25, which it cuts too",
        ),
        (dataclasses.replace(MODEL, experts=4), Parallel(tensor=2), "tensor: the trainer cuts no"),
        (dataclasses.replace(MODEL, tied=True), Parallel(pipeline=2), "pipeline: first and last"),
        (MODEL, Parallel(pipeline=4, virtual_stages=2), "pipeline: 8 stages are more than the 4"),
        (MODEL, Parallel(context=2, tensor=2, data=2), None),
        (dataclasses.replace(MODEL, experts=4), Parallel(context=2), None),
        (MODEL, Parallel(context=5), "context: 2 x 5 pieces do not divide the 24 tokens"),
        (MODEL, Parallel(context=4, tensor=4), "tensor: 4 does not divide the context of 6"),
        (MODEL, Parallel(context=2, pipeline=2), "context: the trainer cuts no sequences in a"),
        (
            dataclasses.replace(MODEL, experts=4),
            Parallel(context=2, data=4, expert=2, zero_stage=1),
            "context: the trainer cuts no sequences in a pipeline, or where ranks share experts",
        ),
        (MODEL, Parallel(data=4, expert=2, zero_stage=1), "expert: 2 does not divide the 1"),
        (
            dataclasses.replace(MODEL, experts=4),
            Parallel(data=2, expert=2, zero_stage=1),
            "expert: want at least twice as many data ranks",
        ),
        (MODEL, Parallel(data=2, zero_stage=2), "zero_stage: 2 is not there"),
        (MODEL, Parallel(data=4, replicate=2), "replicate: want 1 with experts"),
    ],
)
def test_a_cut_that_cannot_run_is_told_by_its_degree(
    model: Model, cut: Parallel, why: str | None
) -> None:
    said = why_not(model, cut)
    assert said is None if why is None else str(said).startswith(why)


@pytest.mark.slow
def test_only_cuts_that_can_run_are_planned() -> None:
    job = load_job(JOB + "plan: {cuts: auto, sites: all}\n", "job.yaml")
    assert job.workload is not None
    cuts = [*every_cut(job.workload, WORLD.sites[0])]
    assert {cut.pipeline for cut in cuts} > {1}
    assert {cut.tensor for cut in cuts} > {1}
    for cut in cuts:
        assert why_not(job.trainer.model, cut) is None
        assert not is_uneven(cut, 63) or cut.expert > 1, "any number of sequences"
    decided = make_plan(job, WORLD)["decisions"]["placement"]
    assert [each["site"] for each in decided] == [site.name for site in WORLD.sites]
    assert all(each["parallel"]["context"] == 1 for each in decided)


@pytest.mark.parametrize(
    ("memory_gib", "stage", "copies"),
    [
        (80, 1, 1),  # parameters fit whole
        (40, 3, 4),  # micro-batches too short to hide what ZeRO 3 would gather from other nodes
        (10, 3, 1),  # nor does a node have room for all
    ],
)
def test_a_plan_has_a_copy_a_node_where_that_is_faster(
    memory_gib: int, stage: int, copies: int
) -> None:
    text = JOB.replace("batch: 64", "batch: 4096\n  micro_batch: 1\n  precision: bf16").replace(
        "layers: 8, heads: 8, width: 512, context: 256, tied: false",
        "layers: 32, heads: 4, width: 4096, context: 1024",
    )
    job = load_job(text + "plan: {cuts: auto}\n", "job.yaml")
    world = sites_of_nodes([4, 4], [(0, 1, 1e9, 0.01)], per_node=8, memory_bytes=memory_gib << 30)
    site = world.sites[0]
    assert site.fabric is not None
    fabric = dataclasses.replace(site.fabric, cluster_bytes_per_s=50e9)
    cuts = site_cuts(job, dataclasses.replace(site, fabric=fabric), None)
    cut = cuts.timings(2048)[0].cut
    assert cut is not None
    assert (cut.degrees.zero_stage, cut.degrees.replicate) == (stage, copies)
    assert (" in 4 copies" in in_words(cut.degrees)) == (copies == 4)


def test_scripts_are_planned_no_copies() -> None:
    model = dataclasses.replace(MODEL_OF_SCRIPT, layers=2)
    site = sites_of_nodes([4], [], per_node=8).sites[0]
    assert {each.replicate for each in every_cut(model, site)} == {1}


def test_a_tied_model_is_planned_without_a_pipeline() -> None:
    text = JOB.replace(", tied: false", "") + "plan: {cuts: auto}\n"
    job = load_job(text, "job.yaml")
    assert job.workload is not None
    assert {cut.pipeline for cut in every_cut(job.workload, WORLD.sites[0])} == {1}


def placed(cut: str, sequences: int = 32) -> Job:
    return load_job(
        f"{JOB}placement:\n"
        f"  - {{site: {WORLD.sites[0].name}, sequences: {sequences}, parallel: {cut}}}\n"
        f"  - {{site: {WORLD.sites[1].name}, sequences: {64 - sequences}}}\n",
        "job.yaml",
    )


def test_a_placement_that_the_trainer_cannot_run_is_refused() -> None:
    assert problems_of(placed(f"{{data: {RANKS}, zero_stage: 3}}"), WORLD) == []
    (problem,) = problems_of(placed(f"{{data: {RANKS}, zero_stage: 2}}"), WORLD)
    assert problem[0] == ("placement", 0, "parallel", "zero_stage")
    (problem,) = problems_of(placed(f"{{data: {RANKS}}}", sequences=33), WORLD)
    assert problem[0] == ("placement", 0, "sequences")
    assert problem[1].startswith(f"want a multiple of {RANKS}")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ([], None),
        (["trainer.compile=true"], "with trainer.compile it was not tried"),
        (["trainer.model.context=64"], "torch's kernel for fp32 takes 32 tokens together, so 128"),
        (["trainer.model.context=64", "trainer.precision=bf16"], None),
        (["trainer.model.context=66"], "2 x 2 pieces do not divide the 66 tokens"),
    ],
)
def test_sequences_are_cut_where_that_can_run(settings: list[str], said: str | None) -> None:
    cut = f"{{context: 2, data: {RANKS // 2}, zero_stage: 1}}"
    text = f"{JOB}placement:\n  - {{site: {WORLD.sites[0].name}, sequences: 64, parallel: {cut}}}\n"
    job = load_job(text, "job.yaml", settings)
    problems = problems_of(job, WORLD)
    assert [path for path, _ in problems] == [("placement", 0, "parallel", "context")] * (
        said is not None
    )
    assert said is None or problems[0][1].startswith(said)


def test_sequences_are_not_cut_on_a_host() -> None:
    job = placed(f"{{context: {RANKS}, zero_stage: 1}}")
    accelerator = dataclasses.replace(WORLD.sites[0].accelerator, name="cpu-core")
    sites = (dataclasses.replace(WORLD.sites[0], accelerator=accelerator), *WORLD.sites[1:])
    (problem,) = problems_of(job, dataclasses.replace(WORLD, sites=sites))
    assert problem[0] == ("placement", 0, "parallel", "context")
    assert "computes on the host" in problem[1]


@pytest.mark.parametrize(
    ("batch", "sequences", "said"),
    [
        (3, (2, 1), None),  # fewer than ranks, and one for each replica
        (2, (1, 1), "want at least 2, a sequence for each replica of"),
    ],
)
def test_a_cut_wants_a_sequence_for_each_replica(
    batch: int, sequences: tuple[int, int], said: str | None
) -> None:
    cuts = ["{tensor: 2, data: 2, zero_stage: 3}", "{tensor: 4}"]
    placed = ", ".join(
        f"{{site: {site.name}, sequences: {count}, parallel: {cut}}}"
        for site, count, cut in zip(WORLD.sites, sequences, cuts, strict=True)
    )
    text = JOB.replace("batch: 64", f"batch: {batch}") + f"placement: [{placed}]\n"
    problem = None
    try:
        joined(load_job(text, "job.yaml"), WORLD, read_with_overrides(text, "job.yaml", ()))
    except ConfigError as error:
        problem = str(error)
    assert problem is None if said is None else said in str(problem)


def test_a_cut_by_precision_wants_a_sequence_for_each_rank() -> None:
    text = JOB.replace("batch: 64", "batch: 7\n  precision: bf16")
    with pytest.raises(ConfigError, match="want at least 8, a sequence for each rank"):
        joined(load_job(text, "job.yaml"), WORLD, read_with_overrides(text, "job.yaml", ()))


def test_a_site_without_a_cut_shares_the_model_over_all_ranks() -> None:
    job = placed(f"{{pipeline: {RANKS}}}")
    assert is_cut(job)
    other = cut_of(job, WORLD.sites[1])
    assert (other.data, other.zero_stage) == (RANKS, 1)
    assert not is_cut(load_job(JOB, "job.yaml"))


def test_what_has_no_place_beside_a_cut_is_refused() -> None:
    cut = "placement:\n  - {site: a, sequences: 64, parallel: {pipeline: 2}}\n"
    text = "plan: {cuts: auto}\nentrypoint: train.py\n"
    with pytest.raises(ConfigError, match="cuts: auto is the shipped trainer's"):
        load_job(JOB + cut + text, "job.yaml")
