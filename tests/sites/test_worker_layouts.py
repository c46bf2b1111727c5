"""Sites with different layouts train one model: as one process does, and bit-identical."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from isthmus.orchestrator.core.parameter_digests import DigestComparison
from tests.fakes.gateways import FakeGateways
from tests.fakes.ranks import Program, results, run_ranks
from tests.fakes.two_sites import check_digests, check_equal, run, run_with_gateways
from tests.sites import layout_programs as programs

pytestmark = [pytest.mark.slow, pytest.mark.multiprocess]

QUICK = ("fsdp3", "tp")


def case(*layouts: str, is_tied: bool = False) -> Any:  # noqa: ANN401 - a parameter set of pytest
    """Return layouts, steps, and whether pipelines' stages share a parameter."""
    num_steps = 6 if layouts == QUICK else 20 if is_tied else 30
    marks = [] if layouts == QUICK else [pytest.mark.exhaustive]
    name = "-".join([*layouts, *(["tied"] if is_tied else [])])
    return pytest.param(layouts, num_steps, is_tied, marks=marks, id=name)


CASES = [
    *itertools.starmap(
        case,
        itertools.combinations_with_replacement(["fsdp3", "tp", "hsdp", "ep", "pp", "ddp"], 2),
    ),
    case("pp4", "pp6"),
    case("interleaved", "fsdp2"),
    case("recomputed", "tp"),
    case("offloaded", "tp"),
    case("moe", "fsdp2"),
    case("lone-tp", "ddp"),
    case("lone", "tp"),
    case("lone-pp", "lone"),
    case("fsdp2", "lone-pp"),
    # Each stage has some of a shared parameter's gradient.
    case("pp", "fsdp3", is_tied=True),
    case("tp", "interleaved", is_tied=True),
    case("pp-sum", "ddp", is_tied=True),
    case("pp", "pp4", is_tied=True),
    # Losses that are sums, and means.
    case("ep-sum", "tp-sum"),
    case("fsdp3-sum", "pp"),
    case("hsdp", "pp-sum"),
    case("ddp-sum", "ep-sum"),
]


def train(
    folder: Path,
    layouts: tuple[str, ...],
    num_steps: int,
    program: Program = programs.train,
    *,
    is_tied: bool = False,
) -> tuple[dict[str, Any], FakeGateways]:
    """Train with these layouts around fake gateways; all ranks have the same parameters."""
    write_plan(folder, layouts, num_steps, is_tied=is_tied)
    ranks = [programs.RANKS[each] for each in layouts]
    saved, gateways = run(folder, program, ranks, job=["exchange.bucket=64KiB"])
    check_digests([each[2] for each in gateways.digests], num_steps, sum(ranks))
    return saved, gateways


def write_plan(folder: Path, layouts: tuple[str, ...], num_steps: int, **more: object) -> None:
    """Have ranks read what to do."""
    plan = {"layouts": layouts, "num_steps": num_steps, "is_tied": False, **more}
    (folder / "layouts.json").write_text(json.dumps(plan))


@pytest.mark.parametrize(("layouts", "num_steps", "is_tied"), CASES)
def test_two_layouts_train_as_one_process(
    tmp_path: Path, layouts: tuple[str, str], num_steps: int, *, is_tied: bool
) -> None:
    """Losses, norms and parameters are those of one process, at all ranks."""
    saved, gateways = train(tmp_path, layouts, num_steps, is_tied=is_tied)
    wanted, norms = programs.reference([*layouts], num_steps, is_tied=is_tied)
    first = 0
    for each in saved.values():
        assert each["norms"] == pytest.approx(norms, rel=1e-5)
        assert each["norms"] == saved["site0-rank0"]["norms"], "the same bits"
    for site, layout in enumerate(layouts):
        for place in range(programs.DATA_RANKS[layout]):
            ranks = [
                each["losses"]
                for name, each in saved.items()
                if name.startswith(f"site{site}-") and each["place"] == place
            ]
            found = [*map(sum, zip(*ranks, strict=True))]
            copies = 2 if layout.startswith(("tp", "lone-")) else 1
            losses = [each[first + place] * copies for each in wanted]
            assert found == pytest.approx(losses, rel=1e-5), (layout, place)
        first += programs.DATA_RANKS[layout]
    if "pp" in layouts:
        assert any(each["participants"] for each in gateways.reduced), "each stage has its own"


@pytest.mark.parametrize(
    "layouts",
    [
        ("ddp", "pp"),
        *(pytest.param((each, "pp"), marks=pytest.mark.exhaustive) for each in ("fsdp3", "hsdp")),
        pytest.param(("tp", "ep"), marks=pytest.mark.exhaustive),
    ],
    ids="-".join,
)
def test_under_a_codec_that_rounds_unlike_sites_stay_equal(
    tmp_path: Path, layouts: tuple[str, str]
) -> None:
    """With the gateways that ship."""
    ranks = [programs.RANKS[each] for each in layouts]
    write_plan(tmp_path, layouts, num_steps=6)
    job = ["exchange.bucket=64KiB"]
    saved, told = run_with_gateways(tmp_path, "int8", programs.train, ranks, job=job)
    assert len({tuple(each["norms"]) for each in saved.values()}) == 1, "the same bits on all ranks"
    check_digests(
        [each for lines in told for each in lines if each["op"] == "digest"], 6, sum(ranks)
    )


def train_alike(folder: Path, codec: str, *, is_rank_major: bool) -> list[dict[str, Any]]:
    """Train at two sites of two ranks that shard alike; return what each rank saved."""
    folder.mkdir()
    (folder / "alike.json").write_text(json.dumps({"is_rank_major": is_rank_major}))
    job = ["exchange.bucket=64KiB"]
    saved, _ = run_with_gateways(folder, codec, programs.train_alike, (2, 2), job=job)
    check_equal(saved, "saved")
    found = [*saved.values()]
    assert all(each["norm"] == found[0]["norm"] for each in found), "the same bits"
    return found


@pytest.mark.exhaustive
@pytest.mark.parametrize("codec", ["fp32", "int8"])
def test_nothing_moves_inside_sites_that_shard_alike(tmp_path: Path, codec: str) -> None:
    """fp32 comes to the same bits in either order; blocks of int8 have other elements."""
    lies, moves = (
        train_alike(tmp_path / str(each), codec, is_rank_major=each) for each in (True, False)
    )
    assert {each["num_moves"] for each in lies} == {0}
    assert all(each["num_moves"] > 20 for each in moves)
    assert lies[0]["norm"] == pytest.approx(
        moves[0]["norm"], rel=1e-12 if codec == "fp32" else 0.05
    )
    for name, value in moves[0]["saved"].items():
        if codec == "fp32":
            assert torch.equal(lies[0]["saved"][name], value), name
        else:
            torch.testing.assert_close(lies[0]["saved"][name], value, rtol=0.1, atol=0.02)


def test_a_schedule_that_divides_gradients_itself_is_refused(tmp_path: Path) -> None:
    with FakeGateways(tmp_path, [4]) as gateways:
        run_ranks(tmp_path, gateways.paths, [4], programs.train_divided)
    found = results(tmp_path)
    assert len(found) == 4
    for each in found.values():
        assert "would divide gradients by 2 after they have crossed: give it scale_grads=" in each


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("layouts", "program"),
    [
        (("pp", "fsdp2"), programs.train_spare),
        (("interleaved", "pp"), programs.train_spare),
        (("pp", "interleaved"), programs.train_spare_only),
    ],
)
def test_a_parameter_that_a_pipeline_does_not_use_holds_nobody_up(
    tmp_path: Path, layouts: tuple[str, str], program: Program
) -> None:
    """Though the script waits for other stages before the optimizer's step."""
    saved, _ = train(tmp_path, layouts, 2, program)
    for found in saved.values():
        for name, is_without in found.items():
            assert is_without == ("spare" in name), name


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "program",
    [programs.train_routed, programs.train_routed_replicas, programs.train_routed_beside_shards],
)
def test_experts_without_tokens_stay_as_they_are(tmp_path: Path, program: Program) -> None:
    """Those that one site uses are averaged; what nobody uses, no optimizer steps."""
    saved, _ = run(tmp_path, program, [2, 1])
    wanted = programs.reference_routed([2, 1])
    for found in saved.values():
        for name, each in wanted.items():
            torch.testing.assert_close(found[name], each, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.exhaustive
def test_a_rank_whose_experts_have_no_tokens_holds_nobody_up(tmp_path: Path) -> None:
    saved, _ = run(tmp_path, programs.train_dealt, [2, 1])
    found = [*saved.values()]
    for each in found[1:]:
        for name, value in found[0].items():
            assert torch.equal(each[name], value), name


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("parameter", "replicas"),
    [
        # Held twice at the site: whoever holds the wrong copy is known.
        ("layers.0.norm.weight", (("site0", 1),)),
        # Held once: all ranks of the site have it in the whole that they hash.
        ("layers.0.up.weight", tuple(("site0", rank) for rank in range(4))),
    ],
)
def test_a_flipped_bit_is_found_and_named(
    tmp_path: Path, parameter: str, replicas: tuple[tuple[str, int], ...]
) -> None:
    """At one rank of four under tensor parallelism, beside two sites of one rank."""
    ranks = [4, 1, 1]
    flip = {"rank": "site0-rank1", "parameter": parameter}
    write_plan(tmp_path, ("tp", "fsdp1", "fsdp1"), 0, **flip)
    _, gateways = run(tmp_path, programs.flip_a_bit, ranks)
    comparison = DigestComparison(dict(zip(gateways.names, ranks, strict=True)))
    found = [
        comparison.report(
            site, rank, each["step"], each["combined"], tuple(each["tensors"]), tuple(each["names"])
        )
        for site, rank, each in sorted(gateways.digests, key=lambda it: (it[2]["step"], *it[:2]))
    ]
    (difference,) = {each for each in found if each is not None}
    assert (difference.step, difference.tensor) == (2, parameter)
    assert (difference.sites, difference.replicas) == (("site0",), replicas)
