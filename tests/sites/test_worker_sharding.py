"""Routes of shards: each element reaches its place and comes back, for any shapes and ranks."""

from __future__ import annotations

import random

import numpy as np
import numpy.typing as npt
import pytest

from sites.worker.sharding import cuts_of, part_of, route

Integers = npt.NDArray[np.int64]


@pytest.mark.parametrize("seed", range(60))
def test_every_element_arrives_and_comes_back(seed: int) -> None:
    draw = random.Random(seed)
    world_size = draw.randint(1, 6)
    parts = []
    for _ in range(draw.randint(1, 5)):
        whole = cuts_of(draw.randint(1, 9), draw.choice([1, 1, 3, 7]), world_size)
        start = draw.randrange(whole[-1])
        parts.append(part_of(whole, start, draw.randint(start + 1, whole[-1])))
    bucket = np.arange(sum(cuts[-1] for cuts in parts))
    starts = np.cumsum([0, *(cuts[-1] for cuts in parts)])
    held = [
        np.concatenate(
            [
                bucket[start + cuts[rank] : start + cuts[rank + 1]]
                for start, cuts in zip(starts, parts, strict=False)
            ]
        )
        for rank in range(world_size)
    ]
    routes = [route(tuple(parts), rank) for rank in range(world_size)]
    shard_numel = -(-len(bucket) // world_size)
    leaving = [_cut(held[rank], routes[rank].outgoing) for rank in range(world_size)]
    for rank, each in enumerate(routes):
        assert (each.numel, each.held_numel) == (len(bucket), len(held[rank])), f"{seed=}"
        arriving = [
            np.split(leaving[source], np.cumsum(routes[source].sent))[rank]
            for source in range(world_size)
        ]
        assert tuple(len(part) for part in arriving) == each.received, f"{seed=}"
        shard = np.full(shard_numel, -1)
        _place(shard, each.incoming, np.concatenate(arriving))
        wanted = bucket[rank * shard_numel : (rank + 1) * shard_numel]
        assert shard[: len(wanted)].tolist() == wanted.tolist(), f"{seed=}"
        # Its reverse: what leaves is what came, so each rank gets back what it had sent.
        assert _cut(shard, each.incoming).tolist() == np.concatenate(arriving).tolist()
        back = np.full(len(held[rank]), -1)
        _place(back, each.outgoing, leaving[rank])
        assert back.tolist() == held[rank].tolist(), f"{seed=}"


def _cut(values: Integers, spans: tuple[tuple[int, int], ...]) -> Integers:
    return np.concatenate([values[:0], *(values[start:stop] for start, stop in spans)])


def _place(values: Integers, spans: tuple[tuple[int, int], ...], given: Integers) -> None:
    place = 0
    for start, stop in spans:
        values[start:stop] = given[place : place + stop - start]
        place += stop - start
    assert place == len(given)


def test_rows_are_dealt_out_as_torch_does() -> None:
    assert cuts_of(10, 3, 4) == (0, 9, 18, 27, 30)
    assert cuts_of(3, 2, 4) == (0, 2, 4, 6, 6)
    assert cuts_of(5, 1, 4) == (0, 2, 4, 5, 5), "the last rank has none"
    assert part_of((0, 9, 18, 27, 30), 5, 20) == (0, 4, 13, 15, 15)
