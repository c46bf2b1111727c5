"""Averages of any tensors: packing, in one process, and over two sites around fake gateways."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from isthmus.protos.errors import NoTokensError
from isthmus.sites.worker.exchange.bucket_pipeline import MAX_BUCKETS, BucketPipeline
from isthmus.sites.worker.exchange.exactness import Exactness
from isthmus.sites.worker.exchange.rounds import RoundTerms
from isthmus.sites.worker.exchange.tensor_average import MAX_LISTS, Packer, TensorAverage
from isthmus.sites.worker.exchange.tensor_hashes import layout_of
from isthmus.topology.spec.job import Exchange as ExchangeWish
from tests.fakes.lone_exchanges import CountingLink, lone_exchange
from tests.fakes.two_sites import NAMES, bits, run
from tests.sites import average_programs as programs


@pytest.fixture
def link() -> CountingLink:
    return CountingLink()


@pytest.fixture
def exchange(link: CountingLink, process_group: None) -> Iterator[BucketPipeline]:
    """The pipeline of this process as the only rank."""
    del process_group
    with lone_exchange(link) as exchange:
        yield exchange


def average_of(exchange: BucketPipeline, codec: str) -> TensorAverage:
    exactness = Exactness(ExchangeWish(codec=codec))
    return TensorAverage(exchange, bucket_bytes=16, exactness=exactness)


@pytest.mark.parametrize("seed", range(20))
def test_packing_loses_nothing_and_fills_every_bucket_but_the_last(seed: int) -> None:
    draw = random.Random(seed)
    numels = [draw.choice([0, 1, 2, 7, 30]) for _ in range(draw.randrange(12))]
    flats = [torch.arange(each) + 100 * index for index, each in enumerate(numels)]
    packer: Packer[torch.Tensor] = Packer(8)
    buckets = [bucket for each in flats for bucket in packer.add(each)]
    buckets += [rest] if (rest := packer.take()) else []
    sizes = [sum(each.numel() for each in bucket) for bucket in buckets]
    assert all(size == 8 for size in sizes[:-1]), f"{seed=}"
    assert all(1 <= size <= 8 for size in sizes), f"{seed=}"
    pieces = [each for bucket in buckets for each in bucket]
    assert [*torch.cat([torch.empty(0), *pieces])] == [*torch.cat([torch.empty(0), *flats])]
    storages = {each.untyped_storage().data_ptr() for each in flats}
    assert all(each.untyped_storage().data_ptr() in storages for each in pieces), "views"


def test_a_list_keeps_its_bucket_numbers_and_shares_the_memory(
    exchange: BucketPipeline, link: CountingLink
) -> None:
    """A list's residual belongs to a bucket's number; memory has none."""
    average = average_of(exchange, "int8")
    lists = [[("a", torch.ones(2, 5))], [("b", torch.ones(3, 3)), ("c", torch.ones(2))]]
    for index in (0, 1, 0):
        average.average(lists[index], 2.0)
    found = [(each.round, each.bucket // MAX_BUCKETS, each.exact) for each in link.requests]
    numbers = [1 + layout_of(each) % MAX_LISTS for each in lists]  # whatever came before
    first = [(numbers[0], False)] * 3
    second = [(numbers[1], False)] * 3 + [(numbers[1], True)]
    assert found == [
        (number, *each) for number, of_list in enumerate((first, second, first)) for each in of_list
    ]
    assert [each.bucket % MAX_BUCKETS for each in link.requests] == [0, 1, 2, 0, 1, 2, 3, 0, 1, 2]
    assert max(link.regions) == 3
    assert all(torch.equal(each, torch.ones_like(each)) for many in lists for _, each in many)
    for index in range(MAX_LISTS + 1):
        average.average([(str(index), torch.ones(1))], 1.0)
    assert max(each.bucket for each in link.requests) < MAX_BUCKETS * (MAX_LISTS + 1) < 1 << 32


def test_only_so_much_is_under_way(exchange: BucketPipeline, link: CountingLink) -> None:
    """However long a round, its buckets pass through the same few buffers."""
    values = torch.arange(50.0)
    exchange.begin(1.0, RoundTerms(num_slots=2))
    for each in values.view(50, 1):
        exchange.submit([each], layout=0)
    exchange.wait()
    assert torch.equal(values, torch.arange(50.0))
    assert [each.region for each in link.requests] == [0, 1] * 25
    assert link.regions == [0, 1]


def test_no_tokens_at_all_are_an_error(exchange: BucketPipeline) -> None:
    with pytest.raises(NoTokensError):
        average_of(exchange, "fp32").average([("a", torch.full((3,), float("nan")))], 0.0)


def expected(call: int) -> list[torch.Tensor]:
    """One process over the lists of all ranks."""
    lists = [programs.tensors_of(rank, call) for rank in range(len(NAMES))]
    tokens = [programs.tokens_of(rank, call) for rank in range(len(NAMES))]
    found = []
    for many in zip(*lists, strict=True):
        total = torch.zeros(many[0].shape, dtype=torch.float64)
        for weight, each in zip(tokens, many, strict=True):
            total += weight / sum(tokens) * each.detach().double()
        found.append(total.to(many[0].dtype))
    return found


@pytest.mark.slow
@pytest.mark.multiprocess
def test_averages_are_those_of_one_process(tmp_path: Path) -> None:
    job = [f"exchange.bucket={programs.BUCKET_BYTES}B"]
    saved, gateways = run(tmp_path, programs.averages, job=job)
    for call in range(3):
        found = [saved[name][call] for name in NAMES]
        for tensor, wanted in zip(found[0][:-1], expected(call), strict=True):
            assert (tensor.shape, tensor.dtype) == (wanted.shape, wanted.dtype)
            rounding = 2**-7 if tensor.dtype == torch.bfloat16 else 1e-5
            torch.testing.assert_close(tensor, wanted, rtol=rounding, atol=1e-6)
        assert float(found[0][-1]) == 1.5, "of ranks 0 to 3"
        for other in found[1:]:
            assert [bits(each) for each in other] == [bits(each) for each in found[0]]
    assert max(each["numel"] for each in gateways.reduced) == programs.BUCKET_BYTES // 4
    assert {each["round"] for each in gateways.reduced} == {*range(6)}, "empty lists do not cross"
    told = [
        (site, rank, message["kind"])
        for site, rank, message in gateways.metrics
        if message["kind"] != "machine"  # its thread may be late
    ]
    assert sorted(told) == [(site, 0, "first_average") for site in ("site0", "site1")], "no steps"


@pytest.mark.slow
@pytest.mark.multiprocess
def test_broadcast_gives_everybody_the_first_ranks_bits(tmp_path: Path) -> None:
    saved, gateways = run(tmp_path, programs.broadcasts)
    found = [[bits(each) for each in saved[name]["tensors"]] for name in NAMES]
    assert saved[NAMES[0]]["tensors"][1].tolist() == [0, 1, 2, 3, 4]
    assert all(each == found[0] for each in found)
    rounds = [each["round"] for each in gateways.reduced]
    assert rounds == [*range(5)], "the first's hash, who differs, and bytes; then the first two"


@pytest.mark.slow
@pytest.mark.multiprocess
def test_buffers_are_averaged_after_every_second_step(tmp_path: Path) -> None:
    results, _ = run(tmp_path, programs.normalise)
    steps = [[results[name][step] for name in NAMES] for step in range(3)]
    for step in (0, 2):
        assert all(torch.equal(own, after) for own, after in steps[step]), "each rank's own"
    mean = torch.stack([own for own, _ in steps[1]]).mean(dim=0)
    for own, after in steps[1]:
        assert not torch.equal(own, after)
        torch.testing.assert_close(after, mean)
        assert torch.equal(after, steps[1][0][1]), "the same bits everywhere"
