"""The trainer in ranks of several sites, over a gateway without a WAN."""

from pathlib import Path

import pytest

from isthmus.sites.trainer.corpus import load_corpus
from isthmus.sites.trainer.learning import evaluate
from isthmus.sites.trainer.reference import train_alone
from isthmus.topology.documents.load import load_job
from tests.fakes.gateways import FakeGateways
from tests.fakes.ranks import JOB as JOB_TEXT
from tests.fakes.ranks import Program, run_ranks
from tests.sites import trainer_programs as programs

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]

STEPS = 12


def write_texts(folder: Path, name: str = "texts") -> None:
    """Write text with something to learn in it: numbers that count up."""
    (folder / name).mkdir()
    for index in range(8):
        lines = [f"{name} {index} line {line} of many\n" for line in range(40)]
        (folder / name / f"{index}.txt").write_text("".join(lines))


def run(
    folder: Path, ranks_per_site: list[int], program: Program
) -> tuple[dict[str, int | None], FakeGateways]:
    with FakeGateways(folder, ranks_per_site) as gateways:
        sockets = [gateways.path(site) for site in range(len(ranks_per_site))]
        codes = run_ranks(folder, sockets, ranks_per_site, program)
    assert not gateways.problems
    return codes, gateways


def test_three_unequal_sites_train_what_one_process_does(tmp_path: Path) -> None:
    write_texts(tmp_path)
    ranks = [2, 1, 3]
    codes, gateways = run(tmp_path, ranks, programs.train)
    assert set(codes.values()) == {0}
    assert len(gateways.left) == sum(ranks)

    job = load_job(JOB_TEXT, "job.yaml", programs.JOB)
    config = job.trainer
    alone = train_alone(job, tmp_path)
    steps = [(site, message) for site, _, message in gateways.metrics if message["kind"] == "step"]
    for step in range(1, STEPS + 1):
        by_site = {site: message["values"] for site, message in steps if message["step"] == step}
        assert sorted(by_site) == ["site0", "site1", "site2"]
        tokens = {site: values["site_tokens"] for site, values in by_site.items()}
        assert sum(tokens.values()) == 13 * config.model.context
        assert {values["tokens"] for values in by_site.values()} == {13 * config.model.context}
        loss = sum(values["loss"] * values["site_tokens"] for values in by_site.values())
        # Other float32 sums only: far below 1e-6 here, see tests/sites/test_trainer_reference.py.
        assert loss / sum(tokens.values()) == pytest.approx(alone.losses[step - 1], rel=1e-6)
        assert len({values["grad_norm"] for values in by_site.values()}) == 1
        assert len({values["learning_rate"] for values in by_site.values()}) == 1

    # Bit-identical parameters: one combined hash a step, whichever rank made it.
    digests = {(message["step"], message["combined"]) for _, _, message in gateways.digests}
    assert len(digests) == STEPS + 1

    corpus = load_corpus(config.data, tmp_path, config.model.context)
    total, tokens_evaluated = evaluate(alone.model, corpus.held_out, config, ranks=1, rank=0)
    evaluations = [
        (site, rank, message)
        for site, rank, message in gateways.metrics
        if message["kind"] == "evaluation"
    ]
    assert len(evaluations) == 3 * 3  # sites; steps 5, 10 and 12
    assert {rank for _, rank, _ in evaluations} == {0}
    for _, _, message in evaluations:
        assert message["labels"] == {"corpus": corpus.digest.hex()}
        assert message["values"]["unigram_entropy"] == corpus.unigram_entropy
        if message["step"] == STEPS:
            expected = total / tokens_evaluated
            assert message["values"]["held_out_loss"] == pytest.approx(expected, rel=1e-6)


def test_modelled_compute_learns_nothing_but_keeps_sites_equal(tmp_path: Path) -> None:
    write_texts(tmp_path)
    codes, gateways = run(tmp_path, [2, 1], programs.train_modelled)
    assert set(codes.values()) == {0}
    steps = [(site, message) for site, _, message in gateways.metrics if message["kind"] == "step"]
    assert len(steps) == 2 * STEPS
    assert {message["step"] for _, message in steps if "loss" in message["values"]} == {1}
    assert {message["values"]["hidden_inter_s"] for _, message in steps} == {0.0}, "serial"
    assert not [message for _, _, message in gateways.metrics if message["kind"] == "evaluation"]
    digests = {(message["step"], message["combined"]) for _, _, message in gateways.digests}
    assert len(digests) == STEPS + 1, "equal in all ranks, and other ones after each step"
    assert len({combined for _, combined in digests}) == STEPS + 1


def test_sites_train_by_themselves_without_an_exchange(tmp_path: Path) -> None:
    write_texts(tmp_path)
    codes, gateways = run(tmp_path, [2, 1], programs.train_each_site_by_itself)
    assert set(codes.values()) == {0}
    assert len(gateways.left) == 3
    assert gateways.reduced == []
    assert gateways.digests == []
    steps = [(site, message) for site, _, message in gateways.metrics if message["kind"] == "step"]
    assert len(steps) == 2 * STEPS
    for _, message in steps:
        assert message["values"]["tokens"] == message["values"]["site_tokens"]
        assert message["values"]["wire_bytes"] == 0.0
    last = {site: message["values"]["grad_norm"] for site, message in steps}
    assert len(set(last.values())) == 2, "each its own gradient"


def test_a_site_with_other_text_says_so(tmp_path: Path) -> None:
    write_texts(tmp_path)
    write_texts(tmp_path, "other")
    codes, _ = run(tmp_path, [1, 2], programs.train_other_text)
    assert set(codes.values()) == {1}
    for rank in range(2):
        said = (tmp_path / f"site1-{rank}.error").read_text()
        assert said.startswith(f"ConfigError: job: error: rank {rank} of site site1 has other text")
        assert "[trainer.data.files]" in said
    # The first site hears that it is alone, not that its own text is wrong.
    assert "site1 ended" in (tmp_path / "site0-0.error").read_text()


def test_a_rank_with_other_text_says_so(tmp_path: Path) -> None:
    write_texts(tmp_path)
    write_texts(tmp_path, "other")
    codes, _ = run(tmp_path, [2, 1], programs.train_other_text_in_one_rank)
    assert set(codes.values()) == {1}
    assert "rank 1 of site site0 has other text" in (tmp_path / "site0-1.error").read_text()
    for place in ("site0-0", "site1-0"):
        assert "has other text" not in (tmp_path / f"{place}.error").read_text()


def test_a_batch_too_small_for_all_ranks_is_refused(tmp_path: Path) -> None:
    codes, _ = run(tmp_path, [1, 1], programs.train_too_small_a_batch)
    assert set(codes.values()) == {1}
    for site in range(2):
        said = (tmp_path / f"site{site}-0.error").read_text()
        if said.startswith("ConfigError"):
            assert "1 sequences for 2 ranks: want at least one for each" in said
            break
    else:
        pytest.fail("no rank said what is wrong")
