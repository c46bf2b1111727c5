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
from tests.sites import training_programs, worker_programs
from tests.sites.test_worker_training import run

MATRIX, VECTOR, SCALAR = torch.ones(2, 2), torch.ones(2), torch.tensor(1.0)
NAMED = [("head.bias", VECTOR), ("head.weight", MATRIX), ("norm.gain", MATRIX), ("scale", SCALAR)]


def names(groups: list[tuple[list[tuple[str, torch.Tensor]], bool]]) -> dict[bool, list[str]]:
    return {is_exact: [name for name, _ in group] for group, is_exact in groups}


def test_what_has_one_dimension_is_exact_under_a_codec_that_rounds() -> None:
    rounds = Exactness(Exchange(codec="int8"))
    assert names(rounds.split(NAMED, exact=False)) == {
        False: ["head.weight", "norm.gain"],
        True: ["head.bias", "scale"],
    }
    assert names(rounds.split(NAMED, exact=True)) == {True: [name for name, _ in NAMED]}
    assert names(rounds.split(NAMED[1:2], exact=False)) == {False: ["head.weight"]}


def test_what_is_named_is_exact_too() -> None:
    rounds = Exactness(Exchange(codec="int8", exact=("*norm*", "embedding.?")))
    assert names(rounds.split(NAMED, exact=False)) == {
        False: ["head.weight"],
        True: ["head.bias", "norm.gain", "scale"],
    }
    assert rounds.spares("embedding.0", MATRIX)
    assert not rounds.spares("embedding.10", MATRIX)
    assert not rounds.spares("head.NORM", MATRIX), "names are told apart by case"


def test_nothing_is_spared_where_nothing_is_rounded() -> None:
    rounds = Exactness(Exchange(codec="split", exact=("*",)))
    assert names(rounds.split(NAMED, exact=False)) == {False: [name for name, _ in NAMED]}
    rounds.check([])
    one_link = LinkCodec(between=("a", "b"), codec="int4")
    assert Exactness(Exchange(codec="fp32", codecs=(one_link,))).spares("a", VECTOR)


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
    saved, gateways = run(tmp_path, (1, 1), program, job)
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
