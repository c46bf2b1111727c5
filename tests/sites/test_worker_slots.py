"""Tensors that are averaged where they lie.

Which buckets these are, and that their bits are the others'.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from isthmus.sites.local.regions import FIRST_TENSOR_REGION
from isthmus.sites.worker.exchange.exactness import Exactness
from isthmus.sites.worker.exchange.slots import SharedTensors
from isthmus.sites.worker.exchange.tensor_average import TensorAverage
from isthmus.topology.spec.job import Exchange as ExchangeWish
from tests.fakes.lone_exchanges import CountingLink, lone_exchange
from tests.fakes.two_sites import bits, run_with_gateways
from tests.sites import average_programs as programs

BUCKET = 16
"""Elements."""


@pytest.fixture
def link() -> CountingLink:
    return CountingLink()


@pytest.fixture
def shared(link: CountingLink) -> SharedTensors:
    return SharedTensors(link)


@pytest.fixture
def average(
    link: CountingLink, shared: SharedTensors, process_group: None
) -> Iterator[TensorAverage]:
    """What averages over this process as the only rank."""
    del process_group
    exactness = Exactness(ExchangeWish(codec="fp32"))
    with lone_exchange(link, shared=shared) as exchange:
        yield TensorAverage(exchange, bucket_bytes=4 * BUCKET, exactness=exactness)


def places(link: CountingLink) -> list[tuple[int, int, int]]:
    """Return which shared tensor, from which element on, and how many, each bucket was."""
    return [(each.region - FIRST_TENSOR_REGION, each.offset, each.numel) for each in link.requests]


@pytest.mark.parametrize("tokens", [1.0, 3.0])
def test_each_bucket_is_a_part_of_the_tensor(
    average: TensorAverage, shared: SharedTensors, link: CountingLink, tokens: float
) -> None:
    tensor = shared.empty(40).view(8, 5)
    wanted = torch.arange(40.0).view(8, 5)
    tensor.copy_(wanted)
    average.average([("a", tensor)], tokens)
    assert torch.equal(tensor, wanted)
    assert places(link) == [(0, 0, BUCKET), (0, BUCKET, BUCKET), (0, 2 * BUCKET, 8)]
    assert link.regions == [FIRST_TENSOR_REGION], "no other memory"


def test_without_tokens_nothing_is_contributed(
    average: TensorAverage, shared: SharedTensors, link: CountingLink
) -> None:
    """The link stands for a gateway: another site's tokens would be the divisor."""
    link.other_tokens = 2.0
    tensor = shared.empty(3)
    tensor.fill_(float("nan"))
    average.average([("a", tensor)], 0.0)
    assert tensor.tolist() == [0.0, 0.0, 0.0]


def test_neighbours_are_one_bucket_where_they_lie(
    average: TensorAverage, shared: SharedTensors, link: CountingLink
) -> None:
    """As gradients are that are views of one tensor."""
    whole = shared.empty(12)
    whole.copy_(torch.arange(12.0))
    first, second = whole[2:5], whole[5:11].view(2, 3)
    average.average([("a", first), ("b", second)], 1.0)
    assert torch.equal(whole, torch.arange(12.0))
    assert places(link) == [(0, 2, 9)]


@pytest.mark.parametrize(
    "choose",
    [
        lambda whole: [whole[6:9], whole[0:3]],
        lambda whole: [whole[0:3], whole[4:7]],
        lambda whole: [whole[0:3], torch.zeros(3)],
        lambda whole: [torch.zeros(3), whole[0:3]],
        lambda whole: [whole.view(torch.bfloat16)[0:6]],
        lambda whole: [whole[::2]],
    ],
    ids=["backwards", "gap", "first shared", "last shared", "halves", "strided"],
)
def test_other_buckets_are_copied(
    average: TensorAverage, shared: SharedTensors, link: CountingLink, choose: object
) -> None:
    whole = shared.empty(12)
    whole.copy_(torch.arange(12.0))
    assert callable(choose)
    tensors: list[torch.Tensor] = choose(whole)
    wanted = [each.clone() for each in tensors]
    average.average([(str(index), each) for index, each in enumerate(tensors)], 1.0)
    assert all(map(torch.equal, tensors, wanted))
    assert {each.region for each in link.requests} == {0}


def test_memory_that_nobody_has_any_more_makes_room_for_the_next(
    shared: SharedTensors, link: CountingLink
) -> None:
    kept, gone = shared.empty(5), shared.empty(6)
    view = gone[1:]
    del gone
    gc.collect()
    assert shared.find([view]) is not None, "a view keeps it"
    del view
    gc.collect()
    assert shared.find([torch.zeros(3)]) is None
    shared.forget()
    assert link.sizes[FIRST_TENSOR_REGION + 1] == 1, "what the gateway keeps of it"
    again, more = shared.empty(7), shared.empty(8)
    found = [shared.find([each]) for each in (kept, again, more)]
    assert [each and each.region - FIRST_TENSOR_REGION for each in found] == [0, 1, 2]
    assert link.regions == [FIRST_TENSOR_REGION + index for index in (0, 1, 1, 1, 2)]
    assert [link.sizes[FIRST_TENSOR_REGION + index] for index in range(3)] == [5, 7, 8]


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("ranks_per_site", "codec"),
    [
        pytest.param((1, 1), "int8", marks=pytest.mark.exhaustive),
        pytest.param((1, 1), "fp32", marks=pytest.mark.exhaustive),
        ((2, 1), "bf16"),
    ],
)
def test_bits_are_those_of_copied_tensors(
    tmp_path: Path, ranks_per_site: tuple[int, int], codec: str
) -> None:
    """Three rounds, so that residuals are alike, too.

    With two ranks, it is an ordinary tensor.
    """
    job = [f"exchange.bucket={programs.BUCKET_BYTES}B"]
    found, _ = run_with_gateways(
        tmp_path, codec, programs.averages_in_place, ranks_per_site, job=job
    )
    for name, saved in found.items():
        is_alone = ranks_per_site[int(name.removeprefix("site")[0])] == 1
        assert saved["lies_there"] == is_alone, name
        first = found["site0-rank0"]["pairs"]
        for (copied, in_place), (elsewhere, _) in zip(saved["pairs"], first, strict=True):
            assert bits(in_place) == bits(copied)
            assert bits(copied) == bits(elsewhere)
