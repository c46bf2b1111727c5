"""Which gradients cross as fp32.

By dimensions and by name, in every way that a script hands them over.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from isthmus.sites.worker.exchange.bucket_pipeline import MAX_BUCKETS
from isthmus.sites.worker.exchange.exactness import Exactness
from isthmus.topology.spec.errors import ConfigError
from isthmus.topology.spec.job import Exchange, LinkCodec
from tests.fakes.ranks import Program
from tests.fakes.two_sites import run
from tests.sites import training_programs, worker_programs

MATRIX, VECTOR, SCALAR = torch.ones(2, 2), torch.ones(2), torch.tensor(1.0)
NAMED = [("head.bias", VECTOR), ("head.weight", MATRIX), ("norm.gain", MATRIX), ("scale", SCALAR)]


def names(groups: list[tuple[list[tuple[str, torch.Tensor]], bool]]) -> dict[bool, list[str]]:
    return {is_exact: [name for name, _ in group] for group, is_exact in groups}


@pytest.mark.parametrize(
    ("exchange", "rounded"),
    [
        (Exchange(codec="int8"), ["head.weight", "norm.gain"]),
        (Exchange(codec="int8", exact=("*norm*", "embedding.?")), ["head.weight"]),
        (Exchange(codec="split", exact=("*",)), [name for name, _ in NAMED]),
    ],
    ids=["by dimensions", "named", "lossless"],
)
def test_what_is_rounded(exchange: Exchange, rounded: list[str]) -> None:
    rounds, all_names = Exactness(exchange), [name for name, _ in NAMED]
    spared = [each for each in all_names if each not in rounded]
    wanted = {False: rounded, **({True: spared} if spared else {})}
    assert names(rounds.split(NAMED, exact=False)) == wanted
    assert names(rounds.split(NAMED, exact=True)) == {True: all_names}
    assert names(rounds.split(NAMED[1:2], exact=False)) == {False: ["head.weight"]}


def test_names_are_told_apart_by_case_and_by_each_letter() -> None:
    rounds = Exactness(Exchange(codec="int8", exact=("*norm*", "embedding.?")))
    places = ("embedding.0", "embedding.10", "head.NORM")
    assert [rounds.spares(each, MATRIX) for each in places] == [True, False, False]


def test_one_link_that_rounds_is_enough() -> None:
    one_link = LinkCodec(between=("a", "b"), codec="int4")
    assert Exactness(Exchange(codec="fp32", codecs=(one_link,))).spares("a", VECTOR)
    Exactness(Exchange(codec="split", exact=("*",))).check([])  # which spares nothing


def test_a_pattern_that_spares_nothing_is_refused() -> None:
    rounds = Exactness(Exchange(codec="int8", exact=("*.bias", "*nrom*")))
    with pytest.raises(ConfigError, match=r"exchange\.exact: no parameter's name fits '\*nrom\*'.*head\.bias"):  # fmt: skip
        rounds.check([name for name, _ in NAMED])


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize(
    "program", [worker_programs.train, training_programs.train_sharded], ids=["ddp", "fsdp2"]
)
def test_named_parameters_cross_exactly_with(tmp_path: Path, program: Program) -> None:
    job = ["exchange.codec=int8", 'exchange.exact=["layers.2.w*"]', "exchange.bucket=64KiB"]
    saved, gateways = run(tmp_path, program, (1, 1), job=job)
    assert len(saved) == 2
    backward = [each for each in gateways.reduced if each["bucket"] < MAX_BUCKETS]
    last = max(each["round"] for each in backward)
    sizes = {name: each.numel() for name, each in worker_programs.build(0).named_parameters()}
    elements = {True: 0, False: 0}
    for each in backward:
        if each["round"] == last and each["numel"] != len(sizes):  # those say what was used
            elements[each["exact"]] += each["numel"]
    expected = sum(
        numel for name, numel in sizes.items() if name.endswith("bias") or name == "layers.2.weight"
    )
    assert elements[True] % expected == 0, f"{elements} {sizes}"
    assert elements[False] * expected == elements[True] * (sum(sizes.values()) - expected)
