"""Whatever the shapes, meshes and placements: each element is somewhere once, and comes back."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from isthmus.sites.worker.exchange.holdings import Holding, problem_of
from isthmus.sites.worker.exchange.sharding import check_is_box, holding_of, local_of, write_whole
from isthmus.sites.worker.layouts.canonical import BucketCut, Entry, cut_gradients, cut_state

pytestmark = pytest.mark.slow

SIZES = st.sampled_from([0, 1, 2, 3, 5, 7, 8, 13])
SHAPES = st.lists(SIZES, min_size=1, max_size=3).map(tuple)
DEGREES = st.integers(1, 4)


@st.composite
def placements(draw: st.DrawFn, dims: int, sizes: tuple[int, int]) -> tuple[Placement, ...]:
    """What HSDP, fully_shard over tensor or expert parallelism, and tensor parallelism do."""
    dim, other = draw(st.integers(0, dims - 1)), draw(st.integers(0, dims - 1))
    kinds: list[tuple[Placement, ...]] = [
        (Replicate(), Replicate()),
        (Replicate(), Shard(dim)),
        (Shard(dim), Replicate()),
        (Shard(dim), Shard(other)),
        (_StridedShard(dim, split_factor=sizes[1]), Shard(dim)),
    ]
    return draw(st.sampled_from(kinds))


@contextmanager
def as_rank(rank: int, sizes: tuple[int, ...]) -> Iterator[DeviceMesh]:
    """Be one rank of a mesh, without the others."""
    num_ranks = math.prod(sizes)
    dist.init_process_group("fake", rank=rank, world_size=num_ranks, store=FakeStore())
    try:
        yield DeviceMesh("cpu", torch.arange(num_ranks).view(sizes), _rank=rank)
    finally:
        dist.destroy_process_group()


@given(st.data())
@settings(max_examples=25)
def test_what_ranks_hold_is_what_torch_gives_them_and_comes_back(data: st.DataObject) -> None:
    shape = data.draw(SHAPES)
    sizes = data.draw(st.tuples(DEGREES, DEGREES))
    placed = data.draw(placements(len(shape), sizes))
    whole = torch.arange(1, 1 + math.prod(shape), dtype=torch.float64).view(shape)
    found = torch.zeros_like(whole).view(-1)
    holdings: set[Holding] = set()
    for rank in range(math.prod(sizes)):
        with as_rank(rank, sizes) as mesh:
            tensor = distribute_tensor(whole, mesh, placed, src_data_rank=None)
            local = local_of(tensor)
            holding = holding_of("weight", tensor)
            if all(len(spans) <= 1 for spans in holding.held):
                check_is_box("weight", tensor)
            else:  # so a length is dealt that both degrees do not divide
                with pytest.raises(TypeError, match="cannot be saved"):
                    check_is_box("weight", tensor)
            empty = DTensor.from_local(
                torch.zeros_like(local),
                mesh,
                placed,
                run_check=False,
                shape=whole.shape,
                stride=whole.stride(),
            )
            write_whole(empty, whole)
            assert torch.equal(local_of(empty), local), "the shard of the whole"
            assert holding.numel == local.numel()
            runs = holding.runs
            for start, length, place in zip(runs.starts, runs.lengths, runs.places, strict=True):
                found[start : start + length] = local.reshape(-1)[place : place + length]
            holdings.add(holding)
    assert torch.equal(found.view(shape), whole), "the whole of the shards"
    assert problem_of(holdings) is None, "each element is held once, but for copies"


ENTRIES = st.lists(
    st.tuples(SHAPES, st.sampled_from([1, 2, 4, 8]), st.booleans(), st.booleans()), max_size=6
)


@given(ENTRIES, st.integers(1, 300))
def test_buckets_have_each_element_once(
    drawn: list[tuple[tuple[int, ...], int, bool, bool]], bucket_numel: int
) -> None:
    law = [
        Entry(f"p{index}", shape, "any", size, "trained" if trained else "buffer", exact)
        for index, (shape, size, trained, exact) in enumerate(drawn)
    ]
    check_covers(
        [each for each in law if each.kind == "trained"], cut_gradients(law, bucket_numel, {})
    )
    state = cut_state(law, bucket_numel)
    check_covers(law, state)
    for cut in state:
        assert len({each.entry.item_bytes for each in cut.slices}) == 1, "elements of one size"


def check_covers(entries: list[Entry], cuts: list[BucketCut]) -> None:
    """Each element of the entries is in one slice of one bucket."""
    covered: dict[str, list[tuple[int, int]]] = {each.name: [] for each in entries}
    for cut in cuts:
        for each in cut.slices:
            covered[each.entry.name].append((each.start, each.stop))
    for entry in entries:
        end = 0
        for start, stop in sorted(covered[entry.name]):
            assert start == end, entry
            end = stop
        assert end == entry.numel, entry
    assert [each.number for each in cuts] == [*range(len(cuts))]
