"""Ranks of two sites as real processes on Gloo; gateways are fake, but share real memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from isthmus.protos import metrics
from tests.fakes.gateways import FakeGateways
from tests.fakes.ranks import Program, results, run_ranks
from tests.fakes.two_sites import (
    NAMES,
    SITES,
    bits_of,
    check_equal,
    check_trained_as_one,
    expected_grads,
    run,
)
from tests.sites import worker_programs as programs

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]


def test_gradients_are_those_of_one_process(tmp_path: Path) -> None:
    # Rounds 0 to 2 made the models equal. DDP rebuilds one bucket into several after round 3, and
    # round 4 compares how sites did that.
    saved, gateways = run(tmp_path, programs.train, swap_from_round=5)
    check_trained_as_one(saved)
    places = [[0, 1, 0, 4], [0, 3, 1, 4], [1, 3, 2, 4], [2, 3, 3, 4]]
    assert [saved[name]["place"] for name in NAMES] == places
    _check_reports(gateways)
    assert _norms_of_first_step(gateways) == {"site0": [None] * 2, "site1": [None] * 2}


def _check_reports(gateways: FakeGateways) -> None:
    assert sorted(gateways.left) == [("site0", 0), ("site1", 0), ("site1", 1), ("site1", 2)]
    steps = [each for each in gateways.metrics if each[2]["kind"] == metrics.STEP]
    for _, _, message in steps:
        values = message["values"]
        tokens = [programs.tokens_of(message["step"] - 1, rank) for rank in range(4)]
        assert values[metrics.TOKENS] == sum(tokens)
        assert values[metrics.SITE_TOKENS] in (tokens[0], sum(tokens[1:]))
        assert values["loss"] == message["step"] - 1
        assert values["norm"] == 2.0
    evaluations = [each for each in gateways.metrics if each[2]["kind"] == metrics.EVALUATION]
    assert len(evaluations) == 4, "one from each rank"
    assert gateways.digests[0][2]["names"][0] == "layers.0.weight"


def _norms_of_first_step(gateways: FakeGateways) -> dict[str, list[float | None]]:
    """Return the norms of a site's own and of the mean gradient, by site; None: not measured."""
    names = (metrics.SITE_GRADIENT_NORM, metrics.MEAN_GRADIENT_NORM)
    return {
        site: [each["values"].get(name) for name in names]
        for site, _, each in gateways.metrics
        if each["kind"] == metrics.STEP and each["step"] == 1
    }


def test_sites_measure_their_own_gradients_where_the_job_asks_for_it(tmp_path: Path) -> None:
    """Of step 1, all of whose gradients are those of the model as it was built."""
    _, gateways = run(tmp_path, programs.train, job=["noise_scale=true"])
    found = _norms_of_first_step(gateways)
    assert len(found) == 2
    net = programs.build(seed=0)
    for site, ranks in (("site0", [0]), ("site1", [1, 2, 3])):
        for name_index, some in enumerate((ranks, range(4))):
            tokens = [programs.tokens_of(0, rank) for rank in some]
            losses = [programs.loss_of(net, 0, rank, 0, torch.float32) for rank in some]
            weighted = [count * loss for count, loss in zip(tokens, losses, strict=True)]
            mean = torch.stack(weighted).sum() / sum(tokens)
            gradients = torch.autograd.grad(mean, [*net.parameters()])
            wanted = torch.cat([each.flatten() for each in gradients]).norm()
            assert found[site][name_index] == pytest.approx(float(wanted), rel=1e-5)


def test_bfloat16_gradients_cross_as_float32(tmp_path: Path) -> None:
    saved, _ = run(tmp_path, programs.train_bfloat16, verify_every=2)
    net = programs.build(seed=0, dtype=torch.bfloat16)
    wanted = expected_grads(net, 0, torch.bfloat16)
    # The reference rounds each sum to bf16, whose precision is 2^-8.
    torch.testing.assert_close(saved[NAMES[0]]["grads"][0], wanted, rtol=3e-2, atol=3e-2)
    check_equal(saved)


@pytest.mark.parametrize("program", [programs.train_equal, programs.train_unequal_ranks])
def test_all_ranks_get_the_first_ones_model(tmp_path: Path, program: Program) -> None:
    """Each decides with all others: one that went its own way would wait for a collective."""
    saved, gateways = run(tmp_path, program)
    wanted = bits_of(programs.build(seed=7).state_dict())
    assert all(bits_of(saved[name]["final"]) == wanted for name in NAMES)
    if program is programs.train_equal:
        assert len(gateways.reduced) == 2, "the hash of one, and whether anybody has another"


@pytest.mark.parametrize(
    ("program", "key", "said"),
    [
        (programs.train_other_model, "code", "LAYOUT_MISMATCH"),
        (programs.forget_tokens, "text", "count_tokens was called"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, program: Program, key: str, said: str) -> None:
    saved, _ = run(tmp_path, program)
    assert all(said in saved[name][key] for name in NAMES)


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        ({"code": "PEER_LOST", "message": "site eu is away", "site": "eu"}, "PeerLostError"),
        pytest.param(
            *({"code": "CORRUPT_DATA", "message": "chunk 3", "site": "eu"}, "CorruptDataError"),
            marks=pytest.mark.exhaustive,  # a code's error: tests/protos/test_failure.py
        ),
        (None, "IsthmusError"),
    ],
    ids=["peer lost", "corrupt", "gateway died"],
)
def test_what_the_gateway_says_ends_backward(
    tmp_path: Path, message: dict[str, str] | None, kind: str
) -> None:
    # Round 4 is the second step's: the seeds are equal, so only rounds 0 and 1 came before the
    # first step, and after it the one that compares DDP's buckets.
    saved, _ = run(tmp_path, programs.backward_until_error, fail_at=(4, 1, message))
    text = message["message"] if message else "the gateway ended: see its log"
    assert all((saved[name]["type"], saved[name]["text"]) == (kind, text) for name in NAMES)


def test_a_dead_rank_ends_all_others(tmp_path: Path) -> None:
    with FakeGateways(tmp_path, SITES) as gateways:
        codes = run_ranks(tmp_path, gateways.paths, SITES, programs.die_in_second_step)
    assert codes == {**dict.fromkeys(NAMES, 0), NAMES[-1]: 9}
    saved = results(tmp_path)
    assert saved[NAMES[0]]["text"] == "rank 2 of site1 ended"
    # Those beside it may hear it from Gloo first, in DDP's own collectives.
    heard = [saved[name]["text"] for name in NAMES[1:-1]]
    assert all("rank 2 of site1 ended" in each or "Connection" in each for each in heard), heard
    assert gateways.left == []
