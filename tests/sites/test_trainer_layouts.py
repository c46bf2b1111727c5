"""The trainer with its model cut over the ranks of a site: it learns what one process does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from isthmus.protos.checkpoint.store import checkpoint_name
from isthmus.sites.checkpoint.export import model_tensors
from isthmus.sites.trainer.corpus import load_corpus
from isthmus.sites.trainer.gpt import Gpt
from isthmus.sites.trainer.learning import clip_gradients, evaluate, learn_from
from isthmus.sites.trainer.reference import train_alone
from isthmus.sites.trainer.sampler import samples_of
from isthmus.topology.documents.load import load_job
from isthmus.topology.spec.job import Job
from tests.fakes.gateways import FakeGateways
from tests.fakes.ranks import JOB as JOB_TEXT
from tests.fakes.ranks import Program, run_ranks
from tests.sites import trainer_programs as programs
from tests.sites.test_trainer_sites import write_texts

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]

UNTIED = "trainer.model.tied=false"
DEEP = ("trainer.model.layers=4", UNTIED)
EXPERTS = ("trainer.model.experts=4", "trainer.model.active_experts=2", "trainer.global_batch=12")

LAYOUTS = {
    "fsdp": ("{data: 2, zero_stage: 3, micro_batch: 2}", ()),
    "replicas": ("{data: 2, micro_batch: 3}", ("trainer.global_batch=12",)),
    "hsdp": ("{data: 4, replicate: 2, zero_stage: 1, micro_batch: 2}", ()),
    "tensor": ("{tensor: 2, micro_batch: 4, recompute: full}", ()),
    "tensor-fsdp": ("{tensor: 2, data: 2, zero_stage: 3}", (UNTIED,)),
    "pipeline": ("{pipeline: 2, micro_batch: 4, recompute: selective}", (UNTIED,)),
    "pipeline-fsdp": ("{pipeline: 2, data: 2, zero_stage: 1, micro_batch: 2}", DEEP),
    "interleaved": ("{pipeline: 2, virtual_stages: 2, micro_batch: 3}", DEEP),
    "pipeline-tensor": ("{pipeline: 2, tensor: 2, micro_batch: 4}", (UNTIED,)),
    "experts": ("{data: 4, expert: 2, zero_stage: 1, micro_batch: 2}", EXPERTS),
}


def parallel_ranks(cut: str) -> int:
    """Return the ranks that a cut takes."""
    placement = f"placement=[{{site: a, sequences: 13, parallel: {cut}}}]"
    parallel = load_job(JOB_TEXT, "job.yaml", [placement]).placement[0].parallel
    assert parallel is not None
    return parallel.num_ranks


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_site_with_a_cut_learns_what_one_process_does(tmp_path: Path, layout: str) -> None:
    cut, settings = LAYOUTS[layout]
    check(tmp_path, [cut], settings)


PAIRS = [("tensor-fsdp", "pipeline-fsdp"), ("hsdp", "tensor"), ("pipeline", "interleaved")]


@pytest.mark.exhaustive
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_sites_with_unlike_cuts_learn_what_one_process_does(
    tmp_path: Path, pair: tuple[str, str]
) -> None:
    check(tmp_path, [LAYOUTS[each][0] for each in pair], DEEP)


def check(
    folder: Path,
    cuts: list[str],
    settings: tuple[str, ...],
    program: Program = programs.train_told,
    tolerance: float = 1e-5,
) -> None:
    """Train with these cuts; losses are those of one process, and parameters equal everywhere."""
    write_texts(folder)
    ranks = [parallel_ranks(each) for each in cuts]
    overrides = [*programs.JOB, *settings]
    config = load_job(JOB_TEXT, "job.yaml", overrides).trainer
    sequences = [config.global_batch // len(cuts)] * len(cuts)
    sequences[0] += config.global_batch - sum(sequences)
    placed = ", ".join(
        f"{{site: site{index}, sequences: {count}, parallel: {cut}}}"
        for index, (count, cut) in enumerate(zip(sequences, cuts, strict=True))
    )
    (folder / "settings.txt").write_text("\n".join([*settings, f"placement=[{placed}]"]))
    with FakeGateways(folder, ranks) as gateways:
        sockets = [gateways.path(site) for site in range(len(ranks))]
        codes = run_ranks(folder, sockets, ranks, program)
    assert not gateways.problems
    assert set(codes.values()) == {0}, [path.read_text() for path in folder.glob("*.error")]

    job = load_job(JOB_TEXT, "job.yaml", overrides)
    alone = train_alone(job, folder)
    steps = [message for _, _, message in gateways.metrics if message["kind"] == "step"]
    for step in range(1, config.steps + 1):
        values = [message["values"] for message in steps if message["step"] == step]
        assert len(values) == len(cuts)
        tokens = [each["site_tokens"] for each in values]
        assert sum(tokens) == config.global_batch * config.model.context
        loss = sum(each["loss"] * count for each, count in zip(values, tokens, strict=True))
        assert loss / sum(tokens) == pytest.approx(alone.losses[step - 1], rel=tolerance)
        assert len({each["grad_norm"] for each in values}) == 1
        if step == 1:  # later ones say nothing of the gradient's scale, which Adam divides out
            assert values[0]["grad_norm"] == pytest.approx(first_norm(job, folder), rel=tolerance)

    digests = {(message["step"], message["combined"]) for _, _, message in gateways.digests}
    assert len(digests) == config.steps + 1, "equal at all ranks"

    corpus = load_corpus(config.data, folder, config.model.context)
    total, count = evaluate(alone.model, corpus.held_out, config, ranks=1, rank=0)
    evaluations = [each for _, _, each in gateways.metrics if each["kind"] == "evaluation"]
    assert len(evaluations) == 3 * len(cuts)
    found = [each["values"]["held_out_loss"] for each in evaluations if each["step"] == 12]
    assert found == pytest.approx([total / count] * len(cuts), rel=tolerance)


def first_norm(job: Job, folder: Path) -> float:
    """Return the norm of one process's gradient in the first step."""
    config = job.trainer
    corpus = load_corpus(config.data, folder, config.model.context)
    model = Gpt(config.model, config.seed)
    learn_from(model, corpus.training, config, samples_of(0, config.global_batch, 1, 0))
    return clip_gradients(model.parameters(), config.optimizer.clip_norm)


@pytest.mark.exhaustive
@pytest.mark.parametrize("after", ["interleaved", "tensor-fsdp"])
def test_a_pipeline_goes_on_from_what_it_has_saved(tmp_path: Path, after: str) -> None:
    """With the same bits, and alike in another layout."""
    whole = saved(tmp_path / "whole", "interleaved")
    resume = f"checkpoint.resume={whole / checkpoint_name(6)}"
    resumed = saved(tmp_path / "resumed", after, resume)
    expected = model_tensors(str(whole / checkpoint_name(12)))
    for name, each in model_tensors(str(resumed / checkpoint_name(12))).items():
        if after == "interleaved":
            assert torch.equal(each, expected[name]), name
        else:
            torch.testing.assert_close(each, expected[name], rtol=1e-4, atol=1e-5, msg=name)


def saved(folder: Path, layout: str, *settings: str) -> Path:
    """Train, and return what was saved."""
    folder.mkdir()
    write_texts(folder)
    cut = LAYOUTS[layout][0]
    store = folder / "store"
    placement = f"placement=[{{site: site0, sequences: 13, parallel: {cut}}}]"
    job = ["exchange.error_feedback=false", f"checkpoint.to={store}", "checkpoint.every=6 steps"]
    (folder / "settings.txt").write_text("\n".join([*DEEP, *job, *settings, placement]))
    ranks = [parallel_ranks(cut)]
    with FakeGateways(folder, ranks) as gateways:
        codes = run_ranks(folder, [gateways.path(0)], ranks, programs.train_told)
    assert set(codes.values()) == {0}, [path.read_text() for path in folder.glob("*.error")]
    return store / "run"
