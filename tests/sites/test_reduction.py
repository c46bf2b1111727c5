"""Bit-identical sums at every site: any tree, any codec, any order of arrival, repeats included."""

import itertools
import random
import time
from dataclasses import replace

import numpy as np
import pytest

from protos.errors import (
    CorruptDataError,
    IsthmusError,
    LayoutMismatchError,
    NoTokensError,
    RemoteProtocolError,
    StaleGenerationError,
)
from protos.frame import ChunkKey, Frame, Kind, pack, unpack
from sites.codecs.codec import Codec, Floats
from sites.codecs.registry import BY_NAME
from sites.gateway.grid import Grid, grid
from sites.gateway.reduction import (
    Action,
    Bucket,
    BucketReduction,
    Event,
    Finish,
    Own,
    Received,
    Send,
    roles,
)
from topology.trees import ReductionPlan, Tree, star

PLANS = {
    "alone": ReductionPlan(1, (), ""),
    "gather-2": ReductionPlan(2, (), ""),
    "gather-4": ReductionPlan(4, (), ""),
    "star-3": ReductionPlan(3, (star(3, 1),), ""),
    "chain-4": ReductionPlan(4, (Tree(2, {0: 1, 1: 2, 3: 2}),), ""),
    "deep-5": ReductionPlan(5, (Tree(4, {0: 3, 1: 3, 3: 2, 2: 4}),), ""),
    "weighted-3": ReductionPlan(
        3, (Tree(0, {1: 0, 2: 0}, 2.0), Tree(2, {0: 1, 1: 2}, 1.0), star(3, 1)), ""
    ),
}
RANKS = (2, 3, 1, 5, 4)


def contribution(seed: int, site: int, numel: int, weight: float) -> Floats:
    generator = np.random.default_rng((seed, site))
    values = generator.standard_normal(numel) * np.exp(generator.normal(0, 3, numel)) * weight
    return values.astype(np.float32)


def reference(
    plan: ReductionPlan, codec: Codec, cut: Grid, parts: list[Floats], weights: list[float]
) -> Floats:
    """Sum by the definition, chunk by chunk and recursively."""
    result = np.empty(cut.numel, dtype=np.float32)
    for chunk in range(cut.num_chunks):
        start, count = cut.span(chunk)
        own = [part[start : start + count] for part in parts]
        divisor = np.float32(sum(weights))
        if plan.is_gather:
            total = codec.quantize(own[0])
            for values in own[1:]:
                total = total + codec.quantize(values)
            result[start : start + count] = total / divisor
            continue
        tree = plan.trees[plan.tree_index(chunk)]
        total = subtree_sum(tree, tree.root, codec, own) / divisor
        result[start : start + count] = codec.quantize(total)
    return result


def subtree_sum(tree: Tree, site: int, codec: Codec, own: list[Floats]) -> Floats:
    """Return what `site` forms: its own part and its children's sums, in ascending order."""
    total: Floats | None = None
    for member in sorted((*tree.children(site), site)):
        value = own[site] if member == site else subtree_sum(tree, member, codec, own)
        total = codec.quantize(value) if total is None else total + codec.quantize(value)
    assert total is not None
    return total


class World:
    """All sites' machines of one bucket, and a wire that reorders and repeats."""

    def __init__(self, plan: ReductionPlan, codec: Codec, numel: int, chunk_numel: int) -> None:
        self.plan = plan
        self.cut = grid(numel, chunk_numel, RANKS[: plan.num_sites])
        self.bucket = Bucket(3, 7, 2, 99, codec, self.cut, time.thread_time)
        self.sites = [
            BucketReduction(self.bucket, plan, roles(plan, site)) for site in range(plan.num_sites)
        ]
        self.finished: dict[tuple[int, int], float] = {}

    def handle(self, site: int, chunk: int, event: Event) -> list[Action]:
        if isinstance(event, Received):
            self.sites[site].check(event.sender, event.frame)
        actions = self.sites[site].chunk(chunk).handle(event)
        for action in actions:
            if isinstance(action, Finish):
                assert (site, chunk) not in self.finished
                self.finished[site, chunk] = action.weight
        return actions

    def run(self, parts: list[Floats], weights: list[float], order: random.Random) -> None:
        """Deliver everything once or twice, in any order that the machines' outputs allow."""
        pending: list[tuple[int, int, Event]] = []
        for site, chunk in itertools.product(
            range(self.plan.num_sites), range(self.cut.num_chunks)
        ):
            start, count = self.cut.span(chunk)
            own = Own(parts[site][start : start + count], weights[site])
            pending += [(site, chunk, own)] * order.choice((1, 1, 2))
        while pending:
            site, chunk, event = pending.pop(order.randrange(len(pending)))
            for action in self.handle(site, chunk, event):
                if isinstance(action, Send):
                    frame = unpack(pack(action.frame))
                    copies = order.choice((1, 1, 2, 3))
                    pending += [(action.site, chunk, Received(site, frame))] * copies


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("codec", BY_NAME.values(), ids=BY_NAME.keys())
def test_all_sites_equal_the_reference_in_any_order(name: str, codec: Codec) -> None:
    plan = PLANS[name]
    for seed, numel in enumerate((0, 1, 3, 40, 97)):
        weights = [float(value) for value in (3, 0, 5, 1, 2)][: plan.num_sites]
        expected = None
        for order_seed in range(4):
            parts = [contribution(seed, site, numel, weight) for site, weight in enumerate(weights)]
            world = World(plan, codec, numel, 8)
            if expected is None:
                originals = [part.copy() for part in parts]
                expected = reference(plan, codec, world.cut, originals, weights)
            world.run(parts, weights, random.Random(order_seed))
            assert len(world.finished) == plan.num_sites * world.cut.num_chunks
            assert set(world.finished.values()) <= {sum(weights)}
            for part in parts:
                assert part.tobytes() == expected.tobytes(), f"{seed=} {order_seed=}"


def test_lossless_codecs_give_the_plain_weighted_mean() -> None:
    weights, order = [3.0, 4.0], random.Random(0)
    parts = [contribution(5, site, 100, weights[site]) for site in range(2)]
    expected = (parts[0] + parts[1]) / np.float32(7)
    World(PLANS["gather-2"], BY_NAME["split"], 100, 16).run(parts, weights, order)
    assert parts[0].tobytes() == parts[1].tobytes() == expected.tobytes()


@pytest.mark.parametrize("name", ["gather-2", "star-3"])
def test_no_tokens_anywhere_is_an_error(name: str) -> None:
    plan = PLANS[name]
    world = World(plan, BY_NAME["fp32"], 10, 16)
    parts = [np.zeros(10, dtype=np.float32) for _ in range(plan.num_sites)]
    with pytest.raises(NoTokensError, match="behind round 7 bucket 2 chunk"):
        world.run(parts, [0.0] * plan.num_sites, random.Random(0))


def good_frame(world: World, sender: int, kind: Kind = Kind.CONTRIBUTION) -> Frame:
    count = world.cut.span(0)[1]
    payload = world.bucket.codec.encode(np.ones(count, dtype=np.float32))
    key = ChunkKey(7, 2, 0, sender, kind)
    return Frame(key, 3, world.bucket.codec.number, 0, 99, world.cut.numel, 1.0, payload)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"generation": 2}, StaleGenerationError, "generation 2; this is 3"),
        ({"numel": 41}, LayoutMismatchError, "41 elements there and 40 here"),
        ({"layout": 98}, LayoutMismatchError, "other parameters"),
        ({"codec": 4}, LayoutMismatchError, "codec number 4; here it is fp32"),
        ({"tree": 1}, RemoteProtocolError, "not its to send"),
        ({"weight": float("nan")}, RemoteProtocolError, "weight of nan"),
        ({"weight": -1.0}, RemoteProtocolError, "weight of -1"),
        ({"weight": 1e300}, RemoteProtocolError, "weight of 1e"),
        ({"payload": bytes(1000)}, RemoteProtocolError, "1000 bytes, at most 32"),
        ({"key": ChunkKey(7, 2, 99, 0, Kind.CONTRIBUTION)}, RemoteProtocolError, "number 99 came"),
        ({"key": ChunkKey(7, 2, 0, 2, Kind.CONTRIBUTION)}, RemoteProtocolError, "not its to send"),
        ({"key": ChunkKey(7, 2, 0, 0, Kind.RESULT)}, RemoteProtocolError, "not its to send"),
    ],
)
def test_foreign_frames_are_refused(
    changes: dict[str, object], error: type[IsthmusError], message: str
) -> None:
    world = World(PLANS["star-3"], BY_NAME["fp32"], 40, 8)
    hub = world.sites[1]
    frame = good_frame(world, 0)
    hub.check(0, frame)
    with pytest.raises(error, match=message):
        hub.check(0, replace(frame, **changes))  # type: ignore[arg-type]


def test_leaves_take_results_from_the_hub_only() -> None:
    world = World(PLANS["star-3"], BY_NAME["fp32"], 40, 8)
    leaf = world.sites[0]
    result = good_frame(world, 1, Kind.RESULT)
    leaf.check(1, result)
    with pytest.raises(RemoteProtocolError, match="not its to send"):
        leaf.check(2, replace(result, key=replace(result.key, site=2)))
    with pytest.raises(RemoteProtocolError, match="without this site's part"):
        leaf.chunk(0).handle(Received(1, result))


def test_a_payload_that_does_not_hold_the_chunk_is_corrupt() -> None:
    world = World(PLANS["gather-2"], BY_NAME["split"], 40, 8)
    world.handle(0, 0, Own(np.ones(8, dtype=np.float32), 1.0))
    with pytest.raises(CorruptDataError, match="round 7 bucket 2 chunk 0"):
        world.handle(0, 0, Received(1, replace(good_frame(world, 1), payload=b"short")))
