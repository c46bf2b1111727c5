"""Holdings and routes: each element reaches its place and comes back, whatever ranks hold.

Of random shapes, meshes and placements; torch's own shards say what a rank holds.
"""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import numpy.typing as npt
import pytest

from isthmus.sites.worker.exchange.holdings import Block, Dealt, Holding, blocks_of, problem_of
from isthmus.sites.worker.exchange.routes import (
    Holders,
    Part,
    Route,
    Way,
    participants,
    rank_major_route,
    route,
)
from isthmus.sites.worker.layouts.canonical import (
    Agreed,
    Entry,
    SiteList,
    SiteTensors,
    rank_major_names,
)

Integers = npt.NDArray[np.int64]
SIZES = [0, 1, 1, 2, 3, 5, 7, 8, 12]


def _holding(
    placements: int, shape: tuple[int, ...], mesh: tuple[int, ...], place: tuple[int, ...]
) -> Holding:
    """Return what the rank at a place of a mesh holds; `placements` is what each axis does."""
    draw, dims = random.Random(placements), len(shape)
    axes: list[Dealt] = []
    for size, rank in zip(mesh, place, strict=True):
        kind = draw.choice(["copy", "rows", "any", "strided"]) if dims else "copy"
        dim = 0 if kind == "rows" else draw.randrange(max(1, dims))
        pieces = draw.randint(1, 3) if kind == "strided" else 1
        if kind != "copy":
            axes.append(Dealt(dim, size, rank, pieces))
    return Holding.of(shape, axes)


def _world(seed: int) -> tuple[tuple[int, ...], list[Holding]]:
    """Return a random shape, and what each rank of a random mesh holds of it."""
    draw = random.Random(seed)
    shape = tuple(draw.choice(SIZES) for _ in range(draw.randint(0, 3)))
    mesh = tuple(draw.randint(1, 3) for _ in range(draw.randint(1, 2)))
    placements = draw.getrandbits(32)
    places = itertools.product(*map(range, mesh))
    return shape, [_holding(placements, shape, mesh, place) for place in places]


def _local(whole: Integers, holding: Holding) -> Integers:
    """Return what a rank's memory holds, dimension by dimension."""
    for dim, spans in enumerate(holding.held):
        indices = [index for start, stop in spans for index in range(start, stop)]
        whole = np.take(whole, np.array(indices, dtype=np.int64), axis=dim)
    return whole.reshape(-1)


def _holders(holdings: list[Holding], ranks: range) -> Holders:
    groups: dict[Holding, list[int]] = {}
    for rank, each in zip(ranks, holdings, strict=True):
        groups.setdefault(each, []).append(rank)
    return Holders(tuple((each, tuple(ranks)) for each, ranks in groups.items()))


@pytest.mark.parametrize("seed", range(300))
def test_runs_are_what_a_rank_holds_and_all_ranks_hold_all(seed: int) -> None:
    shape, holdings = _world(seed)
    whole = np.arange(math.prod(shape)).reshape(shape)
    for each in holdings:
        runs = each.runs
        pairs = zip(runs.starts, runs.lengths, strict=True)
        numbers = [np.arange(start, start + length) for start, length in pairs]
        held = np.concatenate([whole.reshape(-1)[:0], *numbers])
        assert held.tolist() == _local(whole, each).tolist(), f"{seed=}"
        assert each.numel == len(held)
        assert _numbers(blocks_of(runs)).tolist() == held.tolist(), f"{seed=}"
    assert problem_of(dict.fromkeys(holdings)) is None, f"{seed=}"


@pytest.mark.parametrize("seed", range(300))
def test_every_element_arrives_and_comes_back(seed: int) -> None:
    """Parts of several tensors; the ranks of a second pipeline stage hold others."""
    draw = random.Random(seed)
    parts, wholes, locals_ = [], [], []
    first_rank = 0
    for index in range(draw.randint(1, 3)):
        shape, holdings = _world(1000 * seed + index)
        numel = math.prod(shape)
        ranks = range(first_rank, first_rank + len(holdings))
        start = draw.randint(0, numel)
        stop = draw.randint(start, numel)
        parts.append(Part(_holders(holdings, ranks), start, stop))
        whole = 10_000 * (index + 1) + np.arange(numel)
        wholes.append(whole[start:stop])
        shaped, pairs = whole.reshape(shape), zip(ranks, holdings, strict=True)
        locals_.append({rank: _local(shaped, each) for rank, each in pairs})
        first_rank = draw.choice([0, first_rank])
    bucket = np.concatenate(wholes)
    ranks_of_bucket = participants(tuple(parts))
    routes = {rank: route(tuple(parts), rank) for rank in ranks_of_bucket}
    held = {rank: _held(routes[rank], rank, locals_) for rank in ranks_of_bucket}
    if len(ranks_of_bucket) == 1:
        (alone,) = routes.values()
        assert (alone.numel, alone.held_numel) == (len(bucket), len(bucket)), f"{seed=}"
        assert (alone.there, alone.back) == (None, None), "nothing moves"
        return
    size = routes[ranks_of_bucket[0]].shard_numel
    shards = {}
    for index, (rank, each) in enumerate(routes.items()):
        assert (each.numel, each.held_numel) == (len(bucket), len(held[rank])), f"{seed=}"
        arriving = _arriving(routes, held, index)
        assert tuple(map(len, arriving)) == _there(each).received, f"{seed=}"
        shard = np.full(size, -1)
        shard[_numbers(_there(each).blocks)] = np.concatenate(arriving)
        wanted = bucket[index * size : (index + 1) * size]
        assert shard[: len(wanted)].tolist() == wanted.tolist(), f"{seed=}"
        assert set(shard[len(wanted) :]) <= {-1}, "padding stays as it was"
        shards[rank] = shard
    for index, rank in enumerate(ranks_of_bucket):
        back = np.full(len(held[rank]), -1)
        leaving = [
            np.split(
                shards[window][_numbers(_back(routes[window]).blocks)],
                np.cumsum(_back(routes[window]).received),
            )[index]
            for window in ranks_of_bucket
        ]
        assert tuple(map(len, leaving)) == _back(routes[rank]).sent, f"{seed=}"
        places = [np.arange(*span) for span in _back(routes[rank]).spans]
        back[np.concatenate([np.zeros(0, np.int64), *places])] = np.concatenate(leaving)
        assert back.tolist() == held[rank].tolist(), f"{seed=}"


@pytest.mark.parametrize("seed", range(100))
def test_gradients_that_parts_of_a_pipeline_share_are_added(seed: int) -> None:
    """Each part lays the shared tensor out in another way, and has one more of its own."""
    draw = random.Random(seed)
    shape = (draw.choice(SIZES), draw.choice(SIZES))
    alone = np.arange(draw.randint(1, 5)) + 1
    locals_: list[dict[int, Integers]] = [{}, {}]
    groups: list[tuple[Holding, tuple[int, ...]]] = []
    shared = np.zeros(math.prod(shape), np.int64)
    for part in range(2):
        mesh = draw.randint(1, 3)
        placements, first = draw.getrandbits(32), len(locals_[0])
        gradient = 1000 * (part + 1) + np.arange(len(shared))
        shared += gradient
        holdings = []
        for place in range(mesh):
            holdings.append(_holding(placements, shape, (mesh,), (place,)))
            locals_[0][first + place] = _local(gradient.reshape(shape), holdings[-1])
        groups += _holders(holdings, range(first, first + mesh)).groups
    locals_[1][0] = alone
    lone = Holders(((Holding.of(alone.shape, []), (0,)),))
    parts = Part(Holders((*groups,), is_tied=True), 0, len(shared)), Part(lone, 0, len(alone))
    bucket = np.concatenate([shared, alone])
    ranks = participants(parts)
    routes = {rank: route(parts, rank, is_gradient=True) for rank in ranks}
    held = {rank: _held(routes[rank], rank, locals_) for rank in ranks}
    for index, each in enumerate(routes.values()):
        assert each.adds
        arriving = _arriving(routes, held, index)
        shard = np.zeros(each.shard_numel, np.int64)
        np.add.at(shard, _numbers(_there(each).blocks), np.concatenate(arriving))
        wanted = bucket[index * len(shard) : (index + 1) * len(shard)]
        assert shard[: len(wanted)].tolist() == wanted.tolist(), f"{seed=}"
    assert not route(parts, 0).adds, "values of parameters are copied"


@pytest.mark.parametrize("seed", range(300))
def test_in_rank_major_order_each_rank_hands_over_what_it_holds(seed: int) -> None:
    """Several tensors of one mesh, cut into buckets along the ranks' shards."""
    draw = random.Random(seed)
    ranks = draw.randint(2, 4)
    holders, locals_ = [], []
    for index in range(draw.randint(1, 3)):
        shape = (draw.choice(SIZES), draw.choice(SIZES))
        holdings = [Holding.of(shape, [Dealt(0, ranks, rank)]) for rank in range(ranks)]
        whole = 10_000 * (index + 1) + np.arange(math.prod(shape)).reshape(shape)
        each = Holders(tuple((one, (rank,)) for rank, one in enumerate(holdings)))
        most = max(one.numel for one in holdings)
        is_padded_much = ranks * most > whole.size * 65 / 64
        assert each.is_rank_major == (not is_padded_much)
        holders.append(each)
        locals_.append({rank: _local(whole, one) for rank, one in enumerate(holdings)})
    found: dict[int, list[int]] = {rank: [] for rank in range(ranks)}
    edge = draw.randint(0, holders[0].shard_numel)
    first, rest = holders[0], [Part(each, 0, each.shard_numel) for each in holders[1:]]
    for parts in [Part(first, 0, edge)], [Part(first, edge, first.shard_numel), *rest]:
        size = sum(each.stop - each.start for each in parts)
        for rank in range(ranks):
            way = rank_major_route((*parts,), rank)
            assert (way.there, way.back) == (None, None)
            assert (way.index, way.shard_numel, way.numel) == (rank, size, ranks * size)
            assert way.held_numel <= size
            found[rank] += _held(way, rank, locals_[: len(parts)]).tolist()
    for rank in range(ranks):
        wanted = [number for each in locals_ for number in each[rank].tolist()]
        assert found[rank] == wanted, f"{seed=}"


def _there(each: Route) -> Way:
    assert each.there is not None
    return each.there


def _back(each: Route) -> Way:
    assert each.back is not None
    return each.back


def _held(each: Route, rank: int, locals_: list[dict[int, Integers]]) -> Integers:
    """Return what a rank's pieces hold, one after another."""
    pieces = [
        local[rank][start:stop]
        for local, (start, stop) in zip(locals_, each.held, strict=True)
        if rank in local
    ]
    return np.concatenate([np.zeros(0, np.int64), *pieces])


def _arriving(routes: dict[int, Route], held: dict[int, Integers], index: int) -> list[Integers]:
    """Return what each rank sends to one of them, by its place among them."""
    found = []
    for rank, each in routes.items():
        way, own = _there(each), held[rank]
        leaving = np.concatenate([own[:0], *(own[start:stop] for start, stop in way.spans)])
        found.append(np.split(leaving, np.cumsum(way.sent))[index])
    return found


def _numbers(blocks: list[Block] | tuple[Block, ...]) -> Integers:
    runs = [
        np.arange(start, start + block.run)
        for block in blocks
        for start in range(block.start, block.start + block.stride * block.count, block.stride)
    ]
    return np.concatenate([np.zeros(0, np.int64), *runs])


def test_columns_of_a_matrix_are_one_block() -> None:
    for shape, dealt, blocks in [
        ((6, 8), Dealt(1, 4, 1), [Block(2, 2, 8, 6)]),
        ((10, 3), Dealt(0, 4, 2), [Block(18, 9, 9, 1)]),
        ((5, 1), Dealt(0, 4, 3), []),  # as torch.chunk, which gives the last rank nothing
    ]:
        assert blocks_of(Holding.of(shape, [dealt]).runs) == blocks


def test_what_no_rank_or_two_hold_is_named() -> None:
    upper, lower = Holding.of((4,), [Dealt(0, 2, 0)]), Holding.of((4,), [Dealt(0, 2, 1)])
    assert problem_of([upper, lower]) is None
    assert problem_of([upper]) == "element 2 is held by no rank"
    whole = Holding.of((4,), [])
    assert problem_of([upper, lower, whole]) == "element 0 is held by ranks of unlike shards"


def test_residuals_in_rank_major_order_belong_to_who_holds_what() -> None:
    """A run that goes on with columns in place of rows has no residual of rows."""
    entry = Entry("weight", (8, 8), "torch.float32", 4, "trained", exact=False)
    found = set()
    for dim in (0, 1):
        holdings = [Holding.of(entry.shape, [Dealt(dim, 2, rank)]) for rank in range(2)]
        tensors = SiteTensors((entry,), {"weight": _holders(holdings, range(2))})
        told = SiteList.from_bytes(tensors.to_bytes())
        agreed = Agreed(
            law=(entry,),
            here=tensors,
            sites=(told.ranks_of(),) * 2,
            ranks_per_site=(2, 2),
            ranks_per_gateway=2,
            rank_major=rank_major_names("a", tensors, [told, told]),
        )
        (cut,) = agreed.cut_gradients(1000)
        assert cut.is_rank_major
        found.add(agreed.identity([cut]))
    assert len(found) == 2
